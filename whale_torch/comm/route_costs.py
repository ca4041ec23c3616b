"""Which way rows take: seconds of every route at some sizes, measured once a group, and interpolated between."""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from whale_torch.comm.collectives import all_reduce
from whale_torch.mesh import Group

__all__ = ["RouteCosts", "measure_routes"]

_TIMES = 7
_SIZES = (256, 1 << 10, 1 << 12, 1 << 14, 1 << 16)
_SIZES_OF_ONE_NODE = (256, 1 << 12, 1 << 16, 1 << 18)
_BISECTIONS = 2
"""Sizes measured besides, between the last that one route is best at and the first that another is."""


@dataclass(frozen=True, slots=True)
class RouteCosts:
    """Seconds by route and size; equal on all ranks.

    sizes: bytes for each pair of ranks, ascending. seconds: of each route at each size, of the slowest rank.
    """

    sizes: tuple[int, ...]
    seconds: Mapping[str, tuple[float, ...]]

    def best(self, pair_bytes: float) -> str:
        """The route that is fastest at a size; beyond the sizes measured the one that is at the nearest of them."""
        return min(self.seconds, key=lambda route: self.at(route, pair_bytes))

    def at(self, route: str, pair_bytes: float) -> float:
        """Seconds of a route, on the line between its two nearest sizes."""
        known = self.seconds[route]
        above = bisect_left(self.sizes, pair_bytes)
        if above in (0, len(self.sizes)):
            return known[min(above, len(self.sizes) - 1)]
        low, high = self.sizes[above - 1], self.sizes[above]
        share = (pair_bytes - low) / (high - low)
        return known[above - 1] * (1 - share) + known[above] * share

    def changes(self) -> list[int]:
        """Places in sizes before which another route is best than at them."""
        found = [self.best(size) for size in self.sizes]
        return [place for place in range(1, len(found)) if found[place] != found[place - 1]]

    def with_size(self, size: int, seconds: Sequence[float]) -> RouteCosts:
        """The same with one more size and its seconds, a route each."""
        place = bisect_left(self.sizes, size)
        longer = {
            route: (*known[:place], new, *known[place:])
            for (route, known), new in zip(self.seconds.items(), seconds, strict=True)
        }
        return RouteCosts((*self.sizes[:place], size, *self.sizes[place:]), longer)


def measure_routes(routes: Sequence[str], group: Group, run: Callable[[str, int], None]) -> RouteCosts:
    """Medians of several exchanges of every route at every size, alternating.

    run(route, pair_bytes): one exchange, of so many bytes for each pair of ranks.
    """
    costs = RouteCosts((), dict.fromkeys(routes, ()))
    for size in _SIZES_OF_ONE_NODE if group.levels is None else _SIZES:
        costs = costs.with_size(size, _seconds(routes, group, size, run))
    for _ in range(_BISECTIONS):
        if not (changes := costs.changes()):
            break
        low, high = costs.sizes[changes[-1] - 1], costs.sizes[changes[-1]]
        between = int((low * high) ** 0.5)
        costs = costs.with_size(between, _seconds(routes, group, between, run))
    return costs


def _seconds(routes: Sequence[str], group: Group, size: int, run: Callable[[str, int], None]) -> list[float]:
    """Each route's median, on the slowest rank; the first exchange of each is not counted."""
    taken: dict[str, list[float]] = {route: [] for route in routes}
    for _ in range(_TIMES + 1):
        for route in routes:
            all_reduce(torch.zeros(1, device="cpu"), group, name="routes measured")  # all begin together
            start = time.perf_counter()
            run(route, size)
            taken[route].append(time.perf_counter() - start)
    medians = torch.tensor([statistics.median(taken[route][1:]) for route in routes], device="cpu")
    found: list[float] = all_reduce(medians, group, op=dist.ReduceOp.MAX, name="routes measured").tolist()
    return found
