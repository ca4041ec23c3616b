"""Exchanges in two levels give what flat ones give, for even, uneven and empty rows."""

from __future__ import annotations

import pytest
import torch

from tests.world import world
from whale_torch.comm.collectives import all_gather_rows, gather_equal, reduce_scatter_rows, spread_async
from whale_torch.mesh import start


def _exchange(rank: int, ranks: int, counts: list[int]) -> None:
    mesh = start()
    everyone = tuple(range(ranks))
    flat = mesh.group("flat", (everyone,), channel="flat")
    levels = mesh.two_levels("levels", (everyone,), channel="levels")
    assert flat.levels is None and levels.levels is not None
    generator = torch.Generator().manual_seed(rank)
    own = torch.randn(counts[rank], 3, generator=generator)
    torch.testing.assert_close(all_gather_rows(own, counts, levels), all_gather_rows(own, counts, flat), rtol=0, atol=0)
    every = torch.randn(sum(counts), 3, generator=generator)
    torch.testing.assert_close(reduce_scatter_rows(every, counts, levels), reduce_scatter_rows(every, counts, flat))
    equal = torch.randn(2, 5, generator=generator)
    torch.testing.assert_close(gather_equal(equal, levels), gather_equal(equal, flat), rtol=0, atol=0)
    for group in (levels, flat):
        table, wait = spread_async((rank, rank + 10), group)
        wait()
        assert table.tolist() == [[r, r + 10] for r in range(ranks)]


@pytest.mark.parametrize(("ranks", "per_node"), [(4, 2), (6, 3), (8, 2), (8, 4)])
@pytest.mark.parametrize("rows", ["even", "uneven", "empty"])
def test_equal_flat_exchanges(ranks: int, per_node: int, rows: str) -> None:
    counts = {
        "even": [2] * ranks,
        "uneven": [r % 3 + 1 for r in range(ranks)],
        "empty": [r % 2 * 3 for r in range(ranks)],
    }
    world(ranks, _exchange, counts[rows], local_world_size=per_node)


def test_one_level_where_nodes_hold_one_rank() -> None:
    world(2, _has_no_levels, local_world_size=1)
    world(2, _has_no_levels)


def _has_no_levels(rank: int, ranks: int) -> None:
    assert start().everyone().levels is None
