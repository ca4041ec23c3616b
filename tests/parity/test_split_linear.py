"""Linear layers in a split: pairs, gated pairs and lone layers equal one process, and pairs move nothing between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.compare import Case, Model, check, check_all, even, own, uneven
from tests.world import world
from whale_torch.comm import bridge
from whale_torch.comm.rows import enter_columns, leave_rows
from whale_torch.state import full_tensor
from whale_torch.strategies.runtime import runtime_of
from whale_torch.strategies.split_linear import RowLinear

WORLDS = [("own", 2), ("own", 3), ("own", 4), ("shared", 2), ("shared", 4), ("pairs", 4)]


class Pairs(Model):
    """A pair, then a gated pair, between replicated layers; 10 and 7 hidden features on up to 4 ranks."""

    def __init__(self, scope: Any, bias: bool = True, cut: str | None = None, shape: tuple[int, ...] = ()):
        super().__init__()
        self.first = nn.Linear(6, 8)
        with scope(**({"cut": cut} if cut else {})):
            self.mlp = nn.Sequential(nn.Linear(8, 10, bias=bias), nn.GELU(), nn.Linear(10, 8, bias=bias))
            self.gate, self.up, self.down = (
                nn.Linear(8, 7, bias=bias),
                nn.Linear(8, 7, bias=bias),
                nn.Linear(7, 8, bias=bias),
            )
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


class Lone(Model):
    """A layer alone that widens, one that narrows, and two of one size of which the second is a wrong guess."""

    def __init__(self, scope: Any):
        super().__init__()
        with scope():
            self.wide, self.narrow = nn.Linear(6, 10), nn.Linear(6, 3)
            self.norm = nn.RMSNorm(6)
            self.same, self.guess = nn.Linear(6, 6), nn.Linear(6, 6)
        self.out = nn.Linear(3, 1)

    batch = Pairs.batch

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return (
            self.wide(h).softmax(-1).sum(-1, keepdim=True)
            + self.out(self.narrow(h))
            + (self.same(h) * self.guess(h)).mean(-1, keepdim=True)
        )


class Twice(Model):
    """One layer object called twice and reachable under two names; a dropout of probability 0; several roots."""

    def __init__(self, scope: Any):
        super().__init__()
        with scope():
            self.layer = nn.Linear(6, 9)
            self.again = self.layer
            self.back = nn.Linear(9, 6)
            self.drop = nn.Dropout(0.0)
        self.between = nn.Linear(6, 6)

    batch = Pairs.batch

    def forward(self, x: Tensor) -> Tensor:
        h = self.back(self.drop(torch.relu(self.layer(x))))
        return self.between(self.back(self.again(torch.tanh(h))))


CASES: list[Case] = [
    (Pairs, {}),
    (Pairs, {"bias": False, "shape": (2, 3)}),
    (Pairs, {"cut": "rows"}),
    (Pairs, {"cut": "columns"}),
    (Lone, {}),
    (Twice, {}),
]


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize(("mode", "n"), WORLDS)
@pytest.mark.parametrize("sizes", [even, uneven])
def test_linear_layers_equal_one_process(mode: str, n: int, sizes: Any) -> None:
    pairs, tuples, rows, columns, *_ = check_all(CASES, n, mode, sizes)
    assert all(run.gathered == [] for run in (*pairs, *tuples, *rows))
    assert all(run.gathered for run in columns)


def test_a_rank_without_rows() -> None:
    check_all(CASES, 3, "own", lambda rows, feeds: [rows - 2, 0, 2])


def count_collectives(rank: int, n: int) -> dict[str, int]:
    """Collectives of the region in one forward and in one backward."""
    model: Any = wh.parallelize(Pairs(own))
    region = runtime_of(model, "a test").regions[0]

    def counted() -> tuple[int, int]:
        return region.headers.num_calls, region.rows.num_calls

    before = counted()
    loss = model(*Pairs.batch(4)).mean()
    forward = counted()
    loss.backward()
    backward = counted()
    return {"headers": forward[0] - before[0], "forward": forward[1] - before[1], "backward": backward[1] - forward[1]}


def test_a_pair_enters_once_and_leaves_once() -> None:
    """Two pairs: one agreement, rows in and rows out each; the gated pair's two columns share what came in."""
    for counted in world(3, count_collectives, timeout=180):
        assert counted == {"headers": 2, "forward": 4, "backward": 4}


def double_leave() -> None:
    """A bridge with a wrong scale: leave's backward forgets to divide by the feeds."""
    bridge._scaled_gather = lambda grad, counts, region, name: bridge.gather_feeds(grad, counts, region, name)  # type: ignore[assignment]


def forget_bias() -> None:
    """Every rank adds its bias before the sum."""
    RowLinear.forward = (
        lambda self, x: leave_rows(  # type: ignore[method-assign]
            F.linear(enter_columns(x, self._cut.widths, self._region)[0], self.weight, self.bias),
            *enter_columns(x, self._cut.widths, self._region)[1:],
            self._region,
        )
    )


@pytest.mark.parametrize("mutate", [double_leave, forget_bias])
def test_the_comparison_sees_a_wrong_bridge(mutate: Any) -> None:
    with pytest.raises(AssertionError, match="is off"):
        check(Pairs, 2, mutate=mutate)


def _types_under_autocast(rank: int, n: int) -> list[torch.dtype]:
    with wh.split():
        attention, pair = (
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)),
        )
    with wh.split(cut="rows"):
        linear, conv = nn.Linear(8, 4), nn.Conv1d(4, 4, 1)
    model = nn.ModuleList([attention, pair, linear, conv])
    wh.parallelize(model)
    x = torch.ones(2, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        return [attention(x, x, x)[0].dtype, pair(x).dtype, linear(x).dtype, conv(x).dtype]


def test_outputs_have_autocasts_type() -> None:
    assert world(2, _types_under_autocast) == [[torch.bfloat16] * 4] * 2


def _written_to(rank: int, n: int) -> list[Tensor]:
    """What a split gave is the user's: residual connections and activations may work in place."""
    torch.manual_seed(0)
    with wh.split(cut="rows"):
        rows = nn.Linear(8, 8, bias=False)
    with wh.split(cut="columns"):
        columns = nn.Linear(8, 6)
    model = wh.parallelize(nn.Sequential(rows, nn.ReLU(inplace=True), columns))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))[rank :: max(n, 1)]
    z: Any = model(x)
    out = z.rows()
    before = z.local.detach().clone()
    out *= 2
    out += 1
    assert torch.equal(z.local, before)
    out.square().mean().backward()
    return [full_tensor(p, p.grad) for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("n", [1, 2])
def test_what_a_split_gave_may_be_written_to(n: int) -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 6))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    (alone(x) * 2 + 1).square().mean().backward()
    for found in world(n, _written_to):
        for mine, parameter in zip(found, alone.parameters(), strict=True):
            torch.testing.assert_close(mine, parameter.grad)
