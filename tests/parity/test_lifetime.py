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
from whale_torch.mesh import Mesh


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
    return [
        weakref.ref(model),
        *(weakref.ref(m) for m in model.modules()),
        *(weakref.ref(p) for p in model.parameters()),
    ]


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


def _joins() -> list[tuple[int, ...]]:
    """Every block that a process group is made for from now on."""
    made: list[tuple[int, ...]] = []
    join = Mesh._join
    Mesh._join = lambda self, block: made.append(block) or join(self, block)  # type: ignore[func-returns-value,method-assign,return-value]
    return made


def _one_after_another(rank: int, n: int, options: dict[str, Any]) -> list[int]:
    made, after = _joins(), []
    for seed in range(4):
        model = _trained(seed, **options)
        after.append(len(made))
        del model
        gc.collect()
    return after


@pytest.mark.parametrize(("n", "local", "options"), [(2, 2, {}), (4, 2, {"all_reduce": "hierarchical"})])
def test_a_model_takes_over_the_groups_of_one_that_is_gone(n: int, local: int, options: dict[str, Any]) -> None:
    for after in world(n, _one_after_another, options, local_world_size=local):
        assert after[0] > 0 and after == after[:1] * 4


def _kept_here_and_there(rank: int, n: int) -> tuple[list[int], list[Tensor]]:
    made, kept, grown, found = _joins(), [], [], []
    for seed in range(4):
        model = _trained(seed)
        grown.append(len(made))
        found.append(model.features.weight.detach().clone())
        if seed == rank:
            kept.append(model)
        del model
        gc.collect()
    return grown, found


def test_a_group_is_taken_over_when_all_ranks_have_let_it_go() -> None:
    """Rank 0 keeps the first model, rank 1 the second: the third needs groups of its own, the fourth has them."""
    (first, weights), (second, others) = world(2, _kept_here_and_there)
    assert first == second
    assert first[0] < first[1] < first[2] == first[3]
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def _failed(rank: int, n: int) -> list[int]:
    made = _joins()
    model = wh.parallelize(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    model[0].weight.register_hook(_blow)
    try:
        model(torch.ones(1, 3)).sum().backward()
    except KeyError:
        before = len(made)
    del model
    gc.collect()
    model = wh.parallelize(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    model(torch.ones(1, 3)).sum().backward()
    return [before, len(made)]


def _blow(grad: Tensor) -> None:
    raise KeyError("a hook of the user")


def test_groups_with_messages_under_way_are_not_taken_over() -> None:
    for before, after in world(2, _failed):
        assert after == before + 1
