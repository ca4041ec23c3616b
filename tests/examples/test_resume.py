"""The example under torchrun: a rank is killed twice, and the losses are those of a run that was left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

ROOT = Path(__file__).parents[2]


def losses(run_dir: Path, *options: str) -> tuple[dict[tuple[int, int], float], str]:
    """By life and step, and what was printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
    command += ["--nproc-per-node", "2", "-m", "examples.resume.main", str(run_dir), "--steps", "40", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = map(json.loads, (run_dir / "losses.jsonl").read_text().splitlines())
    return {(line["life"], line["step"]): line["loss"] for line in lines}, done.stdout


@pytest.mark.parametrize("die_at", [("13", "31")])
@pytest.mark.matrix(keep=0)
def test_losses_behind_a_killed_rank_are_those_of_a_run_without(die_at: tuple[str, ...], tmp_path: Path) -> None:
    alone, _ = losses(tmp_path / "alone")
    killed, printed = losses(tmp_path / "killed", "--die-at", *die_at)
    assert sorted(alone) == [(0, step) for step in range(1, 41)] and alone[0, 40] < 0.5 * alone[0, 1]
    assert {life for life, _ in killed} == {0, 1, 2} and (2, 40) in killed and (0, 13) not in killed
    assert all(loss == alone[0, step] for (_, step), loss in killed.items())
    resumed = [min(step for at, step in killed if at == life) for life in (1, 2)]
    assert resumed[0] in (6, 11) and resumed[1] in (26, 31), "the checkpoint before the death, or the one before that"
    assert "life 1: goes on behind step" in printed and "life 2: step 40" in printed
