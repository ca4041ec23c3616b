"""Rows of tokens to rows of experts and back, where a gradient may be scaled on the way without a pass of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whale_torch import ops
from whale_torch.ops.precision import statistics_dtype

__all__ = ["combine", "permute"]


def permute(x: Tensor, positions: Tensor, rows: int, *, back: float = 1.0) -> Tensor:
    """ops.moe_permute, whose gradient for x is multiplied by `back`."""
    if back == 1.0:
        return ops.moe_permute(x, positions, rows)
    out: Tensor = _Permute.apply(x, positions, rows, back)  # type: ignore[no-untyped-call]
    return out


def combine(y: Tensor, positions: Tensor, weights: Tensor, *, back: float = 1.0) -> Tensor:
    """ops.moe_combine, whose gradient for y, not that for weights, is multiplied by `back`."""
    if back == 1.0:
        return ops.moe_combine(y, positions, weights)
    out: Tensor = _Combine.apply(y, positions, weights, back)  # type: ignore[no-untyped-call]
    return out


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, rows: int, back: float) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.back, ctx.wide = back, statistics_dtype(x.dtype)
        return ops.moe_permute(x, positions, rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        weights = grads[0].new_full(positions.shape, ctx.back, dtype=ctx.wide)
        return ops.moe_combine(grads[0], positions, weights), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, positions: Tensor, weights: Tensor, back: float) -> Tensor:
        ctx.save_for_backward(y, positions, weights)
        ctx.back = back
        return ops.moe_combine(y, positions, weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, positions, weights = ctx.saved_tensors
        # <dy, y> is not scaled: the weights stay on the rank of their tokens
        wide = weights.to(statistics_dtype(weights.dtype))
        drows, dweights = ops.moe_combine_backward(grads[0], y, positions, wide * ctx.back)
        return drows, None, dweights, None
