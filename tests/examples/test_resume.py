"""The example under torchrun: a rank is killed, and the losses are those of a run that was left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.world import world

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

ROOT = Path(__file__).parents[2]
STEPS = 24


def alone(rank: int, n: int, run_dir: str) -> None:
    from examples.resume.main import main

    main([run_dir, "--steps", str(STEPS)])


def losses(run_dir: Path) -> dict[tuple[int, int], float]:
    """By life and step."""
    lines = map(json.loads, (run_dir / "losses.jsonl").read_text().splitlines())
    return {(line["life"], line["step"]): line["loss"] for line in lines}


def killed(run_dir: Path, *options: str) -> str:
    """What was printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
    command += ["--nproc-per-node", "2", "-m", "examples.resume.main", str(run_dir), "--steps", str(STEPS), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("options", [("--die-at", "13"), ("--wait", "--die-at", "11", "18")])
@pytest.mark.matrix(keep=0)
def test_losses_behind_a_killed_rank_are_those_of_a_run_without(options: tuple[str, ...], tmp_path: Path) -> None:
    world(2, alone, str(tmp_path / "alone"))
    expected = losses(tmp_path / "alone")
    assert sorted(expected) == [(0, step) for step in range(1, STEPS + 1)] and expected[0, STEPS] < expected[0, 1] / 2
    printed = killed(tmp_path / "killed", *options)
    found = losses(tmp_path / "killed")
    deaths = [int(step) for step in options[options.index("--die-at") + 1 :]]
    assert {life for life, _ in found} == {*range(len(deaths) + 1)} and (len(deaths), STEPS) in found
    assert all(loss == expected[0, step] for (_, step), loss in found.items())
    for life, death in enumerate(deaths, start=1):
        before = (death - 1) // 5 * 5  # the checkpoint before the death, or, still being written then, the one before
        first = min(step for at, step in found if at == life)
        assert (life - 1, death) not in found
        assert first in ((before + 1,) if "--wait" in options else (before - 4, before + 1))
        assert f"life {life}: goes on after step {first - 1}" in printed
