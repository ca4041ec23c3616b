"""python -m whale_torch: what is installed and what answers."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import whale_torch as wh
from whale_torch.__main__ import main, report
from whale_torch.ops import backend

ROOT = Path(__file__).parents[2]


def test_the_report_names_versions_kernels_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    text = report()
    for expected in (
        f"whale_torch {wh.__version__}",
        f"torch {torch.__version__}",
        f"Python {platform.python_version()}",
        "_C_cpu.so: ",
        "CPU cores",
        "torchrun",
    ):
        assert expected in text
    for name, found in backend().items():
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
        assert f"cpu: {found['cpu']}" in line
    assert not dist.is_initialized()


def test_under_a_launcher_it_describes_the_cluster_and_joins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "0",
        "LOCAL_RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    text = report()
    assert "rank 0 of 8, on node 0" in text and "cluster: 2 nodes x 4 ranks" in text
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"RANK": "1"}, "rank 1 of 3; ranks of one host will be a node"),
        ({}, "WORLD_SIZE is 3 but RANK is not set: wh.parallelize will refuse it"),
        ({"RANK": "0", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "rank 0 of 3, on node 0, of 2 ranks: nodes have"),
    ],
)
def test_of_what_a_launcher_left_out_nothing_is_said(
    environment: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WORLD_SIZE": "3", **environment}.items():
        monkeypatch.setenv(name, value)
    assert report().splitlines()[-1].strip().startswith(told)


def test_it_names_its_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["whale_torch", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert "{verify,inspect,diff,convert}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("environment", "first"),
    [({}, "versions"), ({"RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "0"}, "rank 1 of 2, on node 0")],
)
def test_as_a_command(environment: dict[str, str], first: str) -> None:
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "whale_torch"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**clean, **environment, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.startswith(first)
