"""The ranks that run a layer, each on tokens of its own, as a gate and a layer ask them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from whale_torch.comm.collectives import all_gather_rows, all_to_all_rows, gather_equal
from whale_torch.mesh import Group

__all__ = ["ALONE", "Everyone", "OnRanks"]

_TOGETHER = "tokens of a layer of experts (the model is called on every rank)"


class Everyone:
    """Asked by all of them at once, in the order of their tokens; alone without a group."""

    def __init__(self, ranks: Group | None = None):
        self._ranks = None if ranks is None or ranks.size == 1 else ranks
        self.size = 1 if ranks is None else ranks.size
        self.index = 0 if ranks is None else ranks.index

    def total(self, x: Tensor) -> Tensor:
        """The sum of all x, of one shape."""
        return x if self._ranks is None else self.gathered(x, _TOGETHER).sum(0)

    def gathered(self, x: Tensor, name: str) -> Tensor:
        """All x, of one shape, [size, *x.shape]."""
        return x.unsqueeze(0) if self._ranks is None else gather_equal(x, self._ranks, name=name)

    def joined(self, x: Tensor) -> tuple[Tensor, slice]:
        """(the rows of all, this rank's among them). x [T, ...]; of [T, k] the narrower ones are filled up with -1."""
        if self._ranks is None:
            return x, slice(0, len(x))
        width = x.shape[1] if x.dim() == 2 else 0
        sizes, widths = self.gathered(torch.tensor([len(x), width]), _TOGETHER).unbind(1)
        if x.dim() == 2:
            x = F.pad(x, (0, int(widths.max()) - width), value=-1)
        whole = all_gather_rows(x.contiguous(), sizes.tolist(), self._ranks, name=_TOGETHER)
        start = int(sizes[: self.index].sum())
        return whole, slice(start, start + len(x))

    def exchanged(self, x: Tensor, sent: list[int], received: list[int], name: str) -> Tensor:
        """sent[i] rows of x go to rank i, received[i] come from it."""
        return x if self._ranks is None else all_to_all_rows(x, sent, received, self._ranks, name=name)


ALONE = Everyone()


class OnRanks:
    """The ranks that run a layer: a copy of it runs on them too, and what a pickle of it makes is of one process."""

    def __init__(self, group: Group | None = None):
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> OnRanks:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return OnRanks, ()
