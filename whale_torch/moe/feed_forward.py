"""The products of feed-forward experts, forward and backward, on blocks of rows that lie anywhere.

One autograd node for all experts: products are written where they belong, and the gradients of a stack of weights into
one tensor (a loop over `stack[e]` makes a gradient of the whole stack for each expert).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whale_torch import ops
from whale_torch.ops import buffers
from whale_torch.ops.precision import statistics_dtype

__all__ = ["Block", "Hidden", "Stacks", "Work", "feed_forward", "run_backward", "run_forward"]

Block = tuple[int, int, int]
"""An expert, and from where to where its rows lie; an expert may have several blocks."""


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
    *,
    biased: Sequence[bool] | None = None,
) -> Tensor:
    """(activation(x w1[e] + b1[e]) [* (x w3[e] + b3[e])]) w2[e] + b2[e] on the rows of each block.

    biased: whether each expert adds its b2; by default all do.
    Shapes: x [rows, dim]; w1, w3 [experts, hidden, dim]; w2 [experts, dim, hidden]; returns [rows, dim], where rows of
    no block are undefined. All of one dtype. Not differentiable twice.
    """
    work = Work(list(blocks), activation, biased or (True,) * len(w1))
    out: Tensor = _FeedForward.apply(x, work, w1, b1, w2, b2, w3, b3)  # type: ignore[no-untyped-call]
    return out


class Stacks(NamedTuple):
    """The weights of all experts: w1, w3 [experts, hidden, dim], w2 [experts, dim, hidden], biases [experts, ...]."""

    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    w3: Tensor | None
    b3: Tensor | None


class Work(NamedTuple):
    """Which experts run on which rows, the function between their layers, and whether each expert adds its b2."""

    blocks: Sequence[Block]
    activation: str
    biased: Sequence[bool]


class Hidden(NamedTuple):
    """What backward needs, [rows, hidden]: h before the activation, u that multiplies it, and a, what comes out."""

    h: Tensor
    a: Tensor
    u: Tensor | None


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None, e: int, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight[e].t(), out=out)
    else:
        torch.addmm(bias[e], x, weight[e].t(), out=out)


def run_forward(x: Tensor, work: Work, stacks: Stacks, y: Tensor) -> Hidden:
    """Writes what experts give their blocks of x to y."""
    w1, b1, w2, b2, w3, b3 = stacks
    rows, hidden = len(x), w1.shape[1]
    h, a = buffers.empty(rows, hidden, like=x), buffers.empty(rows, hidden, like=x)
    u = None if w3 is None else buffers.empty(rows, hidden, like=x)
    for e, start, end in work.blocks:
        if start == end:
            continue
        part, before, active = x[start:end], h[start:end], a[start:end]
        _affine(part, w1, b1, e, before)
        gate = None
        if u is not None and w3 is not None:
            gate = u[start:end]
            _affine(part, w3, b3, e, gate)
        ops.moe_activate(before, work.activation, active, u=gate)
        _affine(active, w2, b2 if work.biased[e] else None, e, y[start:end])
    return Hidden(h, a, u)


def run_backward(
    dy: Tensor,
    x: Tensor,
    hidden: Hidden,
    work: Work,
    stacks: Stacks,
    wanted: Sequence[bool],
    dx: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of the stacks that are wanted; writes that of x to dx."""
    (h, a, u), (w1, b1, w2, b2, w3, b3) = hidden, stacks
    d1, d2, d3 = (_Stack(w, want) for w, want in zip((w1, w2, w3), wanted[::2], strict=True))
    e1, e2, e3 = (_Sums(b, want) for b, want in zip((b1, b2, b3), wanted[1::2], strict=True))
    most = max((end - start for _, start, end in work.blocks), default=0)
    below = buffers.empty(most, w1.shape[1], like=x)
    gate_below = None if u is None else buffers.empty(most, w1.shape[1], like=x)
    for e, start, end in work.blocks:
        if start == end:
            continue
        part, grad, size = x[start:end], dy[start:end], end - start
        d2.add(e, grad, a[start:end])
        if work.biased[e]:
            e2.add(e, grad)
        dh = torch.mm(grad, w2[e], out=below[:size])
        gate, du = None if u is None else u[start:end], None if gate_below is None else gate_below[:size]
        ops.moe_activate_backward(dh, h[start:end], work.activation, u=gate, du=du, dbias=e1.of(e), du_bias=e3.of(e))
        d1.add(e, dh, part)
        if dx is not None:
            torch.mm(dh, w1[e], out=dx[start:end])
        if du is not None and w3 is not None:
            d3.add(e, du, part)
            if dx is not None:
                dx[start:end].addmm_(du, w3[e])
    return d1.done(), e1.done(), d2.done(), e2.done(), d3.done(), e3.done()


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Work, *stacks: Any) -> Tensor:
        given = Stacks(*stacks)
        y = buffers.empty(len(x), given.w2.shape[1], like=x)
        ctx.save_for_backward(x, *run_forward(x, work, given, y), *given)
        ctx.work = work
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, h, a, u, *stacks = ctx.saved_tensors
        dx = buffers.empty(*x.shape, like=x) if ctx.needs_input_grad[0] else None
        wanted, given = ctx.needs_input_grad[2:], Stacks(*stacks)
        grads = run_backward(dy.contiguous(), x, Hidden(h, a, u), ctx.work, given, wanted, dx)
        return dx, None, *grads


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
    """The gradient of a stack of biases, summed in float32 at least."""

    def __init__(self, bias: Tensor | None, wanted: bool):
        self._bias = bias if wanted else None
        self._sums = None
        if self._bias is not None:
            self._sums = torch.zeros_like(self._bias, dtype=statistics_dtype(self._bias.dtype))

    def of(self, e: int) -> Tensor | None:
        """An expert's."""
        return None if self._sums is None else self._sums[e]

    def add(self, e: int, grad: Tensor) -> None:
        if self._sums is not None:
            self._sums[e] += grad.sum(0, dtype=self._sums.dtype)

    def done(self) -> Tensor | None:
        return None if self._sums is None or self._bias is None else self._sums.to(self._bias.dtype)
