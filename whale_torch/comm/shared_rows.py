"""Rows that the ranks of one node write where those that want them read: no copy in between.

    rows = SharedRows(routes, splits, name)       # the places of all rows, by (goal, kind, source)
    with rows.open(dtype, features) as slot:
        slot.whole[rows of this rank] = ...       # `first` says where its rows of each kind begin
        slot.meet()                               # all have written
        use(slot.mine)                            # what came for this rank, kind by kind

Every rank opens as many, in the same order; an opened one has a slot of the node's memory until it is left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whale_torch.comm.splits import Splits

if TYPE_CHECKING:
    from whale_torch.comm.node_routes import NodeRoutes

__all__ = ["SharedRows", "Slot"]


class Slot:
    """whole: all rows of the node, [rows, features]. mine: those for this rank."""

    def __init__(self, routes: NodeRoutes, number: int, name: str, whole: Tensor, mine: Tensor):
        self._routes, self._number, self._name = routes, number, name
        self.whole, self.mine = whole, mine

    def meet(self) -> None:
        """Tells the others that this rank has written its rows, and waits for theirs."""
        self._routes.meet(self._number, self._name)


class SharedRows:
    """first: [size, k], where the rows begin that this rank has of each kind for each rank. lengths: rows of each kind
    that come for this rank."""

    def __init__(self, routes: NodeRoutes, splits: Splits, name: str):
        self._routes, self._name = routes, name
        by_kind = splits.counts.permute(1, 2, 0)
        flat = by_kind.flatten()
        places = (flat.cumsum(0) - flat).view(by_kind.shape)
        self.first = places[:, :, splits.index]
        self.lengths: list[int] = by_kind[splits.index].sum(1).tolist()
        self._num_rows = int(flat.sum())
        self._start = int(places[splits.index, 0, 0])

    @contextlib.contextmanager
    def open(self, dtype: torch.dtype, features: int) -> Iterator[Slot]:
        """A slot for rows of so many features."""
        number, memory = self._routes.open(self._name)
        whole = memory[: self._num_rows * features * dtype.itemsize].view(dtype).view(self._num_rows, features)
        try:
            yield Slot(self._routes, number, self._name, whole, whole.narrow(0, self._start, sum(self.lengths)))
        finally:  # an error that all ranks have leaves the slot free for what they do next
            self._routes.close(number)
