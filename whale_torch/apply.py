"""parallelize: collect, plan, check, apply, in one fixed order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from whale_torch.annotation import Annotation, close_annotations
from whale_torch.capture import Scope
from whale_torch.checkpoint.plain import Weights, read_weights
from whale_torch.cluster import Cluster
from whale_torch.comm.drift import watch_optimizers
from whale_torch.comm.failure import explain
from whale_torch.comm.meeting import Meeting, OtherRankFailed
from whale_torch.comm.registry import place_of
from whale_torch.errors import CheckpointError, PlanError, WhaleError
from whale_torch.mesh import Group, Mesh, start
from whale_torch.metrics import note_replicas
from whale_torch.optim import guard
from whale_torch.planning.fit import check_fit
from whale_torch.planning.plan import Plan
from whale_torch.planning.planner import make_plan, measured_at
from whale_torch.profiling import mean_seconds, module_seconds
from whale_torch.rehearsal import arguments, rehearse
from whale_torch.strategies.batch import BatchReader
from whale_torch.strategies.batch_norm import check_batch_norm, sync_batch_norm
from whale_torch.strategies.materialize import InitFunction, check_can_materialize, is_meta, materialize
from whale_torch.strategies.outputs import tensors_in
from whale_torch.strategies.pipeline.programs import Programs
from whale_torch.strategies.pipeline.runtime import PipelineRuntime
from whale_torch.strategies.replica import equalize, make_reducers, place_whole_parameters
from whale_torch.strategies.root import make_root
from whale_torch.strategies.runtime import KEY, Runtime, is_parallelized
from whale_torch.strategies.split import apply_split, cut_parameters
from whale_torch.strategies.state_hooks import attach_state_hooks
from whale_torch.strategies.wrappers import keep_off_wrappers, refuse_wrappers

__all__ = ["parallelize", "plan"]

T = TypeVar("T")


def plan(
    model: nn.Module, *, cluster: Cluster | None = None, sample_inputs: object = None, default: Scope | None = None
) -> Plan:
    """The plan of an annotated model for any cluster, without a process group; once it is parallelized, that in force.

    cluster: default one rank; its layout of nodes and ranks decides, its rates are only printed.
    sample_inputs: what one rank would be fed, for byte counts.
    Raises AnnotationError and PlanError as wh.parallelize would.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"wh.plan takes an nn.Module, got {type(model).__name__}.", fix="wh.plan(model, cluster=...)")
    runtime = model.__dict__.get(KEY)
    if runtime is not None and cluster is None:
        return runtime.current_plan() if isinstance(runtime, Runtime) else runtime.plan
    if runtime is not None:
        raise PlanError(
            "this model is parallelized already; a plan for another cluster needs the model as it was.",
            fix="plan before wh.parallelize",
        )
    made = make_plan(
        model,
        cluster or Cluster.of(),
        default=_default(default),
        rows_per_rank=_rows(sample_inputs),
        sample_inputs=sample_inputs,
        seconds=_seconds(model, default, sample_inputs, torch.device("cpu")),
    )
    return made if sample_inputs is None else rehearse(made, model, sample_inputs)


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
    """Turns an annotated model into a distributed one, in place, and returns it; its parameters stay the same objects.

    sample_inputs: what one rank is fed, for the plan's byte counts. plan: a saved one to apply. cluster: one with
    known rates, for the plan's text (its nodes and ranks must be those running). default: scope of what no scope
    names. device: this rank's. seed: of initial values on meta, and of torch's random state from here on, different on
    each replica and equal on the ranks of one. init_fn: initialises one meta module.
    weights: a plain state dict, or a file of one, that replaces the initial values; built on meta, a rank never holds
    more of it than its parts. timeout: of every collective, in seconds or as a timedelta.
    A deepcopy of the result evaluates and refuses to train; one of a member that is not cut is an ordinary module,
    whose gradients are this rank's own.
    Raises AnnotationError, PlanError, CheckpointError (weights that do not fit): before the first change to the model,
    with the same text on every rank, also where the cause is another error on one rank (a file, an init_fn's own).
    CommError where a rank is gone.
    """
    seconds = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
    mesh = _explained(lambda: start(device, seconds))
    made = _decide(model, mesh, cluster, plan, default, sample_inputs)
    _together(mesh, lambda: check_batch_norm(model, made))
    reader = _together(mesh, lambda: BatchReader(model, made.batch_dim))
    programs = None if made.pipeline is None else _together(mesh, lambda: Programs(model, made, mesh.device))
    cuts = cut_parameters(model, made, mesh)
    state = None if weights is None else _together(mesh, lambda: read_weights(weights, model), CheckpointError)
    if is_meta(model):
        given = state or {}
        _together(mesh, lambda: check_can_materialize(model, init_fn, given))
        shards = {name: (at.shard, at.parts.index) for name, at in cuts.items() if at.shard and at.parts}
        meeting = Meeting(mesh.everyone())
        _together(
            mesh,
            lambda: meeting.run(
                lambda: materialize(model, shards, seed=seed, init_fn=init_fn, given=given, any_rank=meeting.any_rank)
            ),
        )
    regions = apply_split(model, made, mesh, cuts)
    attach_state_hooks(model)
    if state is not None:
        model.load_state_dict(state)
    model.to(mesh.device)
    place_whole_parameters(model, mesh)
    equalize(model, mesh)
    sync_batch_norm(model, made, mesh)
    if made.pipeline is None:
        runtime = Runtime(model, made, mesh, regions, reader, lambda: make_reducers(model, made, mesh))
    else:
        assert programs is not None
        runtime = PipelineRuntime(model, made, mesh, regions, reader, programs, seed)
    make_root(model, runtime)
    keep_off_wrappers(model)
    close_annotations(model)
    note_replicas(mesh, made.feeds)
    guard.install()
    watch_optimizers()
    if isinstance(runtime, PipelineRuntime) and sample_inputs is not None:
        args, kwargs = arguments(sample_inputs)
        prepare = functools.partial(runtime.prepare, model, args, kwargs)
        _together(mesh, prepare)
    torch.manual_seed(seed + 1 + made.feed_of(mesh.rank))
    return model


def _seconds(
    model: nn.Module, default: Scope | None, sample_inputs: object, device: torch.device
) -> dict[str, float] | None:
    """Of modules, where a pipeline is to be balanced by them. Raises PlanError where nothing can be measured."""
    site = measured_at(model, _default(default))
    if site is None:
        return None
    if sample_inputs is None:
        raise PlanError(
            "a pipeline is to be balanced by measured times, and nothing says what its model is fed.",
            where=site,
            fix="give sample_inputs, or leave balance out",
        )
    return module_seconds(model, sample_inputs, device, where=site)


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
            raise PlanError(
                f"{where} is parallelized already.", fix="call wh.parallelize once, on the outermost module"
            )
    if is_parallelized(model):
        found = next((place.name for p in model.parameters() if (place := place_of(p))), None)
        raise PlanError(
            f"this {model._get_name()} belongs to a parallelized model" + (f" (as its '{found}')." if found else "."),
            fix="call wh.parallelize once, on the outermost module",
        )


def _decide(
    model: nn.Module,
    mesh: Mesh,
    cluster: Cluster | None,
    saved: Plan | None,
    default: Scope | None,
    sample_inputs: object,
) -> Plan:
    """The plan, checked against the ranks that run and equal on all of them."""

    def measure() -> dict[str, float] | None:
        _check_first_time(model)
        refuse_wrappers(model)
        return None if saved is not None else _seconds(model, default, sample_inputs, mesh.device)

    own = _together(mesh, measure)
    seconds = None if own is None else mean_seconds(_from_all(mesh, own))

    def decide() -> Plan:
        measured = mesh.cluster
        if cluster is not None and cluster.ranks_of_nodes != measured.ranks_of_nodes:
            raise PlanError(
                f"the cluster described has ranks {list(cluster.ranks_of_nodes)} on its nodes, "
                f"but {list(measured.ranks_of_nodes)} are running.",
                fix="describe the running ranks, or use wh.plan for another cluster",
            )
        if saved is not None:
            made = check_fit(saved, model, measured, _default(default))
        else:
            made = make_plan(
                model,
                cluster or measured,
                default=_default(default),
                rows_per_rank=_rows(sample_inputs),
                sample_inputs=sample_inputs,
                seconds=seconds,
            )
        return made if sample_inputs is None else rehearse(made, model, sample_inputs, rank=mesh.rank)

    made = _together(mesh, decide)
    digests = _from_all(mesh, made.digest())
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise PlanError(
            f"ranks {odd} plan another model than rank 0.",
            ranks=odd,
            fix="build the same model with the same scopes on every rank; "
            "compare print(wh.plan(model, cluster=...)) of two ranks",
        )
    return made


def _from_all(mesh: Mesh, value: T) -> list[T]:
    """Every rank's value, in rank order."""
    values: list[Any] = [value] * mesh.world
    if mesh.world > 1:
        _explained(lambda: dist.all_gather_object(values, value))
    return values


def _explained(step: Callable[[], T]) -> T:
    """Runs a step over the world's own group. Raises CommError where ranks of it are gone or do not come."""
    try:
        return step()
    except RuntimeError as error:
        if not dist.is_initialized():  # the launcher's address is wrong, say
            raise
        world = Group("world", tuple(range(dist.get_world_size())), dist.get_rank(), None)
        raise explain(world, "wh.parallelize", error) from error


def _together(mesh: Mesh, step: Callable[[], T], kind: type[WhaleError] = PlanError) -> T:
    """Runs a step that may be refused. Raises, on every rank, the error of the first rank that refused it.

    kind: of the error that stands for one which is none of this package's, such as a file that a rank does not find.
    """
    error: WhaleError | None = None
    cause: BaseException | None = None
    result: T | None = None
    try:
        result = step()
    except WhaleError as refused:
        error, cause = refused, refused.__cause__
    except OtherRankFailed:
        pass  # its error is among all ranks'
    except Exception as failed:  # whatever a file, an initialiser or a model's own code raises
        error, cause = kind(f"{type(failed).__name__}: {failed}", fix="see the traceback of that rank"), failed
    errors = _from_all(mesh, error)
    first = next((found for found in errors if found is not None), None)
    if first is None:
        return cast(T, result)
    trace = None if error is None else error.__traceback__  # shown once, under what all ranks say
    if all(found is not None and found.what == first.what for found in errors):
        raise first.with_traceback(trace) from cause
    ranks = [rank for rank, found in enumerate(errors) if found is not None]
    what = f"rank {ranks[0]} was refused, and not every rank with it: {first.what}"
    raise type(first)(what, where=first.where, fix=first.fix, ranks=ranks).with_traceback(trace) from cause
