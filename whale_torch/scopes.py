"""Scopes: `wh.replica()`, `wh.split()`, ...; each is a context manager, a decorator and a function on a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast, overload

import torch

from whale_torch.by_name import annotate
from whale_torch.capture import Scope, call_site
from whale_torch.errors import AnnotationError
from whale_torch.planning.schedules import NAMES, Rows, Schedule, from_table, validate

__all__ = ["Scope", "annotate", "auto_parallel", "cpu_offload", "pipeline", "recompute", "replica", "split", "stage"]

T = TypeVar("T", bound=Callable[..., object])


@overload
def replica(
    *,
    reduce_dtype: torch.dtype | None = None,
    bucket_bytes: int | None = None,
    max_in_flight: int | None = None,
    all_reduce: Literal["auto", "flat", "hierarchical"] = "auto",
    sync_batch_norm: bool = False,
    loss: Literal["mean", "sum"] = "mean",
    batch_dim: int | Mapping[str, int | None] = 0,
) -> Scope: ...
@overload
def replica(
    target: T,
    /,
    *,
    reduce_dtype: torch.dtype | None = None,
    bucket_bytes: int | None = None,
    max_in_flight: int | None = None,
    all_reduce: Literal["auto", "flat", "hierarchical"] = "auto",
    sync_batch_norm: bool = False,
    loss: Literal["mean", "sum"] = "mean",
    batch_dim: int | Mapping[str, int | None] = 0,
) -> T: ...
def replica(
    target: object = None,
    /,
    *,
    reduce_dtype: torch.dtype | None = None,
    bucket_bytes: int | None = None,
    max_in_flight: int | None = None,
    all_reduce: Literal["auto", "flat", "hierarchical"] = "auto",
    sync_batch_norm: bool = False,
    loss: Literal["mean", "sum"] = "mean",
    batch_dim: int | Mapping[str, int | None] = 0,
) -> object:
    """Every rank holds these modules whole, on its own samples; gradients are the true mean over all samples.

    reduce_dtype: what gradients travel in: float32, bfloat16 (error 3-6e-3) or float16 (4-7e-4, cannot overflow).
    bucket_bytes, max_in_flight: bytes of a gradient bucket, and buckets under way at once; their product bounds memory.
    all_reduce: "hierarchical" reduces inside a node first; "auto" does so where the ranks sit on several nodes,
        several and equally many on each.
    sync_batch_norm: BatchNorm takes its statistics over all replicas, with uneven and empty batches too, also in
        splits inside this replica. Without it each rank has the running statistics of its own samples;
        wh.full_state_dict keeps rank 0's.
    loss: "sum" where the loss is a sum over samples, so that gradients are summed and not averaged.
    batch_dim: the dim that counts samples; by default dim 0 of the first input tensor that has one, in the order of the
        call's arguments. Or for inputs of the model by name, the dim that counts samples, or None where an input has
        none: needed where the first tensor is not a batch (a (T, T) mask, (1, T) positions). A list of tensors under a
        name counts its items. Without any tensor all ranks weigh the same. Samples are weighed where the model's own
        forward returns: methods called past it weigh alike.

    One process and n ranks agree but for three named exceptions: BatchNorm is local unless `sync_batch_norm=True`
    (then exact); a mean over ignored or weighted labels is the row-weighted mean of the ranks' own means where it is
    taken outside the model (a loss of torch called inside the model's forward is exact); a sum-loss needs `loss="sum"`.
    A masked mean of one's own, `(l * m).sum() / m.sum()`, is such a mean of means in the forward too.

    Raises: AnnotationError for a value outside these, and for an illegal nesting.
    Reference: Whale (arXiv 2011.09208), `replica`.
    """
    given = {
        "reduce_dtype": reduce_dtype,
        "bucket_bytes": bucket_bytes,
        "max_in_flight": max_in_flight,
        "all_reduce": all_reduce,
        "sync_batch_norm": sync_batch_norm,
        "loss": loss,
        "batch_dim": batch_dim,
    }
    return _scope("replica", target, given)


@overload
def split(
    *,
    size: int | None = None,
    rows: Literal["own", "shared"] | None = None,
    output: Literal["columns"] | None = None,
    cut: Literal["columns", "rows"] | None = None,
    gather: Literal["error"] | None = None,
    chunked_loss: bool = False,
) -> Scope: ...
@overload
def split(
    target: T,
    /,
    *,
    size: int | None = None,
    rows: Literal["own", "shared"] | None = None,
    output: Literal["columns"] | None = None,
    cut: Literal["columns", "rows"] | None = None,
    gather: Literal["error"] | None = None,
    chunked_loss: bool = False,
) -> T: ...
def split(
    target: object = None,
    /,
    *,
    size: int | None = None,
    rows: Literal["own", "shared"] | None = None,
    output: Literal["columns"] | None = None,
    cut: Literal["columns", "rows"] | None = None,
    gather: Literal["error"] | None = None,
    chunked_loss: bool = False,
) -> object:
    """Each rank of a group holds a share of these modules' parameters; what they compute is that of one process.

    size: ranks of a group; None is the ranks of a node where rows are shared, all ranks of the stage where not.
    rows: "own" (each rank brings its own samples; they are gathered where the split begins) or "shared" (the ranks
        are one replica and are fed the same batch). None is "shared" directly inside a `wh.replica()`, else "own".
    output: "columns" returns `Columns` in eval mode and under no_grad too, where plain tensors are the default.
    cut: how linear layers and convolutions are cut, by output or by input features; None is whatever moves fewer bytes.
    gather: "error" forbids implicit gathers of columns; without it the plan lists those that happened.
    chunked_loss: computes the classifier and its cross entropy in chunks of rows, for less memory; for linear layers
        cut by columns.

    Shapes: in training the output is a `Columns`: its shape is the logical one (own rows, all features), `.local` is
    this rank's shard, `.rows()` gathers. Element-wise ops, `F.cross_entropy`, argmax and top-k work across ranks.
    A cut parameter is this rank's part, and code that reads it (`self.fc.weight.norm()` in forward) gets the part: a
    penalty on it belongs into the optimizer (weight_decay), its whole value is in wh.full_state_dict(model).
    Raises: AnnotationError for a value outside these, and for an illegal nesting; when planned, PlanError for `cut` or
    `chunked_loss` where no module under the scope can follow it.
    Reference: Whale (arXiv 2011.09208), `split`.
    """
    given = {"size": size, "rows": rows, "output": output, "cut": cut, "gather": gather, "chunked_loss": chunked_loss}
    return _scope("split", target, given)


@overload
def stage() -> Scope: ...
@overload
def stage(target: T, /) -> T: ...
def stage(target: object = None, /) -> object:
    """These modules are one stage of the pipeline around them; each entry of the scope is a stage of its own.

    Stages run in the order in which their scopes were entered (in `wh.annotate`: of the dict). Modules of a pipeline
    that no stage holds run where their inputs are. A split inside a stage shares its rows: its ranks get the same
    micro-batch. A wh.replica inside says how the gradients of its modules travel, and where the pipeline has splits,
    each rank runs these modules on a slice of the micro-batch: they have to treat samples one by one.

    Raises: AnnotationError for an illegal nesting.
    """
    return _scope("stage", target, {})


@overload
def pipeline(
    *,
    num_micro_batches: int | None = None,
    num_stages: int | None = None,
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] | Schedule | Rows | None = None,
    num_ranks: int | None = None,
    balance: Literal["modelled", "measured"] = "modelled",
    micro_batch_loss: Literal["mean"] | None = None,
    batch_dim: Mapping[str, int | None] | None = None,
    mixing: Literal["accept"] | None = None,
) -> Scope: ...
@overload
def pipeline(
    target: T,
    /,
    *,
    num_micro_batches: int | None = None,
    num_stages: int | None = None,
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] | Schedule | Rows | None = None,
    num_ranks: int | None = None,
    balance: Literal["modelled", "measured"] = "modelled",
    micro_batch_loss: Literal["mean"] | None = None,
    batch_dim: Mapping[str, int | None] | None = None,
    mixing: Literal["accept"] | None = None,
) -> T: ...
def pipeline(
    target: object = None,
    /,
    *,
    num_micro_batches: int | None = None,
    num_stages: int | None = None,
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] | Schedule | Rows | None = None,
    num_ranks: int | None = None,
    balance: Literal["modelled", "measured"] = "modelled",
    micro_batch_loss: Literal["mean"] | None = None,
    batch_dim: Mapping[str, int | None] | None = None,
    mixing: Literal["accept"] | None = None,
) -> object:
    """The stages inside run one after the other on different ranks, micro-batch by micro-batch.

    The ranks of one pipeline are one replica and are fed the same batch; of P ranks in a world of n there are n / P
    pipelines. Where `sample_inputs` are given and the ranks sit on several nodes, the ranks of a pipeline are placed
    inside a node or across nodes, whichever has the busiest node send fewer bytes to others in a step: outputs of
    stages and their gradients, against gradients to be averaged. Without them the ranks of one stage are neighbours.
    `print(wh.plan(...))` has the bytes of both.

    num_micro_batches: parts a batch is cut into, 4 where it is left out; a batch of fewer samples makes fewer.
    num_stages: stages to cut the model into where none is annotated. Modules are taken in the order in which a forward
        calls them and weighed by its floating-point operations where `sample_inputs` are given, else in the order of
        registration and by parameters; blocks stay whole, what takes more than an even share is opened. No stage has
        more parameters and gradients than `wh.Cluster(memory_bytes=...)` leaves room for.
    balance: "measured" weighs modules, for `num_stages`, by the seconds that their forward and backward take on the
        sample inputs, each run by itself on this machine (the mean over ranks), which takes a few training steps' time.
    schedule: order of forwards and backwards; None is "1f1b", and "interleaved" where a rank has several stages.
        "zero_bubble" computes the weight gradients of linear layers later, where a rank would wait. Or a table of one's
        own with a row for each rank of the pipeline, ["F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1"]: "F0.3" or
        ("F", 0, 3) is the forward of micro-batch 3 on stage 0, B a backward, I and W its input and weight part. It says
        how many stages, ranks and micro-batches there are, and which rank runs which stage.
    num_ranks: ranks of one pipeline; None is the largest divisor of the world not above the number of stages.
    micro_batch_loss: "mean" accepts the mean of the micro-batches' losses where the loss is not a mean over samples,
        and with it samples that meet on the way to a loss or another number; other outputs need `mixing` for that.
    mixing: "accept" lets each micro-batch mix its own samples where the code between stages lets samples meet (a
        contrastive loss, `h - h.mean(0)`), which raises without it: the step is then that of accumulated micro-batches
        and not of the whole batch. It implies `micro_batch_loss="mean"`, and is named for what it accepts as well.
    batch_dim: for the inputs of the model by name, the dim that counts samples, or None where an input has none and
        goes to every micro-batch as it is. Every input with tensors is named. Without it every tensor as long as the
        batch along dim 0, or that of `wh.replica(batch_dim=1)` around the pipeline, is cut: name them where a mask or
        a table may be as long as the batch by accident.

    Raises: AnnotationError for a value outside these, and for an illegal nesting; PlanError for a table that is not
    complete or cannot run to its end; when planned, PlanError where ranks do not divide or a table says otherwise than
    the scope, and for what no pipeline runs (own rows inside a stage, BatchNorm on slices, a split beside the stages,
    `sync_batch_norm=True`, `loss="sum"`); TraceError for a forward that cannot be recorded.
    Reference: Whale (arXiv 2011.09208), `pipeline`; the schedules in planning/schedules.
    """
    given = {
        "num_micro_batches": num_micro_batches,
        "num_stages": num_stages,
        "schedule": schedule,
        "num_ranks": num_ranks,
        "balance": balance,
        "micro_batch_loss": micro_batch_loss,
        "batch_dim": batch_dim,
        "mixing": mixing,
    }
    return _scope("pipeline", target, given)


@overload
def auto_parallel() -> Scope: ...
@overload
def auto_parallel(target: T, /) -> T: ...
def auto_parallel(target: object = None, /) -> object:
    """The planner decides how these modules run; what is annotated inside is a constraint.

    Raises: AnnotationError where it is not the outermost parallel scope.
    """
    return _scope("auto_parallel", target, {})


@overload
def recompute() -> Scope: ...
@overload
def recompute(target: T, /) -> T: ...
def recompute(target: object = None, /) -> object:
    """These modules drop their activations and compute them again in the backward pass."""
    return _scope("recompute", target, {})


@overload
def cpu_offload() -> Scope: ...
@overload
def cpu_offload(target: T, /) -> T: ...
def cpu_offload(target: object = None, /) -> object:
    """The parameters of these modules rest in host memory and visit the device where they are used."""
    return _scope("cpu_offload", target, {})


@dataclass(frozen=True, slots=True)
class _Option:
    default: object
    legal: Callable[[Any], bool]
    expected: str


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_batch_dims(value: object) -> bool:
    return value is None or (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(name, str) and (dim is None or _is_int(dim, 0)) for name, dim in value.items())
    )


def _is_table(value: object) -> bool:
    return isinstance(value, (Schedule, Sequence))


def _one_of(*choices: object) -> _Option:
    texts = [str(choice) if isinstance(choice, torch.dtype) else repr(choice) for choice in choices]
    return _Option(
        choices[0],
        lambda value: any(type(value) is type(choice) and value == choice for choice in choices),
        f"{', '.join(texts[:-1])} or {texts[-1]}",
    )


_COUNT = _Option(None, lambda value: value is None or _is_int(value, 1), "a positive whole number or None")
_FLAG = _one_of(False, True)
_DIM_OR_DIMS = _Option(
    0,
    lambda value: _is_int(value, 0) or (value is not None and _is_batch_dims(value)),
    "a whole number, 0 or more, or a dict of input names to a dim (0 or more) or None",
)
_SCHEDULE = _Option(
    None,
    lambda value: value in (None, *NAMES) if value is None or isinstance(value, str) else _is_table(value),
    f"None, {', '.join(map(repr, NAMES))}, or a table: one row of actions a rank",
)
_BATCH_DIMS = _Option(None, _is_batch_dims, "a dict of input names to a dim (0 or more) or None")

_OPTIONS: dict[str, dict[str, _Option]] = {
    "replica": {
        "reduce_dtype": _one_of(None, torch.float32, torch.bfloat16, torch.float16),
        "bucket_bytes": _COUNT,
        "max_in_flight": _COUNT,
        "all_reduce": _one_of("auto", "flat", "hierarchical"),
        "sync_batch_norm": _FLAG,
        "loss": _one_of("mean", "sum"),
        "batch_dim": _DIM_OR_DIMS,
    },
    "split": {
        "size": _COUNT,
        "rows": _one_of(None, "own", "shared"),
        "output": _one_of(None, "columns"),
        "cut": _one_of(None, "columns", "rows"),
        "gather": _one_of(None, "error"),
        "chunked_loss": _FLAG,
    },
    "pipeline": {
        "num_micro_batches": _COUNT,
        "num_stages": _COUNT,
        "schedule": _SCHEDULE,
        "num_ranks": _COUNT,
        "balance": _one_of("modelled", "measured"),
        "micro_batch_loss": _one_of(None, "mean"),
        "batch_dim": _BATCH_DIMS,
        "mixing": _one_of(None, "accept"),
    },
}


def _frozen(name: str, value: object, site: str) -> object:
    """An option as an annotation keeps it. Raises PlanError for a table that no pipeline can run."""
    if isinstance(value, Mapping):
        return tuple(sorted(value.items()))
    if name != "schedule" or isinstance(value, str):
        return value
    if not isinstance(value, Schedule):
        return from_table(cast(Rows, value), where=site)
    validate(value, where=site)
    return replace(value, name="table") if value.name in NAMES else value


def _scope(kind: str, target: object, given: Mapping[str, object]) -> object:
    site = call_site()
    options: dict[str, object] = {}
    for name, value in given.items():
        option = _OPTIONS[kind][name]
        if not option.legal(value):
            raise AnnotationError(
                f"wh.{kind}({name}={value!r}): {name} must be {option.expected}.",
                where=site,
                fix=f"give one of these, or leave {name} out (its default is {option.default!r}).",
            )
        if value != option.default:
            options[name] = _frozen(name, value, site)
    scope = Scope(kind, tuple(sorted(options.items())), site)
    return scope if target is None else scope(cast(Callable[..., object], target))
