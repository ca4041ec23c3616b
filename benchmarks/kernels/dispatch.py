"""Variants of the dispatch to experts: the compiled ops and the chains of torch ops that do the same."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from whale_torch import ops

__all__ = ["Size", "combine", "combine_backward", "combine_into", "keep_memory", "permute", "permute_into", "route"]

Variants = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Size:
    """Tokens of `dim` features, each to k of so many experts."""

    tokens: int
    dim: int
    experts: int
    k: int

    def __str__(self) -> str:
        return f"{self.tokens} x {self.dim}, {self.k} of {self.experts}"


def keep_memory() -> None:
    """Keeps the C library from giving memory back: else a variant pays page faults for what another let go."""
    trim_threshold, mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    libc.mallopt(trim_threshold, 1 << 30)
    libc.mallopt(mmap_max, 0)


def route(size: Size) -> Variants:
    """From logits to scores, experts, the row of each route and the counts."""
    logits = torch.randn(size.tokens, size.experts)

    def whale() -> object:
        scores, experts, probs = ops.moe_route(logits, size.k)
        return scores, probs, ops.moe_positions(experts, size.experts, slot_major=False)

    def chain() -> object:
        probs = logits.softmax(1)
        scores, experts = probs.topk(size.k, 1)
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        positions = torch.empty_like(order)
        positions[order] = torch.arange(len(order))
        return scores, probs, positions, torch.bincount(flat, minlength=size.experts)

    return {"whale": whale, "chain": chain}


@dataclass(frozen=True)
class _Routed:
    """One batch that was routed: what torch's ops index with, in their types, is made outside the time."""

    x: Tensor
    y: Tensor
    weights: Tensor
    positions: Tensor  # int32 [tokens, k]
    rows: Tensor  # the same, int64 and flat: the row of each route
    route_of_row: Tensor
    token_of_row: Tensor

    def weight_of_row(self) -> Tensor:
        return self.weights.flatten()[self.route_of_row].to(self.y.dtype)[:, None]

    @staticmethod
    def draw(size: Size, dtype: torch.dtype) -> _Routed:
        _, experts, _ = ops.moe_route(torch.randn(size.tokens, size.experts), size.k)
        positions, _, _ = ops.moe_positions(experts, size.experts, slot_major=False)
        rows = positions.flatten().long()
        route_of_row = torch.empty_like(rows)
        route_of_row[rows] = torch.arange(len(rows))
        weights = torch.rand(size.tokens, size.k)
        x, y = torch.randn(size.tokens, size.dim).to(dtype), torch.randn(len(rows), size.dim).to(dtype)
        return _Routed(x, y, weights, positions, rows, route_of_row, route_of_row // size.k)


def combine(size: Size, dtype: torch.dtype) -> Variants:
    """The weighted sum of each token's rows, into a new tensor. The chains sum in y's dtype."""
    r = _Routed.draw(size, dtype)
    shape = (size.tokens, size.k, size.dim)

    def index_add() -> object:
        return torch.zeros(size.tokens, size.dim, dtype=dtype).index_add_(0, r.token_of_row, r.y * r.weight_of_row())

    def bmm() -> object:
        return torch.bmm(r.weights.to(dtype)[:, None], r.y.index_select(0, r.rows).view(shape))[:, 0]

    def gathered_sum() -> object:
        return (r.y.index_select(0, r.rows).view(shape) * r.weights.to(dtype)[:, :, None]).sum(1)

    whale = partial(ops.moe_combine, r.y, r.positions, r.weights)
    return {"whale": whale, "index_add": index_add, "bmm": bmm, "gather + sum": gathered_sum}


def combine_into(size: Size, dtype: torch.dtype) -> Variants:
    """The same where all, the chain's rows too, go to memory that is used again."""
    r = _Routed.draw(size, dtype)
    out, rows, theirs = torch.empty_like(r.x), torch.empty_like(r.y), torch.empty_like(r.x)

    def index_add() -> object:
        torch.mul(r.y, r.weight_of_row(), out=rows)
        return theirs.zero_().index_add_(0, r.token_of_row, rows)

    return {"whale": partial(ops.moe_combine, r.y, r.positions, r.weights, out=out), "index_add": index_add}


def combine_backward(size: Size, dtype: torch.dtype) -> Variants:
    """The gradients of the rows and of the weights."""
    r = _Routed.draw(size, dtype)

    def chain() -> object:
        dy = r.x.index_select(0, r.token_of_row)
        return dy * r.weight_of_row(), (dy * r.y).sum(1)[r.rows]

    return {"whale": partial(ops.moe_combine_backward, r.x, r.y, r.positions, r.weights), "chain": chain}


def permute(size: Size, dtype: torch.dtype) -> Variants:
    """Each token's features to the rows of its routes."""
    r = _Routed.draw(size, dtype)
    return {
        "whale": partial(ops.moe_permute, r.x, r.positions, len(r.y)),
        "index_select": partial(r.x.index_select, 0, r.token_of_row),
    }


def permute_into(size: Size, dtype: torch.dtype) -> Variants:
    """The same, to memory that is used again."""
    r = _Routed.draw(size, dtype)
    ours, theirs = torch.empty_like(r.y), torch.empty_like(r.y)
    return {
        "whale": partial(ops.moe_permute, r.x, r.positions, len(r.y), out=ours),
        "index_select": partial(torch.index_select, r.x, 0, r.token_of_row, out=theirs),
    }
