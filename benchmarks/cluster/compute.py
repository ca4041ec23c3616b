"""Compute that is modelled: a layer that holds real parameters and takes a given time, without using the CPU.

Ranks of an emulated cluster share a few cores, so real matrix products would measure those cores. A modelled layer
sleeps for the time that the modelled device would need; its parameters and gradients are real, so is what they cost to
exchange. Its function is simple but not trivial, so a step's gradients can be checked.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ModelledLayer"]


class _Modelled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor, forward_s: float, backward_s: float
    ) -> Tensor:
        if type(x) is Tensor:  # and no stand-in on which a pipeline is recorded
            time.sleep(forward_s)
        ctx.numel, ctx.backward_s = weight.numel(), backward_s  # type: ignore[attr-defined]
        if not weight.numel():
            return x.clone()
        width = x.shape[-1]
        rows = -(-weight.numel() // width)
        return x + F.pad(weight, (0, rows * width - weight.numel())).view(rows, width).mean(0)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        time.sleep(ctx.backward_s)  # type: ignore[attr-defined]
        numel: int = ctx.numel  # type: ignore[attr-defined]
        if not ctx.needs_input_grad[1] or not numel:  # type: ignore[attr-defined]
            return grad, None, None, None
        width = grad.shape[-1]
        rows = -(-numel // width)
        return grad, (grad.reshape(-1, width).sum(0) / rows).repeat(rows)[:numel], None, None


class ModelledLayer(nn.Module):
    """y = x + the mean of the rows of `weight`, taking the given seconds for each row of x.

    num_parameters: size of `weight`, cut into rows as wide as x, the last one filled with zeros; 0 for a layer that
    only takes time.
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
