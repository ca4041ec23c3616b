"""Cross entropy across the ranks of a split.

One mean over the whole batch is wanted, of whatever rows the ranks hold: the value a rank sees is the mean over the
rows its group ran; the gradient is divided by the global count (docs/design.md 5.3).
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from whale_torch import ops
from whale_torch.comm.bridge import first_order, gather_feeds, mean_of_seeds, own_feed
from whale_torch.comm.call import deliver
from whale_torch.comm.collectives import all_reduce_async, gather_equal
from whale_torch.comm.columns import Columns, ColumnsPlace, dtype_and_device, plain, register_function
from whale_torch.comm.reentrant import refuse_reentrant
from whale_torch.comm.region import MOST_NUMBERS, Region
from whale_torch.mesh import Group
from whale_torch.ops.precision import autocast_dtype

__all__ = ["cross_entropy", "divided"]


class _Rows:
    """The targets of all rows of the region and what each row weighs in the loss.

    target: class of each row, -1 where the row is ignored. hard, soft, smooth: what the target's logit, the log-sum-exp
    and the (weighted) sum of all logits are multiplied by; 0 where the row is ignored, NaN where its label is no class
    (off the CPU: then the loss is NaN, and every gradient). denominator: of the mean.
    plain: every row counts, and counts the same.
    """

    def __init__(self, target: Tensor, options: _Options, num_classes: int, dtype: torch.dtype):
        self.plain = _all_count(target, options, num_classes)
        if self.plain:
            self.target, self.smooth = target, None
            self.hard = self.soft = torch.ones(target.shape, dtype=dtype, device=target.device)
            self.denominator: Tensor | float = float(target.numel())
            return
        keep = target != options.ignore_index
        wrong = _wrong(target, keep, num_classes)
        self.target = target.masked_fill(~keep, -1)
        weight = keep.to(dtype)
        weight_sum = float(num_classes)
        if options.weight is not None:
            weight = options.weight.to(dtype)[self.target.clamp(0, num_classes - 1)] * keep
            weight_sum = float(options.weight.sum())
        if wrong is not None:
            weight = weight.masked_fill(wrong, torch.nan)
            self.target = self.target.masked_fill(wrong, 0)
        smoothing = options.label_smoothing
        self.smooth = keep.to(dtype) * (smoothing / num_classes) if smoothing else None
        self.hard = weight * (1 - smoothing)
        self.soft = self.hard if self.smooth is None else self.hard + self.smooth * weight_sum
        self.denominator = weight.sum()

    def weigh(self, lse: Tensor, target_logit: Tensor, smooth_sum: Tensor | None) -> Tensor:
        """The loss of each row; 0 of an ignored one, also where its logits are infinite."""
        losses = self.soft * lse - self.hard * target_logit
        if self.smooth is not None and smooth_sum is not None:
            losses = losses - self.smooth * smooth_sum
        return torch.where(self.target < 0, 0.0, losses)


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
        lse, target_logit, smooth_sum = _combine(stats, region, smooth=rows.smooth is not None)
        losses = lse - target_logit if rows.plain else rows.weigh(lse, target_logit, smooth_sum)
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
        if self.reduction != "none":
            grad = mean_of_seeds(grad, region)
        if self.reduction == "none":
            per_row = gather_feeds(grad.contiguous(), self.place.counts, region, "cross_entropy's backward")
            per_row = per_row / region.rows.size
        elif self.divisor is None:
            per_row = grad * self.sum_scale
        else:
            per_row = divided(grad, self.divisor())
        soft = per_row * rows.soft
        if rows.plain:
            return soft, soft, None
        return soft, per_row * rows.hard, None if rows.smooth is None else per_row * rows.smooth


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
        ctx.problem, ctx.may_overwrite = problem, may_overwrite
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, lse = ctx.saved_tensors
        problem = ctx.problem
        soft, hard, smooth = problem.coefficients(grad)
        # a graph that is kept (retain_graph=True) may be gone through again
        overwrite = ctx.may_overwrite() and not torch._C._autograd._get_current_graph_task_keep_graph()
        target, first, weight = problem.rows.target, problem.place.first, problem.my_weight
        out = ops.softmax_grad(z, lse, target, first, soft, hard, smooth, weight, overwrite)
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


_FEW = 4
_SHORT = 1 << 31
CHUNK = 4096
"""Columns of one chunk of the chunked loss."""


def _combine(stats: Tensor, region: Region, *, smooth: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """log-sum-exp, target logit and weighted sum over all columns, from each rank's [4, rows]."""
    parts = gather_equal(stats, region.columns, name="cross_entropy statistics")
    of_ranks = parts[:, 0] + parts[:, 1].log()
    # of few ranks pair by pair: logsumexp is a chain of ten operations
    lse = functools.reduce(torch.logaddexp, of_ranks.unbind()) if len(parts) <= _FEW else of_ranks.logsumexp(0)
    return lse, parts[:, 2].sum(0), parts[:, 3].sum(0) if smooth else None


class _Divisor:
    """What a mean's gradient is divided by: the mean of the ranks' counts of labels, times `share`, by which the
    gradient of the model's output will be multiplied. The counts travel while the model runs."""

    def __init__(self, mine: Tensor | float, copies: Group, share: Callable[[], float]):
        self._sum, self._share, self._size = mine, share, copies.size
        self._wait: Callable[[], None] | None = None
        if copies.size > 1:
            self._sum = torch.as_tensor(mine).detach().to(torch.float64).clone()
            self._wait = all_reduce_async(self._sum, copies, name="count of labels")

    def __call__(self) -> Tensor | float:
        if self._wait is not None:
            self._wait()
            self._wait = None
        return self._sum * (self._share() / self._size)


def divided(x: Tensor, by: Tensor | float) -> Tensor:
    """x / by, and 0 where there is nothing to divide by."""
    if isinstance(by, float):
        return x / by if by else torch.zeros_like(x)
    return torch.where(by == 0, 0.0, x / by).to(x.dtype)


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
    Raises what F.cross_entropy raises: IndexError for a class out of range, on every rank of the group. Off the CPU the
    loss and its gradients are NaN instead, so that nobody waits for the device.
    """
    if not _runs_across(z, target, size_average, reduce, reduction):
        gathered = z.implicit_rows("cross_entropy")
        return F.cross_entropy(gathered, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    if not torch.is_grad_enabled():
        refuse_reentrant()
    place, num_classes = _flat(z.place), sum(z.place.widths)
    options = _Options(weight, ignore_index, reduction, label_smoothing)
    _check_options(options, num_classes)
    z_dtype, device = dtype_and_device(z)
    weighed = "" if weight is None else f" weight {_hash(weight):x}"
    detail = f"{z_dtype} {reduction} ignore_index={ignore_index} label_smoothing={label_smoothing}{weighed}"
    short = num_classes <= _SHORT and -_SHORT < ignore_index < _SHORT  # so that labels travel as 32 bits
    targets = _targets_of_all(target.reshape(-1).long(), place, detail, short=short)
    dtype = torch.float64 if z_dtype == torch.float64 else torch.float32
    rows = _Rows(targets, options, num_classes, dtype)
    if not rows.plain:
        _check_targets(targets, ignore_index, num_classes)
    problem = _Problem(place, rows, options, dtype)
    if z.deferred is not None and not z.deferred.made:
        out: Tensor = _ChunkedCrossEntropy.apply(*z.deferred.inputs, problem)  # type: ignore[no-untyped-call]
    elif not z.place.tail:
        out = _ShardedCrossEntropy.apply(plain(z), problem, z.hold.release())  # type: ignore[no-untyped-call]
    else:
        flat = z.local.flatten(2).movedim(1, 2).flatten(0, 1)
        out = _ShardedCrossEntropy.apply(flat, problem, lambda: False)  # type: ignore[no-untyped-call]
    if place.call is not None and (reduction == "none" or z.deferred is not None):  # other logits were delivered
        out = deliver(out, place.call, weigh=reduction == "none")
    out = out.reshape(target.shape) if reduction == "none" else out
    return out if out.dtype is z_dtype or autocast_dtype(device) else out.to(z_dtype)


def _targets_of_all(mine: Tensor, place: ColumnsPlace, detail: str, *, short: bool) -> Tensor:
    """The feed's class numbers -> those of the region's feeds; few of them travel with what the ranks agree on."""
    region, counts = place.region, place.counts
    if region.rows.size > 1 and region.on_host and short and max(counts) <= MOST_NUMBERS:
        numbers = [0] * mine.numel() if mine.is_meta else mine.tolist()
        rows = place.agree_with("cross_entropy", numbers, detail)
        labels = [label for row, count in zip(rows, counts, strict=True) for label in row[:count]]
        return torch.tensor(labels, dtype=torch.int64, device=mine.device)
    if region.twins.size > 1 and region.rows.size > 1 and mine.device.type == "cpu":  # twins' labels must be equal
        place.agree_with("cross_entropy", [zlib.crc32(mine.contiguous().numpy().data) >> 1], detail)
        return gather_feeds(mine, counts, region, "cross_entropy labels")
    if region.twins.size > 1 and region.rows.size == 1 and mine.device.type == "cpu":  # one feed: labels must be equal
        detail += f" labels {zlib.crc32(mine.contiguous().numpy().data):x}"
    place.agree("cross_entropy", detail)
    return gather_feeds(mine, counts, region, "cross_entropy labels")


def _hash(x: Tensor) -> int:
    """31 bits of values on the CPU; elsewhere 1, since reading them would wait for the device."""
    if x.device.type != "cpu":
        return 1
    return zlib.crc32(x.detach().contiguous().view(torch.uint8).numpy().data) & 0x7FFFFFFF


def _runs_across(z: Columns, target: Tensor, size_average: Any, reduce: Any, reduction: str) -> bool:
    """Whether the loss has a form across ranks: class numbers for rows, or for pixels behind the columns."""
    place = z.place
    shape = (*place.lead, *place.tail)
    known = size_average is None and reduce is None and reduction in ("none", "sum", "mean")
    classes = target.dtype in (torch.int64, torch.uint8) and tuple(target.shape) == shape
    return known and classes and len(place.lead) == 1


def _flat(place: ColumnsPlace) -> ColumnsPlace:
    """The place of the same logits with one row for each pixel behind the columns."""
    if not place.tail:
        return place
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


def _all_count(target: Tensor, options: _Options, num_classes: int) -> bool:
    """Whether no row is ignored and none weighs more; said only where the answer needs no waiting for a device."""
    if options.weight is not None or options.label_smoothing or target.device.type != "cpu" or not target.numel():
        return False
    low, high = torch.aminmax(target)
    ignored = options.ignore_index
    return int(low) >= 0 and int(high) < num_classes and not int(low) <= ignored <= int(high)


def _check_targets(targets: Tensor, ignore_index: int, num_classes: int) -> None:
    if targets.device.type != "cpu":  # reading it back would wait for the device: _Rows makes the loss NaN
        return
    wrong = targets[_no_class(targets, targets != ignore_index, num_classes)]
    if wrong.numel():
        raise IndexError(f"Target {int(wrong[0])} is out of bounds.")


def _no_class(targets: Tensor, keep: Tensor, num_classes: int) -> Tensor:
    """Which labels are neither ignored nor a class."""
    return keep & ((targets < 0) | (targets >= num_classes))


def _wrong(targets: Tensor, keep: Tensor, num_classes: int) -> Tensor | None:
    """The same, or None on the CPU, where such labels have raised."""
    return None if targets.device.type == "cpu" else _no_class(targets, keep, num_classes)


@register_function(F.cross_entropy)
def _cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    z, target = args[:2]  # F.cross_entropy hands both on by position
    if not isinstance(z, Columns) or isinstance(target, Columns):
        return NotImplemented
    return cross_entropy(*args, **kwargs)
