"""parallelize: collect, plan, check, apply, in one fixed order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import torch
from torch import nn

from whale_torch.agreement import explained, from_all, refuse_other_arguments, refuse_others, together
from whale_torch.annotation import Annotation, close_annotations
from whale_torch.capture import Scope
from whale_torch.checkpoint.plain import Weights
from whale_torch.cluster import Cluster
from whale_torch.comm.drift import watch_optimizers
from whale_torch.comm.registry import place_of
from whale_torch.errors import PlanError
from whale_torch.initial_values import load_together, make_together, read_together
from whale_torch.mesh import Mesh, start
from whale_torch.metrics import note_replicas
from whale_torch.moe.parallel import attach_experts
from whale_torch.optim import guard
from whale_torch.planning.fit import check_fit
from whale_torch.planning.plan import Plan
from whale_torch.planning.planner import make_plan, measured_at
from whale_torch.planning.recording import arguments
from whale_torch.profiling import mean_seconds, module_seconds
from whale_torch.rehearsal import rehearse
from whale_torch.strategies.batch import BatchReader
from whale_torch.strategies.batch_norm import check_batch_norm, sync_batch_norm
from whale_torch.strategies.materialize import InitFunction, names_on_meta
from whale_torch.strategies.pipeline.holders import Holders
from whale_torch.strategies.pipeline.places import Places
from whale_torch.strategies.pipeline.programs import Programs
from whale_torch.strategies.pipeline.runtime import PipelineRuntime
from whale_torch.strategies.replica import equalize, make_reducers, place_whole_parameters
from whale_torch.strategies.root import make_root
from whale_torch.strategies.runtime import KEY, Runtime, is_parallelized
from whale_torch.strategies.split import apply_split, cut_parameters
from whale_torch.strategies.state_hooks import attach_state_hooks
from whale_torch.strategies.wrappers import keep_off_wrappers, refuse_wrappers
from whale_torch.trace.program import StageProgram

__all__ = ["parallelize", "plan"]


def plan(
    model: nn.Module, *, cluster: Cluster | None = None, sample_inputs: object = None, default: Scope | None = None
) -> Plan:
    """The plan of an annotated model for any cluster, without a process group; once it is parallelized, that in force.

    cluster: default one rank; its layout of nodes and ranks decides, its rates are only printed.
    sample_inputs: what one rank would be fed, for byte counts, and to balance and place a pipeline.
    Raises AnnotationError, PlanError, TraceError and LossError as wh.parallelize would.
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
        sample_inputs=sample_inputs,
        seconds=_seconds(model, default, sample_inputs, torch.device("cpu")),
    )
    if sample_inputs is None:
        return made
    if made.pipeline is not None:  # what parallelize would find
        reader = BatchReader(model, made.batch_dim, items=False)
        _stages_of(Programs(model, made, torch.device("cpu")), reader, sample_inputs)
    return rehearse(made, model, sample_inputs)


def _stages_of(programs: Programs, reader: BatchReader, sample_inputs: object) -> tuple[StageProgram, ...]:
    """What the stages run of a call. Raises TraceError and LossError where no pipeline can run it."""
    args, kwargs = arguments(sample_inputs)
    return programs.ahead(args, kwargs, reader.read(args, kwargs, hashed=False).rows)


def _default(scope: Scope | None) -> tuple[Annotation, ...]:
    return () if scope is None else (replace(scope.entry(), entry=-1),)


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

    sample_inputs: what one rank is fed, for the plan's byte counts; a pipeline is balanced and placed by them, and its
    ranks let the values of other stages go in this call, not in the first forward. plan: a saved one to apply. cluster:
    one with known rates, for the plan's text (its nodes and ranks must be those running). default: scope of what no
    scope names. device: this rank's. seed: of initial values on meta, and of torch's random state from here on,
    different on each replica and equal on the ranks of one. init_fn: initialises one meta module. weights: a plain
    state dict, or files of one (a checkpoint of wh.save, safetensors, a Hugging Face folder, torch.save, DCP), that
    replaces the initial values; built on meta, a rank never holds more of it than its parts, and of files reads no
    more. timeout: of every collective, in seconds or as a timedelta.
    A deepcopy of the result evaluates and refuses to train; one of a member that is not cut is an ordinary module,
    whose gradients are this rank's own. A deepcopy of a pipelined one has the values of this rank's stages.
    Raises AnnotationError, PlanError, CheckpointError (weights that do not fit), TraceError and LossError (inputs on
    which no pipeline runs): before the first change to the model, with the same text on every rank, also where the
    cause is another error on one rank (a file, an init_fn's own). CommError where a rank is gone.
    """
    seconds = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
    mesh = explained(lambda: start(device, seconds))
    given = {"seed": str(seed), "init_fn": _some(init_fn), "weights": _some(weights)}
    made = _decide(model, mesh, cluster, plan, default, sample_inputs, given)
    together(mesh, lambda: check_batch_norm(model, made))
    reader = together(mesh, lambda: BatchReader(model, made.batch_dim, items=made.pipeline is None))
    programs = None if made.pipeline is None else together(mesh, lambda: Programs(model, made, mesh.device))
    places = None if programs is None else _places(model, made, mesh, programs, reader, sample_inputs)
    cuts = cut_parameters(model, made, mesh)
    state = None if weights is None else read_together(weights, model, mesh, cuts, places)
    built = names_on_meta(model)
    if built:
        make_together(model, mesh, cuts, places, seed, init_fn, frozenset(state or ()))
    regions = apply_split(model, made, mesh, cuts)
    has_experts = attach_experts(model, made, mesh)
    if places is not None:
        places.note(built)
    attach_state_hooks(model)
    if state is not None:
        load_together(model, state, mesh)
    if places is None:
        model.to(mesh.device)
    place_whole_parameters(model, mesh)
    equalize(model, mesh, None if places is None else places.copies_of_buffers(built))
    sync_batch_norm(model, made, mesh)
    if programs is None:
        runtime = Runtime(model, made, mesh, regions, reader, lambda made: make_reducers(model, made, mesh))
    else:
        runtime = PipelineRuntime(model, made, mesh, regions, reader, programs, seed, meets=has_experts)
        if places is not None:
            runtime.hold(model, places)
    make_root(model, runtime)
    keep_off_wrappers(model)
    close_annotations(model)
    note_replicas(mesh, made.feeds)
    guard.install()
    watch_optimizers()
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


def _places(
    model: nn.Module, made: Plan, mesh: Mesh, programs: Programs, reader: BatchReader, sample_inputs: object
) -> Places | None:
    """What lies where in a pipeline, as a recording of the sample inputs or, for a model without memory, names say.

    None where the first call will tell. Raises PlanError where ranks disagree.
    """
    if sample_inputs is None and not names_on_meta(model):
        return None

    def decide() -> Holders:
        stages = None if sample_inputs is None else _stages_of(programs, reader, sample_inputs)
        assert made.pipeline is not None
        return Holders(model, made.pipeline, made.pipeline.num_ranks, stages)

    holders = together(mesh, decide)
    refuse_others(mesh, holders.digest(), "place parameters otherwise than rank 0", model, sample_inputs)
    return Places(model, made, mesh, holders)


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
    arguments: Mapping[str, str],
) -> Plan:
    """The plan, checked against the ranks that run and equal on all of them.

    arguments: others of wh.parallelize that have to be the same on all ranks.
    """

    def measure() -> dict[str, float] | None:
        _check_first_time(model)
        refuse_wrappers(model)
        return None if saved is not None else _seconds(model, default, sample_inputs, mesh.device)

    own = together(mesh, measure)
    told = from_all(mesh, (own, arguments))
    refuse_other_arguments([{**given, "balance": "modelled" if of is None else "measured"} for of, given in told])
    seconds = None if own is None else mean_seconds([of for of, _ in told if of is not None])

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
                sample_inputs=sample_inputs,
                seconds=seconds,
            )
        return made if sample_inputs is None else rehearse(made, model, sample_inputs, rank=mesh.rank)

    made = together(mesh, decide)
    given = sorted(names_on_meta(model)), made.pipeline is not None and sample_inputs is None
    refuse_others(mesh, f"{made.digest()} {given}", "plan another model than rank 0", model, sample_inputs)
    return made


def _some(value: object) -> str:
    return "none" if value is None else "some"
