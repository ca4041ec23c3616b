"""Gates and drops that look at all tokens, beside splits of shared rows: n ranks are one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.split_case import gradients_of
from tests.world import world
from whale_torch import moe

BAR, DIM = 1e-5, 8


class Named(moe.Gate):
    """The expert that a feature names; the larger another one is, the sooner a token's turn."""

    def route(self, x: Tensor, mask: Tensor | None) -> moe.Routing:
        experts = (x[:, :1].detach() * 100).int().remainder(self.num_experts)
        return moe.Routing(experts, x[:, 1:2].sigmoid(), mask=mask, priority=x[:, 2])


OPTIONS: dict[str, Any] = {
    "by position": {"capacity_factor": 0.6, "min_capacity": 1},
    "by priority": {"capacity_factor": 0.6, "min_capacity": 1, "drop": "priority", "importance_coef": 0.1},
    "by experts": {"gate": lambda: moe.ExpertChoice(DIM, 5, capacity_factor=1.3)},
    "by experts, few": {
        "gate": lambda: moe.ExpertChoice(DIM, 5, capacity_factor=1.3),
        "capacity_factor": 0.5,
        "min_capacity": 1,
    },
    "by their ids": {"gate": lambda: moe.Hash(9, 5, 2), "capacity_factor": 0.6, "min_capacity": 1},
    "by a gate of one's own": {"gate": lambda: Named(5, 1), "capacity": [2, 1, 3, 0, 2]},
}
SCOPES: dict[str, Any] = {"whole": wh.replica, "pairs": lambda: wh.split(size=2, rows="shared"), "all": wh.split}


class Beside(nn.Module):
    """A layer of experts that gets the columns of a split whose ranks are fed alike."""

    def __init__(self, fed_alike: int, scope: str, gate: Any = "softmax", **options: Any) -> None:
        super().__init__()
        with wh.split(size=fed_alike, rows="shared"):
            self.first = nn.Linear(5, DIM)
        with SCOPES[scope]():
            self.ffn = moe.MoELayer(DIM, 5, hidden=12, gate=gate if isinstance(gate, str) else gate(), **options)
        self.last = nn.Linear(DIM, 7)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        ids = {"token_ids": (4 * x[..., 1]).long().remainder(9)} if isinstance(self.ffn.gate, moe.Hash) else {}
        out: Tensor = self.last(h + self.ffn(h, mask=x[..., 0] > -1, **ids))
        return out


def _beside(rank: int, n: int, fed_alike: int, scope: str, options: str) -> tuple[float, float, float, float]:
    """(errors of outputs, of gradients, of the auxiliary loss, of the tokens that wh.moe.load counts)"""
    torch.manual_seed(0)
    model: Any = Beside(fed_alike, scope, **OPTIONS[options])
    for p in model.ffn.gate.parameters():
        p.data.normal_()
    alone: Any = copy.deepcopy(model)
    wh.parallelize(model)
    index, feeds = wh.data_rank(model)
    counts = [3, 2, 4, 1][:feeds]
    here = slice(sum(counts[:index]), sum(counts[: index + 1]))
    moe.load(model)
    torch.manual_seed(1)
    x, y = torch.randn(sum(counts), 3, 5), torch.randint(7, (sum(counts), 3))
    outputs = []
    for m, part in ((model, here), (alone, slice(None))):
        z = m(x[part])
        F.cross_entropy(z.flatten(0, 1), y[part].flatten()).backward()
        outputs.append(z.detach())
    error = float((outputs[0] - outputs[1][here]).abs().max())
    tokens = moe.load(model)["ffn"]["tokens"] - float((x[..., 0] > -1).sum())
    loss = float((moe.aux_loss(model) - moe.aux_loss(alone)).abs())
    return error, relative_error(gradients_of(model), gradients_of(alone)), loss, abs(tokens)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("fed_alike", [2, 4])
@pytest.mark.matrix(keep=1)
def test_tokens_that_several_ranks_are_fed_count_once(fed_alike: int, scope: str, options: str) -> None:
    for errors in world(4, _beside, fed_alike, scope, options):
        assert max(errors) < BAR, errors


class Drawing(nn.Module):
    """Ranks that are fed alike draw numbers for slices of different sizes, and then for the same masks."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        with wh.split(size=2, rows="shared"):
            self.ffn = moe.MoELayer(DIM, 4, **options)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.ffn(x) + 1)
        return out


def _drawn(rank: int, n: int, what: str) -> list[Tensor]:
    """Outputs of three steps."""
    torch.manual_seed(0)
    options: Any = {
        "jitter": {"jitter": 0.1},
        "second": {"gate": moe.TopK(DIM, 4, 2, second="random")},
        "experts": {"expert": lambda: nn.Sequential(nn.Dropout(0.3), nn.Linear(DIM, DIM))},
    }[what]
    model = wh.parallelize(Drawing(**options))
    outputs = []
    for x in torch.randn(3, 5, DIM):
        y = model(x)
        y.sum().backward()
        outputs.append(y.detach())
    return outputs


@pytest.mark.parametrize("what", ["jitter", "second", "experts"])
@pytest.mark.matrix(keep=1)
def test_ranks_that_share_tokens_draw_alike_afterwards(what: str) -> None:
    one, other = world(2, _drawn, what)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Beneath(nn.Module):
    """A stage with a split whose ranks are fed alike, and experts that each rank runs whole or on a slice."""

    def __init__(self, gate: Any = "softmax", **options: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, DIM), nn.Linear(DIM, 7)
        self.ffn = moe.MoELayer(DIM, 5, hidden=12, gate=gate if isinstance(gate, str) else gate(), **options)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return F.cross_entropy(self.last(h + self.ffn(h)), y)


def _beneath(rank: int, n: int, inner: bool, options: str, rows: int) -> float:
    """Error of gradients."""
    torch.manual_seed(0)
    model: Any = Beneath(**OPTIONS[options])
    for p in model.ffn.gate.parameters():
        p.data.normal_()
    alone: Any = copy.deepcopy(model)
    one = wh.stage()
    scopes = {
        "first": (one, wh.split(rows="shared")),
        "ffn": (one, wh.replica()) if inner else one,
        "last": wh.stage(),
    }
    wh.parallelize(wh.annotate(model, scopes, inside=wh.pipeline(num_micro_batches=2, num_ranks=2)))
    torch.manual_seed(1)
    x, y = torch.randn(rows, 5), torch.randint(7, (rows,))
    model(x, y).backward()
    for part in torch.arange(rows).tensor_split(2):
        alone.ffn.loss_factor = len(part) / rows
        (alone(x[part], y[part]) * len(part) / rows).backward()
    return relative_error(gradients_of(model), gradients_of(alone))


@pytest.mark.parametrize("options", ["by position", "by experts"])
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.matrix(keep=1)
def test_stages_that_are_fed_alike_count_tokens_once(inner: bool, options: str) -> None:
    assert max(world(4, _beneath, inner, options, 9)) < BAR


def _too_few(rank: int, n: int) -> str:
    try:
        _beneath(rank, n, True, "by position", 3)
    except wh.LayoutError as error:
        return str(error)
    except wh.CommError:
        return "of another stage"
    return ""


def test_too_few_samples_for_a_capacity_are_refused() -> None:
    said = world(4, _too_few)
    assert sum("fewer samples than the 2 ranks" in one for one in said) >= 2 and all(said), said
