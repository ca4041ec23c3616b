"""fairscale's MOELayer, taken over, gives what fairscale gave: one rank with dropped tokens, two with none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.world import world
from whale_torch import moe

DIM, BAR = 8, 1e-5


def _theirs(n: int, rank: int, experts: int) -> Any:
    from fairscale.nn import MOELayer, Top2Gate  # type: ignore[import-not-found]

    torch.manual_seed(0)
    gate = Top2Gate(DIM, n * experts)
    torch.manual_seed(1 + rank)
    local = nn.ModuleList([nn.Sequential(nn.Linear(DIM, 12), nn.ReLU(), nn.Linear(12, DIM)) for _ in range(experts)])
    return MOELayer(gate, local)


def _alone(rank: int, n: int) -> tuple[float, float, int]:
    """Errors of outputs, loss and gradients; dropped routes."""
    theirs = _theirs(1, 0, 4)
    theirs.gate.wg.weight.data.mul_(5)
    copied = copy.deepcopy(theirs.gate.wg)
    ours = moe.from_fairscale(theirs)
    assert ours.gate.wg is theirs.gate.wg
    ours.gate.wg = copied
    errors = []
    for step in range(4):
        x = torch.randn(4, 4, DIM, generator=torch.Generator().manual_seed(step))
        found: dict[str, list[Any]] = {}
        for name, layer in (("theirs", theirs), ("ours", ours)):
            layer.zero_grad()
            mine = x.clone().requires_grad_()
            torch.manual_seed(step)
            out = layer(mine)
            loss = layer.l_aux if name == "theirs" else layer.gate.l_aux
            (out.square().sum() + 3 * loss).backward()
            weights = [layer.gate.wg.weight.grad, mine.grad]
            stacked = (
                torch.stack([expert[0].weight.grad for expert in layer.experts])
                if name == "theirs"
                else layer.experts.w1.grad
            )
            found[name] = [out.detach(), loss.detach(), *weights, stacked]
        errors += [relative_error({"": a}, {"": b}) for a, b in zip(found["ours"], found["theirs"], strict=True)]
    assert ours.load is not None
    return max(errors), float(found["ours"][1]), int((ours.load.counts - ours.load.kept).sum())


def test_a_layer_on_one_rank() -> None:
    pytest.importorskip("fairscale", reason="fairscale is not installed")
    ((error, _, dropped),) = world(1, _alone, init=True)
    assert error < BAR
    assert dropped > 0


class Net(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.moe = layer

    def forward(self, x: torch.Tensor) -> Any:
        return self.moe(x)


def _ranks(rank: int, n: int) -> tuple[float, list[int]]:
    theirs = _theirs(n, rank, 2)
    theirs.gate.wg.weight.data.zero_()  # any second expert: what follows asks for the experts' order alone
    theirs.gate.wg.weight.data[:, 0] = torch.arange(4.0)
    model = Net(moe.from_fairscale(theirs, capacity_factor=None))
    wh.annotate(model, {"moe": wh.split()})
    wh.parallelize(model)
    x = torch.zeros(4, 2, DIM)
    x[..., 0] = 20.0  # expert 3, then expert 2
    x[:2, :, 0] = -20.0  # expert 0, then expert 1
    torch.manual_seed(5)
    expected = theirs(x)
    torch.manual_seed(5)
    found = model(x)
    return relative_error({"": found.detach()}, {"": expected.detach()}), [len(model.moe.experts.w1)]  # type: ignore


def test_experts_of_all_ranks_in_their_order() -> None:
    pytest.importorskip("fairscale", reason="fairscale is not installed")
    for error, experts in world(2, _ranks, init=True):
        assert error < BAR
        assert experts == [2]


def test_other_layers_and_gates_are_refused() -> None:
    with pytest.raises(wh.PlanError, match=r"takes a fairscale.nn.MOELayer, got Linear"):
        moe.from_fairscale(nn.Linear(3, 3))
    layer: Any = type("MOELayer", (nn.Module,), {})()
    layer.gate, layer.experts, layer.group = nn.Identity(), nn.ModuleList([nn.Linear(3, 3)]), None
    layer.world_size = layer.num_local_experts = 1
    with pytest.raises(wh.PlanError, match="its gate is a Identity, not fairscale's Top2Gate"):
        moe.from_fairscale(layer)
    with pytest.raises(wh.PlanError, match="its Identity has no linear layer `wg`"):
        moe.from_fairscale(layer, gate=moe.Hash(9, 1))
    assert moe.from_fairscale(layer, gate=moe.Hash(9, 1), dim=3)(torch.ones(2, 3), token_ids=torch.ones(2).long()).shape
