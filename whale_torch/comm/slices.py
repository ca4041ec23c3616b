"""Tensors that ranks hold alike, cut into a slice for each of them and joined again.

Gradients outside are equal on all these ranks; those of a slice are so many times larger as there are ranks, so that
the mean over the ranks of what each slice gives a parameter is the whole gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from whale_torch.comm.collectives import all_gather_rows, all_reduce
from whale_torch.mesh import Group

__all__ = ["join", "part_of", "parts_of", "ranks_run_whole", "run_whole", "take"]

Dims = Sequence[int | None]


_WHOLE: ContextVar[int] = ContextVar("ranks_run_whole", default=1)


@contextlib.contextmanager
def run_whole(ranks: int) -> Iterator[None]:
    """What runs inside runs on the same rows on so many ranks, as there are too few rows for slices."""
    token = _WHOLE.set(ranks)
    try:
        yield
    finally:
        _WHOLE.reset(token)


def ranks_run_whole() -> int:
    """How many ranks run this forward on the same rows, where they would run slices of more."""
    return _WHOLE.get()


def parts_of(rows: int, number: int) -> list[int]:
    """Rows of each slice."""
    return [rows // number + (part < rows % number) for part in range(number)]


def part_of(rows: int, group: Group) -> slice:
    """Where this rank's slice lies among all rows."""
    parts = parts_of(rows, group.size)
    start = sum(parts[: group.index])
    return slice(start, start + parts[group.index])


def take(tensors: Sequence[Tensor], dims: Dims, rows: int, group: Group) -> list[Tensor]:
    """This rank's slice of each tensor, along its dim of `rows` samples; one without (None) stays whole."""
    with_grad = [place for place, x in enumerate(tensors) if x.requires_grad and torch.is_grad_enabled()]
    found = [_slice(x, dim, rows, group) for x, dim in zip(tensors, dims, strict=True)]
    if with_grad:
        chosen = [dims[place] for place in with_grad]
        sliced = _Take.apply(chosen, rows, group, *(tensors[place] for place in with_grad))  # type: ignore[no-untyped-call]
        for place, x in zip(with_grad, sliced, strict=True):
            found[place] = x
    return found


def join(tensors: Sequence[Tensor], dims: Sequence[int], rows: int, group: Group) -> list[Tensor]:
    """The whole tensors, on every rank, of slices along their dims."""
    with_grad = [place for place, x in enumerate(tensors) if x.requires_grad and torch.is_grad_enabled()]
    found = list(tensors)
    for place in set(range(len(tensors))).difference(with_grad):
        found[place] = _gather(tensors[place], dims[place], rows, group, "slices")
    if with_grad:
        chosen = [dims[place] for place in with_grad]
        joined = _Join.apply(chosen, rows, group, *(tensors[place] for place in with_grad))  # type: ignore[no-untyped-call]
        for place, x in zip(with_grad, joined, strict=True):
            found[place] = x
    return found


def _slice(x: Tensor, dim: int | None, rows: int, group: Group) -> Tensor:
    if dim is None:
        return x
    part = part_of(rows, group)
    return x.narrow(dim, part.start, part.stop - part.start)


def _gather(x: Tensor, dim: int, rows: int, group: Group, name: str) -> Tensor:
    whole = all_gather_rows(x.movedim(dim, 0).contiguous(), parts_of(rows, group.size), group, name=name)
    return whole if dim == 0 else whole.movedim(0, dim).contiguous()


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dims: Dims, rows: int, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dims, ctx.rows, ctx.group = dims, rows, group
        sliced = (_slice(x, dim, rows, group) for x, dim in zip(tensors, dims, strict=True))
        return tuple(x.view_as(x) for x in sliced)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = []
        for grad, dim in zip(grads, ctx.dims, strict=True):
            if dim is None:
                whole = all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group, name=_GRADIENTS)
            else:
                whole = _gather(grad, dim, ctx.rows, ctx.group, _GRADIENTS)
            found.append(whole / ctx.group.size)
        return (None, None, None, *found)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dims: Sequence[int], rows: int, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dims, ctx.rows, ctx.group = dims, rows, group
        return tuple(_gather(x, dim, rows, group, "slices") for x, dim in zip(tensors, dims, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = [_slice(g, dim, ctx.rows, ctx.group) * ctx.group.size for g, dim in zip(grads, ctx.dims, strict=True)]
        return (None, None, None, *found)


_GRADIENTS = "gradients of slices"
