"""Whether a saved or edited plan fits a model and is one that the strategies can carry out."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from whale_torch.annotation import Annotation
from whale_torch.cluster import Cluster
from whale_torch.errors import PlanError
from whale_torch.planning.cost import price, shards_of
from whale_torch.planning.fit_pipeline import check_pipeline
from whale_torch.planning.layout import Shard
from whale_torch.planning.plan import Plan, Reduce
from whale_torch.planning.rules import Cut
from whale_torch.planning.taskgraph import TaskGraph, group_modules

__all__ = ["check_fit"]

_ANEW = "make the plan anew: wh.plan(model, cluster=...)"
_WIRES = ("float32", "bfloat16", "float16")


def check_fit(plan: Plan, model: nn.Module, cluster: Cluster, default: tuple[Annotation, ...] = ()) -> Plan:
    """The plan, with byte counts of what it now says, if it can be applied to this model on these ranks.

    Widths, buckets, wire dtypes, all-reduce algorithms, and of a pipeline its stages' modules, schedule or table and
    number of micro-batches may have been edited. Raises PlanError, naming both values, for a plan of another cluster,
    model or annotations, and for an edit that cannot be carried out.
    """
    if plan.cluster.ranks_of_nodes != cluster.ranks_of_nodes:
        raise PlanError(
            f"the saved plan is for ranks {list(plan.cluster.ranks_of_nodes)} on its "
            f"nodes, but {list(cluster.ranks_of_nodes)} are running.",
            fix="make the plan for this cluster: wh.plan(model, cluster=...)",
        )
    _check_parameters(plan, model)
    _check_scopes(plan, model, default)
    if plan.pipeline is not None:
        pipeline = plan.pipeline.without_stale()
        check_pipeline(pipeline, model, plan.world)
        plan = replace(plan, pipeline=pipeline)
    _check_devices(plan)
    _check_cuts(plan, model)
    for reduce in plan.reduces:
        _check_reduce(reduce, plan)
    _check_averages(plan, model)
    if plan.loss not in ("mean", "sum"):
        raise PlanError(f"the plan's loss is {plan.loss!r}.", fix='it is "mean" or "sum"')
    return price(plan, model)


def _check_parameters(plan: Plan, model: nn.Module) -> None:
    have = tuple((name, tuple(p.shape)) for name, p in model.named_parameters())
    if have == plan.parameters:
        return
    pair = next((p for p in zip(plan.parameters, have, strict=False) if p[0] != p[1]), None)
    told = (
        f"the first that differs is '{pair[0][0]}' {list(pair[0][1])} in the "
        f"plan and '{pair[1][0]}' {list(pair[1][1])} here"
        if pair
        else f"{len(plan.parameters)} parameters in the plan, {len(have)} here"
    )
    raise PlanError(f"the saved plan is for another model: {told}.", fix=_ANEW)


def _check_scopes(plan: Plan, model: nn.Module, default: tuple[Annotation, ...]) -> None:
    """A model without scopes takes the plan's; a model with other scopes than the plan's contradicts it."""
    here = group_modules(model, default).graphs
    if not any(graph.annotations for graph in here):
        return
    planned = {name: graph for graph in plan.taskgraphs for name in graph.modules}
    for graph in here:
        for name in graph.modules:
            other = planned.pop(name, None)
            if other is None or _options(other) != _options(graph):
                there = "no scope of its own" if other is None else _scopes(other) or "no scope"
                there += ", with another table" if other is not None and _scopes(other) == _scopes(graph) else ""
                raise PlanError(
                    f"module '{name}' is under {_scopes(graph) or 'no scope'} here "
                    f"and under {there} in the saved plan.",
                    where=graph.site,
                    fix=f"{_ANEW}, or take the scopes off the model: the plan has its own",
                )
    if planned:
        name, graph = next(iter(planned.items()))
        raise PlanError(
            f"module '{name}' is under {_scopes(graph)} in the saved plan and has no scope of its own here.",
            where=graph.site,
            fix=_ANEW,
        )


def _options(graph: TaskGraph) -> list[tuple[str, tuple[tuple[str, object], ...]]]:
    return [(annotation.kind, annotation.options) for annotation in graph.annotations]


def _scopes(graph: TaskGraph) -> str:
    return " > ".join(annotation.call for annotation in graph.annotations)


def _check_devices(plan: Plan) -> None:
    by_name = {device.name: device for device in plan.devices}
    places = (1, False) if plan.pipeline is None else (plan.pipeline.num_ranks, plan.pipeline.inner)
    for device in plan.devices:
        if (device.num_places, device.inner) != places:
            raise PlanError(
                f"VirtualDevice '{device.name}' has {device.num_places} places (inner: {device.inner}), but the plan's "
                f"pipelines have {places[0]} ranks (inner: {places[1]}).",
                fix="edit both alike",
            )
        small, large = sorted((device.size, plan.feed_size))
        if (
            device.size < 1
            or device.world != plan.world
            or device.feed_size != plan.feed_size
            or device.ranks_of_a_place % device.size
            or large % max(small, 1)
        ):
            raise PlanError(
                f"VirtualDevice '{device.name}' has groups of {device.size} of "
                f"{device.world} ranks, fed by {device.feed_size}; "
                f"the plan has {plan.world} ranks, fed by {plan.feed_size}.",
                fix="sizes divide the number of ranks, and of a size and feed_size one divides the other",
            )
    for graph in plan.taskgraphs:
        if graph.device not in by_name:
            raise PlanError(
                f"TaskGraph {graph.index} runs on '{graph.device}', but the plan's VirtualDevices are {list(by_name)}.",
                fix=_ANEW,
            )


def _check_cuts(plan: Plan, model: nn.Module) -> None:
    shapes = dict(plan.parameters)
    modules = dict(model.named_modules(remove_duplicate=False))
    first = {id(p): name for name, p in model.named_parameters()}
    for cut in plan.cuts:
        if cut.module not in modules:
            raise PlanError(f"the plan cuts '{cut.module}', which is not in the model.", fix=_ANEW)
        num_ranks = plan.device(plan.taskgraph_of(cut.module).device).size
        if len(cut.widths) != num_ranks:
            raise _refused(
                cut, f"{len(cut.widths)} widths for {num_ranks} ranks", f"give {num_ranks} widths, one a rank"
            )
        for key, shard in cut.shards:
            owner, _, attribute = cut.full_name(key).rpartition(".")
            parameter = modules[owner]._parameters.get(attribute) if owner in modules else None
            shape = None if parameter is None else shapes.get(first[id(parameter)])
            _check_shard(cut, key, shard, shape)


def _check_shard(cut: Cut, key: str, shard: Shard, shape: tuple[int, ...] | None) -> None:
    """shape: of the model's parameter, None where it has no such parameter."""
    if shape != shard.shape:
        raise _refused(cut, f"'{key}' is {list(shard.shape)} in the cut and {list(shape or ())} in the model", _ANEW)
    if shard.widths != cut.widths:
        raise _refused(
            cut,
            f"its widths are {list(cut.widths)}, but those of '{key}' are {list(shard.widths)}",
            "edit all widths of a module alike",
        )
    if min(shard.widths) < 0:
        raise _refused(cut, f"widths {list(shard.widths)} of '{key}'", "a width is 0 or more")


def _refused(cut: Cut, what: str, fix: str) -> PlanError:
    return PlanError(f"the plan's cut of '{cut.module}' cannot be carried out: {what}.", fix=fix)


def _check_reduce(reduce: Reduce, plan: Plan) -> None:
    """Whether one all-reduce can be run as it is described."""
    devices = {device.name: device for device in plan.devices}
    if reduce.device not in devices:
        raise PlanError(
            f"gradients are averaged on '{reduce.device}', but the plan's VirtualDevices are {list(devices)}.",
            fix=_ANEW,
        )
    if reduce.algorithm not in ("flat", "hierarchical"):
        raise PlanError(
            f"the plan's all-reduce algorithm is {reduce.algorithm!r}.", fix='it is "flat" or "hierarchical"'
        )
    if reduce.algorithm == "hierarchical" and plan.cluster.levels_of(devices[reduce.device].copies) is None:
        raise PlanError(
            f"the plan averages gradients on '{reduce.device}' hierarchically, but on {plan.cluster} their copies do "
            "not sit on several nodes, several and equally many on each.",
            fix='set its algorithm to "flat"',
        )
    if reduce.wire is not None and reduce.wire not in _WIRES:
        raise PlanError(
            f"the plan's gradients travel in {reduce.wire!r}.", fix=f"it is null or one of {', '.join(_WIRES)}"
        )
    if not (_positive(reduce.bucket_bytes) and _positive(reduce.max_in_flight)):
        raise PlanError(
            f"the plan's gradient buckets are {reduce.bucket_bytes!r} bytes, {reduce.max_in_flight!r} in flight.",
            fix="both are positive whole numbers",
        )


def _check_averages(plan: Plan, model: nn.Module) -> None:
    """Every parameter that several ranks hold and that could train is averaged once, over the ranks that hold it."""
    could_train = {name: p for name, p in model.named_parameters() if p.is_floating_point() or p.is_complex()}
    shards = shards_of(plan, model)
    wanted: dict[str, str] = {}
    for name in could_train:
        holder = plan.taskgraph_of(name.rpartition(".")[0]).device if name in shards else "replica"
        if plan.device(holder).num_copies > 1:
            wanted[name] = holder
    found: dict[str, str] = {}
    for reduce in plan.reduces:
        dtypes = {could_train[name].dtype for name in reduce.parameters if name in could_train}
        if len(dtypes) > 1:
            raise PlanError(
                f"gradients of {sorted(map(str, dtypes))} share a bucket.", fix="give each dtype a reduce of its own"
            )
        for name in reduce.parameters:
            if name in found:
                raise PlanError(f"the gradient of '{name}' is averaged twice in the plan.", fix=_ANEW)
            found[name] = reduce.device
    wrong = next((name for name in {**wanted, **found} if wanted.get(name) != found.get(name)), None)
    if wrong is not None:
        raise PlanError(
            f"the gradient of '{wrong}' is averaged on {found.get(wrong, 'no ranks')} in the "
            f"plan and has to be on {wanted.get(wrong, 'no ranks')}.",
            fix=_ANEW,
        )


def _positive(value: object) -> bool:
    return type(value) is int and value > 0
