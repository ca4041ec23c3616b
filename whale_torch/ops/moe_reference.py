"""Default kernels in plain torch of the dispatch to experts: the specification, run where nothing compiled answers."""

from __future__ import annotations

import torch
from torch import Tensor

from whale_torch.ops.precision import arithmetic_dtype, statistics_dtype

__all__ = [
    "moe_chunk_sort",
    "moe_combine",
    "moe_combine_backward",
    "moe_permute",
    "moe_positions",
    "moe_route",
    "moe_route_backward",
]


def _descending(keys: Tensor) -> Tensor:
    """Indices by falling key along the last dim, equal keys by index, NaN last."""
    is_nan = keys.isnan()
    by_key = torch.where(is_nan, float("-inf"), keys).sort(dim=-1, descending=True, stable=True).indices
    return by_key.gather(-1, is_nan.gather(-1, by_key).to(torch.uint8).sort(dim=-1, stable=True).indices)


def moe_route(logits: Tensor, k: int, sigmoid: bool, bias: Tensor | None, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """(scores [n, k], experts [n, k], probs [n, e]): k / groups experts of each block of e / groups columns.

    The largest logits are chosen, with a bias the largest probs + bias; NaN is below everything, ties go to the lowest
    expert. A softmax is over its block.
    """
    num_tokens, num_experts = logits.shape
    z = logits.to(statistics_dtype(logits.dtype)).contiguous().view(num_tokens, groups, num_experts // groups)
    probs = z.sigmoid() if sigmoid else z.softmax(2)
    keys = z if bias is None else probs + bias.to(z.dtype).view(groups, num_experts // groups)
    first = torch.arange(groups, device=z.device)[:, None] * (num_experts // groups)
    experts = (_descending(keys)[..., : k // groups] + first).reshape(num_tokens, k)
    probs = probs.reshape(num_tokens, num_experts)
    return probs.gather(1, experts), experts.to(torch.int32), probs


def moe_route_backward(
    probs: Tensor,
    experts: Tensor,
    dscores: Tensor | None,
    dprobs: Tensor | None,
    sigmoid: bool,
    groups: int,
    dtype: torch.dtype,
) -> Tensor:
    """dlogits [n, e] from the gradients of scores and probs; a route to expert -1 has none."""
    num_tokens, num_experts = probs.shape
    grad = torch.zeros_like(probs) if dprobs is None else dprobs.to(probs.dtype)
    if dscores is not None:
        routed = experts >= 0
        chosen = torch.where(routed, experts, 0).to(torch.int64)
        grad = grad.scatter_add(1, chosen, torch.where(routed, dscores.to(probs.dtype), 0.0))
    if sigmoid:
        return (grad * probs * (1.0 - probs)).to(dtype).contiguous()
    blocks = (num_tokens, groups, num_experts // groups)
    p, grad = probs.reshape(blocks), grad.reshape(blocks)
    dlogits = p * (grad - (grad * p).sum(2, keepdim=True))
    return dlogits.reshape(num_tokens, num_experts).to(dtype).contiguous()


def moe_positions(
    experts: Tensor,
    num_experts: int,
    capacity: Tensor | None,
    slots: int | None,
    slot_major: bool,
    order: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(positions [n, k], counts [e], kept [e]): each route's row in a buffer of rows sorted by expert, or -1.

    Routes are numbered within their expert by (slot, token) if slot_major, else by (token, slot), tokens in the given
    order. Those from the expert's capacity on get no row. Rows are packed, or an expert's begin at expert * slots.
    """
    if experts.numel() and int(experts.amax()) >= num_experts:
        raise RuntimeError(f"moe_positions: an expert is {int(experts.amax())} of {num_experts}")
    if capacity is not None and bool((capacity < 0).any()):
        raise RuntimeError("moe_positions: a capacity is negative")
    if order is not None and not torch.equal(order.sort().values, torch.arange(len(order), device=order.device)):
        raise RuntimeError("moe_positions: order is no permutation")
    visited = experts if order is None else experts.index_select(0, order)
    flat = (visited.t() if slot_major else visited).reshape(-1).to(torch.int64)
    key = torch.where(flat < 0, num_experts, flat)
    counts = torch.bincount(key, minlength=num_experts + 1)[:num_experts]
    kept = counts.clone()
    if capacity is not None:
        kept = torch.minimum(kept, capacity)
    if slots is not None:
        kept = kept.clamp(max=slots)
    by_expert = key.sort(stable=True).indices
    number = torch.empty_like(key)
    number[by_expert] = torch.arange(len(key), device=key.device)
    nobody = kept.new_zeros(1)
    number -= torch.cat((nobody, counts.cumsum(0)))[key]
    first = kept.cumsum(0) - kept if slots is None else torch.arange(num_experts, device=key.device) * slots
    row = torch.where(number < torch.cat((kept, nobody))[key], torch.cat((first, nobody))[key] + number, -1)
    row = (row.view(experts.shape[1], -1).t() if slot_major else row.view(experts.shape)).to(torch.int32)
    positions = experts.new_empty(experts.shape)
    positions[slice(None) if order is None else order] = row
    return positions, counts, kept


def moe_permute(x: Tensor, positions: Tensor, out: Tensor) -> None:
    """out[positions[t, s]] = cast(x[t]); a row that no position names is 0."""
    out.zero_()
    token, slot = (positions >= 0).nonzero(as_tuple=True)
    out.index_copy_(0, positions[token, slot].to(torch.int64), x.index_select(0, token).to(out.dtype))


def moe_combine(y: Tensor, positions: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """out[t] = cast(sum over s, in order, of weights[t, s] y[positions[t, s]]); a route without a row adds nothing."""
    total = out.new_zeros(out.shape, dtype=arithmetic_dtype(y.dtype, out.dtype))
    for slot in range(positions.shape[1]):
        (token,) = (positions[:, slot] >= 0).nonzero(as_tuple=True)
        rows = y.index_select(0, positions[token, slot].to(torch.int64)).to(total.dtype)
        total[token] += rows if weights is None else rows * weights[token, slot, None]
    out.copy_(total)


def moe_combine_backward(dy: Tensor, y: Tensor, positions: Tensor, weights: Tensor, drows: Tensor) -> Tensor:
    """drows[positions[t, s]] = cast(weights[t, s] dy[t]), other rows 0; returns <dy[t], y[positions[t, s]]>, else 0."""
    drows.zero_()
    dweights = weights.new_zeros(weights.shape)
    for slot in range(positions.shape[1]):
        (token,) = (positions[:, slot] >= 0).nonzero(as_tuple=True)
        row = positions[token, slot].to(torch.int64)
        grad = dy.index_select(0, token).to(weights.dtype)
        dweights[token, slot] = (grad * y.index_select(0, row).to(weights.dtype)).sum(1)
        drows.index_copy_(0, row, (grad * weights[token, slot, None]).to(drows.dtype))
    return dweights


def moe_chunk_sort(x: Tensor, lengths: Tensor, inverse: bool, out: Tensor) -> None:
    """Chunks of lengths[source, expert] rows, source-major to expert-major or back; the rows behind them are 0."""
    num_rows = int(lengths.sum())
    if num_rows > len(x) or bool((lengths < 0).any()):
        raise RuntimeError(f"moe_chunk_sort: chunks of {num_rows} rows do not fit {len(x)}")
    stored = (lengths.t() if inverse else lengths).reshape(-1).tolist()
    wanted = torch.arange(len(stored)).view(lengths.shape if not inverse else lengths.t().shape).t().reshape(-1)
    chunks = x[:num_rows].split(stored) if stored else ()
    sorted_chunks = [chunks[index] for index in wanted.tolist()]
    out[num_rows:] = 0
    if sorted_chunks:
        out[:num_rows] = torch.cat(sorted_chunks)


def moe_scatter(x: Tensor, positions: Tensor, out: Tensor) -> None:
    """out[positions[t, s]] = cast(x[t]); the other rows stay as they are."""
    token, slot = (positions >= 0).nonzero(as_tuple=True)
    out.index_copy_(0, positions[token, slot].to(torch.int64), x.index_select(0, token).to(out.dtype))


def moe_collect(y: Tensor, positions: Tensor, weights: Tensor, out: Tensor, rows: Tensor) -> None:
    """As moe_combine, and rows[t k + s] = y[positions[t, s]]; the other rows stay as they are."""
    (route,) = (positions.reshape(-1) >= 0).nonzero(as_tuple=True)
    rows.index_copy_(0, route, y.index_select(0, positions.reshape(-1)[route].to(torch.int64)))
    moe_combine(y, positions, weights, out)


def moe_scatter_backward(dy: Tensor, rows: Tensor, positions: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """out[positions[t, s]] = cast(weights[t, s] dy[t]), others stay; returns <dy[t], rows[t k + s]>, 0 for no route."""
    token, slot = (positions >= 0).nonzero(as_tuple=True)
    grad = dy.index_select(0, token).to(weights.dtype)
    factors = weights[token, slot]
    dweights = weights.new_zeros(weights.shape)
    of_route = rows.index_select(0, token * positions.shape[1] + slot).to(weights.dtype)
    dweights[token, slot] = (grad * of_route).sum(1)
    out.index_copy_(0, positions[token, slot].to(torch.int64), (grad * factors[:, None]).to(out.dtype))
    return dweights
