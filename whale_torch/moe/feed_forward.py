"""The products of feed-forward experts, forward and backward, on blocks of rows that lie anywhere.

One autograd node for all experts: products are written where they belong, and the gradients of a stack of weights into
one tensor (a loop over `stack[e]` makes a gradient of the whole stack for each expert).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["ACTIVATIONS", "Activation", "Block", "feed_forward"]

Block = tuple[int, int, int]
"""An expert, and from where to where its rows lie; an expert may have several blocks."""

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """forward: from what goes in, into `out`. backward: from the gradient and what went in."""

    forward: Callable[..., Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


ACTIVATIONS = {
    "gelu": Activation(lambda h, out: _aten.gelu.out(h, out=out), lambda grad, h: _aten.gelu_backward(grad, h)),
    "gelu_tanh": Activation(
        lambda h, out: _aten.gelu.out(h, approximate="tanh", out=out),
        lambda grad, h: _aten.gelu_backward(grad, h, approximate="tanh"),
    ),
    "relu": Activation(
        lambda h, out: torch.clamp_min(h, 0, out=out), lambda grad, h: _aten.threshold_backward(grad, h, 0)
    ),
    "silu": Activation(lambda h, out: _aten.silu.out(h, out=out), lambda grad, h: _aten.silu_backward(grad, h)),
}


def feed_forward(
    x: Tensor,
    blocks: Sequence[Block],
    activation: str,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    w3: Tensor | None = None,
    b3: Tensor | None = None,
) -> Tensor:
    """(activation(x w1[e] + b1[e]) [* (x w3[e] + b3[e])]) w2[e] + b2[e] on the rows of each block.

    Shapes: x [rows, dim]; w1, w3 [experts, hidden, dim]; w2 [experts, dim, hidden]; returns [rows, dim], where rows of
    no block are undefined. All of one dtype. Not differentiable twice.
    """
    out: Tensor = _FeedForward.apply(x, list(blocks), ACTIVATIONS[activation], w1, b1, w2, b2, w3, b3)  # type: ignore[no-untyped-call]
    return out


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, blocks: list[Block], activation: Activation, w1: Tensor, b1: Any, w2: Tensor, b2: Any,
        w3: Any, b3: Any,
    ) -> Tensor:  # fmt: skip
        rows, hidden = len(x), w1.shape[1]
        h, a = x.new_empty(rows, hidden), x.new_empty(rows, hidden)
        u = None if w3 is None else x.new_empty(rows, hidden)
        y = x.new_empty(rows, w2.shape[1])
        for e, start, end in blocks:
            if start == end:
                continue
            part, active = x[start:end], a[start:end]
            _affine(part, w1[e], None if b1 is None else b1[e], h[start:end])
            activation.forward(h[start:end], active)
            if u is not None:
                _affine(part, w3[e], None if b3 is None else b3[e], u[start:end])
                active = active * u[start:end]
            _affine(active, w2[e], None if b2 is None else b2[e], y[start:end])
        ctx.save_for_backward(x, h, a, u, w1, w2, w3)
        ctx.blocks, ctx.activation = blocks, activation
        ctx.biases = [bias is not None for bias in (b1, b2, b3)]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, h, a, u, w1, w2, w3 = ctx.saved_tensors
        wants = ctx.needs_input_grad
        dy = dy.contiguous()
        dx = torch.empty_like(x) if wants[0] else None
        d1, d2, d3 = (_Stack(w, wanted) for w, wanted in ((w1, wants[3]), (w2, wants[5]), (w3, wants[7])))
        e1, e2, e3 = (_Sums(w, has) for w, has in zip((w1, w2, w3), ctx.biases, strict=True))
        for e, start, end in ctx.blocks:
            if start == end:
                continue
            part, grad, before, active = x[start:end], dy[start:end], h[start:end], a[start:end]
            d2.add(e, grad, active if u is None else active * u[start:end])
            e2.add(e, grad)
            da = grad @ w2[e]
            du = None
            if u is not None:
                du, da = da * active, da * u[start:end]
            dh = ctx.activation.backward(da, before)
            d1.add(e, dh, part)
            e1.add(e, dh)
            if dx is not None:
                torch.mm(dh, w1[e], out=dx[start:end])
            if du is not None:
                d3.add(e, du, part)
                e3.add(e, du)
                if dx is not None:
                    dx[start:end].addmm_(du, w3[e])
        return dx, None, None, d1.done(), e1.done(), d2.done(), e2.done(), d3.done(), e3.done()


class _Stack:
    """The gradient of a stack of weights, written expert by expert."""

    def __init__(self, weight: Tensor | None, wanted: bool):
        self._grad = torch.empty_like(weight) if wanted and weight is not None else None
        self._written: set[int] = set()

    def add(self, e: int, grad: Tensor, x: Tensor) -> None:
        if self._grad is None:
            return
        if e in self._written:
            self._grad[e].addmm_(grad.t(), x)
        else:
            torch.mm(grad.t(), x, out=self._grad[e])
            self._written.add(e)

    def done(self) -> Tensor | None:
        if self._grad is not None:
            for e in range(len(self._grad)):
                if e not in self._written:
                    self._grad[e].zero_()
        return self._grad


class _Sums:
    """The gradient of a stack of biases."""

    def __init__(self, weight: Tensor | None, wanted: bool):
        self._grad = weight.new_zeros(weight.shape[:2]) if wanted and weight is not None else None

    def add(self, e: int, grad: Tensor) -> None:
        if self._grad is not None:
            self._grad[e] += grad.sum(0)

    def done(self) -> Tensor | None:
        return self._grad
