"""Which experts a token goes to, and which row of the experts' buffer each of its routes gets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whale_torch.errors import LayoutError
from whale_torch.ops import moe_reference
from whale_torch.ops.library import differentiated_again, op, run
from whale_torch.ops.precision import FLOATS

__all__ = ["moe_positions", "moe_route", "moe_route_backward"]

_ROUTE = op("moe_route")
_ROUTE_BACKWARD = op("moe_route_backward")
_POSITIONS = op("moe_positions")
_SCORES = ("softmax", "sigmoid")


def _check_score(score: str) -> None:
    if score not in _SCORES:
        raise LayoutError(f"score is {score!r}; it is one of {', '.join(map(repr, _SCORES))}")


def _check_route(logits: Tensor, k: int, score: str, bias: Tensor | None, groups: int) -> None:
    if logits.dim() != 2 or logits.dtype not in FLOATS:
        raise LayoutError(
            f"logits are {logits.dtype} of shape {tuple(logits.shape)}; they are floats of shape (tokens, experts)"
        )
    _check_score(score)
    num_experts = logits.shape[1]
    if groups < 1 or num_experts % groups or k % groups:
        raise LayoutError(
            f"{groups} groups do not divide {num_experts} experts and k = {k}",
            fix="take a number of groups that divides both",
        )
    if not 1 <= k <= num_experts:
        raise LayoutError(f"k is {k}, and there are {num_experts} experts to choose from")
    if bias is not None and bias.shape != (num_experts,):
        raise LayoutError(f"bias has shape {tuple(bias.shape)} for {num_experts} experts")


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, k: int, sigmoid: bool, bias: Tensor | None, groups: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores, experts, probs = _ROUTE(logits, k, sigmoid, bias, groups)
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(probs, experts)
        ctx.options = (sigmoid, groups, logits.dtype)
        return scores, experts, probs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        probs, experts = ctx.saved_tensors
        kernel = moe_reference.moe_route_backward if differentiated_again() else _ROUTE_BACKWARD
        dlogits = kernel(probs, experts, grads[0], grads[2], *ctx.options)
        return dlogits, None, None, None, None


def moe_route(
    logits: Tensor, k: int, *, score: str = "softmax", bias: Tensor | None = None, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """(scores, experts, probs) of each token's k experts, in falling order within a group; differentiable.

    Shapes: logits [n, e], bias [e]; scores [n, k] float32, not renormalised; experts int32 [n, k]; probs float32 [n, e]
    (float64 for float64 logits). The largest logits win, or with a bias, which nothing else sees, the largest
    probs + bias. Ties go to the lowest expert; NaN is below everything, and the k experts are distinct in any case.
    groups: the experts are that many equal blocks, k / groups are chosen in each, and a softmax is over its block.
    Raises: LayoutError if shapes, dtypes or options disagree.
    """
    _check_route(logits, k, score, bias, groups)
    arguments = (logits, k, score == "sigmoid", bias, groups)
    if torch.is_grad_enabled() and logits.requires_grad:
        routed: tuple[Tensor, Tensor, Tensor] = _Route.apply(*arguments)  # type: ignore[no-untyped-call]
        return routed
    with torch.no_grad():
        scores, experts, probs = _ROUTE(*arguments)
    return scores, experts, probs


def moe_route_backward(
    probs: Tensor,
    experts: Tensor,
    dscores: Tensor | None,
    dprobs: Tensor | None,
    *,
    score: str = "softmax",
    groups: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The gradient of `moe_route`'s logits from those of its scores and probs, None being zeros.

    Shapes: probs and dprobs [n, e], experts int32 and dscores [n, k], where expert -1 passes nothing on; returns [n, e]
    of dtype.
    Raises: LayoutError if shapes or dtypes disagree.
    """
    _check_score(score)
    wanted = {"dscores": (dscores, experts.shape), "dprobs": (dprobs, probs.shape)}
    for name, (grad, shape) in wanted.items():
        if grad is not None and grad.shape != shape:
            raise LayoutError(f"{name} has shape {tuple(grad.shape)}, not {tuple(shape)}")
    if groups < 1 or probs.shape[1] % groups:
        raise LayoutError(f"{groups} groups do not divide {probs.shape[1]} experts")
    with torch.no_grad():
        dlogits: Tensor = _ROUTE_BACKWARD(probs, experts, dscores, dprobs, score == "sigmoid", groups, dtype)
    return dlogits


def _check_positions(experts: Tensor, num_experts: int, slots: int | None, vectors: dict[str, Tensor | None]) -> None:
    if experts.dim() != 2 or experts.dtype != torch.int32:
        raise LayoutError(
            f"experts are {experts.dtype} of shape {tuple(experts.shape)}; they are int32 of shape (tokens, k)"
        )
    if num_experts < 1 or (slots is not None and slots < 0):
        raise LayoutError(
            f"{num_experts} experts of {slots} slots: there is at least one expert, and slots are not negative"
        )
    if max(experts.numel(), num_experts * (slots or 0)) >= 2**31:
        raise LayoutError(
            f"{experts.numel()} routes, {num_experts} experts of {slots} slots: rows are numbered in int32",
            fix="dispatch fewer tokens at a time",
        )
    for (name, vector), length in zip(vectors.items(), (num_experts, experts.shape[0]), strict=True):
        if vector is not None and (vector.shape != (length,) or vector.dtype != torch.int64):
            raise LayoutError(
                f"{name} is {vector.dtype} of shape {tuple(vector.shape)}, not int64 of shape ({length},)"
            )


def _check_experts(experts: Tensor, num_experts: int, capacity: Tensor | None, order: Tensor | None) -> None:
    if experts.numel() and int(experts.amax()) >= num_experts:
        raise LayoutError(f"an expert is {int(experts.amax())}, and there are {num_experts}, counted from 0")
    if capacity is not None and bool((capacity < 0).any()):
        raise LayoutError(f"a capacity is {int(capacity.amin())}; it counts routes")
    if order is not None and not torch.equal(order.sort().values, torch.arange(len(order), device=order.device)):
        raise LayoutError(f"order is no permutation of the {len(order)} tokens")


def moe_positions(
    experts: Tensor,
    num_experts: int,
    *,
    capacity: Tensor | None = None,
    slots: int | None = None,
    slot_major: bool = True,
    order: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(positions, counts, kept): the row that each route gets in a buffer of rows sorted by expert, -1 for none.

    Shapes: experts int32 [n, k], -1 (a padding token) being no route; capacity int64 [num_experts]; order int64 [n], a
    permutation: tokens as they take their turns. Returns positions int32 [n, k]; counts int64 [num_experts], routes
    to an expert before the drop; kept int64 [num_experts], those with a row. Routes take turns by slot first, so that
    first choices win, or if not slot_major by token first; those that find an expert's capacity taken are dropped.
    Rows are packed; with slots an expert has that many, from expert * slots on, and capacity is at most slots.
    The same for any number of threads. Not differentiable.
    Raises: LayoutError if shapes or dtypes disagree; on CPU also for an expert out of range, a negative capacity or an
    order that is none (a GPU traps).
    """
    _check_positions(experts, num_experts, slots, {"capacity": capacity, "order": order})
    arguments = (experts, num_experts, capacity, slots, slot_major, order)
    positions, counts, kept = run(_POSITIONS, lambda: _check_experts(experts, num_experts, capacity, order), *arguments)
    return positions, counts, kept
