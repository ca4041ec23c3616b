"""Losses that keep experts evenly loaded: their values for the log, and their gradient, added at the gate.

All are of the global batch: of the tokens of all ranks that run the layer, so that n ranks are one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whale_torch.comm.loss_part import WHOLE, LossPart
from whale_torch.errors import PlanError
from whale_torch.moe.routing import Routing

__all__ = ["Coefficients", "add_losses"]

Sum = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks that run the layer."""
Multiplier = Callable[[], Tensor | float]


@dataclass(frozen=True)
class Coefficients:
    """switch: of E * sum_e f_e P_e, f the fraction of routes, or with of_first of tokens' first ones, P the mean
    probability (Switch, 2.2; GShard, 2.2; 1 where the load is even). z: of the mean squared logsumexp of logits
    (ST-MoE, 2.3). importance: of the squared coefficient of variation of sum_t p (Shazeer 2017, 4)."""

    switch: float = 0.0
    z: float = 0.0
    importance: float = 0.0
    of_first: bool = False

    def __post_init__(self) -> None:
        for name, value in (("aux_loss", self.switch), ("z_loss", self.z), ("importance", self.importance)):
            if not 0 <= value < math.inf:
                raise PlanError(f"{name}_coef is {value}.", fix="0 for none, or a small positive number")

    def any(self) -> bool:
        return bool(self.switch or self.z or self.importance)


def add_losses(
    routing: Routing,
    counts: Tensor,
    of: Coefficients,
    total: Sum,
    num_ranks: int,
    part: LossPart = WHOLE,
    multiplier: Multiplier = lambda: 1.0,
) -> tuple[Tensor, Tensor]:
    """(weights of the routes, whose backward gives the gate the losses' gradient; the losses, coefficients applied).

    counts: routes of this rank to each expert, before any was dropped. num_ranks: over which gradients are averaged.
    part: which the forward is of a step. multiplier: of the gradient, asked in backward. Without grad the losses alone.
    """
    logits, probs, mask = routing.logits, routing.probs, routing.mask
    assert logits is not None
    grad = torch.is_grad_enabled()
    with torch.enable_grad():
        p = (logits.softmax(1) if probs is None else probs).detach().requires_grad_()
        z = logits.detach().requires_grad_()
        seen = torch.ones(len(p), dtype=p.dtype, device=p.device) if mask is None else mask.to(p.dtype)
        importance = (p * seen.unsqueeze(1)).sum(0)
        squares = (z.logsumexp(1).square() * seen).sum()
        mine = torch.cat(
            [
                importance.detach(),
                squares.detach().view(1),
                seen.sum().view(1),
                p.new_tensor([part.share]),
                counts.to(p.dtype),
            ]
        )
        of_all = total(mine)
        num_experts = p.shape[1]
        rows = float(of_all[num_experts + 2])  # num_ranks times the part of the step's rows that all these tokens are
        tokens = of_all[num_experts + 1].clamp(min=1)
        routes = of_all[num_experts + 3 :]
        # sums over all ranks, of which this rank's part has a gradient
        whole = importance + (of_all[:num_experts] - importance.detach())
        all_squares = squares + (of_all[num_experts] - squares.detach())
        fractions = routes / routes.sum().clamp(min=1)
        loss = of.switch * num_experts * (fractions * whole / tokens).sum() + of.z * all_squares / tokens
        if of.importance:
            mean = whole.mean()
            loss = loss + of.importance * (whole - mean).square().mean() / mean.square().clamp(min=1e-20)
        weights = routing.weights
        if not grad:
            return weights, loss.detach()
        dp, dz = torch.autograd.grad(loss, (p, z), allow_unused=True)
    given = [(source, d) for source, d in ((probs, dp), (logits, dz)) if source is not None and d is not None]
    if probs is None and dp is not None:  # through a softmax
        d = p.detach() * (dp - (dp * p.detach()).sum(1, keepdim=True))
        given = [(logits, d + (0 if dz is None else dz))]
    for source, of_source in given:
        weights = _AddGradient.apply(weights, source, of_source, rows, multiplier)  # type: ignore[no-untyped-call]
    return weights, loss.detach()


class _AddGradient(torch.autograd.Function):
    """The first argument; its backward gives the second one a gradient that is known already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, grad: Tensor, rows: float, multiplier: Multiplier) -> Tensor:
        ctx.save_for_backward(grad)
        ctx.rows, ctx.multiplier, ctx.dtype = rows, multiplier, source.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grads[0], (grad * (ctx.rows * ctx.multiplier())).to(ctx.dtype), None, None, None
