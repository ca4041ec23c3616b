"""argmax and top-k across the columns of a split: k candidates a rank travel, not the columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from whale_torch.comm.bridge import gather_feeds
from whale_torch.comm.collectives import gather_equal
from whale_torch.comm.columns import Columns, ColumnsPlace, register_function

__all__ = ["topk"]


class TopK(NamedTuple):
    """As torch.return_types.topk."""

    values: Tensor
    indices: Tensor


def topk(z: Columns, k: int, *, operation: str = "topk") -> TopK:
    """The k largest columns of each own row, in descending order.

    Returns values (differentiable) and indices of shape [*lead, k]. Raises RuntimeError where k is out of range.
    """
    place = z.place
    total = sum(place.widths)
    if not 0 <= k <= total:
        raise RuntimeError(f"selected index k out of range: k={k} of {total} columns")
    place.region.agree(operation, place.counts[place.region.rows.index])
    indices = _indices(z.local.detach(), k, place)
    values = _Values.apply(z.local, indices, place)
    return TopK(values.reshape(*place.lead, k), _own(indices, place).reshape(*place.lead, k))


def _own(x: Tensor, place: ColumnsPlace) -> Tensor:
    return x.split(list(place.counts))[place.region.rows.index]


def _indices(local: Tensor, k: int, place: ColumnsPlace) -> Tensor:
    """Columns of the k largest of every row of the region, equal on its ranks."""
    width, most = local.shape[1], min(k, max(place.widths))
    values, here = local.float().topk(min(most, width), -1)
    if width < most:
        values = torch.nn.functional.pad(values, (0, most - width), value=-torch.inf)
        here = torch.nn.functional.pad(here, (0, most - width), value=width)
    order = here.argsort(dim=-1, stable=True)  # lower columns first, so that the stable sort below keeps them first
    values, here = values.gather(-1, order), here.gather(-1, order) + place.first
    candidates = gather_equal(torch.cat([values.double(), here.double()], -1), place.region.columns, name="topk candidates")
    values = torch.cat(list(candidates[..., :most]), -1)
    columns = torch.cat(list(candidates[..., most:]), -1).long()
    best = values.argsort(dim=-1, descending=True, stable=True)[:, :k]
    return columns.gather(-1, best)


class _Values(torch.autograd.Function):
    """Values of the chosen columns for the own rows; backward, each value's gradient goes to the rank of its column."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, indices: Tensor, place: ColumnsPlace) -> Tensor:
        here = indices - place.first
        inside = (here >= 0) & (here < local.shape[1])
        ctx.place, ctx.shape = place, local.shape
        ctx.save_for_backward(here.clamp(0, max(local.shape[1] - 1, 0)), inside)
        if local.shape[1] == 0:
            found = local.new_zeros(indices.shape)
        else:
            found = torch.where(inside, local.gather(1, here.clamp(0, local.shape[1] - 1)), local.new_zeros(()))
        total = torch.where(gather_equal(inside, place.region.columns, name="topk values"), gather_equal(found, place.region.columns, name="topk values"), 0).sum(0)
        return _own(total, place).to(local.dtype).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        here, inside = ctx.saved_tensors
        region = ctx.place.region
        everyone = gather_feeds(grad.contiguous(), ctx.place.counts, region, "topk's backward") / region.rows.size
        out = everyone.new_zeros(ctx.shape)
        if ctx.shape[1]:
            out.scatter_add_(1, here, torch.where(inside, everyone, 0).to(out.dtype))
        return out, None, None


@register_function(torch.topk, Tensor.topk)
def _topk(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("input", "k", "dim", "largest", "sorted"), args, strict=False)) | kwargs
    z, dim = given["input"], given.get("dim", -1)
    last = dim in (-1, len(z.place.shape) - 1)
    if not isinstance(z, Columns) or not last or z.place.tail or not given.get("largest", True) or given.get("out") is not None:
        return NotImplemented
    return topk(z, given["k"])


@register_function(torch.argmax, Tensor.argmax)
def _argmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
    z, dim = given["input"], given.get("dim")
    if not isinstance(z, Columns) or z.place.tail or dim is None or dim not in (-1, len(z.place.shape) - 1):
        return NotImplemented
    columns = topk(z, 1, operation="argmax").indices
    return columns if given.get("keepdim", False) else columns[..., 0]
