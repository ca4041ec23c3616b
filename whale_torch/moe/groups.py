"""Top-k among the experts of a token's best groups, so that it goes to few of the ranks that hold them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whale_torch import ops

__all__ = ["route_within_groups"]


def route_within_groups(
    logits: Tensor, k: int, *, score: str, bias: Tensor | None, num_groups: int, top_groups: int, best: int
) -> tuple[Tensor, Tensor, Tensor]:
    """ops.moe_route, of the top_groups groups whose `best` best experts have the largest sum (with the bias).

    Groups are equal blocks of experts; a softmax is over all experts. Ties go to the lowest group and expert.
    """
    probs = logits.sigmoid() if score == "sigmoid" else logits.softmax(1)
    with torch.no_grad():
        of_choice = probs if bias is None else probs + bias.to(probs.dtype)
        keys = logits if bias is None else of_choice  # logits where they order alike: a softmax makes equal ones
        of_groups = (keys if best == 1 else of_choice).view(len(logits), num_groups, -1)
        of_groups = of_groups.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        best_of = of_groups.topk(min(best, of_groups.shape[2]), dim=2).values.sum(2)
        groups = ops.moe_route(best_of, top_groups)[1]
        within = torch.zeros(best_of.shape, dtype=torch.bool, device=keys.device).scatter_(1, groups.long(), True)
        lowest = torch.finfo(keys.dtype).min  # above what is in no group
        keys = keys.nan_to_num(nan=lowest, posinf=math.inf, neginf=lowest)
        outside = ~within.repeat_interleave(of_groups.shape[2], 1)
        experts = ops.moe_route(keys.masked_fill(outside, -math.inf), k)[1]
    return probs.gather(1, experts.long()), experts, probs
