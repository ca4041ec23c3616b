"""Ways of rows that pass through memory which the ranks of a node share: no socket inside a node.

    one node     every rank writes its rows where the others read them
    two levels   the same for the part inside the node; what lies there for a rank is then sent on by it to other nodes
    leader       what lies there is sent on by the node's first rank, which receives for all ranks of the node

Rows are bytes, [rows, bytes of a row], and come in the order of the flat exchange. An exchange has a number, alike on
all ranks; its slot is written again once every rank of the node has read what was there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from whale_torch import ops
from whale_torch.comm.collectives import all_to_all_rows_async, gather_equal
from whale_torch.comm.node_memory import NUM_SLOTS, Flag, NodeMemory
from whale_torch.comm.routes import Arrival, node_matrix
from whale_torch.comm.splits import Splits
from whale_torch.mesh import Group
from whale_torch.ops import buffers

__all__ = ["NodeRoutes"]


class _Flight:
    """An exchange whose slot is in use until its rows are read."""

    def __init__(self, arrive: Callable[[], Tensor]):
        self._arrive: Callable[[], Tensor] | None = arrive
        self._rows: Tensor | None = None

    def land(self) -> None:
        """Reads the rows out of the slot, if they are not yet."""
        if self._arrive is not None:
            arrive, self._arrive = self._arrive, None
            self._rows = arrive()

    def rows(self) -> Tensor:
        """The rows; asked for once."""
        self.land()
        rows, self._rows = self._rows, None
        assert rows is not None
        return rows


class _Places(NamedTuple):
    """Where this rank writes and reads in an exchange.

    written, read: blocks of ops.copy_blocks, into the slot and out of it. sent, received: rows of each message.
    num_rows: that come for this rank. start: first byte in the slot of what this rank sends on.
    """

    written: Tensor
    read: Tensor
    sent: list[int]
    received: list[int]
    num_rows: int
    start: int = 0


class NodeRoutes:
    """The ways through the shared memory of one node. group: all ranks. inside: those of this node."""

    def __init__(self, group: Group, inside: Group, memory: NodeMemory):
        self._group, self._inside, self.memory = group, inside, memory
        self._flights: deque[_Flight] = deque()

    def slot_bytes(self, route: str, splits: Splits, row_bytes: int) -> int:
        """Bytes that an exchange takes in the slot of the fullest node, the same on every rank."""
        rows = splits.kept.get(route)
        if rows is None:
            rows = splits.kept[route] = self._most_rows(route, splits)
        return int(rows) * row_bytes

    def _most_rows(self, route: str, splits: Splits) -> int:
        if route == "shared":
            return int(splits.matrix.sum())
        matrix, _, _ = node_matrix(splits, self._group)
        if route == "two-level shared":
            return int(matrix.sum((1, 2, 3)).max())
        return int((matrix.sum((1, 2, 3)) + matrix.sum((0, 1, 3))).max())

    def begin(self, route: str, x: Tensor, splits: Splits, name: str) -> Arrival:
        """Starts an exchange; the slots have room for it."""
        memory, row_bytes = self.memory, x.shape[1]
        number = self._next(name)
        key = (route, row_bytes)
        places = splits.kept.get(key)
        if places is None:
            places = splits.kept[key] = self._find(route, splits, row_bytes)
        ops.copy_blocks(x.view(-1), places.written, memory.slot(number))
        memory.post(Flag.WRITTEN, number)
        start = {"shared": self._one_node, "two-level shared": self._two_levels, "leader": self._leader}[route]
        flight = _Flight(start(x, places, number, name))
        self._flights.append(flight)
        return flight.rows

    def gather(self, x: Tensor, name: str) -> Tensor | None:
        """Every rank's whole numbers [count] -> [size, count], in rank order; None where memory is too small for them.

        They meet at each node's first rank, which exchanges them with those of other nodes.
        """
        row_bytes, places, size = x.numel() * x.element_size(), self._inside.size, self._group.size
        memory = self.memory
        if not memory.provide(row_bytes * (places + size)):
            return None
        number = self._next(name)
        here, all_rows = memory.slot(number)[: row_bytes * (places + size)].split(
            [row_bytes * places, row_bytes * size]
        )
        here.view(places, row_bytes)[self._inside.index].copy_(x.view(torch.uint8))
        memory.post(Flag.COUNTED, number)
        levels = self._group.levels
        if levels is None:
            memory.wait(Flag.COUNTED, number, name)
            all_rows = here
        elif self._inside.index == 0:
            memory.wait(Flag.COUNTED, number, f"{name} inside a node")
            all_rows.copy_(gather_equal(here, levels.between, name=f"{name} between nodes").view(-1))
            memory.post(Flag.ARRIVED, number)
        else:
            memory.wait(Flag.ARRIVED, number, f"{name} between nodes", [0])
        rows: Tensor = all_rows.clone().view(x.dtype).view(size, -1)
        memory.post(Flag.READ, number)
        self._flights.append(_Flight(lambda: rows))
        return rows

    def open(self, name: str) -> tuple[int, Tensor]:
        """(number, slot) of an exchange in which ranks write and read the slot themselves; it has room already."""
        number = self._next(name)
        self._flights.append(_Flight(lambda: torch.empty(0)))
        return number, self.memory.slot(number)

    def meet(self, number: int, name: str) -> None:
        """Tells that this rank has written, and waits for the others."""
        self.memory.post(Flag.WRITTEN, number)
        self.memory.wait(Flag.WRITTEN, number, name)

    def close(self, number: int) -> None:
        """Tells that this rank has read."""
        self.memory.post(Flag.READ, number)

    def _next(self, name: str) -> int:
        """The number of a new exchange, whose slot is free."""
        if len(self._flights) == NUM_SLOTS:
            self._flights.popleft().land()
        self.memory.number += 1
        self.memory.wait(Flag.READ, self.memory.number - NUM_SLOTS, name)
        return self.memory.number

    def _find(self, route: str, splits: Splits, row_bytes: int) -> _Places:
        find = {"shared": self._in_one_node, "two-level shared": self._in_two_levels, "leader": self._through_leader}
        places: _Places = find[route](splits, row_bytes)
        return places

    # ---- one node ----

    def _in_one_node(self, splits: Splits, row_bytes: int) -> _Places:
        """Rows by goal, then by source; own rows have room and are not written."""
        matrix, me = splits.matrix, self._inside.index
        places = _before(matrix.t().flatten(), 0).view(matrix.shape)  # [goal, source]
        sizes = matrix[me].clone()
        sizes[me] = 0
        written = _blocks(_before(matrix[me], 0) * row_bytes, places[:, me] * row_bytes, sizes * row_bytes)
        before, upto, num_rows = sum(splits.received[:me]), sum(splits.received[: me + 1]), sum(splits.received)
        starts, sizes = torch.tensor([0, upto]) * row_bytes, torch.tensor([before, num_rows - upto]) * row_bytes
        read = _blocks(starts + places[me, 0] * row_bytes, starts, sizes)
        return _Places(written, read, splits.sent, splits.received, num_rows)

    def _one_node(self, x: Tensor, places: _Places, number: int, name: str) -> Callable[[], Tensor]:
        memory, me, slot = self.memory, self._inside.index, self.memory.slot(number)
        out = buffers.empty(places.num_rows, x.shape[1], like=x)
        own = places.sent[me]
        out.narrow(0, sum(places.received[:me]), own).copy_(x.narrow(0, sum(places.sent[:me]), own))

        def arrive() -> Tensor:
            memory.wait(Flag.WRITTEN, number, name)
            ops.copy_blocks(slot, places.read, out.view(-1))
            memory.post(Flag.READ, number)
            return out

        return arrive

    # ---- two levels ----

    def _in_two_levels(self, splits: Splits, row_bytes: int) -> _Places:
        """What this node sends, by goal place, goal node and source place: one piece for each rank of the node."""
        matrix, node, place = node_matrix(splits, self._group)
        leaving = matrix[node].permute(2, 1, 0)
        places = _before(leaving.flatten(), 0).view(leaving.shape)
        own = matrix[node, place]  # [goal node, goal place], as x lies
        starts = _before(own.flatten(), 0).view(own.shape).t()
        written = _blocks(starts * row_bytes, places[:, :, place] * row_bytes, own.t() * row_bytes)
        sent, received = matrix[node, :, :, place].sum(0), matrix[:, :, node, place].sum(1)
        start = int(places[place, 0, 0]) * row_bytes
        return _Places(written, written[:0], sent.tolist(), received.tolist(), int(received.sum()), start)

    def _two_levels(self, x: Tensor, places: _Places, number: int, name: str) -> Callable[[], Tensor]:
        assert self._group.levels is not None
        memory, row_bytes = self.memory, x.shape[1]
        memory.wait(Flag.WRITTEN, number, f"{name} inside a node")
        mine = memory.slot(number)[places.start : places.start + sum(places.sent) * row_bytes].view(-1, row_bytes)
        between = all_to_all_rows_async(
            mine, places.sent, places.received, self._group.levels.between, name=f"{name} between nodes"
        )

        def arrive() -> Tensor:
            out = between()
            memory.post(Flag.READ, number)
            return out

        return arrive

    # ---- through a leader ----

    def _through_leader(self, splits: Splits, row_bytes: int) -> _Places:
        """All that the node sends, by goal node, goal place and source place; then all that comes.

        What comes is ordered by source node, goal place and source place: for each node a block for each rank.
        """
        matrix, node, place = node_matrix(splits, self._group)
        leaving = matrix[node].permute(1, 2, 0)  # [goal node, goal place, source place]
        places = _before(leaving.flatten(), 0).view(leaving.shape)[:, :, place]
        own = matrix[node, place]
        starts = _before(own.flatten(), 0).view(own.shape)
        written = _blocks(starts * row_bytes, places * row_bytes, own * row_bytes)
        coming = matrix[:, :, node].transpose(1, 2)  # [source node, goal place, source place]
        sizes = coming[:, place].sum(1)
        first = int(leaving.sum())
        from_rows = first + _before(coming.flatten(), 0).view(coming.shape)[:, place, 0]
        read = _blocks(from_rows * row_bytes, _before(sizes, 0) * row_bytes, sizes * row_bytes)
        return _Places(written, read, leaving.sum((1, 2)).tolist(), coming.sum((1, 2)).tolist(), int(sizes.sum()))

    def _leader(self, x: Tensor, places: _Places, number: int, name: str) -> Callable[[], Tensor]:
        assert self._group.levels is not None
        memory, row_bytes = self.memory, x.shape[1]
        slot = memory.slot(number)
        between: Callable[[], Tensor] | None = None
        if self._inside.index == 0:
            memory.wait(Flag.WRITTEN, number, f"{name} inside a node")
            rows = slot[: (sum(places.sent) + sum(places.received)) * row_bytes].view(-1, row_bytes)
            leaving, coming = rows.split([sum(places.sent), sum(places.received)])
            between = all_to_all_rows_async(
                leaving,
                places.sent,
                places.received,
                self._group.levels.between,
                name=f"{name} between nodes",
                out=coming,
            )

        def arrive() -> Tensor:
            if between is not None:
                between()
                memory.post(Flag.ARRIVED, number)
            else:
                memory.wait(Flag.ARRIVED, number, f"{name} between nodes", [0])
            out = buffers.empty(places.num_rows, row_bytes, like=x)
            ops.copy_blocks(slot, places.read, out.view(-1))
            memory.post(Flag.READ, number)
            return out

        return arrive


def _before(counts: Tensor, dim: int) -> Tensor:
    """Sums of what stands before each along a dim."""
    return counts.cumsum(dim) - counts


def _blocks(start: Tensor, to: Tensor, size: Tensor) -> Tensor:
    return torch.stack([start.flatten(), to.flatten(), size.flatten()], 1)
