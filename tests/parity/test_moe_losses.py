"""The gradient of auxiliary losses on ranks, whatever a loop does to its loss and however often a layer runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.split_case import gradients_of
from tests.world import world
from whale_torch import moe

BAR, DIM = 1e-5, 8
SCOPES: dict[str, Any] = {"replica": wh.replica, "split": wh.split}


class Again(nn.Module):
    """A layer of experts in a checkpoint."""

    def __init__(self, ffn: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.ffn, self.reentrant = ffn, reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.ffn, x, use_reentrant=self.reentrant)
        return x + out


def _net(scope: str, reentrant: bool) -> Any:
    with SCOPES[scope]():
        ffn = moe.MoELayer(DIM, 4, 2, hidden=12, aux_loss_coef=0.5, z_loss_coef=0.1)
    ffn.gate.weight.data.normal_()
    return nn.Sequential(nn.Linear(5, DIM), Again(ffn, reentrant), nn.Linear(DIM, 7))


def _scaled(rank: int, n: int, scope: str, reentrant: bool, added: bool) -> tuple[float, float, float]:
    """(errors of gradients under wh.GradScaler and under a division, of the auxiliary loss)"""
    torch.manual_seed(0)
    model = _net(scope, reentrant)
    alone = copy.deepcopy(model)
    wh.parallelize(model)
    counts = [3, 5, 0, 2][:n]
    here = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    torch.manual_seed(1)
    x, y = torch.randn(sum(counts), 5), torch.randint(7, (sum(counts),))

    def loss(m: Any, part: slice) -> Tensor:
        task = F.cross_entropy(m(x[part]), y[part]) if len(x[part]) else m(x[part]).sum()
        return task + moe.aux_loss(m, added=True) if added else task

    loss(alone, slice(None)).backward()
    scaler, optimizer = wh.GradScaler(model, init_scale=1024.0), torch.optim.SGD(model.parameters(), lr=0.0)
    scaler.scale(loss(model, here)).backward()
    scaler.unscale_(optimizer)
    errors = [relative_error(gradients_of(model), gradients_of(alone))]
    value = float((moe.aux_loss(model) - moe.aux_loss(alone)).abs())
    scaler.step(optimizer)
    scaler = wh.GradScaler(model, init_scale=1.0)
    for m, part in ((model, here), (alone, slice(None))):
        m.zero_grad()
        m[1].ffn.loss_factor = 1.0 if added else 1 / 3
        (loss(m, part) / 3).backward()
    return *errors, relative_error(gradients_of(model), gradients_of(alone)), value


class Stages(nn.Module):
    """A layer of experts in each of two stages, whose loss is inside or outside."""

    def __init__(self, reentrant: bool | None, inside: bool) -> None:
        super().__init__()
        self.first, self.last, self.inside = nn.Linear(5, DIM), nn.Linear(DIM, 7), inside
        layers = [moe.MoELayer(DIM, 4, 2, hidden=12, aux_loss_coef=0.5) for _ in range(2)]
        self.a, self.b = layers if reentrant is None else [Again(layer, reentrant) for layer in layers]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.last(self.b(self.a(self.first(x).tanh())))
        return F.cross_entropy(z, y) if self.inside else z


def _layers(model: nn.Module) -> list[moe.MoELayer]:
    return [m for m in model.modules() if isinstance(m, moe.MoELayer)]


def _piped(rank: int, n: int, reentrant: bool | None, inside: bool, added: bool) -> tuple[float, float]:
    """(errors of gradients of a loss divided by 3, and of one that wh.GradScaler scaled)"""
    torch.manual_seed(0)
    model: Any = Stages(reentrant, inside)
    alone: Any = copy.deepcopy(model)
    alone.inside = True
    one, other = wh.stage(), wh.stage()
    wh.annotate(
        model, {"first": one, "a": one, "b": other, "last": other}, inside=wh.pipeline(num_micro_batches=2, num_ranks=2)
    )
    wh.parallelize(model)
    torch.manual_seed(1)
    x, y = torch.randn(5, 5), torch.randint(7, (5,))
    for rows in torch.arange(5).tensor_split(2):  # a loss of balance is of one micro-batch
        for layer in _layers(alone):
            layer.loss_factor = len(rows) / 5
        (alone(x[rows], y[rows]) * len(rows) / 5).backward()
    expected = gradients_of(alone)

    def loss() -> Tensor:
        found = model(x, y)
        task = found if inside else F.cross_entropy(found, y)
        return task + moe.aux_loss(model, added=True) if added else task

    (loss() / 3).backward()
    divided = relative_error({k: 3 * g for k, g in gradients_of(model).items()}, expected)
    model.zero_grad()
    scaler, optimizer = wh.GradScaler(model, init_scale=1024.0), torch.optim.SGD(model.parameters(), lr=0.0)
    scaler.scale(loss()).backward()
    scaler.unscale_(optimizer)
    return divided, relative_error(gradients_of(model), expected)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.matrix(keep=1)
def test_stages_scale_auxiliary_losses_as_the_loss_is(reentrant: bool | None, inside: bool, added: bool) -> None:
    for divided, scaled in world(2, _piped, reentrant, inside, added):
        assert scaled < BAR
        if added or inside:
            assert divided < BAR


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.matrix(keep=2)
def test_auxiliary_losses_are_scaled_as_the_loss_is(n: int, scope: str, reentrant: bool, added: bool) -> None:
    for errors in world(n, _scaled, scope, reentrant, added):
        assert max(errors) < BAR, errors
