"""Mixture of experts over ranks: n ranks are one process."""

from __future__ import annotations

import copy
from functools import cache
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

BAR = 1e-5
DIM = 8


class Net(nn.Module):
    """A layer of experts between whole ones; rows are sequences of 3 tokens."""

    def __init__(self, split: dict[str, Any] | None, around: Any = None, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(5, DIM)
        options = {"hidden": None if "expert" in options else 12, "aux_loss_coef": 0.1, "z_loss_coef": 0.01} | options
        options["gate"] = made() if callable(made := options.get("gate", "softmax")) else made
        with wh.replica() if split is None else wh.split(**split):
            self.ffn = moe.MoELayer(DIM, **options)
        self.last = nn.Linear(DIM, 7)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        out: Tensor = self.last(h + self.ffn(h, mask=x[..., 0] > -1))
        return out


EXPERTS: dict[str, dict[str, Any]] = {
    "top2": {"num_experts": 4, "top_k": 2},
    "top1": {"num_experts": 5, "top_k": 1},
    "gated": {"num_experts": 3, "top_k": 2, "gated": True, "activation": "silu", "shared": nn.Linear(DIM, DIM)},
    "prototypes": {"num_experts": 6, "top_k": 3, "gate": "prototypes", "importance_coef": 0.1},
    "sigmoid": {"num_experts": 7, "top_k": 3, "gate": "sigmoid"},
    "biased": {"num_experts": 4, "top_k": 2, "gate": lambda: moe.TopK(DIM, 4, 2, score="sigmoid", bias_rate=0.3)},
    "groups": {
        "num_experts": 8,
        "gate": lambda: moe.TopK(DIM, 8, 3, score="sigmoid", bias_rate=0.3, num_groups=4, top_groups=2),
    },
    "first choices": {"num_experts": 4, "aux_loss_of": "first", "capacity": [3, 9, 2, 20]},
    "own": {
        "num_experts": 4,
        "top_k": 2,
        "expert": lambda: nn.Sequential(nn.Linear(DIM, 6), nn.ReLU(), nn.Linear(6, DIM)),
    },
    "capacity": {"num_experts": 4, "top_k": 2, "capacity_factor": 0.6, "min_capacity": 1, "renormalize": "after"},
    "priority": {"num_experts": 4, "top_k": 2, "capacity_factor": 0.5, "min_capacity": 1, "drop": "priority"},
    "expert choice": {"num_experts": 5, "gate": lambda: moe.ExpertChoice(DIM, 5, capacity_factor=1.3)},
    "one expert": {"num_experts": 1, "top_k": 1},
    "in slices": {"num_experts": 3, "top_k": 2, "slices": 2},
    "gated slices through gloo": {"num_experts": 2, "top_k": 1, "slices": 3, "gated": True, "node_memory": False},
    "in chunks": {"num_experts": 4, "top_k": 2, "chunks": 3},
    "through gloo": {"num_experts": 5, "top_k": 2, "chunks": 2, "node_memory": False},
}
SPLITS: dict[str, dict[str, Any] | None] = {
    "replica": None,
    "all": {},
    "pairs": {"size": 2},
    "shared": {"size": 2, "rows": "shared"},
}


def _trained(
    rank: int, n: int, name: str, layout: str, counts: list[int]
) -> tuple[float, float, float, float, list[int]]:
    """(errors of outputs, of gradients, of parameters after two SGD steps, of the auxiliary loss, rows of experts)"""
    torch.manual_seed(0)
    model: Any = Net(SPLITS[layout], **EXPERTS[name])
    model.ffn.gate.weight.data.normal_()
    alone: Any = copy.deepcopy(model)
    wh.parallelize(model)
    index, feeds = wh.data_rank(model)
    counts = counts[:feeds]
    here = slice(sum(counts[:index]), sum(counts[: index + 1]))
    torch.manual_seed(1)
    outputs, gradients, losses = [], [], []
    for _ in range(2):
        x, y = torch.randn(sum(counts), 3, 5), torch.randint(7, (sum(counts), 3))
        for m, part in ((model, here), (alone, slice(None))):
            m.zero_grad()
            z = m(x[part])
            F.cross_entropy(z.flatten(0, 1), y[part].flatten()).backward()
            outputs.append(z.detach())
            losses.append(float(moe.aux_loss(m)))
        outputs[-1] = outputs[-1][here]
        gradients.append(relative_error(gradients_of(model), gradients_of(alone)))
        for m in (model, alone):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
    error = max(
        float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(outputs[::2], outputs[1::2], strict=True)
    )
    loss = max(abs(a - b) for a, b in zip(losses[::2], losses[1::2], strict=True))
    state = relative_error(wh.full_state_dict(model), alone.state_dict())
    return error, max(gradients), state, loss, [len(p) for p in model.ffn.experts.parameters()]


ROWS = {"even": [4] * 8, "uneven": [5, 2, 1, 3, 1, 2, 7, 1]}
WORLDS = [(n, layout) for n in (1, 2, 3, 4, 8) for layout in SPLITS if layout in ("replica", "all") or n % 2 == 0]


def _trained_each(rank: int, n: int, names: list[str], layout: str, counts: list[int]) -> list[Any]:
    return [_trained(rank, n, name, layout, counts) for name in names]


@cache
def _trained_kept(n: int, layout: str, rows: str, kept: frozenset[tuple[Any, ...]]) -> dict[str, list[Any]]:
    """What each rank found, by the kinds of experts that this run has: one world for all of them."""
    names = [name for name in EXPERTS if (name, rows, (n, layout)) in kept]
    by_rank = world(n, _trained_each, names, layout, ROWS[rows], timeout=240)
    return {name: [found[place] for found in by_rank] for place, name in enumerate(names)}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("where", WORLDS, ids=lambda where: f"{where[0]}-{where[1]}")
@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.matrix(keep=1)
def test_experts_on_ranks_are_one_process(
    name: str, where: tuple[int, str], rows: str, kept: frozenset[tuple[Any, ...]]
) -> None:
    for *errors, sizes in _trained_kept(*where, rows, kept)[name]:
        assert max(errors) < BAR, (errors, sizes)


@pytest.mark.parametrize("counts", [[3, 0, 2, 0], [1, 0, 0, 0], [2, 5, 1, 4]], ids=str)
@pytest.mark.parametrize("layout", SPLITS)
@pytest.mark.matrix(keep=1)
def test_experts_choose_among_the_tokens_of_all_ranks(layout: str, counts: list[int]) -> None:
    """Also where some ranks have none, and a rank's best tokens are all that an expert takes."""
    for *errors, rows in world(4, _trained, "expert choice", layout, counts):
        assert max(errors) < BAR, (errors, rows)


class Stages(nn.Module):
    """A layer of experts in each of two stages."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, DIM), nn.Linear(DIM, 7)
        self.a, self.b = (moe.MoELayer(DIM, 4, 2, hidden=12, aux_loss_coef=0.2, **options) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x).tanh()
        h = h + self.a(h)
        h = h + self.b(h, mask=x[..., 0] > -1)
        return F.cross_entropy(self.last(h).flatten(0, 1), y.flatten())


def in_stages(inside: Any) -> nn.Module:
    one, other = wh.stage(), wh.stage()
    scopes = {"first": one, "a": (one, *inside()), "b": (other, *inside()), "last": other}
    return wh.annotate(Stages(), scopes, inside=wh.pipeline(num_micro_batches=2, num_ranks=2))


INSIDE: dict[str, Any] = {
    "whole": lambda: (),
    "experts on ranks": lambda: (wh.split(),),
    "of shared rows": lambda: (wh.split(rows="shared"),),
}


def _piped(rank: int, n: int, inside: str, counts: list[int]) -> tuple[float, float, float]:
    """(errors of the loss, of gradients, of parameters after two SGD steps)"""
    torch.manual_seed(0)
    model: Any = in_stages(INSIDE[inside])
    alone: Any = copy.deepcopy(model)
    wh.parallelize(model)
    index, feeds = wh.data_rank(model)
    counts = counts[:feeds]
    here = slice(sum(counts[:index]), sum(counts[: index + 1]))
    torch.manual_seed(1)
    losses, gradients = [], []
    for _ in range(2):
        x, y = torch.randn(sum(counts), 3, 5), torch.randint(7, (sum(counts), 3))
        values = []
        for m, part in ((model, here), (alone, slice(None))):
            m.zero_grad()
            if m is model:
                loss = m(x[part], y[part])
                loss.backward()
            else:
                loss = by_micro_batches(m, x, y, counts)
            values.append(loss.detach())
        losses.append(float((values[0] - values[1]).abs()))
        gradients.append(relative_error(gradients_of(model), gradients_of(alone)))
        for m in (model, alone):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
    return max(losses), max(gradients), relative_error(wh.full_state_dict(model), alone.state_dict())


def by_micro_batches(model: Any, x: Tensor, y: Tensor, counts: list[int]) -> Tensor:
    """One process: a loss of balance is of all tokens that the layer sees at once, those of one micro-batch each."""
    starts = [sum(counts[:k]) for k in range(len(counts))]
    cut = [[part + start for part in torch.arange(n).tensor_split(2)] for start, n in zip(starts, counts, strict=True)]
    total = torch.zeros(())
    for parts in zip(*cut, strict=True):
        rows = torch.cat(parts)
        share = len(rows) / len(x)
        for layer in (model.a, model.b):
            layer.loss_factor = share
        loss = model(x[rows], y[rows]) * share
        loss.backward()
        total = total + loss.detach()
    return total


@pytest.mark.parametrize("counts", [[4, 4, 4, 4], [5, 3, 2, 6]], ids=["even", "uneven"])
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.matrix(keep=1)
def test_experts_in_stages_are_one_process(n: int, inside: str, counts: list[int]) -> None:
    for errors in world(n, _piped, inside, counts):
        assert max(errors) < BAR


def _few(rank: int, n: int) -> tuple[str, float]:
    """(what is said of a batch of one sample beside one of four, error of the outputs of a call that all can make)"""
    torch.manual_seed(0)
    model: Any = in_stages(INSIDE["experts on ranks"])
    alone: Any = copy.deepcopy(model)
    wh.parallelize(model)
    index, _ = wh.data_rank(model)
    torch.manual_seed(1)
    x, y = torch.randn(5, 3, 5), torch.randint(7, (5, 3))
    part = slice(0, 1) if index == 0 else slice(1, 5)
    try:
        model(x[part], y[part])
        said = ""
    except wh.LayoutError as error:
        said = str(error)
    with torch.no_grad():
        part = slice(0, 2) if index == 0 else slice(2, 5)
        return said, float((model.eval()(x[part], y[part]) - alone.eval()(x[part], y[part])).abs())


def test_pipelines_with_experts_cut_their_batches_alike() -> None:
    for said, error in world(4, _few):
        assert "into [1, 2, 1, 2] micro-batches" in said or "into [1, 1, 2, 2] micro-batches" in said, said
        assert error < BAR


def _clipped(rank: int, n: int, layout: str) -> tuple[float, float, float, float]:
    """(error of the norm of all gradients, of the gradients clipped by it, of gradients under a scaler, skipped)"""
    torch.manual_seed(0)
    model: Any = Net(SPLITS[layout], **EXPERTS["top2"])
    alone: Any = copy.deepcopy(model)
    wh.parallelize(model)
    index, feeds = wh.data_rank(model)
    torch.manual_seed(1)
    x, y = torch.randn(2 * feeds, 3, 5), torch.randint(7, (2 * feeds, 3))
    here = slice(2 * index, 2 * index + 2)

    def loss(m: Any, part: slice) -> Tensor:
        return F.cross_entropy(m(x[part]).flatten(0, 1), y[part].flatten())

    for m, part in ((model, here), (alone, slice(None))):
        loss(m, part).backward()
    norms = wh.clip_grad_norm_(model, 0.1), torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    clipped = relative_error(gradients_of(model), gradients_of(alone))
    scaler = wh.GradScaler(model, init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for m in (model, alone):
        m.zero_grad()
    scaler.scale(loss(model, here)).backward()
    scaler.unscale_(optimizer)
    loss(alone, slice(None)).backward()
    scaled = relative_error(gradients_of(model), gradients_of(alone))
    if rank == 0 and len(model.ffn.experts.w1):  # an overflow in one expert skips the step on all ranks
        model.ffn.experts.w1.grad[0, 0, 0] = float("inf")
    scaler = wh.GradScaler(model, init_scale=1024.0)
    scaler.scale(torch.zeros((), requires_grad=True))
    scaler.step(optimizer)
    scaler.update()
    return float((norms[0] - norms[1]).abs()), clipped, scaled, scaler.get_scale()


@pytest.mark.parametrize("layout", ["all", "pairs"])
@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.matrix(keep=1)
def test_each_expert_counts_once_in_norms_and_overflows(n: int, layout: str) -> None:
    for *errors, scale in world(n, _clipped, layout):
        assert max(errors) < BAR, errors
        assert scale == 512.0


def test_the_plan_says_where_experts_are_and_what_tokens_move() -> None:
    """4 ranks, 6 samples of 3 tokens each: a token goes to 2 experts and back, and so its gradients."""
    model = Net({}, **EXPERTS["top2"])
    estimated, counted = (wh.plan(model, cluster=wh.Cluster.of(1, 4), **given) for given in ({}, _sample(6)))
    text = str(counted)
    assert "experts x 4 (EP)" in text and "tokens to experts and back" in text and "TP" not in text
    (row,) = [row for row in counted.traffic if row.what == "tokens"]
    assert row.sent_bytes == 4 * (6 * 3 * 2) * DIM * 4 * 3 / 4
    assert any(row.what == "tokens" for row in estimated.traffic)
    assert wh.Plan.from_json(counted.to_json()) == counted
    inside_replica = wh.annotate(moe.MoELayer(DIM, 4), {"": (wh.replica(), wh.split())})
    assert wh.plan(inside_replica, cluster=wh.Cluster.of(2, 2)).num_feeds == 4


def _sample(rows: int) -> dict[str, Any]:
    return {"sample_inputs": torch.randn(rows, 3, 5)}


def _built_on_meta(rank: int, n: int) -> tuple[list[tuple[int, ...]], float]:
    """(shapes of the experts' parameters, how far outputs are from one process's with the same values)"""
    with torch.device("meta"):
        model: Any = Net({}, **EXPERTS["own"])
    wh.parallelize(model)
    alone: Any = Net({}, **EXPERTS["own"])
    alone.load_state_dict(wh.full_state_dict(model))
    x = torch.randn(4, 3, 5)
    with torch.no_grad():
        error = float((model.eval()(x) - alone.eval()(x)).abs().max())
    return [tuple(p.shape) for p in model.ffn.experts.parameters()], error


def test_a_layer_built_on_meta_holds_its_own_experts() -> None:
    for shapes, error in world(2, _built_on_meta):
        assert all(shape[0] == 2 for shape in shapes) and error < BAR
