"""Saves in the background: the values of their call whatever training does, one at a time, and errors that are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import whale_torch as wh
from tests.parity.layouts import backward, batch, build, mine
from tests.world import outcomes, world
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.folders import read_index
from whale_torch.checkpoint.load import load
from whale_torch.checkpoint.save import save
from whale_torch.errors import CheckpointError, CommError

ROOT = Path(__file__).parents[2]


class Gate(Files):
    """Payload is written once the gate is open."""

    def __init__(self) -> None:
        self.open_gate = threading.Event()

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        self.open_gate.wait(20)
        super().write(fd, data, offset)


class Broken(Files):
    """A disk that fails on what is written."""

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        raise OSError(5, "Input/output error")


class Net(nn.Module):
    """A matrix of two chunks, running statistics, and a part that is split."""

    def __init__(self) -> None:
        super().__init__()
        with wh.replica():
            self.norm, self.wide = nn.BatchNorm1d(1030), nn.Linear(1030, 1030)
        with wh.split():
            self.head = nn.Linear(1030, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.wide(self.norm(x)))


def trained() -> tuple[nn.Module, Adam]:
    torch.manual_seed(0)
    model = wh.parallelize(Net())
    optimizer = Adam(model.parameters(), lr=0.1)
    steps(model, optimizer, 2)
    return model, optimizer


def steps(model: nn.Module, optimizer: Adam, count: int) -> None:
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(8, 1030, generator=generator), torch.randint(11, (8,), generator=generator)
        optimizer.zero_grad()
        backward(model, x, y)
        optimizer.step()


def stored(folder: Path) -> dict[str, Any]:
    """All of a checkpoint but its name: where every tensor lies, and the checksums of its bytes."""
    index = read_index(folder, Files())
    return {"values": index.values, "ties": index.ties, **index.tensors}


def during_steps(rank: int, n: int, folder: str, staging_bytes: int | None) -> None:
    model, optimizer = trained()
    extra = {"tensor": torch.ones(3), "numbers": [1, 2]}
    save(f"{folder}/now", step=2, model=model, optimizer=optimizer, extra=extra)
    files = Gate()
    pending = save(
        f"{folder}/later", step=2, model=model, optimizer=optimizer, extra=extra, files=files,
        wait=False, staging_bytes=staging_bytes,
    )  # fmt: skip
    extra["tensor"].zero_()
    extra["numbers"].clear()
    assert not pending.done() and not pending.path.exists()
    if staging_bytes is None:
        steps(model, optimizer, 3)
        assert not pending.done()
    else:
        threading.Timer(0.3, files.open_gate.set).start()
        steps(model, optimizer, 3)
        assert files.open_gate.is_set(), "a step changed values that had neither been written nor copied"
    files.open_gate.set()
    assert pending.wait() == pending.path == Path(f"{folder}/later/step-00000002") and pending.done()
    assert stored(pending.path) == stored(Path(f"{folder}/now/step-00000002"))
    read = load(f"{folder}/later", model=model, optimizer=optimizer)
    assert read.extra["numbers"] == [1, 2] and read.extra["tensor"].equal(torch.ones(3))


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("staging_bytes", [None, 0, 1 << 20])
@pytest.mark.matrix(keep=3)
def test_steps_do_not_change_what_is_written(n: int, staging_bytes: int | None, tmp_path: Path) -> None:
    world(n, during_steps, str(tmp_path), staging_bytes)


def one_after_another(rank: int, n: int, folder: str) -> None:
    model = wh.parallelize(build("own"))
    files = Gate()
    first = save(folder, step=1, model=model, files=files, wait=False)
    with pytest.raises(CheckpointError, match=r"step-00000002 failed.*step-00000001 is still being written"):
        save(folder, step=2, model=model, if_busy="raise")
    threading.Timer(0.2, files.open_gate.set).start()
    save(folder, step=2, model=model)
    assert first.done() and first.path.exists()
    save(folder, step=3, model=model, wait=False)
    assert load(folder, model=model).step == 3, "a load waits for what is being written"


def test_one_save_waits_for_the_other(tmp_path: Path) -> None:
    world(2, one_after_another, str(tmp_path))


def failing(rank: int, n: int, folder: str) -> None:
    model = wh.parallelize(build("own"))
    optimizer = Adam(model.parameters())
    for told in (False, True):
        pending = save(
            folder, step=1, model=model, optimizer=optimizer, wait=False, staging_bytes=0,
            files=Broken() if rank == n - 1 else Files(),
        )  # fmt: skip
        backward(model, *mine(model, *batch()))
        optimizer.step()  # waits for nobody
        if told and rank == 0:
            with pytest.raises(CheckpointError, match=f"on rank {n - 1}: OSError.*Input/output error"):
                pending.wait()
        with pytest.raises(CheckpointError, match=f"the save before failed .* rank {n - 1}: OSError"):
            save(folder, step=2, model=model)
    assert not list(Path(folder).glob("step-????????"))
    save(folder, step=2, model=model)


def test_a_failure_is_raised_by_the_next_save_on_all_ranks(tmp_path: Path) -> None:
    world(2, failing, str(tmp_path))


def killed(rank: int, n: int, folder: str) -> str:
    model = wh.parallelize(build("own"))
    optimizer = Adam(model.parameters())
    backward(model, *mine(model, *batch()))
    save(folder, step=1, model=model, optimizer=optimizer)
    if rank == 1:
        killer: Any = Files()
        killer.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    pending = save(
        folder, step=2, model=model, optimizer=optimizer, wait=False, staging_bytes=0,
        files=killer if rank == 1 else Files(),
    )  # fmt: skip
    SGD(
        [torch.ones(1, requires_grad=True)]
    ).step()  # of an optimizer that asks nobody: it waits no longer than the disk
    start = time.monotonic()
    with pytest.raises(CommError) as caught:
        pending.wait()
    assert time.monotonic() - start < 20
    return str(caught.value)


def test_a_rank_that_is_killed_while_it_writes_ends_the_save_of_all(tmp_path: Path) -> None:
    alive, dead = outcomes(2, killed, str(tmp_path), timeout=40)
    assert dead.exit_code == -signal.SIGKILL and alive.ok, alive
    assert "'what ranks save or load' over world (ranks [0, 1]) failed on rank 0" in alive.value
    assert [path.name for path in tmp_path.glob("step-????????")] == ["step-00000001"]


@pytest.mark.parametrize("how", ["in place", "by data", "by a load"])
@pytest.mark.parametrize("copied", [False, True])
def test_what_no_optimizer_changes_is_refused(how: str, copied: bool, tmp_path: Path) -> None:
    model, files = nn.Linear(50, 70), Gate()
    optimizer = Adam(model.parameters())
    pending = save(tmp_path, step=1, model=model, files=files, wait=False)
    if how == "in place":
        with torch.no_grad():
            model.weight.mul_(2)
    elif how == "by data":
        model.weight.data.mul_(2)
    else:
        model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    if copied:
        model(torch.ones(1, 50)).sum().backward()
        optimizer.step()
    files.open_gate.set()
    with pytest.raises(CheckpointError, match=r"'model/weight' was changed while it was saved in the background"):
        pending.wait()
    assert not list(tmp_path.glob("step-????????"))


ENDING = """
    import sys, time
    from pathlib import Path
    import torch, torch.distributed as dist
    from torch import nn
    import whale_torch as wh
    from whale_torch.checkpoint.files import Files
    from whale_torch.checkpoint.save import save

    class Slow(Files):
        def write(self, fd, data, offset):
            time.sleep(0.5)
            if "broken" in sys.argv:
                raise OSError(28, "No space left on device")
            super().write(fd, data, offset)

    model = wh.parallelize(nn.Linear(4, 4))
    save(sys.argv[1], step=1, model=model, files=Slow(), wait=False)
    if "left" in sys.argv:
        dist.destroy_process_group()
    if "failing" in sys.argv:
        raise ValueError("of the script")
    if "exit" in sys.argv:
        sys.exit(3)
"""


@pytest.mark.parametrize(
    ("n", "how"), [(1, ""), (1, "broken"), (1, "failing"), (1, "exit"), (2, "left"), (2, "broken"), (2, "failing")]
)
@pytest.mark.matrix(keep=0)
def test_a_process_ends_when_all_is_written(n: int, how: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(ENDING))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)] if n > 1 else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(script), str(tmp_path / "run"), how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    finished = (tmp_path / "run" / "step-00000001").exists()
    if how == "broken":
        assert done.returncode == 1 and "No space left on device" in done.stderr and not finished, done.stderr
    elif how == "failing":
        assert done.returncode == 1 and "ValueError: of the script" in done.stderr, done.stderr
    else:
        assert done.returncode == (3 if how == "exit" else 0) and finished, done.stderr
        assert not done.stderr.replace("\n", "").strip(), done.stderr
