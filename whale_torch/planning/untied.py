"""The plan of a model some of whose ties were undone while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from whale_torch.planning.cost import gradient_traffic, reduce_bytes, shards_among
from whale_torch.planning.gradients import local_numel, plan_reduces
from whale_torch.planning.layout import Shard
from whale_torch.planning.plan import Plan

__all__ = ["named_once", "untied"]


def named_once(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Every parameter under its first name. modules: by the names that the plan has for them, in order."""
    seen: set[int] = set()
    found: dict[str, nn.Parameter] = {}
    for name, module in modules.items():
        for key, p in module._parameters.items():
            if p is not None and id(p) not in seen:
                seen.add(id(p))
                found[f"{name}.{key}" if name else key] = p
    return found


def untied(plan: Plan, modules: Mapping[str, nn.Module]) -> Plan:
    """As a model that never had these ties would be planned, by modules whose parameters are cut already.

    Without a pipeline. What rows cost stays as it was.
    """
    held = named_once(modules)
    first = {id(p): name for name, p in held.items()}
    shards = shards_among(plan, modules, first)
    whole = {name: _whole(p, shards.get(name)) for name, p in held.items()}
    owner_of = {name: plan.taskgraph_of(name.rpartition(".")[0]).index for name in whole}
    devices = {device.name: device for device in plan.devices}
    reduces = plan_reduces(whole, shards, owner_of, plan.taskgraphs, devices, plan.cluster)
    sizes = {name: local_numel(p, shards.get(name)) * p.element_size() for name, p in whole.items()}
    made = replace(
        plan,
        taskgraphs=tuple(
            replace(g, num_parameters=_numel(plan, modules, whole, first, g.index)) for g in plan.taskgraphs
        ),
        reduces=tuple(reduce_bytes(reduce, whole, shards, [frozenset(whole)]) for reduce in reduces),
        parameters=tuple((name, tuple(p.shape)) for name, p in whole.items()),
        parameter_bytes=sum(sizes.values()),
        gradient_bytes=sum(size for name, size in sizes.items() if whole[name].requires_grad),
    )
    rest = tuple(traffic for traffic in plan.traffic if traffic.what != "gradients")
    return replace(made, traffic=(*gradient_traffic(made, whole, shards), *rest))


def _whole(p: nn.Parameter, shard: Shard | None) -> nn.Parameter:
    shape = p.shape if shard is None else shard.shape
    return nn.Parameter(torch.empty(shape, dtype=p.dtype, device="meta"), requires_grad=p.requires_grad)


def _numel(
    plan: Plan,
    modules: Mapping[str, nn.Module],
    whole: Mapping[str, nn.Parameter],
    first: Mapping[int, str],
    graph: int,
) -> int:
    """Parameters of a TaskGraph, a tied one once."""
    names = {
        first[id(p)]
        for name, module in modules.items()
        if plan.taskgraph_of(name).index == graph
        for p in module._parameters.values()
        if p is not None
    }
    return sum(whole[name].numel() for name in names)
