"""Cross entropy across the ranks of a split, and the true mean of any cross entropy inside the model.

One mean over the whole batch is wanted, of whatever rows the ranks hold: the value a rank sees is the mean over the
rows its group ran; the gradient is divided by the global count (docs/design.md 5.3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from whale_torch import ops
from whale_torch.comm.bridge import gather_feeds, mean_seed
from whale_torch.comm.call import Call
from whale_torch.comm.collectives import all_reduce_async, gather_equal
from whale_torch.comm.columns import Columns, ColumnsPlace, plain, register_function
from whale_torch.comm.region import Region
from whale_torch.errors import LossError
from whale_torch.mesh import Group

__all__ = ["TrueMeanLoss", "cross_entropy"]


def _float(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class _Rows:
    """The targets of all rows of the region and what each row weighs in the loss.

    target: class of each row, -1 where the row is ignored. weight: its class weight (0 where ignored).
    """

    def __init__(self, target: Tensor, ignore_index: int, class_weight: Tensor | None, smoothing: float, num_classes: int, dtype: torch.dtype):
        keep = target != ignore_index
        self.target = target.masked_fill(~keep, -1)
        if class_weight is None:
            self.weight = keep.to(dtype)
            weight_sum = float(num_classes)
        else:
            self.weight = class_weight.to(dtype)[self.target.clamp(min=0)] * keep
            weight_sum = float(class_weight.sum())
        self.smooth = keep.to(dtype) * (smoothing / num_classes) if smoothing else None
        self.hard = self.weight * (1 - smoothing)
        self.soft = self.hard if self.smooth is None else self.hard + self.smooth * weight_sum
        self.denominator = self.weight.sum()


class _ShardedCrossEntropy(torch.autograd.Function):
    """Losses of the region's rows from each rank's columns.

    Forward: one pass over the shard for (max, sum of exp, target logit, weighted sum), one all-gather of those four
    numbers a row. Backward: softmax minus target, written over the logits where nobody else holds them.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, rows: _Rows, place: ColumnsPlace, class_weight: Tensor | None, reduction: str, owned: Callable[[], bool]) -> Tensor:
        region = place.region
        stats = ops.softmax_stats(z, rows.target, place.first, class_weight, rows.smooth is not None)
        lse, target_logit, smooth_sum = _combine(stats, region)
        ctx.save_for_backward(z, lse)
        ctx.rows, ctx.place, ctx.class_weight, ctx.reduction, ctx.owned, ctx.overwritten = rows, place, class_weight, reduction, owned, False
        return _finish(ctx, rows, lse, target_logit, smooth_sum, place, reduction)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.overwritten:
            raise LossError(
                "backward ran twice through a cross entropy whose logits were overwritten by the first run.",
                fix="keep the logits: z = model(x); loss = F.cross_entropy(z, y); z stays alive until the last backward",
            )
        z, lse = ctx.saved_tensors
        rows = ctx.rows
        per_row = _row_gradient(ctx, grad)
        ctx.overwritten = ctx.owned()
        out = ops.softmax_grad(
            z, lse, rows.target, ctx.place.first, per_row * rows.soft, per_row * rows.hard,
            None if rows.smooth is None else per_row * rows.smooth, ctx.class_weight, ctx.overwritten,
        )  # fmt: skip
        return out, None, None, None, None, None


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The last linear layer and its loss over chunks of the vocabulary: the logits are never held."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: _Rows, place: ColumnsPlace, class_weight: Tensor | None, reduction: str) -> Tensor:
        stats = ops.linear_softmax_stats(x, weight, bias, rows.target, place.first, class_weight, rows.smooth is not None, CHUNK)
        lse, target_logit, smooth_sum = _combine(stats, place.region)
        ctx.save_for_backward(x, weight, bias, lse)
        ctx.rows, ctx.place, ctx.class_weight, ctx.reduction = rows, place, class_weight, reduction
        return _finish(ctx, rows, lse, target_logit, smooth_sum, place, reduction)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, lse = ctx.saved_tensors
        rows = ctx.rows
        per_row = _row_gradient(ctx, grad)
        smooth = None if rows.smooth is None else per_row * rows.smooth
        dx, dweight, dbias = ops.linear_softmax_grad(
            x, weight, bias, lse, rows.target, ctx.place.first, per_row * rows.soft, per_row * rows.hard, smooth, ctx.class_weight, CHUNK
        )
        return dx, dweight, dbias if bias is not None else None, None, None, None, None


CHUNK = 4096
"""Columns of one chunk of the chunked loss."""


def _combine(stats: Tensor, region: Region) -> tuple[Tensor, Tensor, Tensor]:
    """log-sum-exp, target logit and weighted sum over all columns, from each rank's [4, rows]."""
    parts = gather_equal(stats, region.columns, name="cross_entropy statistics")
    if region.columns.size == 1:
        return stats[0] + stats[1].log(), stats[2], stats[3]
    top = parts[:, 0].max(0).values
    scale = (parts[:, 0] - top).exp()
    scale = torch.where(parts[:, 0] == -torch.inf, torch.zeros_like(scale), scale)
    return top + (parts[:, 1] * scale).sum(0).log(), parts[:, 2].sum(0), parts[:, 3].sum(0)


def _finish(ctx: Any, rows: _Rows, lse: Tensor, target_logit: Tensor, smooth_sum: Tensor, place: ColumnsPlace, reduction: str) -> Tensor:
    losses = rows.soft * lse - rows.hard * target_logit
    if rows.smooth is not None:
        losses = losses - rows.smooth * smooth_sum
    losses = torch.where(rows.target < 0, torch.zeros_like(losses), losses)
    region = place.region
    if reduction == "none":
        return losses.split(list(place.counts))[region.rows.index].clone()
    if reduction == "sum":
        return losses.sum()
    if ctx.needs_input_grad[0]:
        ctx.divisor = _Divisor(rows.denominator, region.copies, region.call if place.call is None else None, region)
    return losses.sum() / rows.denominator


def _row_gradient(ctx: Any, grad: Tensor) -> Tensor:
    """Gradient of each row's loss in the region's running scale."""
    region, rows = ctx.place.region, ctx.rows
    if ctx.reduction == "none":
        gathered = gather_feeds(grad.contiguous(), ctx.place.counts, region, "cross_entropy's backward")
        return gathered / region.rows.size
    seed = mean_seed(grad, region)
    if ctx.reduction == "sum":
        return seed.expand_as(rows.weight).to(rows.weight.dtype)
    divisor = ctx.divisor()
    per_row = torch.where(divisor == 0, torch.zeros_like(divisor), seed / divisor)
    return per_row.to(rows.weight.dtype).expand_as(rows.weight)


class _Divisor:
    """What a mean's gradient is divided by: the mean over the groups of their counts, times the group's row share
    where the model's output weighs it again. The counts travel while the model runs."""

    def __init__(self, mine: Tensor, copies: Group, call: Call | None, region: Region | None):
        self._sum = mine.detach().to(torch.float64).reshape(1).clone()
        self._wait = all_reduce_async(self._sum, copies, name="count of labels")
        self._size, self._call, self._region, self._waited = copies.size, call, region, False

    def __call__(self) -> Tensor:
        if not self._waited:
            self._wait()
            self._waited = True
        share = 1.0
        if self._call is not None:
            share = self._call.share(self._region) if self._region is not None else self._call.weight()
        return self._sum[0] / self._size * share


def cross_entropy(
    z: Columns,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """F.cross_entropy of a split's output; the logits stay where they are.

    The value is that of all rows of the split's group, equal on its ranks; reduction="none" gives the own rows.
    Probability targets and more than one dimension of rows are gathered. Raises IndexError for a class out of range.
    """
    place = z.place
    simple = len(place.lead) == 1 and not place.tail and size_average is None and reduce is None and reduction in ("none", "sum", "mean")
    if not simple or target.is_floating_point() or tuple(target.shape) != place.lead:
        return F.cross_entropy(z.implicit_rows("cross_entropy"), target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    region, num_classes = place.region, sum(place.widths)
    counts = region.agree("cross_entropy", target.shape[0])
    targets = gather_feeds(target, counts, region, "cross_entropy labels")
    _check_targets(targets, ignore_index, num_classes)
    dtype = torch.float64 if z.dtype == torch.float64 else torch.float32
    rows = _Rows(targets, ignore_index, weight, label_smoothing, num_classes, dtype)
    mine = None if weight is None else weight[place.first : place.first + place.widths[region.columns.index]].to(dtype).contiguous()
    if z.deferred is not None and not z.deferred.made:
        out = _ChunkedCrossEntropy.apply(*z.deferred.inputs, rows, place, mine, reduction)
    else:
        out = _ShardedCrossEntropy.apply(plain(z), rows, place, mine, reduction, z.hold.release())
    return out.to(z.dtype)


def _check_targets(targets: Tensor, ignore_index: int, num_classes: int) -> None:
    if targets.device.type != "cpu":  # reading it back would wait for the device; the kernels treat it as no column's
        return
    wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= num_classes))]
    if wrong.numel():
        raise IndexError(f"Target {int(wrong[0])} is out of bounds for {num_classes} classes.")


@register_function(F.cross_entropy)
def _cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = dict(zip(("input", "target"), args, strict=False)) | kwargs
    if not isinstance(bound.get("input"), Columns) or isinstance(bound.get("target"), Columns):
        return NotImplemented
    return cross_entropy(*args, **kwargs) if args else cross_entropy(kwargs.pop("input"), **kwargs)


class _ScaleBackward(torch.autograd.Function):
    """Identity whose backward multiplies by a number known only then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Callable[[], Tensor]) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad * ctx.factor().to(grad.dtype), None


class TrueMeanLoss(TorchFunctionMode):
    """While the model's forward runs: a mean over ignored or weighted labels gets the gradient of the global mean.

    The value stays the rank's own mean. Loss functions on Columns do this themselves.
    """

    def __init__(self, call: Call, copies: Group):
        super().__init__()
        self._call, self._copies = call, copies

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.cross_entropy or func is F.nll_loss:
            return self._true_mean(out, *args, **(kwargs or {}))
        return out

    def _true_mean(
        self, out: Tensor, input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None,
        ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> Tensor:  # fmt: skip
        mean = reduction == "mean" and size_average in (None, True) and reduce in (None, True)
        if not mean or isinstance(input, Columns) or target.is_floating_point() or not out.requires_grad:
            return out
        keep = target != ignore_index
        mine = keep.sum() if weight is None else (weight.to(torch.float64)[target.masked_fill(~keep, 0)] * keep).sum()
        divisor = _Divisor(mine, self._copies, self._call, None)

        def factor() -> Tensor:
            by = divisor()
            return torch.where(by == 0, torch.zeros_like(by), mine / by)

        scaled: Tensor = _ScaleBackward.apply(out, factor)
        return scaled
