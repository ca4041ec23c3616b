"""The products of feed-forward experts, forward and backward, on blocks of rows that lie anywhere.

One autograd node for all experts: products are written where they belong, and the gradients of a stack of weights into
one tensor (a loop over `stack[e]` makes a gradient of the whole stack for each expert).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whale_torch.ops import buffers

__all__ = ["ACTIVATIONS", "Activation", "Block", "Hidden", "Stacks", "feed_forward", "run_backward", "run_forward"]

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


class Stacks(NamedTuple):
    """The weights of all experts: w1, w3 [experts, hidden, dim], w2 [experts, dim, hidden], biases [experts, ...]."""

    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    w3: Tensor | None
    b3: Tensor | None


class Hidden(NamedTuple):
    """What backward needs: h before and a after the activation, u what a gate multiplies; each [rows, hidden]."""

    h: Tensor
    a: Tensor
    u: Tensor | None


def run_forward(x: Tensor, blocks: Sequence[Block], activation: Activation, stacks: Stacks, y: Tensor) -> Hidden:
    """Writes what experts give their blocks of x to y."""
    w1, b1, w2, b2, w3, b3 = stacks
    rows, hidden = len(x), w1.shape[1]
    h, a = buffers.empty(rows, hidden, like=x), buffers.empty(rows, hidden, like=x)
    u = None if w3 is None else buffers.empty(rows, hidden, like=x)
    for e, start, end in blocks:
        if start == end:
            continue
        part, active = x[start:end], a[start:end]
        _affine(part, w1[e], None if b1 is None else b1[e], h[start:end])
        activation.forward(h[start:end], active)
        if u is not None and w3 is not None:
            _affine(part, w3[e], None if b3 is None else b3[e], u[start:end])
            active = active * u[start:end]
        _affine(active, w2[e], None if b2 is None else b2[e], y[start:end])
    return Hidden(h, a, u)


def run_backward(
    dy: Tensor,
    x: Tensor,
    hidden: Hidden,
    blocks: Sequence[Block],
    activation: Activation,
    stacks: Stacks,
    wanted: Sequence[bool],
    dx: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of the stacks that are wanted; writes that of x to dx."""
    (h, a, u), (w1, b1, w2, b2, w3, b3) = hidden, stacks
    d1, d2, d3 = (_Stack(w, want) for w, want in zip((w1, w2, w3), wanted[::2], strict=True))
    e1, e2, e3 = (_Sums(b, want) for b, want in zip((b1, b2, b3), wanted[1::2], strict=True))
    for e, start, end in blocks:
        if start == end:
            continue
        part, grad, before, active = x[start:end], dy[start:end], h[start:end], a[start:end]
        d2.add(e, grad, active if u is None else active * u[start:end])
        e2.add(e, grad)
        da = grad @ w2[e]
        du = None
        if u is not None:
            du, da = da * active, da * u[start:end]
        dh = activation.backward(da, before)
        d1.add(e, dh, part)
        e1.add(e, dh)
        if dx is not None:
            torch.mm(dh, w1[e], out=dx[start:end])
        if du is not None and w3 is not None:
            d3.add(e, du, part)
            e3.add(e, du)
            if dx is not None:
                dx[start:end].addmm_(du, w3[e])
    return d1.done(), e1.done(), d2.done(), e2.done(), d3.done(), e3.done()


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: list[Block], activation: Activation, *stacks: Any) -> Tensor:
        given = Stacks(*stacks)
        y = buffers.empty(len(x), given.w2.shape[1], like=x)
        ctx.save_for_backward(x, *run_forward(x, blocks, activation, given, y), *given)
        ctx.blocks, ctx.activation = blocks, activation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, h, a, u, *stacks = ctx.saved_tensors
        dx = buffers.empty(*x.shape, like=x) if ctx.needs_input_grad[0] else None
        wanted = ctx.needs_input_grad[3:]
        hidden, given = Hidden(h, a, u), Stacks(*stacks)
        grads = run_backward(dy.contiguous(), x, hidden, ctx.blocks, ctx.activation, given, wanted, dx)
        return dx, None, None, *grads


class _Stack:
    """The gradient of a stack of weights, written expert by expert."""

    def __init__(self, weight: Tensor | None, wanted: bool):
        self._grad = buffers.empty(*weight.shape, like=weight) if wanted and weight is not None else None
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

    def __init__(self, bias: Tensor | None, wanted: bool):
        self._grad = torch.zeros_like(bias) if wanted and bias is not None else None

    def add(self, e: int, grad: Tensor) -> None:
        if self._grad is not None:
            self._grad[e] += grad.sum(0)

    def done(self) -> Tensor | None:
        return self._grad
