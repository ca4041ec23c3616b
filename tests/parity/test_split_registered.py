"""A user's own split rule equals one process, and so do modules that stay whole inside a split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity.compare import Model, check, uneven
from whale_torch.comm.columns import Columns
from whale_torch.comm.rows import enter_rows, partial_parameter
from whale_torch.planning.layout import Shard, balanced
from whale_torch.planning.rules import Cut, RuleContext
from whale_torch.strategies.split_rules import SplitModule, register_split_rule


class LowRank(nn.Module):
    """x @ down @ up: `up` is the large one and is cut by columns, `down` stays whole."""

    def __init__(self, taken: int, given: int, rank: int = 3):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(taken, rank)), nn.Parameter(torch.randn(rank, given))
        self.scale = nn.Parameter(torch.ones(taken))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale) @ self.down @ self.up


def plan_low_rank(module: nn.Module, name: str, context: RuleContext) -> list[Cut]:
    rank, given = module.up.shape  # type: ignore[union-attr, misc]
    widths = balanced(given, context.size)
    return [Cut(name, "low rank", "columns", widths, (("up", Shard(1, widths, (rank, given))),), module.down.shape[0])]  # type: ignore[index, union-attr, arg-type]


class SplitLowRank(SplitModule, LowRank):
    def forward(self, x: Tensor) -> Columns:
        rows, counts, lead = enter_rows(x, self._region)
        down, scale = partial_parameter(self.down, self._region), partial_parameter(self.scale, self._region)
        return self._columns((rows * scale) @ down @ self.up, counts, lead, fresh=True)


class WrongLowRank(SplitModule, LowRank):
    """Forgets that each rank sees the gradient of `down` only through its own columns."""

    def forward(self, x: Tensor) -> Columns:
        rows, counts, lead = enter_rows(x, self._region)
        return self._columns((rows * self.scale) @ self.down @ self.up, counts, lead, fresh=True)


class Adapted(Model):
    """A registered module, a vector of the container's own and a norm, all in one split."""

    rule: type[SplitModule] = SplitLowRank

    def __init__(self, scope: Any):
        super().__init__()
        register_split_rule(LowRank, plan=plan_low_rank, classes={"columns": self.rule}, name="low rank")
        with scope():
            self.body = Body()
        self.head = nn.Linear(7, 2)

    @staticmethod
    def batch(rows: int) -> tuple[Any, ...]:
        return (torch.randn(rows, 5, generator=torch.Generator().manual_seed(1)),)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = LowRank(5, 10)
        self.fc = nn.Linear(10, 7)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 7))
        self.norm = nn.LayerNorm(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(self.low(x).tanh()) * self.gain)


class Wrong(Adapted):
    rule = WrongLowRank


@pytest.mark.parametrize(("mode", "n"), [("own", 3), ("shared", 4), ("pairs", 4)])
def test_a_registered_rule(mode: str, n: int) -> None:
    check(Adapted, n, mode, uneven)


def test_the_comparison_sees_a_gradient_of_a_part() -> None:
    with pytest.raises(AssertionError, match="is off"):
        check(Wrong, 2)
