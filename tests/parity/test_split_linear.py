"""Linear layers in a split: pairs, gated pairs and lone layers equal one process, and pairs move nothing between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.compare import Model, check, even, uneven

WORLDS = [("own", 2), ("own", 3), ("own", 4), ("shared", 2), ("shared", 4), ("pairs", 4)]


class Pairs(Model):
    """A pair, then a gated pair, between replicated layers; 10 and 7 hidden features on up to 4 ranks."""

    def __init__(self, scope: Any, bias: bool = True, cut: str | None = None, shape: tuple[int, ...] = ()):
        super().__init__()
        self.first = nn.Linear(6, 8)
        with scope(**({"cut": cut} if cut else {})):
            self.mlp = nn.Sequential(nn.Linear(8, 10, bias=bias), nn.GELU(), nn.Linear(10, 8, bias=bias))
            self.gate, self.up, self.down = nn.Linear(8, 7, bias=bias), nn.Linear(8, 7, bias=bias), nn.Linear(7, 8, bias=bias)
            self.norm = nn.LayerNorm(8)
        self.shape = shape

    @staticmethod
    def batch(rows: int) -> tuple[Tensor, ...]:
        return (torch.randn(rows, 6, 6, generator=torch.Generator().manual_seed(1)),)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = h.unflatten(1, self.shape) if self.shape else h
        h = h + self.mlp(h)
        h = self.norm(h)
        return h + self.down(F.silu(self.gate(h)) * self.up(h))


@pytest.mark.parametrize(("mode", "n"), WORLDS)
@pytest.mark.parametrize("sizes", [even, uneven])
def test_pairs_equal_one_process_and_gather_nothing(mode: str, n: int, sizes: Any) -> None:
    for run in check(Pairs, n, mode, sizes):
        assert run.gathered == []


@pytest.mark.parametrize(("cut", "gathers"), [("columns", True), ("rows", False)])
def test_a_forced_cut_is_exact(cut: str, gathers: bool) -> None:
    for run in check(Pairs, 3, "own", uneven, cut=cut):
        assert bool(run.gathered) is gathers


def test_without_bias_in_four_dimensions() -> None:
    check(Pairs, 3, "own", uneven, bias=False, shape=(2, 3))


def test_a_rank_without_rows() -> None:
    check(Pairs, 3, "own", lambda rows, feeds: [rows - 2, 0, 2])
