"""Joining a world: which ranks share a node, whose process group it is, few groups, and a clean end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import whale_torch as wh
from tests.world import outcomes, world
from whale_torch.mesh import Group, Mesh, start
from whale_torch.strategies.runtime import runtime_of

ROOT = Path(__file__).parents[2]


def _nodes(rank: int, n: int, group_ranks: list[str] | None) -> tuple[int, ...]:
    if group_ranks is not None:
        os.environ["GROUP_RANK"] = group_ranks[rank]
    return start().cluster.ranks_of_nodes


def test_nodes_are_those_of_torchrun() -> None:
    assert world(4, _nodes, None, local_world_size=2) == [(2, 2)] * 4
    assert world(4, _nodes, None) == [(4,)] * 4
    assert world(3, _nodes, ["0", "0", "1"]) == [(2, 1)] * 3


def test_ranks_of_a_node_that_are_not_neighbours_are_refused_on_all_ranks() -> None:
    texts = {str(o.error) for o in outcomes(4, _nodes, ["0", "1", "0", "1"])}
    (text,) = texts
    assert "ranks 0 to 3 are on nodes ['0', '1', '0', '1']" in text and "torchrun" in text


def _without_torchrun(rank: int, n: int) -> tuple[int, ...]:
    for name in ("GROUP_RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE"):
        os.environ.pop(name, None)
    return start().cluster.ranks_of_nodes


def test_another_launcher_is_asked_for_host_names() -> None:
    assert world(2, _without_torchrun) == [(2,)] * 2


def _own_process_group(rank: int, n: int) -> tuple[bool, int]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=50))
    mine = dist.group.WORLD
    model = wh.parallelize(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    return dist.group.WORLD is mine, runtime_of(model, "the test").mesh.world


def test_a_process_group_of_the_script_is_used() -> None:
    assert world(2, _own_process_group) == [(True, 2)] * 2


def _late(rank: int, n: int) -> float:
    with wh.split():
        model = nn.Linear(2, 4)
    wh.parallelize(model, timeout=2)
    if rank == 1:
        time.sleep(8)
        return 0.0
    begin = time.monotonic()
    try:
        model(torch.ones(1, 2)).sum().backward()
    except wh.CommError:
        return time.monotonic() - begin
    return -1.0


@pytest.mark.matrix(keep=0)
def test_every_group_has_the_time_out_that_was_given() -> None:
    waited, _ = world(2, _late)
    assert 1.5 < waited < 8


def test_a_world_of_one_needs_no_launcher_and_makes_no_group() -> None:
    mesh = start("cpu")
    assert (mesh.world, mesh.rank, mesh.cluster) == (1, 0, wh.Cluster.of())
    assert mesh.everyone().process_group is None and not dist.is_initialized()


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 but RANK is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
    ],
)
def test_an_environment_that_names_no_rank(
    environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(wh.PlanError, match=said) as caught:
        start("cpu")
    assert "torchrun" in str(caught.value)


def test_a_device_without_a_way_to_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(wh.PlanError, match="1 ranks cannot train on device 'meta'"):
        start("meta")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(wh.PlanError, match="2 ranks cannot train on device 'mps'"):
        start("mps")


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(wh.PlanError, match=r"cuda:3 \(LOCAL_RANK 3\), but torch sees 2 CUDA devices"):
        start("cuda")


# ---- few groups ----


class Layers(nn.Module):
    def __init__(self, layers: int = 6):
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            with wh.replica(), wh.split(size=2):
                self.blocks.append(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)))
        with wh.split():
            self.head = nn.Linear(4, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _joined(mesh: Mesh) -> list[Group]:
    return [group for group in mesh.groups() if group.process_group is not None]


def _two_models(rank: int, n: int) -> tuple[int, int, float]:
    begin = time.process_time()
    first = wh.parallelize(Layers())
    alone = len(_joined(runtime_of(first, "the test").mesh))
    second = wh.parallelize(Layers(2))
    both = {id(g.process_group) for m in (first, second) for g in _joined(runtime_of(m, "the test").mesh)}
    took = time.process_time() - begin
    x = torch.ones(2, 4)
    (first(x).rows().sum() + second(x).rows().sum()).backward()
    return alone, len(both), took


def test_groups_do_not_grow_with_layers_and_models_share_them() -> None:
    for alone, both, _ in world(4, _two_models):
        assert alone <= 10
        assert both <= alone + 2, "a second model brings the groups of its gradients"


# ---- the end ----

SCRIPT = """
import atexit, os, sys, time
def tell_threads():  # registered first, so it runs last
    os.write(1, f"at the end: {len(os.listdir('/proc/self/task'))} threads\\n".encode())
atexit.register(tell_threads)
import torch, torch.distributed as dist, torch.nn as nn, whale_torch as wh
if "own" in sys.argv:
    dist.init_process_group("gloo")
with wh.replica(reduce_dtype=torch.float16):
    model = nn.Linear(4, 4)
wh.parallelize(model)
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
if "fail" in sys.argv and os.environ["RANK"] == "1":
    raise RuntimeError("rank 1 has had enough")
os.write(1, f"done at {time.time()}\\n".encode())  # in one piece: two ranks share the pipe
if "destroy" in sys.argv:
    dist.destroy_process_group()
"""


def _torchrun(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    return done, time.time()


@pytest.mark.parametrize("how", ["", "destroy", "own destroy"])
@pytest.mark.matrix(keep=1)
def test_processes_end_quickly_and_without_a_word(tmp_path: Path, how: str) -> None:
    """A thread of gloo that still runs when the interpreter goes can abort the process."""
    done, end = _torchrun(tmp_path, *how.split())
    assert done.returncode == 0, done.stderr
    assert "arning" not in done.stderr and "destroy_process_group" not in done.stderr, done.stderr
    stamps = [float(stamp) for stamp in re.findall(r"done at (\d+\.\d+)", done.stdout)]
    assert len(stamps) == 2 and end - max(stamps) < 20
    assert done.stdout.count("at the end: 1 threads") == 2, done.stdout


def test_an_error_on_one_rank_ends_the_run(tmp_path: Path) -> None:
    done, _ = _torchrun(tmp_path, "fail")
    assert done.returncode != 0 and "rank 1 has had enough" in done.stderr
