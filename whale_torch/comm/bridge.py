"""Bridges: what moves an activation between layouts, forward and backward, under one scale rule.

Inside a region run by groups of g ranks the running gradient is n/g times the true one (docs/design.md 5.3). So a
bridge whose backward goes from a region of h ranks into one of g multiplies by h/g; between a feed's rows and a split's
region that is the number of feeds of the region, |R|. The table is in docs/design.md 8.

Shapes: F rows of this rank's feed, N rows of all feeds of the region, C all columns, K columns of this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from whale_torch.comm.collectives import all_gather_rows, all_reduce, all_to_all_rows, gather_equal, reduce_scatter_rows
from whale_torch.comm.region import Region
from whale_torch.errors import LossError

__all__ = [
    "ColumnsToRows",
    "Enter",
    "Leave",
    "RowsToColumns",
    "ScaleBackward",
    "Shared",
    "first_order",
    "gather_feeds",
    "mean_of_seeds",
    "own_feed",
]

Backward = TypeVar("Backward", bound=Callable[..., Any])


def first_order(backward: Backward) -> Backward:
    """Marks a backward whose collectives no second derivative passes.

    Under create_graph it raises LossError. (torch's once_differentiable lets it pass silently where the gradient that
    flows in is a constant, as it is at a loss.)
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise LossError(
                "a second derivative (create_graph=True) was asked for through a split or its loss.",
                fix="take such derivatives of a model without wh.split, or leave create_graph out",
            )
        return backward(ctx, *grads)

    return cast(Backward, checked)


def gather_feeds(x: torch.Tensor, counts: Sequence[int], region: Region, name: str) -> torch.Tensor:
    """Own feed's rows -> rows of all feeds."""
    return all_gather_rows(x, counts, region.rows, name=name)


def sum_to_feed(x: torch.Tensor, counts: Sequence[int], region: Region, name: str) -> torch.Tensor:
    """Partial sums of all rows -> complete rows of the own feed."""
    out = reduce_scatter_rows(x, counts, region.rows, name=name)
    if region.twins.size > 1:
        out = out.clone() if out is x else out.contiguous()
        all_reduce(out, region.twins, name=name)
    return out


def own_feed(x: torch.Tensor, counts: Sequence[int], region: Region) -> torch.Tensor:
    """All rows -> rows of the own feed, a view."""
    start = sum(counts[: region.rows.index])
    return x[start : start + counts[region.rows.index]]


def columns_to_rows(
    z: torch.Tensor, counts: Sequence[int], widths: Sequence[int], region: Region, name: str
) -> torch.Tensor:
    """[N, K] -> [F, C]."""
    mine = counts[region.rows.index]
    received = [widths[p] for p in region.row_positions]
    if region.rows.size > 1:
        flat = all_to_all_rows(
            z.reshape(-1), [c * z.shape[1] for c in counts], [mine * w for w in received], region.rows, name=name
        )
        blocks = [
            part.view(mine, w) for part, w in zip(flat.split([mine * w for w in received]), received, strict=True)
        ]
    else:
        blocks = [z]
    if region.twins.size == 1:
        return torch.cat(blocks, 1) if len(blocks) > 1 else blocks[0]
    return torch.cat(_gather_blocks(blocks, widths, region, name), 1)


def _gather_blocks(blocks: list[torch.Tensor], widths: Sequence[int], region: Region, name: str) -> list[torch.Tensor]:
    """The column blocks of all positions of the region, from the twins that hold them."""
    mine = blocks[0].shape[0]
    of_twin = [sum(widths[p] for p in region.positions_of_twin(i)) for i in range(region.twins.size)]
    sent = torch.cat([block.reshape(-1) for block in blocks])
    spread = sent.unsqueeze(0).expand(region.twins.size, -1).reshape(-1)
    flat = all_to_all_rows(
        spread, [sent.numel()] * region.twins.size, [mine * w for w in of_twin], region.twins, name=name
    )
    parts: dict[int, torch.Tensor] = {}
    for i, part in enumerate(flat.split([mine * w for w in of_twin])):
        positions = region.positions_of_twin(i)
        for p, block in zip(positions, part.split([mine * widths[p] for p in positions]), strict=True):
            parts[p] = block.view(mine, widths[p])
    return [parts[p] for p in range(region.columns.size)]


def rows_to_columns(
    x: torch.Tensor, counts: Sequence[int], widths: Sequence[int], region: Region, name: str
) -> torch.Tensor:
    """[F, C] -> [N, K]."""
    blocks = x.split(list(widths), 1)
    if region.rows.size == 1:
        return blocks[region.columns.index]  # type: ignore[no-any-return]
    mine, width = x.shape[0], widths[region.columns.index]
    sent = torch.cat([blocks[p].reshape(-1) for p in region.row_positions])
    out = all_to_all_rows(
        sent, [mine * widths[p] for p in region.row_positions], [c * width for c in counts], region.rows, name=name
    )
    return out.view(sum(counts), width)


class Enter(torch.autograd.Function):
    """Rows of a feed -> all rows of the region: [F, ...] -> [N, ...]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: Sequence[int], region: Region) -> torch.Tensor:
        ctx.counts, ctx.region = counts, region
        out = gather_feeds(x, counts, region, "enter")
        return out.view_as(out) if out is x else out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        out = sum_to_feed(grad, ctx.counts, ctx.region, "enter's backward")
        return (out * ctx.region.rows.size if ctx.region.rows.size > 1 else out), None, None


class Leave(torch.autograd.Function):
    """Partial sums of all rows -> complete rows of the feed: [N, ...] -> [F, ...]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: Sequence[int], region: Region) -> torch.Tensor:
        ctx.counts, ctx.region = counts, region
        out = sum_to_feed(x, counts, region, "leave")
        return out.detach() if out is x else out  # no view to autograd, so that the user may write into it

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _scaled_gather(grad, ctx.counts, ctx.region, "leave's backward"), None, None


def _scaled_gather(grad: torch.Tensor, counts: Sequence[int], region: Region, name: str) -> torch.Tensor:
    if region.rows.size == 1:
        return grad
    return gather_feeds(grad / region.rows.size, counts, region, name)


class ColumnsToRows(torch.autograd.Function):
    """All rows, my columns -> rows of the feed, all columns: [N, K] -> [F, C]."""

    @staticmethod
    def forward(
        ctx: Any, z: torch.Tensor, counts: Sequence[int], widths: Sequence[int], region: Region
    ) -> torch.Tensor:
        ctx.counts, ctx.widths, ctx.region = counts, widths, region
        out = columns_to_rows(z, counts, widths, region, "columns to rows")
        return out.clone() if out is z else out  # z is the user's too

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        out = rows_to_columns(grad, ctx.counts, ctx.widths, ctx.region, "columns to rows' backward")
        return (out / ctx.region.rows.size if ctx.region.rows.size > 1 else out), None, None, None


class RowsToColumns(torch.autograd.Function):
    """Rows of the feed, all columns -> all rows, my columns: [F, C] -> [N, K]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, counts: Sequence[int], widths: Sequence[int], region: Region
    ) -> torch.Tensor:
        ctx.counts, ctx.widths, ctx.region = counts, widths, region
        out = rows_to_columns(x, counts, widths, region, "rows to columns")
        return out.contiguous() if region.rows.size == 1 else out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        out = columns_to_rows(grad.contiguous(), ctx.counts, ctx.widths, ctx.region, "rows to columns' backward")
        return (out * ctx.region.rows.size if ctx.region.rows.size > 1 else out), None, None, None


class Shared(torch.autograd.Function):
    """Identity on a tensor that all ranks of a region hold alike, each for its part; backward sums the parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: Region) -> torch.Tensor:
        ctx.region = region
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return all_reduce(grad.contiguous().clone(), ctx.region.columns, name="gradient of a shared tensor"), None


class ScaleBackward(torch.autograd.Function):
    """Identity whose backward multiplies by a number that is asked for only then."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: Callable[[], torch.Tensor | float]) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        factor = ctx.factor()
        return grad * (factor.to(grad.dtype) if isinstance(factor, torch.Tensor) else factor), None


def mean_of_seeds(grad: torch.Tensor, region: Region) -> torch.Tensor:
    """What flows into a scalar that every rank of a region holds: the mean of the ranks' gradients."""
    if region.columns.size == 1:
        return grad
    return gather_equal(grad.reshape(1), region.columns, name="seed of a loss").mean().reshape(grad.shape)
