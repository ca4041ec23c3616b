"""Uneven rows from every rank of a group to every other, differentiable, begun and finished apart.

    rows = AllToAll(mesh, "experts", blocks)
    splits = rows.splits(counts)         # one small exchange: every rank knows how many rows go where
    y = rows(x, splits)                  # [sum(sent), ...] -> [sum(received), ...]; the gradient goes the way back
    z = rows(f(y), splits.transposed)    # back to where the rows came from

`begin` starts an exchange, and what it returns waits for the rows; the exchange of the gradient too begins where
backward comes to the one and is waited for where it comes to the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whale_torch.cluster import Blocks
from whale_torch.comm.node_memory import NodeMemory
from whale_torch.comm.node_routes import NodeRoutes
from whale_torch.comm.route_costs import RouteCosts, measure_routes
from whale_torch.comm.routes import Arrival, begin_flat, begin_two_levels
from whale_torch.comm.shared_rows import SharedRows
from whale_torch.comm.splits import Splits, gather_splits
from whale_torch.errors import LayoutError
from whale_torch.mesh import Group, Mesh

__all__ = ["AllToAll", "Underway"]


_THROUGH_MEMORY = ("shared", "two-level shared", "leader")


class AllToAll:
    """The exchange of rows in one group; every rank of it does the same exchanges in the same order.

    That holds for gradients too: rows want one on all ranks or on none, also on a rank that sends or receives nothing.
    One object serves all layers of a group: it holds the memory that ranks share, and the times of the routes.

    blocks: as of Mesh.group. channel: exchanges on different channels never wait for each other. shared: whether ranks
    of one node exchange through memory that they share. refused: why they do not, or not what is large.
    """

    def __init__(self, mesh: Mesh, name: str, blocks: Blocks, *, channel: str = "rows", shared: bool = True):
        self.name = name
        self.group = mesh.two_levels(name, blocks, channel=channel)
        inside = self.group.levels.inside if self.group.levels is not None else self.group
        one_node = len({mesh.cluster.nodes[rank] for rank in inside.ranks}) == 1
        self._node: NodeRoutes | None = None
        if shared and one_node and inside.size > 1 and mesh.device.type == "cpu":
            self._node = NodeRoutes(self.group, inside, NodeMemory(self.group, inside, mesh.timeout))
        self._routes = _routes(self.group, self._node is not None and self._node.memory.usable)
        self._device = mesh.device
        self._costs: RouteCosts | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> AllToAll:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("what ranks share cannot be pickled")

    @property
    def refused(self) -> str | None:
        return None if self._node is None else self._node.memory.refused

    def splits(self, counts: Tensor) -> Splits:
        """What every rank sends, from the counts of rows [size * k] or [size, k] that each of them tells."""
        gather = None if self._node is None else self._node.gather
        return gather_splits(counts, self.group, name=f"counts of {self.name}", gather=gather)

    def __call__(
        self, x: Tensor, splits: Splits, *, wire_dtype: torch.dtype | None = None, route: str | None = None
    ) -> Tensor:
        """The rows that the others send here, those of the first rank first: [sum(sent), ...] -> [sum(received), ...].

        wire_dtype: what floats are cast to where they are sent, and back from where they are received; so are their
        gradients. Raises LayoutError where x has other rows than splits says, CommError where a rank does not come.
        """
        return self.begin(x, splits, wire_dtype=wire_dtype, route=route).finish()

    def begin(
        self, x: Tensor, splits: Splits, *, wire_dtype: torch.dtype | None = None, route: str | None = None
    ) -> Underway:
        """Starts an exchange; x must not change before it is finished."""
        if x.shape[:1] != (splits.num_sent,):
            raise LayoutError(
                f"{self.name}: {tuple(x.shape)} is to be sent, and its counts say {splits.num_sent} rows.",
                fix="count the rows that are sent",
            )
        cast = wire_dtype if wire_dtype is not None and x.dtype.is_floating_point else x.dtype
        exchange = _Exchange(self, splits, cast, route)
        if not (torch.is_grad_enabled() and x.requires_grad):
            exchange.begin(x)
            return Underway(None, exchange)
        return Underway(_Begin.apply(x, exchange), exchange)  # type: ignore[no-untyped-call]

    def in_memory(self, splits: Splits, row_bytes: int) -> SharedRows | None:
        """Places of rows that are written where they are wanted: where all ranks share memory, and it is large enough.

        Every rank of the group asks, at the same place among its exchanges.
        """
        if self._node is None or self.group.levels is not None:
            return None
        if not self._node.memory.provide(self._node.slot_bytes("shared", splits, row_bytes)):
            return None
        return SharedRows(self._node, splits, self.name)

    def routes(self) -> list[str]:
        """The ways that rows can take here."""
        return list(self._routes)

    def route_of(self, splits: Splits, row_bytes: int) -> str:
        """The way that rows of so many bytes take: the same on every rank, by what the fullest of them has to carry."""
        if len(self._routes) == 1:
            return "flat"
        key = ("route", row_bytes)
        if key not in splits.kept:
            splits.kept[key] = self.measure().best(splits.most_rows * row_bytes / self.group.size)
        route: str = splits.kept[key]
        return route

    def measure(self) -> RouteCosts:
        """How long every route takes; measured at the first call, or else at the first exchange that has a choice.

        All ranks of the group call it; it takes some seconds where the group spans many nodes.
        """
        if self._costs is None:
            with torch.no_grad():
                self._costs = measure_routes(self._candidates(), self.group, self._run_once, self._meet)
        return self._costs

    def _candidates(self) -> list[str]:
        """Routes to choose from: where a node's ranks share memory, sockets inside it are never faster."""
        return [route for route in self._routes if route != "two-level" or len(self._routes) == 2]

    def _meet(self) -> None:
        self.splits(torch.zeros(self.group.size, dtype=torch.int64))

    def _run_once(self, route: str, pair_bytes: int) -> None:
        n = self.group.size
        even = Splits(torch.ones(n, n, 1, dtype=torch.int64), self.group.index)
        self.start(torch.zeros(n, pair_bytes, dtype=torch.uint8, device=self._device), even, route)()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def start(self, x: Tensor, splits: Splits, route: str | None) -> Arrival:
        """Starts the exchange of rows of bytes; a route that memory is too small for is taken without it."""
        if route is None:
            route = self.route_of(splits, x.shape[1])
        elif route not in self._routes:
            known = ", ".join(self._routes)
            raise LayoutError(f"{self.name}: rows cannot go by '{route}' here.", fix=f"name one of {known}, or none")
        if self._node is not None and route in _THROUGH_MEMORY:
            if self._node.memory.provide(self._node.slot_bytes(route, splits, x.shape[1])):
                return self._node.begin(route, x, splits, self.name)
        if self.group.levels is not None and route != "flat":
            return begin_two_levels(x, splits, self.group, self.name)
        return begin_flat(x, splits, self.group, self.name)


def _routes(group: Group, through_memory: bool) -> tuple[str, ...]:
    if group.levels is None:
        return ("flat", "shared") if through_memory else ("flat",)
    return ("flat", "two-level", "two-level shared", "leader") if through_memory else ("flat", "two-level")


class Underway:
    """An exchange under way."""

    def __init__(self, token: Tensor | None, exchange: _Exchange):
        self._token, self._exchange = token, exchange

    def finish(self) -> Tensor:
        """The rows, once they are here; asked for once."""
        if self._token is None:
            return self._exchange.finish()
        out: Tensor = _Finish.apply(self._token, self._exchange)  # type: ignore[no-untyped-call]
        return out


class _Exchange:
    """One exchange and, once backward comes to it, that of its gradient."""

    def __init__(self, rows: AllToAll, splits: Splits, wire_dtype: torch.dtype, route: str | None):
        self.rows, self.splits, self.wire_dtype, self.route = rows, splits, wire_dtype, route
        self.back: _Exchange | None = None
        self._arrival: Arrival | None = None

    def turned(self) -> _Exchange:
        """That of the gradient."""
        self.back = _Exchange(self.rows, self.splits.transposed, self.wire_dtype, self.route)
        return self.back

    def begin(self, x: Tensor) -> None:
        dtype, shape, group = x.dtype, x.shape[1:], self.rows.group
        if group.size == 1:
            self._arrival = lambda: x.clone()
            return
        if not shape.numel():
            self._arrival = lambda: x.new_empty(sum(self.splits.received), *shape)
            return
        sent = x.detach().to(self.wire_dtype).contiguous()
        row_bytes = sent.element_size() * shape.numel()
        arrival = self.rows.start(sent.view(-1).view(torch.uint8).view(-1, row_bytes), self.splits, self.route)
        self._arrival = lambda: arrival().view(-1).view(self.wire_dtype).view(-1, *shape).to(dtype)

    def finish(self) -> Tensor:
        assert self._arrival is not None, f"{self.rows.name}: an exchange is finished once"
        arrival, self._arrival = self._arrival, None
        return arrival()


class _Begin(torch.autograd.Function):
    """Rows to a token, which stands for them in the graph while they travel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.begin(x)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, None]:
        return _Finish.apply(token, ctx.exchange.back), None  # type: ignore[no-untyped-call]


class _Finish(torch.autograd.Function):
    """A token to the rows."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.finish()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Begin.apply(grad, ctx.exchange.turned()), None  # type: ignore[no-untyped-call]
