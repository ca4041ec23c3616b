"""The weight gradient that is computed last: the same numbers, whatever is frozen, recomputed or used twice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.replica_cases import WIDTH, batch_of, gradients, rows_of, share
from tests.world import world
from whale_torch.state import full_tensor
from whale_torch.strategies import delayed

BAR = 2e-5


class Headed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.features = nn.Linear(WIDTH, 8)
        with wh.split():
            self.head = nn.Linear(8, 10, bias=kind != "no bias")
        if kind == "frozen weight":
            self.head.weight.requires_grad_(False)
        if kind == "frozen bias":
            self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.features(x))
        if self.kind == "twice":
            return self.head(h) + self.head(h * 2)
        if self.kind == "recomputed":
            return checkpoint(self.head, h, use_reentrant=False)
        return self.head(h)


def headed_rank(rank: int, n: int, kind: str) -> dict[str, Tensor | None]:
    delayed.MIN_ELEMENTS = 1
    made: list[int] = []
    linear = delayed.Delay.linear
    delayed.Delay.linear = lambda self, *args: made.append(1) or linear(self, *args)  # type: ignore[func-returns-value,method-assign]
    torch.manual_seed(0)
    model = wh.parallelize(Headed(kind))
    x, y = share(batch_of(sum(rows_of(n, "uneven"))), rows_of(n, "uneven"), rank)
    for _ in range(2):
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=kind == "retained")
        if kind == "retained":
            loss.backward()
    assert bool(made) == (kind != "frozen weight" and n > 1), "put off where there is something to wait for"
    return {name: None if p.grad is None else full_tensor(p, p.grad) for name, p in model.named_parameters()}


KINDS = ["plain", "no bias", "frozen weight", "frozen bias", "twice", "recomputed"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 3])
def test_a_gradient_put_off_is_the_same(kind: str, n: int) -> None:
    torch.manual_seed(0)
    model = Headed(kind)
    x, y = batch_of(sum(rows_of(n, "uneven")))
    F.cross_entropy(model(x), y).backward()
    for found in world(n, headed_rank, kind):
        assert relative_error(found, gradients(model)) <= BAR
