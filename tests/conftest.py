"""Options of the suite: how much of a large matrix runs."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("whale_torch")
    group.addoption(
        "--matrix", choices=["subset", "all"], default="subset", help="how much of tests marked `matrix` runs"
    )
    group.addoption("--matrix-seed", type=int, default=0, help="which subset of a matrix runs")


def pytest_report_header(config: pytest.Config) -> str:
    matrix, seed = config.getoption("--matrix"), config.getoption("--matrix-seed")
    chosen = f"subset, --matrix-seed={seed}" if matrix == "subset" else "all"
    return f"torch {torch.__version__}; matrices: {chosen}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--matrix") == "subset":
        dropped = _outside_the_subset(items, config.getoption("--matrix-seed"))
        config.hook.pytest_deselected(items=dropped)
        gone = set(dropped)
        items[:] = [item for item in items if item not in gone]


def _outside_the_subset(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Of each test marked `matrix(keep=k)` all cases but k, chosen by the seed and the test's name alone."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("matrix"):
            cases[item.nodeid.partition("[")[0]].append(item)
    dropped: list[pytest.Item] = []
    for name, matrix in cases.items():
        marker = matrix[0].get_closest_marker("matrix")
        assert marker is not None
        keep: int = marker.kwargs["keep"]
        chosen = set(random.Random(f"{seed} {name}").sample(range(len(matrix)), min(keep, len(matrix))))
        dropped += [item for index, item in enumerate(matrix) if index not in chosen]
    return dropped


@pytest.fixture
def kept(request: pytest.FixtureRequest) -> frozenset[tuple[object, ...]]:
    """The cases of a test that this run of the suite has, their parameters in the order of their names.

    A world of ranks may then train all of them, once.
    """
    mine = (item for item in request.session.items if isinstance(item, pytest.Function))
    return frozenset(
        tuple(item.callspec.params[name] for name in sorted(item.callspec.params))
        for item in mine
        if item.path == request.node.path and item.originalname == request.node.originalname
    )
