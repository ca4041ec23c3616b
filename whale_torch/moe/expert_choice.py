"""A gate of which experts choose the tokens, among those of all ranks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whale_torch.comm.slices import parts_of
from whale_torch.errors import PlanError
from whale_torch.moe.everyone import ALONE, Everyone
from whale_torch.moe.gates import LinearGate
from whale_torch.moe.routing import Routing

__all__ = ["ExpertChoice"]

_NAN, _PADDING = -1.0, -2.0  # below every probability


class ExpertChoice(LinearGate):
    """Each expert takes the capacity_factor * T / E tokens, of the T of all ranks, that score highest (arXiv
    2202.09368, 3.2).

    A token has capacity_factor experts on average, and may have none or all. What one is given depends on tokens that
    come later: no gate for a causal language model. Ties go to the first token; NaN is below everything.
    """

    has_first = compiles = False

    def __init__(self, dim: int, num_experts: int, *, capacity_factor: float = 2.0, jitter: float = 0.0):
        if not 0 < capacity_factor < math.inf:
            raise PlanError(f"capacity_factor is {capacity_factor}.", fix="a positive number: experts of a token")
        super().__init__(dim, num_experts, min(num_experts, max(1, round(capacity_factor))), jitter=jitter)
        self.capacity_factor = capacity_factor

    def route(self, x: Tensor, mask: Tensor | None) -> Routing:
        return self.route_among(x, mask, ALONE)

    def route_among(self, x: Tensor, mask: Tensor | None, everyone: Everyone) -> Routing:
        logits = self.logits(x)
        probs = logits.softmax(1)
        experts = _compact(self._chosen(probs.detach(), mask, everyone))
        weights = probs.gather(1, experts.clamp(min=0).long()).where(experts >= 0, 0.0)
        return Routing(experts, weights, logits, probs, mask)

    def _chosen(self, probs: Tensor, mask: Tensor | None, everyone: Everyone) -> Tensor:
        """Which experts take which tokens of this rank, bool [T, E]."""
        tokens = len(probs) if mask is None else int(mask.sum())
        of_ranks = everyone.gathered(torch.tensor(tokens), "tokens of a layer").tolist()
        wanted = math.ceil(round(sum(of_ranks) * self.capacity_factor / self.num_experts, 9))
        capacity = min(sum(of_ranks), wanted)
        keys = probs.nan_to_num(nan=_NAN)
        if mask is not None:
            keys = keys.masked_fill(~mask.unsqueeze(1), _PADDING)
        best = keys.t().sort(dim=1, descending=True, stable=True)  # [E, T]
        widths = [min(capacity, count) for count in of_ranks]
        taken = _taken(best.values[:, : widths[everyone.index]], widths, capacity, everyone)
        places = torch.arange(len(probs), device=probs.device)
        chosen = torch.empty(best.indices.shape, dtype=torch.bool, device=probs.device)
        return chosen.scatter_(1, best.indices, places < taken.unsqueeze(1)).t()


def _taken(best: Tensor, widths: list[int], capacity: int, everyone: Everyone) -> Tensor:
    """How many of this rank's tokens each expert takes, [E]: those are its first.

    best: scores of this rank's best tokens for each expert, falling, [E, widths[index]]. Every rank decides for a part
    of the experts, so that it sees no more than these take and ranks have: scores travel there, and numbers back.
    """
    of_ranks = parts_of(len(best), everyone.size)
    mine = of_ranks[everyone.index]
    sent, received = [part * best.shape[1] for part in of_ranks], [mine * width for width in widths]
    scores = everyone.exchanged(best.reshape(-1), sent, received, "scores of tokens")
    seen = torch.cat(
        [part.view(mine, width) for part, width in zip(scores.split(received), widths, strict=True)], 1
    )  # rank by rank, so that of equal ones the first token's comes first
    winners = seen.sort(dim=1, descending=True, stable=True).indices[:, :capacity]
    sources = torch.arange(everyone.size).repeat_interleave(torch.tensor(widths)).to(best.device)
    source = sources[winners]
    taken = torch.zeros(mine, everyone.size, dtype=torch.int64, device=best.device)
    taken.scatter_add_(1, source, torch.ones_like(source))
    return everyone.exchanged(taken.t().reshape(-1), [mine] * everyone.size, of_ranks, "numbers of tokens")


def _compact(chosen: Tensor) -> Tensor:
    """int32 [T, k], for [T, E] bool: the experts of each token in order and then -1, k the most that one has."""
    token, expert = chosen.nonzero(as_tuple=True)
    numbers = chosen.cumsum(1, dtype=torch.int32)
    width = max(1, int(numbers[:, -1].max())) if len(numbers) else 1
    experts = torch.full((len(chosen), width), -1, dtype=torch.int32, device=chosen.device)
    experts[token, numbers[token, expert].long() - 1] = expert.int()
    return experts
