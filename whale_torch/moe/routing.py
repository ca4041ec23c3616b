"""What a gate decides: the experts of every token, and with which weight each of them counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

__all__ = ["LEAST", "Renormalize", "Routing", "renormalized"]

LEAST = 1e-20
"""What sums of scores are divided by at least, so that sigmoids that are all 0 stay 0 and have a finite gradient."""

Renormalize = Literal["none", "before", "after"]


@dataclass(frozen=True)
class Routing:
    """The routes of T tokens, k each.

    experts: int32 [T, k], -1 is no route. weights: [T, k]. logits, probs: [T, E], None where a gate has none; losses of
    balance are made of them. mask: [T] bool, which tokens are no padding; None: all of them. priority: [T], the tokens
    of the largest take their turn first where experts are full; None: as the layer's `drop` says.
    """

    experts: Tensor
    weights: Tensor
    logits: Tensor | None = None
    probs: Tensor | None = None
    mask: Tensor | None = None
    priority: Tensor | None = None

    def masked(self) -> Routing:
        """The same without routes of padding."""
        if self.mask is None:
            return self
        keep = self.mask.unsqueeze(1)
        return replace(self, experts=torch.where(keep, self.experts, -1), weights=self.weights.where(keep, 0.0))

    def sliced(self, slices: int) -> Routing:
        """Those to all slices of each expert, which stand one after the other: [T, k * slices]."""
        if slices == 1:
            return self
        each = torch.arange(slices, dtype=torch.int32, device=self.experts.device)
        experts = torch.where(self.experts < 0, -1, self.experts * slices).unsqueeze(2)
        experts = torch.where(experts < 0, -1, experts + each).flatten(1)
        return replace(self, experts=experts, weights=self.weights.repeat_interleave(slices, 1))


def renormalized(weights: Tensor) -> Tensor:
    """[T, k] weights that sum to 1 for each token; those of a token without any stay 0."""
    return weights / weights.sum(1, keepdim=True).clamp(min=max(LEAST, torch.finfo(weights.dtype).tiny))
