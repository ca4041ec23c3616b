"""Feed-forward experts of ranks that share memory, with all that lies between tokens and tokens: one autograd node.

Tokens are written where their experts read them, and what experts give lies where tokens' ranks sum it; the same for
gradients on the way back. Of four exchanges two leave a copy behind, which backward needs: the rows that this rank's
experts ran on, and what came back for its tokens.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whale_torch import ops
from whale_torch.comm.shared_rows import SharedRows
from whale_torch.moe.experts import FeedForward
from whale_torch.moe.feed_forward import Hidden, Stacks, Work, run_backward, run_forward
from whale_torch.ops import buffers
from whale_torch.ops.precision import statistics_dtype

__all__ = ["through_memory"]


def through_memory(
    x: Tensor, positions: Tensor, weights: Tensor, experts: FeedForward, rows: SharedRows, size: int
) -> Tensor:
    """The weighted sums of what experts of all ranks give tokens: x [n, dim] -> [n, dim].

    positions: int32 [n, k], the place of each route among the rows of all ranks, -1 for none. size: of the region, by
    which gradients of experts are divided and what flows back to tokens is multiplied.
    """
    x, stacks = experts.cast(x)
    ends = list(accumulate(rows.lengths))
    blocks = [(e, end - number, end) for e, (number, end) in enumerate(zip(rows.lengths, ends, strict=True))]
    work = Work(blocks, experts.activation, experts.biased)
    how = (rows, work, size, torch.is_grad_enabled())
    out: Tensor = _ThroughMemory.apply(x, weights, positions, how, *stacks)  # type: ignore[no-untyped-call]
    return out


class _ThroughMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, positions: Tensor, how: tuple[Any, ...], *stacks: Any) -> Tensor:
        rows, work, _, keep = how
        given = Stacks(*stacks)
        with rows.open(x.dtype, x.shape[1]) as slot:
            ops.moe_scatter(x, positions, slot.whole)
            slot.meet()
            mine = buffers.empty(*slot.mine.shape, like=x).copy_(slot.mine)
        with rows.open(x.dtype, x.shape[1]) as slot:
            hidden = run_forward(mine, work, given, slot.mine)
            slot.meet()
            if not keep:
                return ops.moe_combine(slot.whole, positions, weights)
            out, back = ops.moe_collect(slot.whole, positions, weights)
        ctx.save_for_backward(mine, back, positions, weights, *hidden, *given)
        ctx.how = how
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        mine, back, positions, weights, h, a, u, *stacks = ctx.saved_tensors
        rows, work, size, _ = ctx.how
        given = Stacks(*stacks)
        dtype, dim, wide = mine.dtype, mine.shape[1], weights.to(statistics_dtype(weights.dtype))
        with rows.open(dtype, dim) as above:
            # <dy, row> is not scaled: the weights stay on the rank of their tokens
            dweights = ops.moe_scatter_backward(dy, back, positions, wide / size, above.whole)
            above.meet()
            with rows.open(dtype, dim) as below:
                hidden, wanted = Hidden(h, a, u), ctx.needs_input_grad[4:]
                grads = run_backward(above.mine, mine, hidden, work, given, wanted, below.mine)
                below.meet()
                dx = None
                if ctx.needs_input_grad[0]:
                    dx = ops.moe_combine(below.whole, positions, torch.full_like(wide, size))
        return dx, dweights, None, None, *grads
