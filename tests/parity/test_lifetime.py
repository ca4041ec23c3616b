"""A parallelized model that nobody holds is gone: its parameters, its thread, and what it had of the process groups."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.world import world


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6, sparse=True)
        self.features = nn.Linear(6, 8)
        with wh.split():
            self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.features(self.words(x))))


def _trained(seed: int = 0, **options: Any) -> nn.Module:
    """A model after one step, with reducers of all kinds."""
    torch.manual_seed(seed)
    model = wh.parallelize(Net(), default=wh.replica(reduce_dtype=torch.float16, **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(torch.arange(5)), torch.arange(5)).backward()
    optimizer.step()
    return model


def _watch(model: nn.Module) -> list[weakref.ref[Any]]:
    return [weakref.ref(model), *(weakref.ref(m) for m in model.modules()), *(weakref.ref(p) for p in model.parameters())]


def _gone(rank: int, n: int) -> tuple[int, int]:
    """What lives on of a model, and how many threads reduce for nobody."""
    watched = _watch(_trained())
    gc.collect()
    alive = sum(ref() is not None for ref in watched)
    return alive, sum(thread.name == "whale-reduce" for thread in threading.enumerate())


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_model_that_nobody_holds_is_gone(n: int) -> None:
    assert world(n, _gone) == [(0, 0)] * n


def _orphan(rank: int, n: int) -> str:
    part = _trained().features
    gc.collect()
    try:
        part(torch.ones(1, 6)).sum().backward()
    except wh.LossError as error:
        return str(error)
    return ""


def test_a_part_does_not_train_without_its_model() -> None:
    for text in world(2, _orphan):
        assert "a gradient came for 'features." in text and "is gone: nothing averages it over ranks" in text


def _held_by_a_loss(rank: int, n: int) -> Tensor:
    model = wh.parallelize(nn.Linear(3, 2))
    parameter, loss = model.weight, model(torch.full((1, 3), float(rank))).sum()
    del model
    gc.collect()
    loss.backward()
    return parameter.grad


def test_a_loss_keeps_what_its_backward_needs() -> None:
    for grad in world(2, _held_by_a_loss):
        assert torch.equal(grad, torch.full((2, 3), 0.5))
