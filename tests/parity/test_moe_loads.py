"""Loads of experts over ranks are those of one process, each token counted once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whale_torch as wh
from tests.world import world
from whale_torch import moe

SPLITS: dict[str, dict[str, Any] | None] = {
    "replica": None,
    "all": {},
    "shared": {"size": 2, "rows": "shared"},
}


class Net(nn.Module):
    """Experts cut or whole, and whole ones beside a split whose ranks are fed alike."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        split = SPLITS[layout]
        self.first = nn.Linear(5, 8)
        self.whole = moe.MoELayer(8, 3, 1, hidden=4)
        with wh.replica() if split is None else wh.split(**split):
            self.ffn = moe.MoELayer(8, 5, 2, hidden=6, capacity_factor=0.9, min_capacity=1)
            self.last = nn.Linear(8, 7)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h + self.whole(h)
        out: Tensor = self.last(h + self.ffn(h))
        return out


def _told(rank: int, n: int, layout: str) -> list[tuple[dict[str, float], dict[str, float]]]:
    torch.manual_seed(0)
    model = Net(layout)
    for layer in (model.ffn, model.whole):
        layer.gate.weight.data.normal_()  # type: ignore[operator, union-attr]
    alone = copy.deepcopy(model)
    wh.parallelize(model)
    index, feeds = wh.data_rank(model)
    told: dict[nn.Module, list[dict[str, float]]] = {}
    optimizers = {}
    for m in (model, alone):
        told[m] = []
        moe.on_load(m, lambda found, log=told[m]: log.append(moe.scalars(found)))  # type: ignore[misc]
        optimizers[m] = torch.optim.SGD(m.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(1)
    counts = [5, 2, 4, 3][:feeds]
    here = slice(sum(counts[:index]), sum(counts[: index + 1]))
    for _ in range(2):
        for _ in range(2):
            x, y = torch.randn(sum(counts), 5, generator=draw), torch.randint(7, (sum(counts),), generator=draw)
            for m, part in ((model, here), (alone, slice(None))):
                F.cross_entropy(m(x[part]), y[part]).backward()
        for m in (model, alone):
            optimizers[m].step()
            m.zero_grad()
    return list(zip(told[model], told[alone], strict=True))


@pytest.mark.parametrize("layout", SPLITS)
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.matrix(keep=2)
def test_loads_on_ranks_are_those_of_one_process(n: int, layout: str) -> None:
    for steps in world(n, _told, layout):
        assert len(steps) == 2
        for found, expected in steps:
            assert found == pytest.approx(expected, rel=1e-4), found


def _piped(rank: int, n: int) -> tuple[dict[str, float], dict[str, float]]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 8), moe.MoELayer(8, 4, 2, hidden=6), nn.Linear(8, 7), nn.CrossEntropyLoss())

    class Piped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.net[3](self.net[2](self.net[1](self.net[0](x))), y)  # type: ignore[no-any-return]

    whole = Piped()
    alone = copy.deepcopy(whole)
    wh.annotate(whole, {r"net\.[01]": wh.stage(), r"net\.[23]": wh.stage()}, inside=wh.pipeline(num_micro_batches=2))
    x, y = torch.randn(8, 5), torch.randint(7, (8,))
    wh.parallelize(whole, sample_inputs=(x, y))
    found = []
    for m in (whole, alone):
        told: list[moe.Loads] = []
        moe.on_load(m, told.append)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        m(x, y).backward()
        optimizer.step()
        assert len(told) == 1
        found.append(moe.scalars(told[0]))
    for key in ("net.1/loss",):  # of a micro-batch
        assert abs(found[0].pop(key) - found[1].pop(key)) < 0.01
    return found[0], found[1]


def test_a_pipelines_loads_are_known_to_all_its_ranks() -> None:
    for found, expected in world(2, _piped):
        assert found == pytest.approx(expected, rel=1e-4)
