"""split: parameters become local shards, modules the classes that run them."""

from __future__ import annotations

from typing import Any

from torch import nn

from whale_torch.comm.region import Region
from whale_torch.comm.registry import ParameterPlace, set_place
from whale_torch.mesh import Group, Mesh
from whale_torch.planning.layout import Shard
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

__all__ = ["CutParameter", "apply_split", "cut_parameters"]

# imported for what they register: the classes that run each rule
RUNNERS = (split_attention, split_convolution, split_embedding, split_huggingface, split_linear, split_normalization)


class CutParameter:
    """One parameter that is cut: its shard, the ranks that hold the parts, those that hold this part, its scope."""

    def __init__(self, name: str, shard: Shard, parts: Group, copies: Group, site: str):
        self.name, self.shard, self.parts, self.copies, self.site = name, shard, parts, copies, site

    @property
    def index(self) -> int:
        return self.parts.index


def groups_of(plan: Plan, mesh: Mesh, device_name: str) -> tuple[Group, Group, Group, Group]:
    """columns, rows, twins, copies of a VirtualDevice; made in one order on all ranks."""
    device = plan.device(device_name)
    return (
        mesh.two_levels(f"{device_name} columns", device.columns),
        mesh.two_levels(f"{device_name} rows", device.rows),
        mesh.group(f"{device_name} twins", device.twins),
        mesh.group(f"{device_name} copies", device.copies),
    )


def cut_parameters(model: nn.Module, plan: Plan, mesh: Mesh) -> dict[str, CutParameter]:
    """Every cut parameter by its first name; nothing is touched."""
    first = {id(p): name for name, p in model.named_parameters()}
    modules = dict(model.named_modules(remove_duplicate=False))
    graph_of = {name: graph for graph in plan.taskgraphs for name in graph.modules}
    found: dict[str, CutParameter] = {}
    for cut in plan.cuts:
        graph = graph_of[_root_of(cut.module, graph_of)]
        columns, _, _, copies = groups_of(plan, mesh, graph.device)
        for key, shard in cut.shards:
            owner_name, _, attribute = f"{cut.module}.{key}".strip(".").rpartition(".")
            parameter = modules[owner_name]._parameters[attribute]
            name = first[id(parameter)]
            found.setdefault(name, CutParameter(name, shard, columns, copies, graph.site))
    return found


def _root_of(name: str, graph_of: dict[str, Any]) -> str:
    while name not in graph_of:
        name = name.rpartition(".")[0]
    return name


def apply_split(model: nn.Module, plan: Plan, mesh: Mesh, cuts: dict[str, CutParameter]) -> list[Region]:
    """Cuts the parameters in place and lets the cut modules run their shards; returns the regions, one a TaskGraph."""
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters())
    for name, cut in cuts.items():
        parameter = parameters[name]
        if tuple(parameter.shape) == cut.shard.shape and tuple(parameter.shape) != cut.shard.local_shape(cut.index):
            grad, parameter.grad = parameter.grad, None
            parameter.data = cut.shard.cut(parameter.data, cut.index)
            parameter.grad = None if grad is None else cut.shard.cut(grad, cut.index)
        set_place(parameter, ParameterPlace(name, cut.copies, cut.shard, cut.parts, cut.site, mesh.everyone()))
    graph_of = {name: graph for graph in plan.taskgraphs for name in graph.modules}
    regions: dict[int, Region] = {}
    for decided in plan.cuts:
        graph = graph_of[_root_of(decided.module, graph_of)]
        if graph.index not in regions:
            groups = groups_of(plan, mesh, graph.device)
            headers = mesh.two_levels(f"{graph.device} headers", plan.device(graph.device).columns, channel="headers")
            regions[graph.index] = Region(
                f"{graph.label} at {graph.site}",
                *groups,
                headers=headers,
                strict=graph.option("split", "gather") == "error",
                keeps_columns=graph.option("split", "output") == "columns",
                on_host=plan.cluster.device == "cpu",
            )
        module = modules[decided.module]
        module.__class__ = run_class(decided, type(module))
        module.__dict__.update(_region=regions[graph.index], _cut=decided, _options=dict(graph.annotations[-1].options))
        assert isinstance(module, SplitModule)
        module._prepare()
    switch_off_fast_paths(model)
    return list(regions.values())
