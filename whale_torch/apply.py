"""parallelize: collect, plan, check, apply, in one fixed order."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from whale_torch.annotation import Annotation
from whale_torch.capture import Scope
from whale_torch.checkpoint.plain import Weights, read_weights
from whale_torch.cluster import Cluster
from whale_torch.comm.drift import watch_optimizers
from whale_torch.comm.registry import place_of
from whale_torch.errors import PlanError
from whale_torch.mesh import Mesh, start
from whale_torch.optim import guard
from whale_torch.planning.plan import Plan
from whale_torch.planning.planner import make_plan
from whale_torch.strategies.batch import BatchReader
from whale_torch.strategies.batch_norm import check_batch_norm, sync_batch_norm
from whale_torch.strategies.materialize import InitFunction, check_can_materialize, is_meta, materialize
from whale_torch.strategies.outputs import tensors_in
from whale_torch.strategies.replica import equalize, make_reducers, place_whole_parameters
from whale_torch.strategies.root import make_root
from whale_torch.strategies.runtime import KEY, Runtime, is_parallelized
from whale_torch.strategies.split import apply_split, cut_parameters
from whale_torch.strategies.state_hooks import attach_state_hooks

__all__ = ["parallelize", "plan"]


def plan(model: nn.Module, *, cluster: Cluster | None = None, sample_inputs: object = None, default: Scope | None = None) -> Plan:
    """The plan of an annotated model for any cluster, without a process group; of a parallelized model, the one in force.

    cluster: default one rank. sample_inputs: what one rank would be fed, for byte counts.
    Raises AnnotationError and PlanError as wh.parallelize would.
    """
    runtime = model.__dict__.get(KEY)
    if runtime is not None and cluster is None:
        return runtime.current_plan() if isinstance(runtime, Runtime) else runtime.plan
    if runtime is not None:
        raise PlanError("this model is parallelized already; a plan for another cluster needs the model as it was.", fix="plan before wh.parallelize")
    return make_plan(model, cluster or Cluster.of(), default=_default(default), rows_per_rank=_rows(sample_inputs))


def _default(scope: Scope | None) -> tuple[Annotation, ...]:
    return () if scope is None else (replace(scope.entry(), entry=-1),)


def _rows(sample_inputs: object) -> int | None:
    return next((t.shape[0] for t in tensors_in(sample_inputs) if t.dim()), None)


def parallelize(
    model: nn.Module,
    *,
    sample_inputs: object = None,
    plan: Plan | None = None,
    cluster: Cluster | None = None,
    default: Scope | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    init_fn: InitFunction | None = None,
    weights: Weights | None = None,
    timeout: timedelta | float | None = None,
) -> nn.Module:
    """Turns an annotated model into a distributed one, in place, and returns it; names and parameters stay the same objects.

    sample_inputs: what one rank is fed, for the plan's byte counts. plan: a saved one to apply. cluster: speeds that
    differ from the measured ones (nodes and ranks must be those running). default: scope of what no scope names.
    device: this rank's. seed: of initial values on meta and of dropout. init_fn: initialises one meta module.
    weights: a plain state dict, or a file of one, that replaces the initial values; built on meta, a rank never holds
    more of it than its parts. timeout: of every collective, in seconds or as a timedelta.
    Raises AnnotationError, PlanError, CheckpointError (weights that do not fit): before the first change to the model,
    with the same text on every rank.
    """
    _check_first_time(model)
    seconds = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
    mesh = start(device, seconds)
    made = _decide(model, mesh, cluster, plan, default, _rows(sample_inputs))
    check_batch_norm(model, made)
    reader = BatchReader(model, made.batch_dim)
    cuts = cut_parameters(model, made, mesh)
    state = None if weights is None else read_weights(weights, model)
    if is_meta(model):
        given = state or {}
        check_can_materialize(model, init_fn, given)
        shards = {name: (cut.shard, cut.index) for name, cut in cuts.items()}
        materialize(model, shards, seed=seed, init_fn=init_fn, given=given)
    regions = apply_split(model, made, mesh, cuts)
    attach_state_hooks(model)
    if state is not None:
        model.load_state_dict(state)
    model.to(mesh.device)
    place_whole_parameters(model, mesh)
    equalize(model)
    sync_batch_norm(model, made, mesh)
    runtime = Runtime(model, made, mesh, regions, reader, lambda: make_reducers(model, made, mesh))
    make_root(model, runtime)
    guard.install()
    watch_optimizers()
    torch.manual_seed(seed + 1 + mesh.rank // made.feed_size)
    return model


def _check_first_time(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise PlanError(f"wh.parallelize takes an nn.Module, got {type(model).__name__}.", fix="wh.parallelize(model)")
    if "forward" in model.__dict__:
        raise PlanError(
            f"this {type(model).__name__} has a forward of its own on the instance, which would run past whale_torch.",
            fix="define forward in the class, or call wh.parallelize before it is replaced",
        )
    for name, module in model.named_modules():
        if KEY in module.__dict__:
            where = f"its member '{name}'" if name else "this model"
            raise PlanError(f"{where} is parallelized already.", fix="call wh.parallelize once, on the outermost module")
    if is_parallelized(model):
        found = next((place.name for p in model.parameters() if (place := place_of(p))), None)
        raise PlanError(
            f"this {type(model).__name__} belongs to a parallelized model" + (f" (as its '{found}')." if found else "."),
            fix="call wh.parallelize once, on the outermost module",
        )


def _decide(model: nn.Module, mesh: Mesh, cluster: Cluster | None, saved: Plan | None, default: Scope | None, rows: int | None) -> Plan:
    """The plan, checked against the ranks that run and equal on all of them."""
    measured = mesh.cluster
    if cluster is not None and cluster.ranks_of_nodes != measured.ranks_of_nodes:
        raise PlanError(
            f"the cluster described has ranks {list(cluster.ranks_of_nodes)} on its nodes, but {list(measured.ranks_of_nodes)} are running.",
            fix="describe the running ranks, or use wh.plan for another cluster",
        )
    if saved is not None:
        _check_saved(saved, model, measured)
        made = saved
    else:
        made = make_plan(model, cluster or measured, default=_default(default), rows_per_rank=rows)
    if mesh.world > 1:
        digests: list[str] = [""] * mesh.world
        dist.all_gather_object(digests, made.digest())
        if len(set(digests)) > 1:
            odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
            raise PlanError(
                f"ranks {odd} plan another model than rank 0.", ranks=odd,
                fix="build the same model with the same scopes on every rank; compare print(wh.plan(model, cluster=...)) of two ranks",
            )  # fmt: skip
    return made


def _check_saved(saved: Plan, model: nn.Module, measured: Cluster) -> None:
    if saved.cluster.ranks_of_nodes != measured.ranks_of_nodes:
        raise PlanError(
            f"the saved plan is for ranks {list(saved.cluster.ranks_of_nodes)} on its nodes, but {list(measured.ranks_of_nodes)} are running.",
            fix="make the plan for this cluster: wh.plan(model, cluster=...)",
        )
    have = tuple((name, tuple(p.shape)) for name, p in model.named_parameters())
    if have != saved.parameters:
        differ = next((pair for pair in zip(saved.parameters, have, strict=False) if pair[0] != pair[1]), None)
        told = f"the first that differs is {differ[0]} in the plan and {differ[1]} here" if differ else f"{len(saved.parameters)} parameters in the plan, {len(have)} here"
        raise PlanError(f"the saved plan is for another model: {told}.", fix="make the plan anew: wh.plan(model)")
