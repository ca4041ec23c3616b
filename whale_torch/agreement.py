"""What the ranks that parallelize one model tell each other: an error of one is one of all, and so is a difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn

from whale_torch.comm.failure import explain
from whale_torch.comm.meeting import OtherRankFailed
from whale_torch.errors import PlanError, WhaleError
from whale_torch.mesh import Group, Mesh
from whale_torch.strategies.materialize import names_on_meta
from whale_torch.strategies.outputs import tensors_in

__all__ = ["explained", "from_all", "refuse_other_arguments", "refuse_others", "together"]

T = TypeVar("T")


def from_all(mesh: Mesh, value: T) -> list[T]:
    """Every rank's value, in rank order."""
    values: list[Any] = [value] * mesh.world
    if mesh.world > 1:
        explained(lambda: dist.all_gather_object(values, value))
    return values


def explained(step: Callable[[], T]) -> T:
    """Runs a step over the world's own group. Raises CommError where ranks of it are gone or do not come."""
    try:
        return step()
    except RuntimeError as error:
        if not dist.is_initialized():  # the launcher's address is wrong, say
            raise
        world = Group("world", tuple(range(dist.get_world_size())), dist.get_rank(), None)
        raise explain(world, "wh.parallelize", error) from error


def together(mesh: Mesh, step: Callable[[], T], kind: type[WhaleError] = PlanError) -> T:
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
    errors = from_all(mesh, error)
    first = next((found for found in errors if found is not None), None)
    if first is None:
        return cast(T, result)
    trace = None if error is None else error.__traceback__  # shown once, under what all ranks say
    if all(found is not None and found.what == first.what for found in errors):
        raise first.with_traceback(trace) from cause
    ranks = [rank for rank, found in enumerate(errors) if found is not None]
    what = f"rank {ranks[0]} was refused, and not every rank with it: {first.what}"
    raise type(first)(what, where=first.where, fix=first.fix, ranks=ranks).with_traceback(trace) from cause


def refuse_others(mesh: Mesh, decided: str, what: str, model: nn.Module, sample_inputs: object) -> None:
    """Raises PlanError, on every rank, where ranks decided otherwise than rank 0, and says what they were given."""
    shapes, meta = _shapes(sample_inputs), len(names_on_meta(model))
    told = from_all(mesh, (decided, shapes, meta))
    odd = [rank for rank, found in enumerate(told) if found[0] != told[0][0]]
    if not odd:
        return
    (_, mine, my_meta), (_, theirs, their_meta) = told[0], told[odd[0]]
    if my_meta != their_meta:
        raise PlanError(
            f"ranks {odd} built another model than rank 0: {their_meta} of its tensors are on the meta device on rank "
            f"{odd[0]}, {my_meta} on rank 0.",
            ranks=odd,
            fix="build the model in one way on every rank: on the meta device, or with memory",
        )
    if mine != theirs:
        raise PlanError(
            f"ranks {odd} {what}: the sample_inputs of rank {odd[0]} are {theirs}, those of rank 0 are {mine}.",
            ranks=odd,
            fix="give every rank sample_inputs of the same names, shapes and dtypes: those of one full batch",
        )
    raise PlanError(
        f"ranks {odd} {what}.",
        ranks=odd,
        fix="build the same model with the same scopes on every rank; "
        "compare print(wh.plan(model, cluster=...)) of two ranks",
    )


def refuse_other_arguments(told: Sequence[Mapping[str, str]]) -> None:
    """Raises PlanError, on every rank, where one was given other arguments than rank 0."""
    for name, first in told[0].items():
        odd = [rank for rank, given in enumerate(told) if given[name] != first]
        if odd:
            raise PlanError(
                f"ranks disagree on {name}: {told[odd[0]][name]} on rank {odd[0]}, {first} on rank 0.",
                ranks=odd,
                fix="give every rank the same arguments of wh.parallelize, and its model the same scopes; of weights a "
                "rank reads what it keeps",
            )


def _shapes(sample_inputs: object) -> str:
    """The tensors among sample inputs, in words."""
    if sample_inputs is None:
        return "None"
    named = sample_inputs.items() if isinstance(sample_inputs, dict) else [("", sample_inputs)]
    found = [
        f"{name}{' ' if name else ''}{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
        for name, value in named
        for t in tensors_in(value)
    ]
    return ", ".join(found) or "no tensors"
