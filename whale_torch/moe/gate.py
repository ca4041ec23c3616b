"""What a layer of experts asks of its gate."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn

from whale_torch.errors import LayoutError, PlanError
from whale_torch.moe.everyone import ALONE, Everyone
from whale_torch.moe.routing import Renormalize, Routing, renormalized

__all__ = ["Gate"]


class Gate(nn.Module):
    """What MoELayer asks of a gate; a subclass of yours gives a Routing from `route`.

    num_experts: of the layer. top_k: routes of a token. renormalize: "after": once routes were dropped for want of
    capacity, the weights of the others are made to sum to 1.
    """

    scale: float = 1.0
    has_first = True
    """Whether the first of a token's experts is its best."""

    def __init__(self, num_experts: int, top_k: int, *, renormalize: Renormalize = "none"):
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise PlanError(
                f"top_k is {top_k}, and there are {num_experts} experts to choose from.",
                fix=f"top_k from 1 to {num_experts}" if num_experts > 1 else "one expert or more, and 1 <= top_k",
            )
        if renormalize not in ("none", "before", "after"):
            raise PlanError(f"renormalize is {renormalize!r}.", fix='it is "none", "before" or "after" the drop')
        if renormalize != "none" and top_k == 1:
            raise PlanError(
                f'renormalize="{renormalize}" with top_k=1 makes every weight 1, so that the gate gets no gradient.',
                fix='renormalize="none"',
            )
        self.num_experts, self.top_k, self.renormalize = num_experts, top_k, renormalize

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers in training."""
        return False

    compiles: ClassVar[bool] = True
    """Whether torch.compile may trace it: it reads no numbers of tensors, and asks no other ranks."""

    def route(self, x: Tensor, mask: Tensor | None) -> Routing:
        """The routes of tokens [T, dim]; mask [T]: which are no padding."""
        raise NotImplementedError

    def route_among(self, x: Tensor, mask: Tensor | None, everyone: Everyone) -> Routing:
        """As `route`; for a gate that asks the other ranks of the layer, which all call it at once."""
        return self.route(x, mask)

    def forward(self, x: Tensor, mask: Tensor | None = None, everyone: Everyone = ALONE) -> Routing:
        """As `route_among`, without routes of padding, which may hold anything, NaN too."""
        found = self.route_among(x if mask is None else x.masked_fill(~mask.unsqueeze(1), 0.0), mask, everyone)
        if not isinstance(found, Routing):
            raise LayoutError(
                f"route() of {type(self).__name__} gives a {type(found).__name__}.",
                fix="whale_torch.moe.Routing(experts, weights)",
            )
        found = found.masked()
        if self.renormalize == "before":
            found = replace(found, weights=renormalized(found.weights))
        return found if self.scale == 1.0 else replace(found, weights=found.weights * self.scale)

    @property
    def follows_load(self) -> bool:
        """Whether `update` is to be called."""
        return False

    def update(self, counts: Tensor) -> None:
        """Told after a step of an optimizer how many tokens of all ranks chose each expert since the last, [E]."""
