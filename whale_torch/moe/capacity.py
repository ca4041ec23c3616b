"""How many routes an expert takes, and which ones are dropped where more want it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from whale_torch import ops
from whale_torch.errors import PlanError
from whale_torch.moe.routing import Routing, renormalized

__all__ = ["Capacity", "drop", "without_dropped"]


@dataclass(frozen=True)
class Capacity:
    """max(minimum, ceil(factor * k * T / E)) routes for each expert, of the T tokens of all ranks that run the layer.

    factor: in training; eval_factor: in evaluation; None: as many as there are (dropless). each: an expert's own
    number, in place of all that. order: "position": first choices before second ones, and earlier tokens first
    (GShard); "priority": tokens whose gate is surer first (batch prioritized routing, V-MoE, 3.2).
    """

    factor: float | None = None
    eval_factor: float | None = None
    minimum: int = 4
    order: Literal["position", "priority"] = "position"
    each: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, factor in (("capacity_factor", self.factor), ("eval_capacity_factor", self.eval_factor)):
            if factor is not None and not factor > 0:
                raise PlanError(f"{name} is {factor}.", fix="a positive number, or None to drop nothing")
        if not isinstance(self.minimum, int) or self.minimum < 0 or self.order not in ("position", "priority"):
            raise PlanError(
                f"min_capacity={self.minimum}, drop={self.order!r}.",
                fix='min_capacity counts routes; drop is "position" or "priority"',
            )

    def drops(self, *, training: bool) -> bool:
        """Whether there is one."""
        return self.each is not None or (self.factor if training else self.eval_factor) is not None

    def of(self, tokens: int, top_k: int, num_experts: int, *, training: bool) -> list[int] | None:
        """Routes of each expert, None where nothing is dropped."""
        if self.each is not None:
            return list(self.each)
        factor = self.factor if training else self.eval_factor
        if factor is None:
            return None
        each = min(factor, num_experts) * top_k * tokens / num_experts  # more than all routes there never are
        return [min(max(self.minimum, math.ceil(round(each, 9))), top_k * tokens)] * num_experts


def drop(routing: Routing, limits: list[int], of_all: Callable[[Tensor], tuple[Tensor, slice]], by: str) -> Routing:
    """The routing without the routes that find their expert full.

    of_all: from a tensor [T, ...] of this rank to that of all ranks in order, and where this rank's tokens are. by: the
    order of `Capacity`. Every rank decides on all routes, so that the number of ranks changes nothing.
    """
    experts, here = of_all(routing.experts)
    order = None
    if by == "priority" or routing.priority is not None:
        order = of_all(_priority(routing))[0].argsort(descending=True, stable=True)
    capacity = torch.tensor(limits, dtype=torch.int64, device=experts.device)
    positions, _, _ = ops.moe_positions(experts, len(limits), capacity=capacity, order=order)
    kept = positions[here, : routing.experts.shape[1]] >= 0
    return replace(routing, experts=torch.where(kept, routing.experts, -1), weights=routing.weights.where(kept, 0.0))


def _priority(routing: Routing) -> Tensor:
    """[T]: what the gate says, else the largest probability that it gives an expert; NaN is below everything."""
    priority = routing.priority
    if priority is None:
        priority = (routing.weights if routing.probs is None else routing.probs).amax(1)
    return priority.detach().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def without_dropped(routing: Routing, scale: float = 1.0) -> Routing:
    """Weights that sum to `scale` over what was kept."""
    return replace(routing, weights=renormalized(routing.weights) * scale)
