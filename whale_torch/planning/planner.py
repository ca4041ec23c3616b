"""The planner: a pure function of annotated model and cluster; equal inputs give equal plans on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from whale_torch.annotation import Annotation
from whale_torch.cluster import Cluster
from whale_torch.errors import PlanError
from whale_torch.names import joined
from whale_torch.planning.balance import balanced_stages
from whale_torch.planning.cost import DEFAULT_ROWS, price, shards_of, split_bytes
from whale_torch.planning.flops import measure
from whale_torch.planning.gradients import plan_reduces
from whale_torch.planning.layout import Shard
from whale_torch.planning.limits import check_pipeline_scopes, check_tied_options, check_ties
from whale_torch.planning.links import links_of
from whale_torch.planning.options import batch_dim_of, check_options, one_option
from whale_torch.planning.pipelines import PipelinePlan, annotated_stages, plan_pipeline, scope_of
from whale_torch.planning.placement import VirtualDevice
from whale_torch.planning.plan import Plan
from whale_torch.planning.recording import arguments, count_rows, record_step
from whale_torch.planning.rules import Cut, Role, RuleContext, find_rule, model_plan, neighbour_roles, own_plans
from whale_torch.planning.slices import SlicedModules
from whale_torch.planning.tables import num_stages_of
from whale_torch.planning.taskgraph import Grouping, TaskGraph, group_modules

__all__ = ["make_plan", "measured_at"]


def make_plan(
    model: nn.Module,
    cluster: Cluster,
    *,
    default: tuple[Annotation, ...] = (),
    sample_inputs: Any = None,
    seconds: Mapping[str, float] | None = None,
) -> Plan:
    """Plans an annotated model on a cluster without changing it.

    sample_inputs: what one replica is fed: from its rows bytes are counted, and a pipeline is balanced and placed.
    seconds: of modules by name, where `measured_at` asks for them.
    Raises AnnotationError and PlanError, and TraceError for a pipeline whose forward cannot be recorded, with the same
    text on every rank.
    """
    grouping = group_modules(model, default)
    pipeline = _plan_pipeline(model, grouping.graphs, cluster, sample_inputs, seconds)
    build = partial(_build, model, cluster, grouping, sample_inputs)
    if pipeline is None or not pipeline.moved or cluster.num_nodes == 1 or pipeline.num_ranks in (1, cluster.num_ranks):
        return build(pipeline)
    outer, inner = build(pipeline), build(replace(pipeline, inner=True))
    shards = shards_of(outer, model)
    links = [links_of(plan, model, shards, split_bytes(plan)) for plan in (outer, inner)]
    plan = inner if links[1].between_bytes < links[0].between_bytes else outer
    assert plan.pipeline is not None
    return replace(plan, pipeline=replace(plan.pipeline, links=tuple(links)))


def measured_at(model: nn.Module, default: tuple[Annotation, ...] = ()) -> str | None:
    """The line of the pipeline that is to be balanced by measured seconds, None where there is none.

    Raises PlanError where nothing would follow them, and where scopes ask for two pipelines.
    """
    graphs = group_modules(model, default).graphs
    scope = scope_of(graphs)
    if scope is None or scope.get("balance") != "measured":
        return None
    check_pipeline_scopes(graphs, scope)
    return None if num_stages_of(scope) is None else scope.site


def _plan_pipeline(
    model: nn.Module,
    graphs: Sequence[TaskGraph],
    cluster: Cluster,
    sample_inputs: Any,
    seconds: Mapping[str, float] | None,
) -> PipelinePlan | None:
    scope = scope_of(graphs)
    if scope is None:
        return None
    check_pipeline_scopes(graphs, scope)
    stages: Sequence[Sequence[str]] = annotated_stages(graphs, scope)
    chosen, measured = "", None
    if not stages:
        measured, why = (None, "") if sample_inputs is None else measure(model, *arguments(sample_inputs))
        asked = plan_pipeline(scope, [()] * (num_stages_of(scope) or 0), cluster)
        stages, chosen = balanced_stages(model, graphs, scope, cluster, asked, measured, seconds)
        chosen += why
    pipeline = plan_pipeline(scope, stages, cluster, chosen=chosen)
    if sample_inputs is None:
        return pipeline
    return record_step(model, pipeline, sample_inputs, batch_dim_of(graphs), graphs, measured)


def _build(
    model: nn.Module, cluster: Cluster, grouping: Grouping, sample_inputs: Any, pipeline: PipelinePlan | None
) -> Plan:
    ranks = cluster.num_ranks // (1 if pipeline is None else pipeline.num_ranks)
    sizes = {graph.index: _split_size(graph, cluster, ranks) for graph in grouping.graphs if graph.kind == "split"}
    feed_size = _feed_size(grouping, sizes)
    graphs, devices = _place(grouping, sizes, cluster.num_ranks, feed_size, pipeline)
    by_name = {device.name: device for device in devices}
    cuts = _cut(model, grouping, graphs, by_name)
    check_options(graphs, cuts, grouping.graph_of)
    shards, owner = _shards(model, cuts, grouping, graphs)
    if pipeline is not None:
        check_ties(pipeline, model, shards)
        check_tied_options(model, graphs, grouping.graph_of)
        SlicedModules(graphs).check(model.named_modules())
    parameters, batch_dim = dict(model.named_parameters()), batch_dim_of(graphs)
    plan = Plan(
        cluster=cluster,
        feed_size=feed_size,
        taskgraphs=tuple(_with_sizes(graphs, model, grouping)),
        devices=devices,
        cuts=tuple(cuts),
        reduces=plan_reduces(parameters, shards, owner, graphs, by_name, cluster),
        traffic=(),
        parameters=tuple((name, tuple(p.shape)) for name, p in parameters.items()),
        rows_per_rank=DEFAULT_ROWS if sample_inputs is None else count_rows(model, sample_inputs, batch_dim),
        batch_dim=batch_dim,
        loss=one_option(graphs, "loss", "mean"),
        pipeline=pipeline,
    )
    return price(plan, model)


def _split_size(graph: TaskGraph, cluster: Cluster, ranks: int) -> int:
    """Ranks of a split. Raises PlanError where they do not cut `ranks`, all of the world or of a stage."""
    asked = graph.option("split", "size")
    nested = any(a.kind == "replica" for a in graph.annotations) and ranks == cluster.num_ranks and not graph.experts
    if asked is None and nested:
        asked = cluster.ranks_per_node
        if asked is None:
            raise PlanError(
                f"{graph.label}: nodes have {list(cluster.ranks_of_nodes)} ranks, "
                "so a split inside a replica has no natural size.",
                where=graph.site,
                fix="name it: wh.split(size=...)",
            )
    size = ranks if asked is None else int(str(asked))
    if size > ranks or ranks % size:
        divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
        of = "" if ranks == cluster.num_ranks else " of a stage"
        raise PlanError(
            f"{graph.label}: {ranks} ranks{of} cannot be cut into groups of {size}.",
            where=graph.site,
            fix=f"choose a size that divides {ranks}: {', '.join(map(str, divisors))}",
        )
    return size


def _rows_mode(graph: TaskGraph) -> str:
    asked = graph.option("split", "rows")
    if asked is not None:
        return str(asked)
    if graph.experts:
        return "own"
    return "shared" if any(a.kind in ("replica", "stage") for a in graph.annotations) else "own"


def _feed_size(grouping: Grouping, sizes: dict[int, int]) -> int:
    """Neighbouring ranks that are fed alike: the largest split with shared rows; smaller ones must divide it."""
    splits = [graph for graph in grouping.graphs if graph.kind == "split"]
    shared = [graph for graph in splits if _rows_mode(graph) == "shared"]
    if not shared:
        return 1
    by = max(shared, key=lambda graph: sizes[graph.index])
    largest = sizes[by.index]
    for graph in splits:
        size = sizes[graph.index]
        if largest % size and size % largest:
            raise PlanError(
                f"{graph.label} has size {size}, {by.label} shares rows over {largest}: neither divides the other.",
                where=f"{graph.site} and {by.site}",
                fix=f"choose sizes of which one divides the other, as {largest} and {2 * largest}",
            )
    return largest


def _place(
    grouping: Grouping, sizes: dict[int, int], world: int, feed_size: int, pipeline: PipelinePlan | None
) -> tuple[list[TaskGraph], tuple[VirtualDevice, ...]]:
    places = (1, False) if pipeline is None else (pipeline.num_ranks, pipeline.inner)
    devices: dict[str, VirtualDevice] = {"replica": VirtualDevice("replica", world, 1, feed_size, *places)}
    graphs = []
    for graph in grouping.graphs:
        name = "replica"
        if graph.kind == "split":
            size = sizes[graph.index]
            name = f"split{size}"
            devices.setdefault(name, VirtualDevice(name, world, size, feed_size, *places))
        graphs.append(replace(graph, device=name))
    return graphs, tuple(devices.values())


def _cut(model: nn.Module, grouping: Grouping, graphs: list[TaskGraph], devices: dict[str, VirtualDevice]) -> list[Cut]:
    """Asks the rules, module by module in order; a rule that takes a whole module over answers for its members."""
    contexts = _contexts(model, grouping, graphs, devices)
    cuts: list[Cut] = []
    last: str | None = None
    for name, module in model.named_modules():
        context = contexts.get(grouping.graph_of[name])
        if context is None or (last is not None and (last in ("", name) or name.startswith(last + "."))):
            continue  # modules come in order: only the last one taken over can hold this one
        rule = find_rule(module, name, context)
        if rule is not None:
            cuts += rule(module, name, context)
            last = name
    return cuts


def _contexts(
    model: nn.Module, grouping: Grouping, graphs: list[TaskGraph], devices: dict[str, VirtualDevice]
) -> dict[int, RuleContext]:
    """What the rules of each split TaskGraph may know: roles from neighbours and from the model's own plan."""
    splits = [graph for graph in graphs if graph.kind == "split"]
    if not splits:
        return {}
    names = {module: name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}
    forced = {graph.index: graph.option("split", "cut") for graph in splits}
    roles: dict[int, dict[nn.Module, Role]] = {graph.index: {} for graph in splits}
    for neighbours in ([model], *(list(parent.children()) for parent in model.modules())):
        together: dict[int, list[nn.Module]] = {}
        for child in neighbours:
            index = grouping.graph_of.get(names[child], -1)
            if index in roles:
                together.setdefault(index, []).append(child)
        for index, children in together.items():
            cut = forced[index]
            roles[index] |= neighbour_roles(children, None if cut is None else str(cut))
    plans = own_plans(model)
    found = {}
    for graph in splits:
        own = roles[graph.index]
        planned, containers = model_plan(plans, partial(_is_in, grouping, names, graph.index))
        for module, role in planned.items():
            if module not in own or (forced[graph.index] is None and own[module].name != role.name):
                own[module] = role
        columns = (m.weight for m, role in own.items() if role.name == "columns" and isinstance(m, nn.Linear))
        size = devices[graph.device].size
        found[graph.index] = RuleContext(size, graph.site, own, frozenset(map(id, columns)), containers)
    return found


def _is_in(grouping: Grouping, names: dict[nn.Module, str], index: int, module: nn.Module) -> bool:
    return grouping.graph_of.get(names[module]) == index


def _shards(
    model: nn.Module, cuts: list[Cut], grouping: Grouping, graphs: list[TaskGraph]
) -> tuple[dict[str, Shard], dict[str, int]]:
    """Shard of every cut parameter by its first name, and the TaskGraph of every parameter.

    Raises PlanError for a parameter that is cut in one place and whole, or cut otherwise, in another.
    """
    first: dict[int, str] = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, tuple[Shard | None, int]] = {}
    cut_of = {cut.full_name(key): shard for cut in cuts for key, shard in cut.shards}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            here = joined(module_name, key)
            graph = grouping.graph_of.get(module_name)
            if graph is None:  # the same module under a second name
                continue
            name, shard = first[id(parameter)], cut_of.get(here)
            first_shard, first_graph = found.setdefault(name, (shard, graph))
            elsewhere = graphs[first_graph].device != graphs[graph].device
            if first_shard != shard or (elsewhere and shard is not None):
                raise PlanError(
                    f"parameter '{name}' is tied to '{here}', but one is "
                    f"{_told(first_shard)} and the other {_told(shard)}.",
                    where=f"{graphs[first_graph].site} and {graphs[graph].site}",
                    fix="put both modules into one wh.split() scope, or both outside",
                )
    shards = {name: shard for name, (shard, _) in found.items() if shard is not None}
    return shards, {name: graph for name, (_, graph) in found.items()}


def _told(shard: Shard | None) -> str:
    return "whole" if shard is None else f"cut along dimension {shard.dim} in {shard.num_ranks}"


def _with_sizes(graphs: list[TaskGraph], model: nn.Module, grouping: Grouping) -> list[TaskGraph]:
    """The TaskGraphs with their numbers of parameters, a shared one counted in each."""
    seen: list[dict[int, int]] = [{} for _ in graphs]
    for name, module in model.named_modules():
        seen[grouping.graph_of[name]].update({id(p): p.numel() for p in module._parameters.values() if p is not None})
    return [replace(graph, num_parameters=sum(found.values())) for graph, found in zip(graphs, seen, strict=True)]
