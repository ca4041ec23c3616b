"""Runs that tests copy and damage, or look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.jobs import Job
from tests.world import world


def _runs(rank: int, n: int, folder: Path) -> None:
    for name in ("run", "other"):
        job = Job()
        for _ in range(2):
            job.train()
            job.save(folder / name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs by two ranks, "run" and "other", each with steps 1 and 2."""
    folder = tmp_path_factory.mktemp("runs")
    world(2, _runs, folder)
    return folder
