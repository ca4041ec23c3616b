"""Exchanges in two levels give what flat ones give, for even, uneven and empty rows."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
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
        spread = spread_async((rank, rank + 10), group)
        if rank % 2:  # on some ranks nobody reads
            spread.advance()
        else:
            assert spread.wait().tolist() == spread.wait().tolist() == [[r, r + 10] for r in range(ranks)]
    dist.barrier()  # a process that ends takes its part of an exchange along


@pytest.mark.matrix(keep=3)
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


def _rank_0_alone(rank: int, n: int, per_node: int, inside: bool) -> tuple[float, float]:
    """A gradient that one rank asks for, while the others go on to their own ends."""
    model = wh.parallelize(LossInside() if inside else nn.Linear(3, 4), timeout=8.0)
    assert (start().everyone().levels is not None) is (per_node < n)
    x = torch.randn(rank + 1, 3, generator=torch.Generator().manual_seed(rank))
    out = model(x, torch.arange(rank + 1) % 4) if inside else model(x).mean()
    if rank == 0:
        torch.autograd.grad(out, list(model.parameters()))
        out = model(x, torch.arange(rank + 1) % 4) if inside else model(x).mean()
    else:
        time.sleep(1.0)
        out = model(x, torch.arange(rank + 1) % 4) if inside else model(x).mean()
    out.backward()
    return float(out.detach()), float(sum(p.grad.sum() for p in model.parameters()))


class LossInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), y)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("per_node", [4, 2])
def test_one_rank_alone_may_ask_for_a_gradient(per_node: int, inside: bool) -> None:
    """What it reads for that, row counts and counts of labels, came without the others' help."""
    found = world(4, _rank_0_alone, per_node, inside, local_world_size=per_node, timeout=40)
    assert all(gradient == pytest.approx(found[0][1], abs=1e-5) for _, gradient in found)
