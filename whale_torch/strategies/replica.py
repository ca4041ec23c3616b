"""replica: equal first values on all ranks that hold a copy, and the reducers that keep them equal."""

from __future__ import annotations

import torch
from torch import nn

from whale_torch.comm.collectives import broadcast
from whale_torch.comm.reducer import Reducer
from whale_torch.comm.reduction import Reduction, TwoLevels
from whale_torch.comm.registry import ParameterPlace, place_of, set_place
from whale_torch.mesh import Group, Mesh
from whale_torch.planning.placement import Blocks
from whale_torch.planning.plan import Plan

__all__ = ["equalize", "make_reducers", "place_whole_parameters"]


def place_whole_parameters(model: nn.Module, mesh: Mesh) -> None:
    """Notes for every parameter that is not cut that all ranks hold a copy."""
    for name, parameter in model.named_parameters():
        if place_of(parameter) is None:
            set_place(parameter, ParameterPlace(name, mesh.everyone()))


@torch.no_grad()
def equalize(model: nn.Module) -> None:
    """Copies every parameter from the first rank that holds it, and every buffer from rank 0."""
    everyone: Group | None = None
    for name, parameter in model.named_parameters():
        place = place_of(parameter)
        assert place is not None
        if place.shard is None:
            everyone = place.copies
        if place.copies.size > 1 and parameter.numel():
            broadcast(parameter.data, place.copies, name=f"first values of {name}")
    if everyone is not None and everyone.size > 1:
        for name, buffer in model.named_buffers():
            if buffer.numel():
                broadcast(buffer, everyone, name=f"first values of {name}")


def make_reducers(model: nn.Module, plan: Plan, mesh: Mesh) -> list[Reducer]:
    """One reducer for every group of gradients that the plan averages together."""
    parameters = dict(model.named_parameters())
    reducers = []
    for number, reduce in enumerate(plan.reduces):
        device = plan.device(reduce.device)
        channel = f"gradients {number}"
        copies = mesh.group(f"copies of {reduce.device}", device.copies, channel=channel)
        levels = None
        if reduce.algorithm == "hierarchical":
            inside, between = two_levels(device.copies, plan)
            levels = TwoLevels(
                mesh.group("copies inside a node", inside, channel=channel), mesh.group("copies between nodes", between, channel=channel)
            )
        wire = getattr(torch, reduce.wire) if reduce.wire else None
        reduction = Reduction(copies, wire=wire, levels=levels)
        chosen = [parameters[name] for name in reduce.parameters]
        reducers.append(Reducer(chosen, reduction, bucket_bytes=reduce.bucket_bytes, max_in_flight=reduce.max_in_flight))
    return reducers


def two_levels(copies: Blocks, plan: Plan) -> tuple[Blocks, Blocks]:
    """The blocks of ranks inside nodes, and of ranks at the same place on all nodes."""
    inside: list[tuple[int, ...]] = []
    between: list[tuple[int, ...]] = []
    for block in copies:
        nodes: dict[int, list[int]] = {}
        for rank in block:
            nodes.setdefault(plan.cluster.node_of(rank), []).append(rank)
        inside += [tuple(ranks) for ranks in nodes.values()]
        between += [tuple(ranks) for ranks in zip(*nodes.values(), strict=True)]
    return tuple(inside), tuple(between)
