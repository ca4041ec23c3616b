"""Rows of tokens to rows of experts and back: permute, combine, and the sort of chunks between sources and experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whale_torch.errors import LayoutError
from whale_torch.ops import buffers
from whale_torch.ops.library import differentiated_again, op, run, written
from whale_torch.ops.precision import FLOATS, arithmetic_dtype

__all__ = ["moe_chunk_sort", "moe_combine", "moe_combine_backward", "moe_permute"]

_PERMUTE = op("moe_permute")
_COMBINE = op("moe_combine")
_COMBINE_BACKWARD = op("moe_combine_backward")
_CHUNK_SORT = op("moe_chunk_sort")


def _check_rows(name: str, rows: Tensor) -> None:
    if rows.dim() != 2 or rows.dtype not in FLOATS:
        raise LayoutError(
            f"{name} is {rows.dtype} of shape {tuple(rows.shape)}; it is floating point of shape (rows, features)"
        )


def _check_matrix(name: str, matrix: Tensor, dtype: torch.dtype, num_rows: int | None = None) -> None:
    if matrix.dim() != 2 or matrix.dtype != dtype or num_rows not in (None, matrix.shape[0]):
        first = "n" if num_rows is None else num_rows
        raise LayoutError(f"{name} is {matrix.dtype} of shape {tuple(matrix.shape)}, not {dtype} of shape ({first}, k)")


def _check_weights(weights: Tensor | None, positions: Tensor) -> None:
    if weights is not None and (weights.shape != positions.shape or weights.dtype not in FLOATS):
        raise LayoutError(
            f"weights are {weights.dtype} of shape {tuple(weights.shape)}, positions have {tuple(positions.shape)}"
        )


def _check_inside(positions: Tensor, num_rows: int) -> None:
    if positions.numel() and int(positions.amax()) >= num_rows:
        raise LayoutError(
            f"a position is {int(positions.amax())}, and there are {num_rows} rows, counted from 0",
            fix="give the number of rows that the positions were made for",
        )


def _output(out: Tensor | None, shape: tuple[int, int], dtype: torch.dtype, *inputs: Tensor | None) -> Tensor:
    """The given output, checked, or a new one like the first input."""
    first = inputs[0]
    assert first is not None
    if out is None:
        return buffers.empty(*shape, like=first, dtype=dtype)
    if out.shape != shape or out.dtype != dtype or out.device != first.device or not out.is_contiguous():
        raise LayoutError(
            f"out is {out.dtype} of shape {tuple(out.shape)} on {out.device}; "
            f"the result is contiguous {dtype} of shape {shape} on {first.device}"
        )
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        raise LayoutError(
            "out is given where a gradient is wanted, which it cannot carry",
            fix="call under torch.no_grad(), or leave out away",
        )
    return out


def _wide(weights: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if weights is None else weights.to(dtype)


def _permute(x: Tensor, positions: Tensor, out: Tensor) -> Tensor:
    run(_PERMUTE, lambda: _check_inside(positions, len(out)), x, positions, out)
    return out


def _combine(y: Tensor, positions: Tensor, weights: Tensor | None, out: Tensor) -> Tensor:
    wide = _wide(weights, arithmetic_dtype(y.dtype, out.dtype))
    run(_COMBINE, lambda: _check_inside(positions, len(y)), y, positions, wide, out)
    return out


def _combine_backward(dy: Tensor, y: Tensor, positions: Tensor, weights: Tensor, drows: Tensor) -> Tensor:
    wide = weights.to(arithmetic_dtype(y.dtype, dy.dtype))
    dweights: Tensor = run(_COMBINE_BACKWARD, lambda: _check_inside(positions, len(y)), dy, y, positions, wide, drows)
    return dweights.to(weights.dtype)


def _differentiable_backward(dy: Tensor, y: Tensor, positions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """`moe_combine_backward` from ops that have gradients, a row at a time for each route."""
    wide = arithmetic_dtype(y.dtype, dy.dtype)
    of_route, k = positions.reshape(-1, 1), positions.shape[1]
    weight_of_row = moe_permute(weights.to(wide).reshape(-1, 1), of_route, y.shape[0])
    drows = moe_permute(dy, positions, y.shape[0], dtype=wide) * weight_of_row
    dweights = (moe_combine(y, of_route, dtype=wide) * dy.to(wide).repeat_interleave(k, 0)).sum(1)
    return drows.to(y.dtype), dweights.view(weights.shape).to(weights.dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.dtype = x.dtype
        return _permute(x, positions, buffers.empty(rows, x.shape[1], like=x, dtype=dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        return moe_combine(grads[0], positions, dtype=ctx.dtype), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, positions: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        # Without weights the backward needs y's shape alone.
        ctx.save_for_backward(positions, *(() if weights is None else (y, weights)))
        ctx.of_y = (y.shape[0], y.dtype)
        return _combine(y, positions, weights, y.new_empty((positions.shape[0], y.shape[1]), dtype=dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        positions, *saved = ctx.saved_tensors
        num_rows, dtype = ctx.of_y
        if not saved:
            return moe_permute(grads[0], positions, num_rows, dtype=dtype), None, None, None
        backward = _differentiable_backward if differentiated_again() else moe_combine_backward
        drows, dweights = backward(grads[0], saved[0], positions, saved[1])
        return drows, None, dweights, None


class _ChunkSort(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Tensor, inverse: bool) -> Tensor:
        ctx.save_for_backward(lengths)
        ctx.inverse = inverse
        return _chunk_sort(x, lengths, inverse, buffers.empty(*x.shape, like=x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (lengths,) = ctx.saved_tensors
        return moe_chunk_sort(grads[0], lengths, inverse=not ctx.inverse), None, None


def moe_permute(
    x: Tensor, positions: Tensor, rows: int, *, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """result[positions[t, s]] = cast(x[t]): each token's row where its routes say; rows that no route has are 0.

    Shapes: x [n, d]; positions int32 [n, k], each row named once at most, -1 is no route; returns [rows, d] of dtype,
    x's own by default. out: written and returned, without autograd; without it differentiable.
    Raises: LayoutError if shapes or dtypes disagree; on CPU also for a position out of range (a GPU traps).
    """
    _check_rows("x", x)
    _check_matrix("positions", positions, torch.int32, x.shape[0])
    dtype = x.dtype if dtype is None else dtype
    if out is None and torch.is_grad_enabled() and x.requires_grad:
        permuted: Tensor = _Permute.apply(x, positions, rows, dtype)  # type: ignore[no-untyped-call]
        return permuted
    result = _permute(x, positions, _output(out, (rows, x.shape[1]), dtype, x))
    if out is not None:
        written(out)
    return result


def moe_combine(
    y: Tensor,
    positions: Tensor,
    weights: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """result[t] = cast(sum over s of weights[t, s] y[positions[t, s]]), summed in float32 in the order of s.

    Shapes: y [rows, d]; positions int32 [n, k], where -1 adds nothing (a row is never multiplied by 0 instead); weights
    [n, k], None is ones; returns [n, d] of dtype, y's own by default. Float64 on either side sums in float64.
    out: written and returned, without autograd; without it differentiable in y and weights.
    Raises: LayoutError if shapes or dtypes disagree; on CPU also for a position out of range (a GPU traps).
    """
    _check_rows("y", y)
    _check_matrix("positions", positions, torch.int32)
    _check_weights(weights, positions)
    dtype = y.dtype if dtype is None else dtype
    wants_grad = y.requires_grad or (weights is not None and weights.requires_grad)
    if out is None and torch.is_grad_enabled() and wants_grad:
        combined: Tensor = _Combine.apply(y, positions, weights, dtype)  # type: ignore[no-untyped-call]
        return combined
    result = _combine(y, positions, weights, _output(out, (positions.shape[0], y.shape[1]), dtype, y, weights))
    if out is not None:
        written(out)
    return result


def moe_combine_backward(
    dy: Tensor, y: Tensor, positions: Tensor, weights: Tensor, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(drows, dweights) of `moe_combine` in one pass: weights[t, s] dy[t] at row positions[t, s], and <dy[t], its row>.

    Shapes: as `moe_combine`, dy [n, d]; drows [rows, d] in y's dtype, 0 in rows that no route has, written to out if
    given; dweights [n, k] in weights' dtype, 0 for a route without a row. Not differentiable.
    Raises: LayoutError as `moe_combine`.
    """
    _check_rows("y", y)
    _check_matrix("positions", positions, torch.int32)
    _check_weights(weights, positions)
    if dy.shape != (positions.shape[0], y.shape[1]) or dy.dtype not in FLOATS:
        raise LayoutError(
            f"dy is {dy.dtype} of shape {tuple(dy.shape)}, the result has shape {(positions.shape[0], y.shape[1])}"
        )
    with torch.no_grad():
        drows = _output(out, (y.shape[0], y.shape[1]), y.dtype, y)
        dweights = _combine_backward(dy, y, positions, weights, drows)
    if out is not None:
        written(out)
    return drows, dweights


def _check_lengths(lengths: Tensor, num_rows: int) -> None:
    if bool((lengths < 0).any()) or int(lengths.sum()) > num_rows:
        raise LayoutError(f"chunks of {lengths.tolist()} rows do not fit {num_rows} rows")


def _chunk_sort(x: Tensor, lengths: Tensor, inverse: bool, out: Tensor) -> Tensor:
    run(_CHUNK_SORT, lambda: _check_lengths(lengths, len(x)), x, lengths, inverse, out)
    return out


def moe_chunk_sort(x: Tensor, lengths: Tensor, *, inverse: bool = False, out: Tensor | None = None) -> Tensor:
    """Rows in chunks of (source, expert) to chunks of (expert, source), as an all-to-all delivers and experts want.

    Shapes: x [n, d]; lengths int64 [sources, experts], rows of each chunk on x's device, n in total or fewer: the rows
    behind the last chunk are 0 in the result, which is as x. inverse: from (expert, source) to (source, expert).
    out: written and returned, without autograd; without it differentiable.
    Raises: LayoutError if shapes or dtypes disagree; on CPU also if the chunks do not fit (a GPU traps).
    """
    _check_rows("x", x)
    _check_matrix("lengths", lengths, torch.int64)
    if out is None and torch.is_grad_enabled() and x.requires_grad:
        result: Tensor = _ChunkSort.apply(x, lengths, inverse)  # type: ignore[no-untyped-call]
        return result
    result = _chunk_sort(x, lengths, inverse, _output(out, (x.shape[0], x.shape[1]), x.dtype, x))
    if out is not None:
        written(out)
    return result
