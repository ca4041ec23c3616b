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


def _of(model: nn.Module, member: str) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.startswith(member)]


def backward(model: nn.Module, kind: str, x: Tensor, y: Tensor) -> None:
    """One step's gradients, by as many backwards as the kind says."""
    z = model(x)  # held, so that no backward overwrites the logits
    loss = F.cross_entropy(z, y)
    if kind == "asked first":
        torch.autograd.grad(loss, x, retain_graph=True)
    if kind == "in two parts":
        loss.backward(retain_graph=True, inputs=_of(model, "features"))
        loss.backward(inputs=_of(model, "head"))
        return
    if kind == "ended by an error":
        fuse = x.register_hook(_blow)
        try:
            loss.backward(retain_graph=True, inputs=[x, *_of(model, "head")])
        except KeyError:
            fuse.remove()
            model.zero_grad()
    loss.backward(retain_graph=kind == "retained")
    if kind == "retained":
        loss.backward()


def _blow(grad: Tensor) -> None:
    raise KeyError("a hook of the user")


def headed_rank(rank: int, n: int, kind: str) -> dict[str, Tensor | None]:
    delayed.MIN_ELEMENTS = 1
    made: list[int] = []
    linear = delayed.Delay.linear
    delayed.Delay.linear = lambda self, *args: made.append(1) or linear(self, *args)  # type: ignore[func-returns-value,method-assign]
    torch.manual_seed(0)
    model = wh.parallelize(Headed(kind))
    x, y = share(batch_of(sum(rows_of(n, "uneven"))), rows_of(n, "uneven"), rank)
    x = x.clone().requires_grad_()
    for _ in range(2):
        model.zero_grad()
        backward(model, kind, x, y)
    assert bool(made) == (kind != "frozen weight" and n > 1), "put off where there is something to wait for"
    return gradients(model)


ONCE = ["plain", "no bias", "frozen weight", "frozen bias", "twice", "recomputed"]
SEVERAL = ["retained", "asked first", "in two parts", "ended by an error"]


@pytest.mark.matrix(keep=5)
@pytest.mark.parametrize("kind", ONCE + SEVERAL)
@pytest.mark.parametrize("n", [1, 3])
def test_a_gradient_put_off_is_the_same(kind: str, n: int) -> None:
    torch.manual_seed(0)
    model = Headed(kind)
    x, y = batch_of(sum(rows_of(n, "uneven")))
    backward(model, kind, x.requires_grad_(), y)
    for found in world(n, headed_rank, kind):
        assert relative_error(found, gradients(model)) <= BAR
