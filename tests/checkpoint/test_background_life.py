"""What else happens while a save is under way: models replaced, freed and loaded, forks, and ranks that end."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader

from tests.checkpoint.jobs import Job, left_over
from tests.checkpoint.layers import Watched
from tests.checkpoint.test_background import Gate, stored
from tests.world import outcomes, world
from whale_torch.checkpoint.background.pending import Pending
from whale_torch.checkpoint.load import load
from whale_torch.checkpoint.save import save
from whale_torch.errors import CheckpointError, CommError


def stepped() -> tuple[nn.Module, Adam]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 1200))
    optimizer = Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 40)).square().mean().backward()
    optimizer.step()


def _new_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = torch.zeros_like(p)


def _new_parameters(model: nn.Module) -> None:
    for layer in model.children():
        layer.weight = nn.Parameter(torch.zeros_like(layer.weight))


def _other_dtype(model: nn.Module) -> None:
    model.to(torch.float64).to(torch.float32)


@pytest.mark.parametrize("replace", [_new_data, _new_parameters, _other_dtype])
@pytest.mark.parametrize("staging_bytes", [None, 0])
def test_what_is_put_in_the_place_of_parameters_is_not_written(
    replace: Callable[[nn.Module], None], staging_bytes: int | None, tmp_path: Path
) -> None:
    model, optimizer = stepped()
    now = save(tmp_path / "now", step=1, model=model, optimizer=optimizer)
    gate = Gate()
    pending = save(
        tmp_path / "later", step=1, model=model, optimizer=optimizer, files=gate, wait=False,
        staging_bytes=staging_bytes,
    )  # fmt: skip
    replace(model)
    threading.Timer(0.1, gate.open_gate.set).start()
    step(model, optimizer)
    assert stored(pending.wait()) == stored(now)


def test_a_model_that_is_freed_is_written_and_then_let_go(tmp_path: Path) -> None:
    model, optimizer = stepped()
    now, gate = save(tmp_path / "now", step=1, model=model, optimizer=optimizer), Gate()
    pending = save(tmp_path / "later", step=1, model=model, optimizer=optimizer, files=gate, wait=False)
    memory = weakref.ref(model[1].weight.untyped_storage())
    del model, optimizer
    gc.collect()
    gate.open_gate.set()
    assert stored(pending.wait()) == stored(now)
    gc.collect()
    assert memory() is None


def test_a_thread_that_cannot_be_started_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, optimizer = stepped()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="new thread"):
        patch.setattr(threading.Thread, "start", refuse)
        save(tmp_path, step=1, model=model, optimizer=optimizer, wait=False)
    assert left_over(tmp_path) == []
    step(model, optimizer)
    save(tmp_path, step=1, model=model, optimizer=optimizer, wait=False).wait()
    assert load(tmp_path, model=model, optimizer=optimizer).step == 1


def test_a_load_waits_for_what_it_would_change(tmp_path: Path) -> None:
    model, optimizer = stepped()
    first = save(tmp_path, step=1, model=model, optimizer=optimizer)
    step(model, optimizer)
    now, gate = save(tmp_path / "now", step=2, model=model, optimizer=optimizer), Gate()
    pending = save(tmp_path, step=2, model=model, optimizer=optimizer, files=gate, wait=False)
    threading.Timer(0.2, gate.open_gate.set).start()
    assert load(first, model=model, optimizer=optimizer).step == 1 and pending.done()
    assert stored(pending.wait()) == stored(now)
    assert load(tmp_path, model=model, optimizer=optimizer).step == 2


def _two_models(rank: int, n: int, folder: Path) -> None:
    jobs = {"a": Job(), "b": Job()}
    jobs["b"].train()
    for name, job in jobs.items():
        job.train()
        job.save(folder / f"now-{name}")
    pendings = {}
    for name, job in jobs.items():
        gate = Gate()
        threading.Timer(0.1, gate.open_gate.set).start()
        extra = {"step": job.step, "noise": torch.full((3,), float(job.step))}
        pendings[name] = save(
            folder / name, step=job.step, model=job.model, optimizer=job.optimizer, extra=extra, rng=False, files=gate,
            wait=False,
        )  # fmt: skip
    for job in jobs.values():
        job.train()
    for name, pending in pendings.items():
        assert stored(pending.wait()) == stored(folder / f"now-{name}" / pending.path.name)


def test_two_models_are_saved_one_after_the_other(tmp_path: Path) -> None:
    world(2, _two_models, tmp_path)


@pytest.mark.parametrize("how", ["wait", "save", "load"])
def test_who_is_interrupted_while_waiting_waits_again(how: str, tmp_path: Path) -> None:
    model, optimizer = stepped()
    now, gate = save(tmp_path / "now", step=1, model=model, optimizer=optimizer), Gate()
    pending = save(tmp_path / "later", step=1, model=model, optimizer=optimizer, files=gate, wait=False)
    threading.Timer(0.1, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        if how == "wait":
            pending.wait()
        elif how == "save":
            save(tmp_path / "next", step=1, model=model, optimizer=optimizer)
        else:
            load(now, model=model, optimizer=optimizer)
    assert not pending.done() and not pending.path.exists()
    threading.Timer(0.1, gate.open_gate.set).start()
    assert stored(pending.wait()) == stored(now) and pending.done()


class _Steps:
    """A data set whose samples are made by training, in the worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        model = nn.Linear(2, 2)
        model(torch.ones(1, 2)).sum().backward()
        SGD(model.parameters(), lr=0.1).step()
        return model.weight.detach()


def test_forked_workers_neither_wait_for_a_save_nor_end_it(tmp_path: Path) -> None:
    model, optimizer = stepped()
    now, gate = save(tmp_path / "now", step=1, model=model, optimizer=optimizer), Gate()
    pending = save(
        tmp_path / "later", step=1, model=model, optimizer=optimizer, files=gate, wait=False, staging_bytes=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        loader = DataLoader(_Steps(), num_workers=2, timeout=20, multiprocessing_context="fork")
        assert len(list(loader)) == 4
    assert not pending.done()
    gate.open_gate.set()
    step(model, optimizer)
    assert stored(pending.wait()) == stored(now)


def _forks_and_dies(rank: int, n: int, folder: Path) -> None:
    model, optimizer = stepped()
    pending = save(folder, step=1, model=model, optimizer=optimizer, files=Gate(), wait=False)
    ready, told = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _outlives(pending, folder, told)
    os.read(ready, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _outlives(pending: Pending, folder: Path, told: int) -> None:
    """A worker that stays some time when its parent is gone."""
    try:
        pending.wait()
    except CheckpointError as error:
        (folder / "child").write_text(f"{os.getpid()} {error}")
    os.closerange(3, told)
    os.closerange(told + 1, 200)
    os.write(told, b"!")
    os.close(told)
    time.sleep(30)
    os._exit(0)


def test_a_worker_that_outlives_its_job_does_not_hold_its_locks(tmp_path: Path) -> None:
    (ended,) = outcomes(1, _forks_and_dies, tmp_path, timeout=30)
    assert ended.exit_code == -signal.SIGKILL
    child, _, text = (tmp_path / "child").read_text().partition(" ")
    os.kill(int(child), 0)  # it is there
    model, optimizer = stepped()
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    assert left_over(tmp_path) == [] and "is written by another process" in text
    os.kill(int(child), signal.SIGKILL)


class _Held(Watched):
    """Its payload takes a while, and another's end comes meanwhile."""

    def before(self, operation: str, path: Path) -> None:
        super().before(operation, path)
        if operation == "write":
            time.sleep(0.5)


def _ends(rank: int, n: int, folder: Path, how: str) -> str:
    job = Job()
    job.train()
    job.save(folder)
    job.train()
    pending = save(
        folder, step=2, model=job.model, optimizer=job.optimizer, rng=False, files=_Held(), wait=False, staging_bytes=0
    )
    if rank == 1 and how == "os._exit":
        os._exit(0)
    if rank == 1 and how == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    start = time.monotonic()
    try:
        pending.wait()
    except (CommError, CheckpointError) as error:
        assert time.monotonic() - start < 15
        return str(error)
    return "complete"


@pytest.mark.parametrize("how", ["os._exit", "SIGTERM"])
@pytest.mark.matrix(keep=0)
def test_a_rank_that_ends_meanwhile_is_an_error_of_the_others_and_the_one_before_stays(
    how: str, tmp_path: Path
) -> None:
    alive, dead = outcomes(2, _ends, tmp_path, how, timeout=40)
    assert alive.ok and "what ranks save or load" in alive.value, alive
    assert dead.exit_code == {"os._exit": 0, "SIGTERM": -signal.SIGTERM}[how]
    job, _ = stepped()
    save(tmp_path, step=3, model=job)
    assert left_over(tmp_path) == []
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003"]
