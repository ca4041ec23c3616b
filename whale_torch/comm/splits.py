"""How many rows every rank of a group sends every other: one small exchange, after which all ranks know all numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from whale_torch.comm.collectives import gather_equal
from whale_torch.errors import LayoutError
from whale_torch.mesh import Group

__all__ = ["Splits", "gather_splits"]


class Splits:
    """Rows between the ranks of a group, equal on all of them, so that all take the same decision by them.

    counts: [size, size, k], int64 on the CPU: rows of kind c (of k) from the i-th rank to the j-th, which lie side by
    side where they are sent and where they are received. index: this rank's place in the group. kept: what routes found
    for these numbers.
    """

    def __init__(self, counts: Tensor, index: int):
        self.counts, self.index = counts, index
        self.kept: dict[Any, Any] = {}

    @cached_property
    def matrix(self) -> Tensor:
        """[size, size]: rows from the i-th rank to the j-th, of all kinds."""
        return self.counts.sum(2).contiguous()

    @cached_property
    def sent(self) -> list[int]:
        """Rows that this rank sends to each."""
        return self._numbers(self.matrix[self.index])

    @cached_property
    def num_sent(self) -> int:
        """Rows that this rank sends."""
        return sum(self.sent)

    @cached_property
    def received(self) -> list[int]:
        """Rows that this rank receives from each."""
        return self._numbers(self.matrix[:, self.index])

    @cached_property
    def most_rows(self) -> int:
        """Rows of the rank that sends, or receives, most."""
        return int(torch.maximum(self.matrix.sum(0), self.matrix.sum(1)).max())

    @cached_property
    def transposed(self) -> Splits:
        """Those of the way back, which sends what this one received."""
        back = Splits(self.counts.transpose(0, 1), self.index)
        back.transposed = self
        return back

    @staticmethod
    def _numbers(rows: Tensor) -> list[int]:
        numbers: list[int] = rows.tolist()
        return numbers


def gather_splits(
    counts: Tensor,
    group: Group,
    *,
    name: str = "counts of rows",
    gather: Callable[[Tensor, str], Tensor | None] | None = None,
) -> Splits:
    """What every rank of the group sends, from what each of them tells: counts [size * k] or [size, k], whole numbers.

    gather: a faster way to bring the numbers [count] of all together, None where it cannot.
    Raises LayoutError where there are not equally many counts for each rank, or one is negative.
    """
    if counts.numel() % group.size or not counts.numel():
        raise LayoutError(
            f"{name}: {counts.numel()} numbers for the {group.size} ranks of {group.name}.",
            fix="give every rank of the group equally many numbers",
        )
    mine = counts.detach().to("cpu", torch.int64).reshape(group.size, -1)
    if bool((mine < 0).any()):
        raise LayoutError(f"{name}: a rank cannot be sent {int(mine.min())} rows.", fix="count the rows anew")
    found = gather(mine.flatten(), name) if gather is not None else None
    if found is None:
        found = gather_equal(mine, group, name=name)
    return Splits(found.view(group.size, group.size, -1), group.index)
