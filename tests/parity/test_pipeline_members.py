"""A module of a pipeline is never run with the values of a rank that does not hold it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.world import outcomes, world

WIDTH = 6


class _Optional(nn.Module):
    """Three stages; `extra`, which no scope names, is used where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.extra = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.c = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor, more: bool = False) -> Tensor:
        h = self.b(self.a(x))
        return F.cross_entropy(self.c(self.extra(h) if more else h), y)


def _pipeline(extra: str) -> tuple[Any, Any, Tensor, Tensor]:
    """The pipelined model, its one-process twin, a batch."""
    torch.manual_seed(0)
    model: Any = _Optional()
    alone = copy.deepcopy(model)
    stages = {name: wh.stage() for name in ("a", f"b{extra}", "c")}
    wh.annotate(model, stages, inside=wh.pipeline(num_micro_batches=2))  # type: ignore[call-overload]
    wh.parallelize(model)
    torch.manual_seed(1)
    return model, alone, torch.randn(4, WIDTH), torch.randint(3, (4,))


def _member(rank: int, n: int) -> None:
    model, _, x, y = _pipeline("")
    model(x, y).backward()
    model.a(x)


def test_a_member_called_where_it_is_not_raises() -> None:
    """The first rank holds it; the others have no values to compute with."""
    first, *others = outcomes(3, _member)
    assert first.ok
    for other in others:
        assert isinstance(other.error, wh.LayoutError)
        assert "module 'a' of a pipelined model was called on a rank that does not hold" in str(other.error)


def _later(rank: int, n: int, extra: str) -> tuple[str, float]:
    """What is said of a later call that uses more modules, and its error where nothing is said."""
    model, alone, x, y = _pipeline(extra)
    model(x, y).backward()
    try:
        return "", float((model(x, y, more=True) - alone(x, y, more=True)).detach().abs())
    except wh.LayoutError as error:
        return str(error), 0.0


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_later_call_that_uses_more(n: int) -> None:
    for said, error in world(n, _later, "|extra"):
        assert said == "" and error < 1e-6
    for said, _ in world(n, _later, ""):
        assert "this call uses 'extra.weight' on stage 1, and it lies with stage 0" in said


def _idle(rank: int, n: int) -> str:
    """Stages entered in another order than that of the forward."""
    model: Any = _Optional()
    scopes = {name: wh.stage() for name in ("a", "c", "b")}
    wh.annotate(model, scopes, inside=wh.pipeline(num_micro_batches=2))  # type: ignore[call-overload]
    wh.parallelize(model)
    with pytest.raises(wh.PlanError) as caught:
        model(torch.zeros(4, WIDTH), torch.zeros(4, dtype=torch.int64))
    return str(caught.value)


def test_a_stage_without_work_is_told_at_the_first_call() -> None:
    found = world(3, _idle)
    assert len(set(found)) == 1
    assert "stage 1 of 3 ('c') has nothing to run" in found[0] and "in the order in which the forward" in found[0]


class _Reads(_Optional):
    """The last stage reads a parameter of the first where it is given something."""

    def forward(self, x: Tensor, y: Tensor, more: Tensor | None = None) -> Tensor:  # type: ignore[override]
        h = self.b(self.a(x))
        return F.cross_entropy(self.c(h if more is None else F.linear(h + more, self.a.weight)), y)


def _disagree(rank: int, n: int, how: str) -> str:
    with torch.device("meta" if how == "built" and rank == 1 else "cpu"):
        model: Any = _Reads()
    wh.annotate(model, {name: wh.stage() for name in ("a", "b|extra", "c")}, inside=wh.pipeline(num_micro_batches=2))  # type: ignore[call-overload]
    samples: Any = {"x": torch.zeros(4, WIDTH), "y": torch.zeros(4, dtype=torch.int64)}
    if how == "used" and rank == 1:
        samples["more"] = torch.zeros(4, WIDTH)
    if how == "none" and rank == 1:
        samples = None
    with pytest.raises(wh.PlanError) as caught:
        wh.parallelize(model, sample_inputs=samples)
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("used", "ranks [1] place parameters otherwise than rank 0: the sample_inputs of rank 1 are x (4, 6) float32, "
         "y (4,) int64, more (4, 6) float32, those of rank 0 are x (4, 6) float32, y (4,) int64."),
        ("none", "ranks [1] plan another model than rank 0: the sample_inputs of rank 1 are None, those of rank 0 "),
        ("built", "ranks [1] built another model than rank 0: 8 of its tensors are on the meta device on rank 1, 0 on"),
    ],
)  # fmt: skip
def test_ranks_that_are_given_other_things_say_which(how: str, text: str) -> None:
    found = world(3, _disagree, how)
    assert len(set(found)) == 1
    assert text in found[0]
