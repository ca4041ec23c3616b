"""argmax, max and top-k across the columns of a split: k candidates a rank travel, not the columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from whale_torch.comm.bridge import first_order, gather_feeds, own_feed
from whale_torch.comm.call import deliver
from whale_torch.comm.collectives import gather_equal
from whale_torch.comm.columns import Columns, ColumnsPlace, register_function

__all__ = ["TopK", "topk"]


class TopK(NamedTuple):
    """As torch.return_types.topk and torch.return_types.max."""

    values: Tensor
    indices: Tensor


def topk(z: Columns, k: int, *, operation: str = "topk") -> TopK:
    """The k largest columns of each own row, in descending order; of equal ones the first column first, if k is 1.

    Returns values (differentiable) and indices of shape [*lead, k]. Raises RuntimeError where k is out of range.
    """
    place, total = z.place, sum(z.place.widths)
    if not 0 <= k <= total:
        raise RuntimeError(f"selected index k out of range: k={k} of {total} columns")
    place.agree(operation, f"{z.dtype} k={k}")
    local = z.local
    best, columns = _best(local.detach(), k, place)
    values = _Values.apply(local, best.to(local.dtype), columns, place)  # type: ignore[no-untyped-call]
    if place.call is not None:
        values = deliver(values, place.call)
    return TopK(values.reshape(*place.lead, k), own_feed(columns, place.counts, place.region).reshape(*place.lead, k))


def _best(local: Tensor, k: int, place: ColumnsPlace) -> tuple[Tensor, Tensor]:
    """Values and columns of the k largest of every row of the region, [rows, k], equal on its ranks."""
    most = [min(k, width) for width in place.widths]
    mine = most[place.region.columns.index]
    if mine == 1:  # unlike topk, max names the first of equal columns
        values, here = local.max(-1, keepdim=True)
    else:
        values, here = local.topk(mine, -1)
    packed = torch.stack([values.double(), (here + place.first).double()])  # both exact
    packed = torch.nn.functional.pad(packed, (0, max(most) - mine))
    candidates = gather_equal(packed, place.region.columns, name="topk candidates")
    values, columns = torch.cat([part[..., :n] for part, n in zip(candidates, most, strict=True)], -1)
    best = values.argsort(dim=-1, descending=True, stable=True)[:, :k]
    return values.gather(-1, best), columns.gather(-1, best).long()


class _Values(torch.autograd.Function):
    """Values of the chosen columns for the own rows; backward, each value's gradient goes to the rank of its column."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, best: Tensor, columns: Tensor, place: ColumnsPlace) -> Tensor:
        ctx.place, ctx.shape = place, local.shape
        ctx.save_for_backward(columns)
        return own_feed(best, place.counts, place.region).clone()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (columns,) = ctx.saved_tensors
        place, width = ctx.place, ctx.shape[1]
        everyone = gather_feeds(grad.contiguous(), place.counts, place.region, "topk's backward")
        here = columns - place.first
        inside = (here >= 0) & (here < width)
        # one column more takes what belongs to other ranks
        out = everyone.new_zeros(ctx.shape[0], width + 1)
        out.scatter_(1, torch.where(inside, here, width), everyone / place.region.rows.size)
        return out[:, :width], None, None, None


def _last(z: Any, dim: Any) -> bool:
    """Whether an operation along `dim` of a Columns runs over its columns, of a dtype whose values travel exactly."""
    if not isinstance(z, Columns) or not isinstance(dim, int) or isinstance(dim, bool):
        return False
    return not z.place.tail and dim in (-1, len(z.place.shape) - 1) and z.dtype.is_floating_point


@register_function(torch.topk, Tensor.topk)
def _topk(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("input", "k", "dim", "largest", "sorted")
    given: dict[str, Any] = {"dim": -1, "largest": True} | dict(zip(names, args, strict=False)) | kwargs
    if not _last(given.get("input"), given["dim"]) or not given["largest"] or given.get("out") is not None:
        return NotImplemented
    return topk(given["input"], given["k"])


@register_function(torch.argmax, Tensor.argmax)
def _argmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given: dict[str, Any] = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
    if not _last(given.get("input"), given.get("dim")) or given.get("out") is not None:
        return NotImplemented
    columns = topk(given["input"], 1, operation="argmax").indices
    return columns if given.get("keepdim", False) else columns[..., 0]


@register_function(torch.max, Tensor.max)
def _max(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given: dict[str, Any] = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
    if not _last(given.get("input"), given.get("dim")) or given.get("out") is not None:
        return NotImplemented
    found = topk(given["input"], 1, operation="max")
    return found if given.get("keepdim", False) else TopK(found.values[..., 0], found.indices[..., 0])
