"""Tokens to rows of experts and back, where the rows lie in memory that other processes write and read as well.

As permute, combine and its gradient, but for rows that no route names: they are another's, and are left alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whale_torch.errors import LayoutError
from whale_torch.ops import buffers
from whale_torch.ops.library import op, run, written
from whale_torch.ops.precision import arithmetic_dtype

__all__ = ["moe_collect", "moe_scatter", "moe_scatter_backward"]

_SCATTER = op("moe_scatter")
_COLLECT = op("moe_collect")
_SCATTER_BACKWARD = op("moe_scatter_backward")


def _check(tokens: Tensor, positions: Tensor, rows: Tensor) -> None:
    if positions.dtype != torch.int32 or positions.dim() != 2 or positions.shape[0] != len(tokens):
        raise LayoutError(f"positions are {positions.dtype} {tuple(positions.shape)} for {len(tokens)} tokens")
    if rows.dim() != 2 or rows.shape[1] != tokens.shape[1]:
        raise LayoutError(f"rows are {tuple(rows.shape)}, and tokens have {tokens.shape[1]} features")
    if positions.numel() and int(positions.amax()) >= len(rows):
        raise LayoutError(f"a position is {int(positions.amax())}, and there are {len(rows)} rows, counted from 0")


def moe_scatter(x: Tensor, positions: Tensor, out: Tensor) -> None:
    """out[positions[t, s]] = cast(x[t]); rows that no route names are not touched.

    Shapes: x [n, d]; positions int32 [n, k], each row named once at most, -1 is no route; out [rows, d].
    Raises: LayoutError if shapes or dtypes disagree, or for a position out of range. Not differentiable.
    """
    run(_SCATTER, lambda: _check(x, positions, out), x, positions, out)
    written(out)


def moe_collect(y: Tensor, positions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(moe_combine(y, positions, weights), the rows that were summed): of y's dtype, [n, d] and [n k, d].

    Shapes: y [rows, d]; positions int32 [n, k]; weights [n, k]. The row of a route that is none is undefined.
    Raises: as moe_scatter. Not differentiable.
    """
    out = y.new_empty(len(positions), y.shape[1])
    rows = buffers.empty(positions.numel(), y.shape[1], like=y)
    wide = weights.to(arithmetic_dtype(y.dtype, y.dtype))
    run(_COLLECT, lambda: _check(out, positions, y), y, positions, wide, out, rows)
    return out, rows


def moe_scatter_backward(dy: Tensor, rows: Tensor, positions: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """Of moe_collect: out[positions[t, s]] = cast(weights[t, s] dy[t]), others untouched; returns <dy[t], its row>.

    Shapes: dy [n, d]; rows [n k, d] as moe_collect returned them; out [all rows, d] of their dtype; returns [n, k], 0
    for a route that is none. Raises: as moe_scatter. Not differentiable.
    """
    wide = weights.to(arithmetic_dtype(rows.dtype, dy.dtype))
    dweights: Tensor = run(_SCATTER_BACKWARD, lambda: _check(dy, positions, out), dy, rows, positions, wide, out)
    written(out)
    return dweights.to(weights.dtype)
