"""Each bridge alone, forward and backward, beside the arithmetic of one process, for own, shared and mixed rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.world import world
from whale_torch.comm import bridge
from whale_torch.comm.bridge import ColumnsToRows, Enter, Leave, OwnRows, RowsToColumns, mean_of_seeds
from whale_torch.comm.region import Region
from whale_torch.mesh import Mesh, start
from whale_torch.planning.placement import VirtualDevice

LAYOUTS = [  # ranks, size of the split, ranks of a feed
    (2, 2, 1),
    (3, 3, 1),
    (4, 4, 1),
    (4, 2, 1),
    (4, 2, 2),
    (4, 4, 2),
    (4, 2, 4),
    (8, 8, 2),
    (8, 4, 2),
    (8, 8, 4),
    (8, 2, 4),
]


def _random(name: str, *shape: int) -> Tensor:
    """The same on every rank that asks for the same name."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 1009 + len(shape))
    return torch.randn(shape, generator=generator)


class _Setting:
    """One rank's region, and what every rank of its group holds."""

    def __init__(self, mesh: Mesh, size: int, feed_size: int, counts: list[int], widths: list[int]):
        rank = mesh.rank
        device = VirtualDevice("split", mesh.world, size, feed_size)
        blocks = (device.columns, device.rows, device.twins, device.copies)
        groups = [mesh.group(f"group {i}", block) for i, block in enumerate(blocks)]
        self.region = Region("a split", *groups)
        self.rank, self.ranks, self.feed = rank, self.region.columns.ranks, rank // feed_size
        self.feeds = sorted({other // feed_size for other in self.ranks})
        self.counts = tuple(counts[feed % len(counts)] for feed in self.feeds)
        self.widths = tuple(widths[i % len(widths)] for i in range(size))
        place, start_row = self.feeds.index(self.feed), 0
        start_row = sum(self.counts[:place])
        self.mine = slice(start_row, start_row + self.counts[place])
        here = self.ranks.index(rank)
        self.my_columns = slice(sum(self.widths[:here]), sum(self.widths[: here + 1]))
        self.factor = len(self.feeds)

    @property
    def num_rows(self) -> int:
        return sum(self.counts)

    def of_feed(self, name: str, feed: int, width: int) -> Tensor:
        return _random(f"{name} of feed {feed}", self.counts[self.feeds.index(feed)], width)

    def of_all_feeds(self, name: str, width: int) -> Tensor:
        return torch.cat([self.of_feed(name, feed, width) for feed in self.feeds])

    def of_rank(self, name: str, rank: int, width: int) -> Tensor:
        return _random(f"{name} of rank {rank}", self.num_rows, width)

    def sum_of_ranks(self, name: str, width: int) -> Tensor:
        return torch.stack([self.of_rank(name, rank, width) for rank in self.ranks]).sum(0)


def _run(x: Tensor, function: Callable[[Tensor], Tensor], grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = function(x)
    out.backward(grad)
    assert x.grad is not None
    return out.detach(), x.grad


def _enter(s: _Setting) -> list[tuple[Tensor, Tensor]]:
    out, grad = _run(s.of_feed("x", s.feed, 3), lambda x: Enter.apply(x, s.counts, s.region), s.of_rank("g", s.rank, 3))
    return [(out, s.of_all_feeds("x", 3)), (grad, s.sum_of_ranks("g", 3)[s.mine] * s.factor)]


def _leave(s: _Setting) -> list[tuple[Tensor, Tensor]]:
    out, grad = _run(s.of_rank("x", s.rank, 3), lambda x: Leave.apply(x, s.counts, s.region), s.of_feed("g", s.feed, 3))
    return [(out, s.sum_of_ranks("x", 3)[s.mine]), (grad, s.of_all_feeds("g", 3) / s.factor)]


def _own_rows(s: _Setting) -> list[tuple[Tensor, Tensor]]:
    x = s.of_all_feeds("x", 3)
    out, grad = _run(x, lambda x: OwnRows.apply(x, s.counts, s.region), s.of_feed("g", s.feed, 3))
    return [(out, x[s.mine]), (grad, s.of_all_feeds("g", 3) / s.factor)]


def _columns_to_rows(s: _Setting) -> list[tuple[Tensor, Tensor]]:
    width = sum(s.widths)
    z, grads = s.of_all_feeds("z", width), s.of_all_feeds("g", width)
    out, grad = _run(
        z[:, s.my_columns],
        lambda x: ColumnsToRows.apply(x, s.counts, s.widths, s.region),
        s.of_feed("g", s.feed, width),
    )
    return [(out, z[s.mine]), (grad, grads[:, s.my_columns] / s.factor)]


def _rows_to_columns(s: _Setting) -> list[tuple[Tensor, Tensor]]:
    width = sum(s.widths)
    grads = torch.cat([s.of_rank("g", rank, w) for rank, w in zip(s.ranks, s.widths, strict=True)], 1)
    out, grad = _run(
        s.of_feed("x", s.feed, width),
        lambda x: RowsToColumns.apply(x, s.counts, s.widths, s.region),
        grads[:, s.my_columns],
    )
    return [(out, s.of_all_feeds("x", width)[:, s.my_columns]), (grad, grads[s.mine] * s.factor)]


def _mean_seed(s: _Setting) -> list[tuple[Tensor, Tensor]]:
    seeds = torch.tensor([float(rank + 1) for rank in s.ranks])
    return [(mean_of_seeds(torch.tensor(float(s.rank + 1)), s.region), seeds.mean())]


BRIDGES = {
    "enter": _enter,
    "leave": _leave,
    "own rows": _own_rows,
    "columns to rows": _columns_to_rows,
    "rows to columns": _rows_to_columns,
    "mean seed": _mean_seed,
}


def _errors(
    rank: int, n: int, size: int, feed_size: int, sizes: list[tuple[list[int], list[int]]], mutation: str | None
) -> dict[str, float]:
    mesh = start()
    found: dict[str, float] = {}
    for counts, widths in sizes:
        s = _Setting(mesh, size, feed_size, counts, widths)
        if mutation is not None:
            MUTATIONS[mutation](s)
        for name, one in BRIDGES.items():
            pairs = one(s)
            assert all(out.shape == expected.shape for out, expected in pairs), (name, pairs)
            found[f"{name} {counts} {widths}"] = max(float((out - expected).abs().sum()) for out, expected in pairs)
    return found


SIZES = [([2], [3]), ([3, 1, 2, 4], [3, 2, 2, 1]), ([0, 2], [0, 2, 1]), ([2, 0], [1, 0]), ([0], [1]), ([1], [0])]


@pytest.mark.parametrize(("n", "size", "feed_size"), LAYOUTS)
def test_bridges(n: int, size: int, feed_size: int) -> None:
    for found in world(n, _errors, size, feed_size, SIZES, None):
        assert {name: error for name, error in found.items() if error > 1e-4} == {}


def _patch(name: str, value: Any) -> Callable[[_Setting], None]:
    return lambda s: setattr(bridge, name, value)


def _scale(name: str, by: float) -> Callable[[_Setting], None]:
    """The scale rule broken in one backward."""

    def patch(s: _Setting) -> None:
        original = getattr(bridge, name)
        patched = lambda *args: original(*args) * (by if "backward" in args[-1] else 1.0)  # noqa: E731
        _patch(name, patched)(s)

    return patch


def _blocks_in_another_order(s: _Setting) -> None:
    original = bridge._gather_blocks
    _patch("_gather_blocks", lambda *args: original(*args)[::-1])(s)


MUTATIONS: dict[str, Callable[[_Setting], None]] = {
    "no scale": _patch(
        "_scaled_gather", lambda grad, counts, region, name: bridge.gather_feeds(grad, counts, region, name)
    ),
    "no sum over twins": _patch("all_reduce", lambda x, group, name: x),
    "columns in another order": _blocks_in_another_order,
    "rows of another feed": _patch("own_feed", lambda x, counts, region: x[: counts[region.rows.index]]),
    "enter's scale": _scale("sum_to_feed", 0.5),
    "columns to rows' scale": _scale("rows_to_columns", 2.0),
    "rows to columns' scale": _scale("columns_to_rows", 0.5),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_seen(mutation: str) -> None:
    """Rows and twins are both more than one here, so every part of a bridge has work to do."""
    results = world(4, _errors, 4, 2, [([2, 3], [3, 3, 3, 3])], mutation)
    assert max(error for found in results for error in found.values()) > 1e-2
