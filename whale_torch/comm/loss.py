"""Cross entropy across the ranks of a split, and the true mean of any cross entropy inside the model.

One mean over the whole batch is wanted, of whatever rows the ranks hold: the value a rank sees is the mean over the
rows its group ran; the gradient is divided by the global count (docs/design.md 5.3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from whale_torch import ops
from whale_torch.comm.bridge import MeanSeed, ScaleBackward, first_order, gather_feeds, own_feed
from whale_torch.comm.call import Call, deliver
from whale_torch.comm.collectives import all_reduce_async, gather_equal
from whale_torch.comm.columns import Columns, ColumnsPlace, plain, register_function
from whale_torch.comm.region import Region
from whale_torch.errors import LossError
from whale_torch.mesh import Group
from whale_torch.ops.precision import autocast_dtype

__all__ = ["TrueMeanLoss", "cross_entropy"]


class _Rows:
    """The targets of all rows of the region and what each row weighs in the loss.

    target: class of each row, -1 where the row is ignored. hard, soft, smooth: what the target's logit, the log-sum-exp
    and the (weighted) sum of all logits are multiplied by; 0 where the row is ignored. denominator: of the mean.
    """

    def __init__(self, target: Tensor, options: _Options, num_classes: int, dtype: torch.dtype):
        keep = target != options.ignore_index
        self.target = target.masked_fill(~keep, -1)
        weight = keep.to(dtype)
        weight_sum = float(num_classes)
        if options.weight is not None:
            weight = options.weight.to(dtype)[self.target.clamp(min=0)] * keep
            weight_sum = float(options.weight.sum())
        smoothing = options.label_smoothing
        self.smooth = keep.to(dtype) * (smoothing / num_classes) if smoothing else None
        self.hard = weight * (1 - smoothing)
        self.soft = self.hard if self.smooth is None else self.hard + self.smooth * weight_sum
        self.denominator = weight.sum()


class _Options(NamedTuple):
    """Arguments of F.cross_entropy that decide what a row weighs."""

    weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float


class _Problem:
    """One loss of a region's rows: what forward and backward share.

    place: of the logits, in flattened rows. my_weight: class weights of this rank's columns.
    """

    def __init__(self, place: ColumnsPlace, rows: _Rows, options: _Options, dtype: torch.dtype):
        self.place, self.rows, self.reduction = place, rows, options.reduction
        width = place.widths[place.region.columns.index]
        weight = options.weight
        self.my_weight = None if weight is None else weight.narrow(0, place.first, width).to(dtype).contiguous()
        self.divisor: _Divisor | None = None
        self.sum_scale = 1.0
        call = place.call or place.region.call
        if call is not None and call.summed:  # the feeds' losses are added up; this one is theirs together
            self.sum_scale = (1.0 if place.call is None else call.num_feeds) / place.region.rows.size

    def statistics(self) -> tuple[int, Tensor | None, bool]:
        """Arguments of ops.softmax_stats behind the targets."""
        return self.place.first, self.my_weight, self.rows.smooth is not None

    def finish(self, stats: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor]:
        """Each rank's statistics [4, rows] -> log-sum-exp of all rows and the reduced loss."""
        region, rows = self.place.region, self.rows
        lse, target_logit, smooth_sum = _combine(stats, region)
        losses = rows.soft * lse - rows.hard * target_logit
        if rows.smooth is not None:
            losses = losses - rows.smooth * smooth_sum
        losses = torch.where(rows.target < 0, 0.0, losses)
        if self.reduction == "none":
            return lse, own_feed(losses, self.place.counts, region).clone()
        if self.reduction == "sum":
            return lse, losses.sum()
        if needs_grad:
            inside = None if self.place.call is not None or region.call is None else region.call
            self.divisor = _Divisor(rows.denominator, region.copies, lambda: inside.share(region) if inside else 1.0)
        return lse, losses.sum() / rows.denominator

    def coefficients(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradient of the reduced loss -> that of each row, in the region's running scale, times soft, hard, smooth."""
        region, rows = self.place.region, self.rows
        if self.reduction == "none":
            per_row = gather_feeds(grad.contiguous(), self.place.counts, region, "cross_entropy's backward")
            per_row = per_row / region.rows.size
        elif self.divisor is None:
            per_row = grad * self.sum_scale
        else:
            divisor = self.divisor()
            per_row = torch.where(divisor == 0, 0.0, grad / divisor).to(grad.dtype)
        return per_row * rows.soft, per_row * rows.hard, None if rows.smooth is None else per_row * rows.smooth


class _ShardedCrossEntropy(torch.autograd.Function):
    """Losses of the region's rows from each rank's columns.

    Forward: one pass over the shard for (max, sum of exp, target logit, weighted sum), one all-gather of those four
    numbers a row. Backward: softmax minus target, written over the logits where nobody else holds them.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, problem: _Problem, may_overwrite: Callable[[], bool]) -> Tensor:
        stats = ops.softmax_stats(z, problem.rows.target, *problem.statistics())
        lse, out = problem.finish(stats, any(ctx.needs_input_grad))
        ctx.save_for_backward(z, lse)
        ctx.problem, ctx.may_overwrite, ctx.overwritten = problem, may_overwrite, False
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.overwritten:
            raise LossError(
                "backward ran twice through a cross entropy whose logits were overwritten by the first run.",
                fix="keep the logits alive until the last backward: z = model(x); loss = F.cross_entropy(z, y)",
            )
        z, lse = ctx.saved_tensors
        problem = ctx.problem
        soft, hard, smooth = problem.coefficients(grad)
        ctx.overwritten = ctx.may_overwrite()
        target, first, weight = problem.rows.target, problem.place.first, problem.my_weight
        out = ops.softmax_grad(z, lse, target, first, soft, hard, smooth, weight, ctx.overwritten)
        return out, None, None


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The last linear layer and its loss over chunks of the vocabulary: the logits are never held."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, problem: _Problem) -> Tensor:
        stats = ops.linear_softmax_stats(x, weight, bias, problem.rows.target, *problem.statistics(), CHUNK)
        lse, out = problem.finish(stats, any(ctx.needs_input_grad))
        ctx.save_for_backward(x, weight, bias, lse)
        ctx.problem = problem
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, lse = ctx.saved_tensors
        problem = ctx.problem
        soft, hard, smooth = problem.coefficients(grad)
        rest = (problem.rows.target, problem.place.first, soft, hard, smooth, problem.my_weight, CHUNK)
        grads = ops.linear_softmax_grad(x, weight, bias, lse, *rest)
        return *grads, None


CHUNK = 4096
"""Columns of one chunk of the chunked loss."""


def _combine(stats: Tensor, region: Region) -> tuple[Tensor, Tensor, Tensor]:
    """log-sum-exp, target logit and weighted sum over all columns, from each rank's [4, rows]."""
    if region.columns.size == 1:
        return stats[0] + stats[1].log(), stats[2], stats[3]
    parts = gather_equal(stats, region.columns, name="cross_entropy statistics")
    top = parts[:, 0].max(0).values
    scale = torch.where(parts[:, 0] == -torch.inf, 0.0, (parts[:, 0] - top).exp())
    return top + (parts[:, 1] * scale).sum(0).log(), parts[:, 2].sum(0), parts[:, 3].sum(0)


class _Divisor:
    """What a mean's gradient is divided by: the mean of the ranks' counts of labels, times `share`, by which the
    gradient of the model's output will be multiplied. The counts travel while the model runs."""

    def __init__(self, mine: Tensor, copies: Group, share: Callable[[], float]):
        self._sum = mine.detach().to(torch.float64).reshape(1).clone()
        self._wait = all_reduce_async(self._sum, copies, name="count of labels")
        self._size, self._share, self._waited = copies.size, share, False

    def __call__(self) -> Tensor:
        if not self._waited:
            self._wait()
            self._waited = True
        return self._sum[0] * (self._share() / self._size)


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
    Probability targets and logits with classes not in the last dimension are gathered, and follow F.cross_entropy.
    Raises what F.cross_entropy raises: IndexError for a class out of range, on every rank of the group.
    """
    if not _runs_across(z, target, size_average, reduce, reduction):
        rows = z.implicit_rows("cross_entropy")
        return F.cross_entropy(rows, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    place, num_classes = _flat(z.place), sum(z.place.widths)
    options = _Options(weight, ignore_index, reduction, label_smoothing)
    _check_options(options, num_classes)
    detail = f"{z.dtype} {reduction} ignore_index={ignore_index} label_smoothing={label_smoothing} {weight is not None}"
    place.agree("cross_entropy", detail)
    targets = gather_feeds(target.reshape(-1).long(), place.counts, place.region, "cross_entropy labels")
    _check_targets(targets, ignore_index, num_classes)
    dtype = torch.float64 if z.dtype == torch.float64 else torch.float32
    problem = _Problem(place, _Rows(targets, options, num_classes, dtype), options, dtype)
    if z.deferred is not None and not z.deferred.made:
        out: Tensor = _ChunkedCrossEntropy.apply(*z.deferred.inputs, problem)  # type: ignore[no-untyped-call]
    elif not z.place.tail:
        out = _ShardedCrossEntropy.apply(plain(z), problem, z.hold.release())  # type: ignore[no-untyped-call]
    else:
        flat = z.local.flatten(2).movedim(1, 2).flatten(0, 1)
        out = _ShardedCrossEntropy.apply(flat, problem, lambda: False)  # type: ignore[no-untyped-call]
    if reduction != "none":
        out = MeanSeed.apply(out, place.region)  # type: ignore[no-untyped-call]
    if place.call is not None:
        out = deliver(out, place.call, weigh=reduction == "none")
    out = out.reshape(target.shape) if reduction == "none" else out
    return out if autocast_dtype(z.device) else out.to(z.dtype)


def _runs_across(z: Columns, target: Tensor, size_average: Any, reduce: Any, reduction: str) -> bool:
    """Whether the loss has a form across ranks: class numbers for rows, or for pixels behind the columns."""
    place = z.place
    shape = (*place.lead, *place.tail)
    known = size_average is None and reduce is None and reduction in ("none", "sum", "mean")
    classes = target.dtype in (torch.int64, torch.uint8) and tuple(target.shape) == shape
    return known and classes and len(place.lead) == 1


def _flat(place: ColumnsPlace) -> ColumnsPlace:
    """The place of the same logits with one row for each pixel behind the columns."""
    pixels = torch.Size(place.tail).numel()
    counts = tuple(count * pixels for count in place.counts)
    return replace(place, counts=counts, lead=(place.mine * pixels,), tail=())


def _check_options(options: _Options, num_classes: int) -> None:
    weight, smoothing = options.weight, options.label_smoothing
    if weight is not None and tuple(weight.shape) != (num_classes,):
        raise RuntimeError(
            f"weight tensor should be defined either for all {num_classes} classes or no classes "
            f"but got weight tensor of shape: {list(weight.shape)}"
        )
    if not 0.0 <= smoothing <= 1.0:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {smoothing:g}")


def _check_targets(targets: Tensor, ignore_index: int, num_classes: int) -> None:
    if targets.device.type != "cpu":  # reading it back would wait for the device; the kernels treat it as no column's
        return
    wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= num_classes))]
    if wrong.numel():
        raise IndexError(f"Target {int(wrong[0])} is out of bounds.")


@register_function(F.cross_entropy)
def _cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    z, target = args[:2]  # F.cross_entropy hands both on by position
    if not isinstance(z, Columns) or isinstance(target, Columns):
        return NotImplemented
    return cross_entropy(*args, **kwargs)


class TrueMeanLoss(TorchFunctionMode):
    """While the model's forward runs: a mean over ignored or weighted labels gets the gradient of the global mean.

    The value stays the rank's own mean. Loss functions on Columns do this themselves.
    """

    def __init__(self, call: Call, copies: Group):
        super().__init__()
        self._call, self._copies = call, copies

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.cross_entropy or func is F.nll_loss:
            return self._true_mean(out, *args, **(kwargs or {}))
        return out

    def _true_mean(
        self,
        out: Tensor,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        mean = reduction == "mean" and size_average in (None, True) and reduce in (None, True)
        if not mean or target.is_floating_point() or not out.requires_grad:
            return out
        if isinstance(input, Columns) and _runs_across(input, target, size_average, reduce, reduction):
            return out
        keep = target != ignore_index
        mine = keep.sum() if weight is None else (weight.to(torch.float64)[target.masked_fill(~keep, 0)] * keep).sum()
        divisor = _Divisor(mine, self._copies, self._call.weight)

        def factor() -> Tensor:
            by = divisor()
            return torch.where(by == 0, torch.zeros_like(by), mine / by)

        scaled: Tensor = ScaleBackward.apply(out, factor)  # type: ignore[no-untyped-call]
        return scaled
