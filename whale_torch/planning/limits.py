"""What a pipeline does not run: refused by the plan, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from whale_torch.annotation import Annotation
from whale_torch.errors import PlanError
from whale_torch.planning.layout import Shard
from whale_torch.planning.pipelines import PipelinePlan
from whale_torch.planning.taskgraph import TaskGraph

__all__ = ["check_pipeline_scopes", "check_tied_options", "check_ties"]

_OF_GRADIENTS = ("reduce_dtype", "bucket_bytes", "max_in_flight", "all_reduce")


def check_pipeline_scopes(graphs: Sequence[TaskGraph], scope: Annotation) -> None:
    """Raises PlanError for scopes and options that nothing follows in a model with this pipeline."""
    has_stages = any(annotation.kind == "stage" for graph in graphs for annotation in graph.annotations)
    if scope.get("balance") == "measured" and has_stages:
        raise PlanError(
            f"{scope.call}: balance says how a pipeline is cut by count, and this one has wh.stage() scopes.",
            where=scope.site,
            fix="leave balance out, or say num_stages and leave wh.stage() scopes out",
        )
    for graph in graphs:
        _check_inner_replica(graph, scope)
        for annotation in graph.annotations:
            _check_option(annotation, scope)
        _check_nesting(graph, scope)


def _check_option(annotation: Annotation, scope: Annotation) -> None:
    if annotation.kind != "replica":
        return
    where = f"{annotation.site} and {scope.site}"
    if annotation.get("sync_batch_norm"):
        raise PlanError(
            f"{annotation.call} holds for {scope.call} too, whose BatchNorm takes its statistics micro-batch by "
            "micro-batch, as one process does that is fed them one after the other.",
            where=where,
            fix="leave sync_batch_norm out, or use nn.GroupNorm",
        )
    if annotation.get("loss", "mean") != "mean":
        raise PlanError(
            f"{annotation.call}: a pipeline averages over replicas, of sums too.",
            where=where,
            fix="take the mean over samples, or multiply the learning rate",
        )


def _check_inner_replica(graph: TaskGraph, scope: Annotation) -> None:
    inner = graph.inner_replica
    if inner is not None and inner.get("batch_dim") is not None:
        raise PlanError(
            f"{inner.call} of '{graph.modules[0]}' is inside a stage, where no batch is cut: the pipeline cuts the "
            "batch of the whole model.",
            where=f"{inner.site}, inside {scope.site}",
            fix="wh.replica(batch_dim=1) around the pipeline says which dim that is",
        )


def _check_nesting(graph: TaskGraph, scope: Annotation) -> None:
    kinds = [annotation.kind for annotation in graph.annotations]
    innermost = graph.annotations[-1] if graph.annotations else None
    if innermost is None or innermost.kind != "split":
        return
    if "stage" in kinds and innermost.get("rows") == "own" and not graph.experts:
        raise PlanError(
            f"{innermost.call} of '{graph.modules[0]}' is inside a stage, whose ranks all get the same micro-batch of "
            "their pipeline.",
            where=f"{innermost.site}, inside {scope.site}",
            fix="leave rows out: a split inside a stage shares its rows",
        )
    if "pipeline" not in kinds:
        raise PlanError(
            f"{innermost.call} of '{graph.modules[0]}' is outside the pipeline of its model: no one rank would run it "
            "for all stages.",
            where=f"{innermost.site} and {scope.site}",
            fix="put it into one of the pipeline's wh.stage() scopes",
        )


def check_ties(pipeline: PipelinePlan, model: nn.Module, shards: dict[str, Shard]) -> None:
    """Raises PlanError for a parameter that is cut by a split and used by stages on several ranks of a pipeline."""
    for name, stages in pipeline.users(model).items():
        if name in shards and len({pipeline.place_of(stage) for stage in stages}) > 1:
            raise PlanError(
                f"parameter '{name}' is cut by a split and tied between the stages {list(stages)}.",
                where=pipeline.site,
                fix="leave the split out for both, untie them, or put both into one stage",
            )


def check_tied_options(model: nn.Module, graphs: Sequence[TaskGraph], graph_of: Mapping[str, int]) -> None:
    """Raises PlanError for a tied parameter whose gradient two replicas, one inside a stage, would send differently."""
    first: dict[int, tuple[str, TaskGraph]] = {}
    for module_name, module in model.named_modules():
        graph = graphs[graph_of[module_name]]
        for key, parameter in module.named_parameters(module_name, recurse=False, remove_duplicate=False):
            name, other = first.setdefault(id(parameter), (key, graph))
            if graph.inner_replica is None and other.inner_replica is None:
                continue
            for option in _OF_GRADIENTS:
                one, two = (found.option("replica", option) for found in (other, graph))
                if one != two:
                    raise PlanError(
                        f"parameter '{name}' is tied to '{key}', and has one gradient: wh.replica says "
                        f"{option}={one!r} for the first and {two!r} for the second.",
                        where=f"{other.site} and {graph.site}",
                        fix="give both the same options, or untie them",
                    )
