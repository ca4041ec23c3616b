"""split: parameters become local shards, modules the classes that run them."""

from __future__ import annotations

from torch import nn

from whale_torch.comm.region import Region
from whale_torch.comm.registry import ParameterPlace, set_place
from whale_torch.mesh import Group, Mesh
from whale_torch.planning.plan import Plan
from whale_torch.strategies import (
    split_attention,
    split_convolution,
    split_embedding,
    split_huggingface,
    split_linear,
    split_normalization,
)
from whale_torch.strategies.split_rules import SplitModule, run_class
from whale_torch.strategies.split_transformer import switch_off_fast_paths

__all__ = ["apply_split", "cut_parameters"]

# imported for what they register: the classes that run each rule
RUNNERS = (split_attention, split_convolution, split_embedding, split_huggingface, split_linear, split_normalization)


def groups_of(plan: Plan, mesh: Mesh, device_name: str) -> tuple[Group, Group, Group, Group]:
    """columns, rows, twins, copies of a VirtualDevice; made in one order on all ranks."""
    device = plan.device(device_name)
    return (
        mesh.two_levels(f"{device_name} columns", device.columns),
        mesh.two_levels(f"{device_name} rows", device.rows),
        mesh.group(f"{device_name} twins", device.twins),
        mesh.group(f"{device_name} copies", device.copies),
    )


def cut_parameters(model: nn.Module, plan: Plan, mesh: Mesh) -> dict[str, ParameterPlace]:
    """Where every cut parameter is to lie, by its first name; nothing is touched.

    Raises PlanError where nothing runs a cut that the plan decided.
    """
    first = {id(p): name for name, p in model.named_parameters()}
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, ParameterPlace] = {}
    for cut in plan.cuts:
        graph = plan.taskgraph_of(cut.module)
        run_class(cut, type(modules[cut.module]))
        columns, _, _, copies = groups_of(plan, mesh, graph.device)
        for key, shard in cut.shards:
            owner_name, _, attribute = f"{cut.module}.{key}".strip(".").rpartition(".")
            parameter = modules[owner_name]._parameters[attribute]
            name = first[id(parameter)]
            found.setdefault(name, ParameterPlace(name, copies, shard, columns, graph.site, mesh.everyone()))
    return found


def apply_split(model: nn.Module, plan: Plan, mesh: Mesh, cuts: dict[str, ParameterPlace]) -> list[Region]:
    """Cuts the parameters in place and lets the cut modules run their shards; returns the regions, one a TaskGraph."""
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters())
    for name, place in cuts.items():
        parameter, shard, parts = parameters[name], place.shard, place.parts
        assert shard is not None and parts is not None
        if tuple(parameter.shape) == shard.shape and tuple(parameter.shape) != shard.local_shape(parts.index):
            grad, parameter.grad = parameter.grad, None
            parameter.data = shard.cut(parameter.data, parts.index)
            parameter.grad = None if grad is None else shard.cut(grad, parts.index)
        set_place(parameter, place)
    regions: dict[int, Region] = {}
    for decided in plan.cuts:
        graph = plan.taskgraph_of(decided.module)
        if graph.index not in regions:
            groups = groups_of(plan, mesh, graph.device)
            headers = mesh.two_levels(f"{graph.device} headers", plan.device(graph.device).columns, channel="headers")
            regions[graph.index] = Region(
                f"{graph.label} at {graph.site}",
                *groups,
                headers=headers,
                strict=graph.option("split", "gather") == "error",
                keeps_columns=graph.option("split", "output") == "columns",
                on_host=(plan.cluster.device if mesh.device.type == "meta" else mesh.device.type) == "cpu",
            )
        module = modules[decided.module]
        module.__class__ = run_class(decided, type(module))
        module.__dict__.update(_region=regions[graph.index], _cut=decided, _options=dict(graph.annotations[-1].options))
        assert isinstance(module, SplitModule)
        regions[graph.index].compiles &= module._compiles
        module._prepare()
    switch_off_fast_paths(model)
    return list(regions.values())
