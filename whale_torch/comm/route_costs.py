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

_FEWEST, _MOST, _ROUNDS_S = 5, 15, 0.5
"""Rounds of all routes at a size: as many as take so many seconds, within bounds; one more before is not counted."""
_PAUSE_S = 0.005
_SIZES = (256, 1 << 10, *(1 << power for power in range(12, 21)))
_MOST_OF_A_NODE = 1 << 26
"""Bytes that all ranks of a node send in one measured exchange, at most."""
_SIZES_OF_ONE_NODE = (256, 1 << 12, 1 << 16, 1 << 18)
_BISECTIONS = 1
"""Sizes measured besides, between the last that another route is best at and the first that `flat` is."""
_CLEARLY, _LONG_S = 1.1, 1.0
_SMALL = 1 << 12
"""Bytes at which a route is not yet known to stay the best."""


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

    def leads(self, route: str) -> bool:
        """Whether a route is best at the two largest sizes, or at the largest: clearly, or where all take long."""
        seconds = {name: known[-1] for name, known in self.seconds.items()}
        ahead = min(known for name, known in seconds.items() if name != route) / seconds[route]
        if ahead <= 1:
            return False
        twice = len(self.sizes) > 1 and self.best(self.sizes[-2]) == route
        return twice or ahead > _CLEARLY or sum(seconds.values()) > _LONG_S

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


def measure_routes(
    routes: Sequence[str], group: Group, run: Callable[[str, int], None], meet: Callable[[], None]
) -> RouteCosts:
    """Medians of several exchanges of every route at every size, alternating.

    run(route, pair_bytes): one exchange, of so many bytes for each pair of ranks. meet: what all ranks come out of
    together. In two levels no size is measured beyond the one from which on the straight way is best: it stays so.
    """
    costs = RouteCosts((), dict.fromkeys(routes, ()))
    for size in _sizes(group):
        costs = costs.with_size(size, _seconds(routes, group, size, run, meet))
        if group.levels is not None and size >= _SMALL and costs.leads("flat"):
            break
    for _ in range(_BISECTIONS):
        if not (changes := costs.changes()):
            break
        low, high = costs.sizes[changes[-1] - 1], costs.sizes[changes[-1]]
        between = int((low * high) ** 0.5)
        costs = costs.with_size(between, _seconds(routes, group, between, run, meet))
    return costs


def _sizes(group: Group) -> list[int]:
    if group.levels is None:
        return list(_SIZES_OF_ONE_NODE)
    return [size for size in _SIZES if size * group.size * group.levels.inside.size <= _MOST_OF_A_NODE]


def _seconds(
    routes: Sequence[str], group: Group, size: int, run: Callable[[str, int], None], meet: Callable[[], None]
) -> list[float]:
    """Each route's median, over exchanges that last as long as on their slowest rank."""

    def round_of_all() -> list[float]:
        taken = []
        for route in routes:
            meet()
            time.sleep(_PAUSE_S)  # links are idle again, as they are after a computation
            start = time.perf_counter()
            run(route, size)
            taken.append(time.perf_counter() - start)
        return taken

    first = _slowest([round_of_all()], group)[0]
    num_rounds = min(max(int(_ROUNDS_S / max(sum(first), 1e-9)), _FEWEST), _MOST)
    rounds = _slowest([round_of_all() for _ in range(num_rounds)], group)
    return [statistics.median(taken) for taken in zip(*rounds, strict=True)]


def _slowest(seconds: list[list[float]], group: Group) -> list[list[float]]:
    told = torch.tensor(seconds, dtype=torch.float64, device="cpu")
    found: list[list[float]] = all_reduce(told, group, op=dist.ReduceOp.MAX, name="routes measured").tolist()
    return found
