"""Autograd of the softmax ops on one device: the cross-entropy that statistics and gradient make together.

The ops alone are not differentiable. The sharded loss (comm/loss.py) places its collectives between the same two calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whale_torch.ops.softmax import linear_softmax_grad, linear_softmax_stats, softmax_grad, softmax_stats

__all__ = ["cross_entropy", "linear_cross_entropy"]

IGNORE = -100
_Coefs = tuple[Tensor, Tensor, Tensor | None]


def _mean_loss(
    stats: Tensor, target: Tensor, weight: Tensor | None, num_classes: int, smoothing: float
) -> tuple[Tensor, Tensor, _Coefs]:
    """(loss, lse, coefficients of `softmax_grad`) of the mean over rows that are not ignored, as `F.cross_entropy`.

    All are NaN where a label is no class: to raise, one would wait for the device.
    """
    lse = stats[0] + stats[1].log()
    kept = target != IGNORE
    no_class = kept & ((target < 0) | (target >= num_classes))
    if weight is None:
        row_weight = kept.to(lse.dtype)
        total_weight = torch.tensor(float(num_classes), dtype=lse.dtype, device=lse.device)
    else:
        row_weight = torch.where(kept, weight.to(lse.dtype)[torch.where(kept & ~no_class, target, 0)], 0.0)
        total_weight = weight.to(lse.dtype).sum()
    row_weight = row_weight.masked_fill(no_class, torch.nan)
    share = row_weight / row_weight.sum()
    target_coef = share * (1.0 - smoothing)
    # Smoothing's mean is over the same denominator, but its terms carry the weights of all classes.
    smooth_coef = kept.to(lse.dtype) / row_weight.sum() * (smoothing / num_classes) if smoothing else None
    softmax_coef = target_coef if smooth_coef is None else target_coef + smooth_coef * total_weight
    terms = softmax_coef * lse - target_coef * stats[2]
    if smooth_coef is not None:
        terms = terms - smooth_coef * stats[3]
    return torch.where(kept, terms, 0.0).sum(), lse, (softmax_coef, target_coef, smooth_coef)


def _scaled(coefs: _Coefs, grad: Tensor) -> _Coefs:
    softmax_coef, target_coef, smooth_coef = coefs
    return softmax_coef * grad, target_coef * grad, None if smooth_coef is None else smooth_coef * grad


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, label_smoothing: float, inplace: bool
    ) -> Tensor:
        stats = softmax_stats(logits, target, 0, weight, label_smoothing > 0)
        loss, lse, coefs = _mean_loss(stats, target, weight, logits.shape[1], label_smoothing)
        ctx.save_for_backward(logits, lse, target, weight, *coefs)
        ctx.inplace = inplace
        return loss.to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, lse, target, weight, softmax_coef, target_coef, smooth_coef = ctx.saved_tensors
        coefs = _scaled((softmax_coef, target_coef, smooth_coef), grads[0])
        grad = softmax_grad(logits, lse, target, 0, *coefs, weight, inplace=ctx.inplace)
        return grad, None, None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        label_smoothing: float,
        chunk: int,
    ) -> Tensor:
        stats = linear_softmax_stats(x, weight, bias, target, 0, class_weight, label_smoothing > 0, chunk)
        loss, lse, coefs = _mean_loss(stats, target, class_weight, weight.shape[0], label_smoothing)
        ctx.save_for_backward(x, weight, bias, lse, target, class_weight, *coefs)
        ctx.chunk = chunk
        return loss.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, lse, target, class_weight, softmax_coef, target_coef, smooth_coef = ctx.saved_tensors
        coefs = _scaled((softmax_coef, target_coef, smooth_coef), grads[0])
        dx, dweight, dbias = linear_softmax_grad(x, weight, bias, lse, target, 0, *coefs, class_weight, ctx.chunk)
        return dx, dweight, dbias, None, None, None, None


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    inplace: bool = False,
) -> Tensor:
    """`F.cross_entropy` (mean, ignore_index -100) on one device from `softmax_stats` and `softmax_grad`.

    Shapes: logits [n, k], target int64 [n], weight [k]; returns a scalar in logits' dtype, NaN where a label is no
    class. inplace: backward writes the gradient over logits, which autograd then refuses to use anywhere else.
    Raises: LayoutError if shapes or dtypes disagree.
    """
    loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, target, weight, label_smoothing, inplace
    )
    return loss


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    chunk: int = 4096,
) -> Tensor:
    """`F.cross_entropy(F.linear(x, weight, bias), target)` on one device without holding the n x k logits.

    Shapes: x [n, d], weight [k, d], bias [k], target int64 [n]; chunk counts classes. Returns a scalar in x's dtype,
    NaN where a label is no class.
    Raises: LayoutError if shapes or dtypes disagree.
    """
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, target, class_weight, label_smoothing, chunk
    )
    return loss
