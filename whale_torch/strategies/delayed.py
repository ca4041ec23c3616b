"""The weight gradient of a large split layer, computed last: it fills the time while the features' gradients travel.

An autograd node made when the model's forward starts is older than every other, so the engine runs it last. The same
cut of input and weight gradient is what zero-bubble pipelines need (arXiv 2401.10241).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from whale_torch.ops.precision import autocast_dtype

__all__ = ["MIN_ELEMENTS", "Delay", "delayed_linear"]

MIN_ELEMENTS = 1 << 20
"""Elements of a weight from which its gradient takes longer than what it costs to put it off."""

# backward's number -> inputs and gradients that the layer's backward left for it
_Left = dict[int, list[tuple[Tensor, Tensor]]]


class _Old(torch.autograd.Function):
    """Made first, so run last: turns what the layer's backward left behind into weight and bias gradients."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, left: _Left) -> Tensor:
        ctx.left, ctx.has_bias = left, bias is not None
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        weight_grad: Tensor | None = None
        bias_grad: Tensor | None = None
        left = ctx.left.pop(torch._C._current_graph_task_id(), [])
        while left:
            x, grad = left.pop()
            weight_grad = grad.t() @ x if weight_grad is None else weight_grad.addmm_(grad.t(), x)
            if ctx.has_bias:
                bias_grad = grad.sum(0) if bias_grad is None else bias_grad + grad.sum(0)
        return weight_grad, bias_grad, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, token: Tensor, left: _Left) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.left = left
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        old = ctx.next_functions[-1][0]  # that of the token, the last input that is a tensor
        if torch._C._will_engine_execute_node(old):  # not where a backward(inputs=...) leaves the weight out
            ctx.left.setdefault(torch._C._current_graph_task_id(), []).append((x, grad))
        return (grad @ weight if ctx.needs_input_grad[0] else None), None, None, grad.new_zeros(()), None


class _Now(torch.autograd.Function):
    """F.linear that keeps what `_Linear` keeps for backward: a recomputation after the forward has no delay."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        bias_grad = grad.sum(0) if ctx.has_bias and wants_bias else None
        return grad @ weight if wants_x else None, grad.t() @ x if wants_weight else None, bias_grad


class Delay:
    """One forward's delayed gradient of one layer: made as the forward starts."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self._left: _Left = {}
        self._token = _Old.apply(weight, bias, self._left)  # type: ignore[no-untyped-call]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """F.linear of x [N, D] whose weight and bias gradients come at the end of backward."""
        out: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            x, weight.detach(), None if bias is None else bias.detach(), self._token, self._left
        )
        return out


def delayed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, delay: Delay | None) -> Tensor:
    """F.linear of x [N, D], delayed where a delay was made and nothing casts in between."""
    if weight.numel() < MIN_ELEMENTS or not torch.is_grad_enabled() or autocast_dtype(x.device):
        return F.linear(x, weight, bias)
    out: Tensor = _Now.apply(x, weight, bias) if delay is None else delay.linear(x, weight, bias)  # type: ignore[no-untyped-call]
    return out
