"""Micro-batches whose activations a rank keeps at once: counted by what autograd saves, beside the schedule's bound."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.pipeline_cases import WIDTH, Chain
from tests.world import world
from whale_torch.planning.schedules import make


class Saves(torch.autograd.Function):
    """The identity, which keeps an activation until its backward or the end of its graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counter: Any) -> Tensor:
        kept = x.detach().clone()
        ctx.save_for_backward(kept)
        counter.keep(kept)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        assert ctx.saved_tensors
        return grad, None


class Counter(nn.Module):
    """alive, most: activations of micro-batches that are kept now, and at most so far."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = 0

    def keep(self, x: Tensor) -> None:
        COUNTS["alive"] += 1
        COUNTS["most"] = max(COUNTS["most"], COUNTS["alive"])
        weakref.finalize(x.untyped_storage(), self.drop)

    @staticmethod
    def drop() -> None:
        COUNTS["alive"] -= 1

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor:  # the recording
            return x.clone()
        out: Tensor = Saves.apply(x, self)  # type: ignore[no-untyped-call]
        return out


COUNTS = {"alive": 0, "most": 0}  # of this rank, over all of its stages


class Counted(Chain):
    """An activation is kept in each of the four stages."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.a, self.c, self.d = (nn.Sequential(m, Counter()) for m in (self.a, self.c, self.d))
        self.b = nn.Sequential(self.b, Counter())
        self.outside = outside

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.features(x)
        return z if self.outside else nn.functional.cross_entropy(z, y)


def _counts(rank: int, n: int, schedule: str, number: int, outside: bool) -> tuple[list[int], int, int]:
    """(most kept in each of two steps, in evaluation, what the schedule allows), and what is left afterwards."""
    torch.manual_seed(0)
    model: Any = Counted(outside)
    stages = {name: wh.stage() for name in "abcd"}
    wh.annotate(model, stages, inside=(wh.replica(), wh.pipeline(num_micro_batches=number, schedule=schedule)))  # type: ignore[call-overload]
    wh.parallelize(model)
    x, y = torch.randn(2 * number, WIDTH), torch.randint(5, (2 * number,))
    found = []
    for _ in range(2):
        COUNTS["most"] = COUNTS["alive"]
        loss = model(x, y)
        loss = nn.functional.cross_entropy(loss, y) if outside else loss
        loss.backward()
        found.append(COUNTS["most"])
        del loss
        assert COUNTS["alive"] == 0
    COUNTS["most"] = 0
    model.eval()
    with torch.no_grad():
        model(x, y)
    return found, COUNTS["most"], make(schedule, 4, number, n).peak_in_flight[rank]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
@pytest.mark.matrix(keep=1)
def test_a_rank_keeps_activations_of_as_many_micro_batches_as_its_schedule_says(n: int, schedule: str) -> None:
    for steps, evaluation, allowed in world(n, _counts, schedule, 6, False):
        assert steps == [allowed, allowed]
        assert evaluation <= 1


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.matrix(keep=0)
def test_with_the_loss_outside_they_are_gpipes(n: int) -> None:
    for rank, (steps, evaluation, _) in enumerate(world(n, _counts, "1f1b", 6, True)):
        assert steps == [make("gpipe", 4, 6, n).peak_in_flight[rank]] * 2
        assert evaluation <= 1
