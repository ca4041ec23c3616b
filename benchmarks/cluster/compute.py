"""Compute that is modelled: a layer that holds real parameters and takes a given time, without using the CPU.

Ranks of an emulated cluster share a few cores, so real matrix products would measure those cores. A modelled layer
sleeps for the time that the modelled device would need; its parameters and gradients are real, so is what they cost to
exchange. Its function is y = x + mean(weight): a step's gradients can be checked against one process.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

__all__ = ["ModelledLayer"]


class _Modelled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor, forward_s: float, backward_s: float
    ) -> Tensor:
        time.sleep(forward_s)
        ctx.weight_shape, ctx.backward_s = weight.shape, backward_s  # type: ignore[attr-defined]
        return x + weight.mean() if weight.numel() else x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        time.sleep(ctx.backward_s)  # type: ignore[attr-defined]
        shape: torch.Size = ctx.weight_shape  # type: ignore[attr-defined]
        if not ctx.needs_input_grad[1] or not shape.numel():  # type: ignore[attr-defined]
            return grad, None, None, None
        return grad, torch.full(shape, grad.sum().item() / shape.numel(), dtype=grad.dtype), None, None


class ModelledLayer(nn.Module):
    """y = x + mean(weight), taking the given seconds for each row of x.

    num_parameters: size of `weight`; 0 for a layer that only takes time.
    forward_s, backward_s: seconds a row (dim 0) in forward and in backward.
    Shapes: x (rows, anything) -> the same.
    """

    def __init__(self, num_parameters: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        if num_parameters:
            self.weight = nn.Parameter(torch.zeros(num_parameters))
        else:
            self.register_buffer("weight", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        y: Tensor = _Modelled.apply(x, self.weight, self.forward_s * rows, self.backward_s * rows)  # type: ignore[no-untyped-call]
        return y

    def extra_repr(self) -> str:
        return f"num_parameters={self.weight.numel()}, forward_s={self.forward_s:g}, backward_s={self.backward_s:g}"
