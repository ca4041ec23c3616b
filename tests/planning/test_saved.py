"""A saved plan: reviewed, edited, applied, or refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import whale_torch as wh
from tests.parity.metric import gradients
from tests.world import outcomes, world
from whale_torch.planning.fit import check_fit
from whale_torch.planning.plan import Plan


class Model(nn.Module):
    """Features 6 -> 8, a pair of layers inside, 10 classes."""

    def __init__(self, annotated: bool = True):
        super().__init__()
        self.features = nn.Linear(6, 8)
        self.ffn = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.head = nn.Linear(8, 10)
        if annotated:
            wh.annotate(self, {"features": wh.replica(), "ffn": (wh.replica(), wh.split(size=2)), "head": wh.split()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.ffn(torch.tanh(self.features(x))))


def model(annotated: bool = True) -> Model:
    torch.manual_seed(0)
    return Model(annotated)


def applied(rank: int, n: int, path: str, annotated: bool) -> dict[str, torch.Tensor | None]:
    trained = wh.parallelize(model(annotated), plan=Plan.load(path), timeout=30)
    made = wh.plan(trained)
    feed = rank // made.feed_size
    x, y = batch()
    mine = slice(feed * 3, feed * 3 + 3)
    F.cross_entropy(trained(x[mine]), y[mine]).backward()
    return gradients(trained)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(6, 6), torch.randint(10, (6,))


def expected() -> dict[str, torch.Tensor]:
    alone, (x, y) = model(), batch()
    F.cross_entropy(alone(x), y).backward()
    return {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}


CLUSTER = wh.Cluster.of(2, 2)


def saved(path: Path, edit: Callable[[dict[str, Any]], None] = lambda data: None) -> str:
    data = json.loads(wh.plan(model(), cluster=CLUSTER).to_json())
    edit(data)
    path.write_text(json.dumps(data))
    return str(path)


def widths(data: dict[str, Any], module: str, new: list[int]) -> None:
    (cut,) = (cut for cut in data["cuts"] if cut["module"] == module)
    cut["widths"] = new
    for shard in cut["shards"].values():
        shard["widths"] = new


def flat_bf16_buckets(data: dict[str, Any]) -> None:
    for reduce in data["reduces"]:
        reduce.update(algorithm="flat", bucket_bytes=100, max_in_flight=1)


def hierarchical(data: dict[str, Any]) -> None:
    assert data["reduces"][0]["device"] == "replica" and data["reduces"][0]["algorithm"] == "hierarchical"


def uneven(data: dict[str, Any]) -> None:
    widths(data, "head", [1, 0, 6, 3])
    widths(data, "ffn.0", [9, 3])
    widths(data, "ffn.2", [9, 3])


def unlike_pair(data: dict[str, Any]) -> None:
    """The two layers of the pair no longer agree: what lies between is gathered, and the result is the same."""
    widths(data, "ffn.0", [9, 3])


HONOURED = {
    "as it was": lambda data: None,
    "flat, small buckets": flat_bf16_buckets,
    "two levels": hierarchical,
    "uneven widths": uneven,
    "unlike widths": unlike_pair,
}


@pytest.mark.parametrize(("name", "annotated"), [*((name, True) for name in HONOURED), ("uneven widths", False)])
def test_a_saved_plan_is_applied_as_it_reads(name: str, annotated: bool, tmp_path: Path) -> None:
    path = saved(tmp_path / "plan.json", HONOURED[name])
    for found in world(4, applied, path, annotated, local_world_size=2):
        for key, grad in expected().items():
            torch.testing.assert_close(found[key], grad, rtol=1e-5, atol=1e-6)


def _shapes(rank: int, n: int, path: str) -> list[int]:
    trained = wh.parallelize(model(), plan=Plan.load(path), timeout=30)
    assert wh.plan(trained).reduces[0].bucket_bytes == 100
    return list(trained.head.weight.shape)


def _unknown_role(rank: int, n: int, path: str) -> list[int]:
    trained = model()
    with pytest.raises(
        wh.PlanError, match=r"'head' cannot be carried out: nothing runs rule 'Linear' in the role 'sides'"
    ):
        wh.parallelize(trained, plan=Plan.load(path), timeout=30)
    return list(trained.head.weight.shape)


def test_a_role_that_nothing_runs_is_refused_before_anything_is_cut(tmp_path: Path) -> None:
    def edit(data: dict[str, Any]) -> None:
        (cut,) = (cut for cut in data["cuts"] if cut["module"] == "head")
        cut["role"] = "sides"

    path = saved(tmp_path / "plan.json", edit)
    assert world(4, _unknown_role, path, local_world_size=2) == [[10, 8]] * 4


def test_edits_reach_the_shards_and_the_buckets(tmp_path: Path) -> None:
    def edit(data: dict[str, Any]) -> None:
        uneven(data)
        flat_bf16_buckets(data)

    path = saved(tmp_path / "plan.json", edit)
    assert world(4, _shapes, path, local_world_size=2) == [[1, 8], [0, 8], [6, 8], [3, 8]]


def edited(module: str, new: list[int], only: str | None = None) -> Callable[[dict[str, Any]], None]:
    def edit(data: dict[str, Any]) -> None:
        (cut,) = (cut for cut in data["cuts"] if cut["module"] == module)
        cut["widths"] = new
        for key, shard in cut["shards"].items():
            if only in (None, key):
                shard["widths"] = new

    return edit


def reduce_of(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["reduces"][0].update(changes)


def drop_gradient(data: dict[str, Any]) -> None:
    data["reduces"][0]["parameters"].remove("features.weight")


def double_gradient(data: dict[str, Any]) -> None:
    data["reduces"][0]["parameters"].append("features.weight")


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "sum of widths": (
        edited("head", [3, 3, 3, 3]),
        r"'head' cannot be carried out: widths " r"\(3, 3, 3, 3\) .* != \(10, 8\)\[0\]",
    ),
    "negative width": (edited("head", [12, -2, 0, 0]), r"widths \[12, -2, 0, 0\] of 'weight'"),
    "number of widths": (edited("head", [5, 5]), r"'head' cannot be carried out: 2 widths for 4 ranks"),
    "one parameter only": (
        edited("head", [1, 2, 3, 4], only="weight"),
        r"widths are \[1, 2, 3, 4\], but " r"those of 'bias' are \[3, 3, 2, 2\]",
    ),
    "algorithm": (reduce_of(algorithm="ring"), r"algorithm is 'ring'.*\n.*\"flat\" or \"hierarchical\""),
    "two levels without nodes": (
        lambda data: data["reduces"][1].update(algorithm="hierarchical"),
        r"hierarchically, but on 2 nodes x 2 ranks",
    ),
    "wire": (reduce_of(wire="int8"), r"travel in 'int8'"),
    "buckets": (reduce_of(bucket_bytes=0), r"buckets are 0 bytes, 8 in flight"),
    "lost gradient": (drop_gradient, r"'features.weight' is averaged on no ranks in the plan and has to be on replica"),
    "doubled gradient": (double_gradient, r"'features.weight' is averaged twice"),
    "unknown device": (
        reduce_of(device="split3"),
        r"'split3', but the plan's VirtualDevices " r"are \['replica', 'split2', 'split4'\]",
    ),
    "device size": (lambda data: data["devices"][1].update(size=3), r"groups of 3 of 4 ranks"),
    "no device size": (lambda data: data["devices"][0].update(size=0), r"groups of 0 of 4 ranks"),
    "dimension": (
        lambda data: data["cuts"][0]["shards"]["bias"].update(dim=1),
        r"'ffn.0' cannot be carried out: dimension 1 of a parameter of shape \(12,\)",
    ),
    "loss": (lambda data: data.update(loss="average"), r"loss is 'average'"),
    "unknown module": (lambda data: data["cuts"][0].update(module="ffn.7"), r"cuts 'ffn.7', which is not in the model"),
    "scope": (
        lambda data: data["taskgraphs"][-1]["annotations"][0].update(options=[["size", 4]]),
        r"'head' is under wh.split\(\) here " r"and under wh.split\(size=4\)",
    ),
    "other cluster": (
        lambda data: data["cluster"].update(ranks_of_nodes=[4]),
        r"for ranks \[4\] on its nodes, but \[2, 2\] are running",
    ),
    "other shapes": (
        lambda data: data["parameters"][0].__setitem__(1, [9, 6]),
        r"'features.weight' \[9, 6\] in the plan " r"and 'features.weight' \[8, 6\] here",
    ),
    "other model": (lambda data: data["parameters"].pop(), r"7 parameters in the plan, 8 here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_out_is_refused(name: str, tmp_path: Path) -> None:
    edit, said = REFUSED[name]
    path = saved(tmp_path / "plan.json", edit)
    with pytest.raises(wh.PlanError, match=said) as caught:
        check_fit(Plan.load(path), model(), CLUSTER)
    assert "AssertionError" not in str(caught.value)
    assert caught.value.fix


def _refuse(rank: int, n: int, paths: list[str]) -> None:
    wh.parallelize(model(), plan=Plan.load(paths[rank]), timeout=30)


def test_ranks_that_load_different_plans_are_told_so(tmp_path: Path) -> None:
    paths = [saved(tmp_path / f"plan{rank}.json", uneven if rank == 1 else lambda data: None) for rank in range(4)]
    for outcome in outcomes(4, _refuse, paths, local_world_size=2):
        assert isinstance(outcome.error, wh.PlanError) and "ranks [1] plan another model than rank 0" in str(
            outcome.error
        )


def test_a_plan_that_one_rank_refuses_is_refused_by_all(tmp_path: Path) -> None:
    bad = REFUSED["number of widths"][0]
    paths = [saved(tmp_path / f"plan{rank}.json", bad if rank == 2 else lambda data: None) for rank in range(4)]
    texts = {str(outcome.error) for outcome in outcomes(4, _refuse, paths, local_world_size=2)}
    (text,) = texts
    assert "rank 2 was refused, and not every rank with it: the plan's cut of 'head'" in text and "ranks:  2" in text


def test_a_plan_holds_for_parameters_that_were_frozen_when_it_was_made() -> None:
    frozen = model()
    frozen.features.requires_grad_(False)
    plan = wh.plan(frozen, cluster=CLUSTER)
    assert check_fit(plan, frozen, CLUSTER) == plan
    thawed = check_fit(plan, model(), CLUSTER)
    assert thawed.gradient_bytes > plan.gradient_bytes and thawed.reduces[0].parameters == plan.reduces[0].parameters


def test_byte_counts_follow_an_edit(tmp_path: Path) -> None:
    plan = Plan.load(saved(tmp_path / "plan.json", lambda data: widths(data, "head", [10, 0, 0, 0])))
    fitted = check_fit(plan, model(), CLUSTER)
    assert fitted.parameter_bytes > plan.parameter_bytes
