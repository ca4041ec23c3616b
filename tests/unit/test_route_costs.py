"""Which route rows take: on lines between the sizes that were measured, and found with few measurements."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from whale_torch.comm import route_costs
from whale_torch.comm.route_costs import RouteCosts, measure_routes
from whale_torch.mesh import Group, TwoLevels


def test_the_fastest_between_the_sizes() -> None:
    costs = RouteCosts((100, 200, 400), {"flat": (4.0, 4.0, 6.0), "leader": (1.0, 3.0, 9.0)})
    assert costs.at("leader", 150) == pytest.approx(2.0)
    assert costs.at("flat", 300) == pytest.approx(5.0)
    assert [costs.at("leader", size) for size in (1, 100, 400, 10_000)] == [1.0, 1.0, 9.0, 9.0]
    assert [costs.best(size) for size in (1, 249, 251, 10_000)] == [
        "leader",
        "leader",
        "flat",
        "flat",
    ]  # 3 + 6s = 4 + 2s
    assert costs.changes() == [2]
    assert costs.leads("flat") and not costs.leads("leader")


def test_a_size_more() -> None:
    costs = RouteCosts((100, 400), {"flat": (4.0, 6.0), "leader": (1.0, 9.0)}).with_size(200, [5.0, 2.0])
    assert costs == RouteCosts((100, 200, 400), {"flat": (4.0, 5.0, 6.0), "leader": (1.0, 2.0, 9.0)})


class _Clock:
    """Routes that take so long as a model says, on a clock that only they move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, tuple[float, float]]):
        self.now, self.seconds, self.calls = 0.0, seconds, 0
        monkeypatch.setattr(route_costs, "time", SimpleNamespace(perf_counter=lambda: self.now, sleep=lambda _: None))

    def run(self, route: str, size: int) -> None:
        start, per_byte = self.seconds[route]
        self.now += start + per_byte * size
        self.calls += 1


def _group(levels: bool) -> Group:
    group = Group("rows", (0,), 0, None)
    group.levels = TwoLevels(group, group) if levels else None
    return group


@pytest.mark.parametrize("crossing", [700, 3000, 9000, 40_000, 300_000])
def test_the_crossing_is_found(monkeypatch: pytest.MonkeyPatch, crossing: int) -> None:
    clock = _Clock(monkeypatch, {"flat": (1.0 + crossing * 1e-4, 1e-4), "leader": (1.0, 2e-4)})
    costs = measure_routes(["flat", "leader"], _group(levels=True), clock.run, lambda: None)
    assert costs.best(crossing * 0.95) == "leader" and costs.best(crossing * 1.05) == "flat"
    assert costs.best(1 << 22) == "flat"
    assert clock.calls <= 12 * 2 * 6


def test_nothing_larger_is_measured_than_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch, {"flat": (1.0, 1e-4), "leader": (0.9, 3e-4)})
    costs = measure_routes(["flat", "leader"], _group(levels=True), clock.run, lambda: None)
    assert max(costs.sizes) == 1 << 12
    clock = _Clock(monkeypatch, {"flat": (2.0, 0.0), "shared": (1.0, 0.0)})
    costs = measure_routes(["flat", "shared"], _group(levels=False), clock.run, lambda: None)
    assert costs.best(9) == costs.best(1 << 30) == "shared"
