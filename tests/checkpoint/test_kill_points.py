"""Ranks that die at any moment of a save, and machines that lose power: the old or the new checkpoint loads, whole."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.checkpoint.jobs import Job, equal, left_over, loaded, plain, said
from tests.checkpoint.layers import Watched
from tests.checkpoint.power import MODES, Logged, after
from tests.world import outcomes, world
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.load import load
from whale_torch.checkpoint.ranks import Ranks, mesh_of
from whale_torch.checkpoint.save import save
from whale_torch.errors import CheckpointError, CommError

PARTS = 5


def _check(run_dir: Path, states: dict[int, dict[str, object]], where: object) -> int:
    """The latest, complete, after which the next save tidies up; its step."""
    found = loaded(run_dir)
    assert equal(found, states[found["step"]]), where
    assert equal(loaded(run_dir / "step-00000001"), states[1]), where
    model, optimizer = plain()
    step = load(run_dir, model=model, optimizer=optimizer).step
    save(run_dir, step=step + 1, model=model, optimizer=optimizer)  # as a job that was started again
    assert left_over(run_dir) == [] and load(run_dir, model=model).step == step + 1, where
    return step


class _Kills:
    """A job on every rank that saves step 2 after step 1, and dies in it, again and again."""

    def __init__(self, folder: Path, rank: int, wait: bool):
        self.job, self.states, self.folder, self._rank = Job(), dict[int, dict[str, object]](), folder, rank
        self._wait = wait
        for step, name in ((1, "base"), (2, "whole")):
            self.job.train()
            self.job.save(folder / name / "run")
            self.states[step] = loaded(folder / name / "run")
        self.ranks = Ranks(mesh_of(self.job.model))

    def save(self, name: str, own: int | None = None, everyone: int | None = None) -> tuple[int, str | None]:
        """Saves in a fresh folder `name`, logged to `name`.log; this rank's changes of files, what all ranks say."""
        root = self.folder / name
        if self._rank == 0:
            shutil.copytree(self.folder / "base", root)
        self.ranks.gather(None)
        files = Logged(root, self.log(name), own=own, everyone=everyone)
        texts = self.ranks.gather(said(lambda: self.job.save(root / "run", files, wait=self._wait)))
        assert len(set(texts)) == 1, texts
        return files.changes, texts[0]

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def points(self) -> list[tuple[int, int, str]]:
        """Rank (-1 for all of them), the change at which it dies, and what the disk keeps then."""
        changes, text = self.save("undisturbed")
        assert text is None
        own = [(place, at, "killed") for place, count in enumerate(self.ranks.gather(changes)) for at in range(count)]
        total = len(self.log("undisturbed").read_text().splitlines())
        return own + [(-1, at, mode) for at in range(total) for mode in MODES]


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def _points(rank: int, n: int, folder: Path, part: int, wait: bool) -> tuple[int, list[int]]:
    kills = _Kills(folder, rank, wait)
    points, steps = kills.points(), []
    for number in range(part, len(points), PARTS):
        place, at, mode = points[number]
        name, left = f"point-{number}", folder / f"left-{number}"
        _, text = kills.save(name, at if place == rank else None, at if place < 0 else None)
        assert text is not None and "killed" in text
        if rank == 0:
            after(folder / "base", kills.log(name), left, mode, random.Random(f"{n} {number}"))
            assert mode != "killed" or _tree(left) == _tree(folder / name)
            steps.append(_check(left / "run", kills.states, points[number]))
            if place < 0 and mode == "killed":  # the last change syncs the folder after the rename
                assert steps[-1] == (2 if at == points[-1][1] else 1), at
    return len(points), steps


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("wait", [True, False])
def test_after_any_kill_and_any_power_cut_the_old_or_the_new_one_is_there(
    n: int, part: int, wait: bool, tmp_path: Path
) -> None:
    total, steps = world(n, _points, tmp_path, part, wait, timeout=80)[0]
    assert total >= 100 and len(steps) >= total // PARTS
    assert set(steps) <= {1, 2}


class _Killer(Watched):
    """Ends its process before an operation."""

    def __init__(self, at: int):
        super().__init__()
        self._at = at

    def before(self, operation: str, path: Path) -> None:
        super().before(operation, path)
        if len(self.ops) == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def _killed(rank: int, n: int, folder: Path, victims: list[int], at: int, after_seconds: float) -> tuple[str, float]:
    job = Job(timeout=8.0)
    job.train()
    job.save(folder / "run")
    job.train()
    files: Files = Files()
    if rank in victims and at:
        files = _Killer(at)
    elif rank in victims:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process
        signal.setitimer(signal.ITIMER_REAL, after_seconds)
    start = time.monotonic()
    try:
        job.save(folder / "run", files)
    except (CheckpointError, CommError) as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def _kill(seed: int, n: int) -> tuple[list[int], int, float]:
    """Who dies, at which operation, or after how many seconds."""
    rng = random.Random(f"{n} {seed}")
    victims = rng.choice([[rng.randrange(n)], [0], list(range(n)), rng.sample(range(n), 2)])
    return victims, rng.choice([0, rng.randint(1, 12 if 0 not in victims else 28)]), 0.03 * rng.random()


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("n", [2, 4])
def test_ranks_that_are_killed_leave_the_others_an_error_and_the_checkpoint(n: int, seed: int, tmp_path: Path) -> None:
    victims, at, seconds = _kill(seed, n)
    ended = outcomes(n, _killed, tmp_path, victims, at, seconds, timeout=40)
    assert all(one.exit_code is not None for one in ended), [one.stack for one in ended]
    for one in ended:
        if one.rank in victims:
            assert one.exit_code in (-signal.SIGKILL, -signal.SIGALRM, 0)
        elif any(ended[victim].exit_code for victim in victims):
            assert one.value is not None and one.value[1] < 10.0, one  # an error, or the save was through
    model, optimizer = plain()
    step = load(tmp_path / "run", model=model, optimizer=optimizer).step
    state = {name: value.clone() for name, value in model.state_dict().items()}
    save(tmp_path / "run", step=step + 1, model=model, optimizer=optimizer)
    assert left_over(tmp_path / "run") == [] and step in (1, 2)
    assert load(tmp_path / "run", model=model).step == step + 1
    assert equal(state, dict(model.state_dict()))
