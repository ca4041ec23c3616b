"""Jobs that save into one run_dir: one wins, what is complete is never touched, and what dead jobs left goes."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoint.jobs import Job, left_over, loaded, said
from tests.checkpoint.layers import Watched
from tests.world import Outcome, outcomes
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.load import load
from whale_torch.checkpoint.save import save

DEAD = "step-00000005.tmp-0123456789abcdef"


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def _races(rank: int, n: int, folder: Path, name: str, rounds: int) -> list[tuple[str | None, object]]:
    job, found = Job(), []
    for _ in range(1 + (name == "b")):
        job.train()  # the jobs' states differ
    for number in range(rounds):
        job.step = 7
        (folder / f"ready-{number}-{name}-{rank}").touch()
        end = time.monotonic() + 20
        while len(list(folder.glob(f"ready-{number}-*"))) < 2 * n and time.monotonic() < end:
            time.sleep(0.001)
        text = said(lambda number=number: job.save(folder / f"run-{number}"))
        mine = {k: v.clone() for k, v in job.model.state_dict().items() if v.shape[0] == 8}  # the layer that is whole
        found.append((text, mine))
    return found


def test_of_two_jobs_that_save_a_step_at_once_one_wins_on_all_its_ranks(tmp_path: Path) -> None:
    ended: dict[str, list[Outcome]] = {}
    threads = [
        threading.Thread(target=lambda name=name: ended.update({name: outcomes(2, _races, tmp_path, name, 12)}))
        for name in ("a", "b")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one.ok for both in ended.values() for one in both), [
        o.traceback for both in ended.values() for o in both
    ]
    for number in range(12):
        texts = {name: {one.value[number][0] for one in both} for name, both in ended.items()}
        assert all(len(text) == 1 for text in texts.values()), texts
        (winner,) = (name for name, (text,) in texts.items() if text is None)
        (lost,) = texts["b" if winner == "a" else "a"]
        assert "another job is saving" in lost or "exists" in lost
        found = loaded(tmp_path / f"run-{number}")
        assert all(torch.equal(found[key], value) for key, value in ended[winner][0].value[number][1].items())
        assert left_over(tmp_path / f"run-{number}") == []


def test_an_existing_step_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    save(tmp_path, step=5, model=model)
    before = _tree(tmp_path)
    assert "nothing committed is overwritten" in (said(lambda: save(tmp_path, step=5, model=nn.Linear(3, 3))) or "")
    assert _tree(tmp_path) == before


def test_a_living_job_keeps_its_folder_and_a_dead_one_does_not(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    (tmp_path / DEAD).mkdir()
    held = Files().lock(tmp_path / DEAD / "lock")
    assert held is not None
    save(tmp_path, step=4, model=model)
    assert left_over(tmp_path) == [DEAD]
    text = said(lambda: save(tmp_path, step=5, model=model))
    assert text is not None and "another job is saving" in text and "fix:" in text
    assert left_over(tmp_path) == [DEAD]
    Files().unlock(held)
    save(tmp_path, step=5, model=model)
    assert left_over(tmp_path) == [] and load(tmp_path, model=model).step == 5


class _WithoutLocks(Watched):
    """A file system that has no locks; somebody else saves the same step before this one's index is written."""

    def __init__(self, rival: nn.Module | None = None, run_dir: Path = Path()):
        super().__init__()
        self._rival, self._run_dir = rival, run_dir

    def lock(self, path: Path, *, create: bool = True) -> int | None:
        raise OSError(errno.ENOLCK, "No locks available")

    def before(self, operation: str, path: Path) -> None:
        super().before(operation, path)
        if self._rival is not None and operation == "create" and path.name == "index.json":
            rival, self._rival = self._rival, None
            save(self._run_dir, step=5, model=rival, files=_WithoutLocks())


class _Nothing(set[Path]):
    def add(self, _: Path) -> None:
        """Forgets that the folder is of this process, as for another one."""


def test_without_locks_nothing_is_removed_and_nothing_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whale_torch.checkpoint.jobs._mine", _Nothing())
    (tmp_path / DEAD).mkdir()
    model, rival = nn.Linear(3, 3), nn.Linear(3, 3)
    save(tmp_path, step=4, model=model, files=_WithoutLocks())
    (tmp_path / DEAD / "lock").touch()
    text = said(lambda: save(tmp_path, step=5, model=model, files=_WithoutLocks(rival, tmp_path)))
    assert text is not None and "exists" in text
    assert left_over(tmp_path) == [DEAD]
    load(tmp_path, model=model)
    assert torch.equal(model.weight, rival.weight)


def test_saves_that_fail_leave_a_run_dir_that_can_be_saved_to(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="object"):
        save(tmp_path, step=1, model=nn.Linear(2, 2), extra={"a": object()})
    assert left_over(tmp_path) == []
    assert save(tmp_path, step=1, model=nn.Linear(2, 2)).exists()
