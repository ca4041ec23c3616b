"""A replica inside a stage: its options hold for the gradients of its modules, and nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.pipeline_cases import CASES
from tests.parity.split_case import gradients_of
from tests.world import world

BAR = 1e-5


def _annotated(name: str, inner: dict[str, Any], outer: dict[str, Any] | None, **options: Any) -> nn.Module:
    """The case's model, the modules named in `inner` in a replica inside their stage, with these options."""
    case = CASES[name]
    scopes = {p: (wh.stage(), wh.replica(**inner[p])) if p in inner else wh.stage() for p in case.stages}
    around = () if outer is None else (wh.replica(**outer),)
    return wh.annotate(case.make(), scopes, inside=(*around, wh.pipeline(num_micro_batches=3, **options)))


def _trained(
    rank: int, n: int, name: str, inner: dict[str, Any], outer: dict[str, Any] | None, options: dict[str, Any]
) -> tuple[float, dict[str, float], list[tuple[torch.dtype, int, int, int]]]:
    """(error after two SGD steps, of each gradient of the first, reducers: dtype, buckets, in flight, parameters)"""
    case = CASES[name]
    torch.manual_seed(0)
    model: Any = _annotated(name, inner, outer, **options)
    alone: Any = copy.deepcopy(model)
    wh.parallelize(model)
    index, count = wh.data_rank(model)
    counts = [7, 2, 5, 3][:count]
    here = slice(sum(counts[:index]), sum(counts[: index + 1]))
    torch.manual_seed(1)
    errors: dict[str, float] = {}
    for _ in range(2):
        batch = case.batch(sum(counts))
        for m, given in ((model, {k: v[here] for k, v in batch.items()}), (alone, batch)):
            m.zero_grad()
            out = m(**given)
            (out if case.outside is None else case.outside(out, given)).backward()
        found, expected = gradients_of(model), gradients_of(alone)
        errors = errors or {key: relative_error({key: found[key]}, {key: expected[key]}) for key in expected}
        for m in (model, alone):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
    told = [
        (one.reducer.reduction.dtype, len(one.reducer.buckets), one.reducer.max_in_flight, len(one.parameters))
        for one in model._whale_runtime.reducers
    ]
    return relative_error(wh.full_state_dict(model), alone.state_dict()), errors, told


@pytest.mark.parametrize("outer", [None, {}, {"bucket_bytes": 128}], ids=["alone", "in a replica", "in its options"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", ["tied", "outputs", "skips", "twice"])
@pytest.mark.matrix(keep=1)
def test_a_replica_inside_a_stage_is_one_process(name: str, n: int, ranks: int, outer: dict[str, Any] | None) -> None:
    how = {"bucket_bytes": 64, "max_in_flight": 1, "all_reduce": "flat"}
    inner = {"a": how, "d": how} if name == "tied" else {"b": how, "c": {}}
    for state, gradients, _ in world(n, _trained, name, inner, outer, {"num_ranks": ranks}):
        assert max(state, *gradients.values()) < BAR


def test_its_options_are_followed_and_nobody_elses_are() -> None:
    """Two pipelines of one rank: only 'c' travels in bfloat16, by three rows of its weight, one bucket at a time."""
    inner = {"c": {"reduce_dtype": torch.bfloat16, "bucket_bytes": 96, "max_in_flight": 1}}
    for _, gradients, told in world(2, _trained, "chain", inner, {"max_in_flight": 5}, {"num_ranks": 1}):
        assert sorted(told, key=str) == [(torch.bfloat16, 4, 1, 2), (torch.float32, 1, 5, 6)]
        for key, error in gradients.items():
            assert 1e-4 < error < 2e-2 if key.startswith("c.") else error < BAR


def test_what_it_does_not_say_is_said_by_the_replica_around() -> None:
    inner = {"b": {}, "c": {"bucket_bytes": 4}, "d": {"reduce_dtype": torch.float32}}
    outer = {"reduce_dtype": torch.bfloat16, "bucket_bytes": 8, "max_in_flight": 3, "batch_dim": 1}
    plan = wh.plan(_annotated("chain", inner, outer), cluster=wh.Cluster.of(nodes=1, ranks_per_node=8))
    found = {name[0]: (r.wire, r.bucket_bytes, r.max_in_flight) for r in plan.reduces for name in r.parameters}
    assert found == {
        "a": ("bfloat16", 8, 3),
        "b": ("bfloat16", 8, 3),
        "c": ("bfloat16", 4, 3),
        "d": (None, 8, 3),
    }
    assert plan.batch_dim == 1
    assert "wh.replica(bucket_bytes=4)" in str(plan)
