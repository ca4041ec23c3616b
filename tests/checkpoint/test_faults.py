"""Disks that are full, break or are slow: all ranks raise the same error, nothing hangs, and what was saved stays."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoint.jobs import Job, equal, left_over, loaded, plain, said
from tests.checkpoint.layers import Failing, Pieces, Slow, Watched
from tests.world import outcomes, world
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.load import load
from whale_torch.checkpoint.ranks import Ranks, mesh_of
from whale_torch.checkpoint.save import save
from whale_torch.errors import CheckpointError, CommError

DEAD = ["latest.new-01234567", "step-00000002.tmp-0123456789abcdef"]  # what a dead job left


class _Runs:
    """Folders that each hold step 1 and what a dead job left, and a job that stands at step 2."""

    def __init__(self, folder: Path, rank: int):
        self.job, self._folder, self._rank, self._count = Job(), folder, rank, 0
        self._ranks = Ranks(mesh_of(self.job.model))
        self.states = {}
        for step, name in ((1, "base"), (2, "whole")):
            self.job.train()
            self.job.save(folder / name)
            self.states[step] = loaded(folder / name)

    def new(self) -> Path:
        self._count += 1
        run_dir = self._folder / f"run-{self._count}"
        if self._rank == 0:
            shutil.copytree(self._folder / "base", run_dir)
            (run_dir / DEAD[0]).touch()
            (run_dir / DEAD[1]).mkdir()
            (run_dir / DEAD[1] / "lock").touch()
        self._ranks.gather(None)
        return run_dir

    def operations(self) -> list[int]:
        """How many a save has, by rank."""
        seen = Watched()
        self.job.save(self.new(), seen)
        return self._ranks.gather(len(seen.ops))

    def check(self, run_dir: Path, where: object, *, dropped: bool) -> None:
        """What is there is complete, and what is not is gone: at once or with the next save."""
        found = loaded(run_dir)
        assert equal(found, self.states[found["step"]]), where
        assert equal(loaded(run_dir / "step-00000001"), self.states[1]), where
        if dropped:
            assert set(left_over(run_dir)) <= set(DEAD), where
        model, _ = plain()
        save(run_dir, step=3, model=model)
        assert left_over(run_dir) == [] and load(run_dir, model=model).step == 3, where


def _every_operation(
    rank: int, n: int, folder: Path, number: int, then: bool, wait: bool
) -> list[tuple[str, str | None]]:
    runs = _Runs(folder, rank)
    told = []
    for place, total in enumerate(runs.operations()):
        for at in range(total):
            files: Files = Failing(at, number, then=then) if rank == place else Files()
            run_dir = runs.new()
            text = said(lambda run_dir=run_dir, files=files: runs.job.save(run_dir, files, wait=wait))
            operation, path = files.ops[at] if isinstance(files, Failing) else ("", Path())
            told.append((operation, text))
            if rank == place and text is not None:
                assert os.strerror(number) in text and f"rank {place}" in text, text
                assert then or str(path) in text, (text, path)
            if rank == 0:
                runs.check(run_dir, (place, at, operation, text), dropped=not then and operation != "remove_folder")
    return told


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize(("number", "then"), [(errno.ENOSPC, False), (errno.EIO, False), (errno.EIO, True)])
@pytest.mark.parametrize("wait", [True, False])
def test_a_failure_of_any_operation_is_told_alike_on_all_ranks(
    tmp_path: Path, number: int, then: bool, wait: bool
) -> None:
    """then: all later operations of that rank fail as well, those that tidy up among them."""
    first, second = world(2, _every_operation, tmp_path, number, then, wait, timeout=80)
    assert [text for _, text in first] == [text for _, text in second] and len(first) > 40
    survived = {operation for told in (first, second) for operation, text in told if text is None} - {""}
    assert survived <= {"remove", "remove_folder"}, survived


def _slow(rank: int, n: int, folder: Path, seconds: float) -> tuple[str, float, bool]:
    job = Job(timeout=4.0)
    job.train()
    job.save(folder)
    before = loaded(folder)
    job.train()
    slow = Slow(
        seconds if rank == 1 else 0.0, lambda operation, path: operation == "sync" and path.suffix == ".safetensors"
    )
    start = time.monotonic()
    try:
        job.save(folder, slow)
        text = ""
    except (CheckpointError, CommError) as error:
        text = str(error)
    took = time.monotonic() - start
    return text, took, equal(loaded(folder), before)


def test_a_slow_disk_is_waited_for(tmp_path: Path) -> None:
    for text, took, old in world(2, _slow, tmp_path, 1.2):
        assert not text and not old and took > 1.0


@pytest.mark.matrix(keep=0)
def test_a_disk_slower_than_the_time_out_is_no_hang(tmp_path: Path) -> None:
    ended = outcomes(2, _slow, tmp_path, 8.0, timeout=50)
    assert all(one.exit_code is not None for one in ended)
    assert ended[0].value is None or (ended[0].value[0] and ended[0].value[2]), ended[0]
    model, _ = plain()
    save(tmp_path, step=3, model=model)
    assert left_over(tmp_path) == []


def test_short_writes_reads_and_signals_lose_nothing(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 500)
    save(tmp_path, step=1, model=model, files=Pieces(1009))
    arrived = 0

    def note(*_: object) -> None:
        nonlocal arrived
        arrived += 1

    previous = signal.signal(signal.SIGALRM, note)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        for step in range(2, 12):
            save(tmp_path, step=step, model=model)
            again = torch.nn.Linear(300, 500)
            load(tmp_path, model=again)
            assert torch.equal(again.weight, model.weight)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert arrived
    for files in (Files(), Pieces(999)):
        again = torch.nn.Linear(300, 500)
        load(tmp_path / "step-00000001", model=again, files=files)
        assert torch.equal(again.weight, model.weight) and torch.equal(again.bias, model.bias)


def test_a_disk_that_takes_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing was written.*rank-00000"):
        save(tmp_path, step=1, model=torch.nn.Linear(2, 2), files=Pieces(0))
    assert [one.name for one in tmp_path.iterdir()] == [".lock"]


class _UntilChanged(Watched):
    """unchanged: how many operations came before a parameter changed."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.unchanged = 0
        self._now = list(model.parameters())
        self._first = [p.detach().clone() for p in self._now]

    def before(self, operation: str, path: Path) -> None:
        super().before(operation, path)
        if all(map(torch.equal, self._now, self._first)):
            self.unchanged = len(self.ops)


def _reads_fail(rank: int, n: int, folder: Path) -> list[str | None]:
    job = Job()
    job.train()
    job.save(folder)
    job.train()
    before = [p.detach().clone() for p in job.model.parameters()]
    seen = _UntilChanged(job.model)
    load(folder, model=job.model, optimizer=job.optimizer, files=seen)
    reading = max(i for i in range(seen.unchanged) if seen.ops[i][0] == "open")  # of the first tensor that changes
    opened = [
        {path for operation, path in ops if operation == "open"} for ops in (seen.ops[:reading], seen.ops[reading:])
    ]
    assert opened[1] and opened[1] <= opened[0]  # what is read was checked
    told: list[str | None] = []
    ranks = Ranks(mesh_of(job.model))
    for place, (total, first) in enumerate(ranks.gather([len(seen.ops), reading])):
        for at in range(total):
            files: Files = Failing(at) if rank == place else Files()
            for p, value in zip(job.model.parameters(), before, strict=True):
                p.data.copy_(value)
            told.append(said(lambda files=files: load(folder, model=job.model, optimizer=job.optimizer, files=files)))
            assert told[-1] is not None and "Input/output error" in told[-1] and str(folder) in told[-1]
            if at < first:
                assert "Nothing was changed." in told[-1], told[-1]
                assert all(map(torch.equal, job.model.parameters(), before)), at
            else:
                assert "Values have been partly replaced." in told[-1] and "load again, or end" in told[-1], told[-1]
    return told


def test_reads_that_fail_are_told_alike_and_change_nothing_before_the_check_has_ended(tmp_path: Path) -> None:
    first, second = world(2, _reads_fail, tmp_path)
    assert first == second and len(first) > 20


class _Removing(Watched):
    """Removes a file once it has been checked."""

    def before(self, operation: str, path: Path) -> None:
        if operation == "open" and path.suffix == ".safetensors" and ("look", path) in self.ops:
            path.unlink(missing_ok=True)
        super().before(operation, path)


def _removed(rank: int, n: int, folder: Path) -> str | None:
    job = Job()
    save(folder, step=1, model=job.model, rng=False)
    return said(lambda: load(folder, model=job.model, files=_Removing() if rank else Files()))


def test_a_file_that_goes_behind_the_check_is_told_with_what_it_left(tmp_path: Path) -> None:
    first, second = world(2, _removed, tmp_path)
    assert first == second and first is not None
    assert "failed on rank" in first and "is missing" in first and "Values have been partly replaced." in first


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("wait", [True, False])
def test_no_failure_leaves_a_descriptor_or_a_thread(wait: bool, tmp_path: Path) -> None:
    model, optimizer = plain()
    save(tmp_path / "good", step=0, model=model, optimizer=optimizer)

    def once(number: int, files: Files) -> None:
        def run() -> None:
            made = save(tmp_path / str(number), step=1, model=model, optimizer=optimizer, files=files, wait=wait)
            if not isinstance(made, Path):
                made.wait()

        said(run)
        said(lambda: load(tmp_path / "good", model=model, optimizer=optimizer, files=files))

    seen = Watched()
    once(0, seen)
    before = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    for at in range(len(seen.ops)):
        once(at + 1, Failing(at))
    gc.collect()
    assert (len(list(Path("/proc/self/fd").iterdir())), threading.active_count()) == before
