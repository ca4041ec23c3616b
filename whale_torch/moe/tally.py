"""What a MoE layer did over several calls, summed on this rank; nothing here waits for a device or another rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Load", "Tally"]


@dataclass(frozen=True)
class Load:
    """What the last call of a layer did, on this rank's tokens.

    counts: routes to each expert, [num_experts]; kept: those that were not dropped for want of capacity. loss: the
    auxiliary losses, coefficients applied, of the tokens of all ranks. tokens: this rank's, padding too; mask: which
    are none, None: all. scores: what the gate gave each token for each expert, not negative, [T, num_experts]; None
    where it has none.
    """

    counts: Tensor
    kept: Tensor
    loss: Tensor
    tokens: int = 0
    mask: Tensor | None = None
    scores: Tensor | None = None


class Tally:
    """Sums of the calls of one layer, those of training and of evaluation apart.

    A call within a backward is a forward that is run again (torch.utils.checkpoint), and is not counted.
    """

    def __init__(self, num_experts: int):
        self.num_experts = num_experts
        self._sums: dict[bool, Tensor] = {}
        self._told: dict[tuple[object, bool], Tensor] = {}

    def add(self, load: Load, *, training: bool) -> None:
        """One call."""
        if torch._C._current_graph_task_id() == -1:
            mine, before = _sums(load), self._sums.get(training)
            self._sums[training] = mine if before is None else before.to(mine.device) + mine

    def take(self, asker: object, *, training: bool) -> Tensor:
        """[2 E + 4]: routes, those kept; tokens, their entropies, finite losses, their sum; since the last time."""
        found, before = self._sums.get(training), self._told.get((asker, training))
        if found is None:
            return torch.zeros(2 * self.num_experts + 4, dtype=torch.float64)
        self._told[asker, training] = found
        return (found if before is None else found - before.to(found.device)).cpu()


@torch.no_grad()
def _sums(load: Load) -> Tensor:
    zero = load.counts.new_zeros((), dtype=torch.float64)
    tokens = zero + (load.tokens if load.mask is None else load.mask.sum())
    entropy = zero
    if load.scores is not None:
        p = load.scores / load.scores.sum(1, keepdim=True)
        each = torch.special.entr(p).sum(1).double().nan_to_num() / math.log(max(2, p.shape[1]))
        entropy = (each if load.mask is None else each * load.mask).sum()
    loss, counts = load.loss.double(), load.loss.isfinite()  # one that overflowed is not to be in all sums from then on
    rest = [tokens, entropy, counts.double(), loss.where(counts, zero)]
    return torch.cat([load.counts.double(), load.kept.double(), torch.stack(rest)])
