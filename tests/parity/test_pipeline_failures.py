"""A rank that raises, dies or stalls in the middle of a schedule ends every rank with a message; nothing hangs."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.pipeline_cases import WIDTH, Chain
from tests.world import Outcome, outcomes, world
from whale_torch.errors import CommError

TIMEOUT = 5.0
PROMPT = 4.0  # a rank that ended is noticed long before the time-out
LONG = 12.0  # more than the time-out and the time for last words
START = 10.0  # of a world and its first recording, on a busy machine


class _Breaks(nn.Module):
    """Does as it is told at its third call that is not a recording: the third micro-batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and not x.is_meta and type(self.how) is str:
            self.calls += 1
        if self.calls == 3 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) // 4:
            if self.how == "raise":
                raise ValueError("a bad sample")
            if self.how == "die":
                os._exit(3)
            if self.how == "stall":
                time.sleep(TIMEOUT + 8)
            if self.how == "backward":
                x.register_hook(_refuse)
        return x


def _refuse(grad: Tensor) -> Tensor:
    raise ValueError("a bad gradient")


def _broken(rank: int, n: int, how: str) -> None:
    torch.manual_seed(0)
    model: Any = Chain(lambda: _Breaks(how))
    wh.annotate(model, {name: wh.stage() for name in "abcd"}, inside=(wh.replica(), wh.pipeline(num_micro_batches=4)))  # type: ignore[call-overload]
    wh.parallelize(model, timeout=TIMEOUT)
    loss = model(torch.randn(8, WIDTH), torch.zeros(8, dtype=torch.int64))
    loss.backward()


class _Tied(nn.Module):
    """The first stage has a weight in common with the last, which breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.b(self.a(x)).relu()).square().mean()
        return out


def _breaks_a_tie(rank: int, n: int, stage: str) -> None:
    model = _Tied()
    wh.annotate(model, {name: wh.stage() for name in "abc"}, inside=(wh.replica(), wh.pipeline()))
    wh.parallelize(model, timeout=30.0)
    model(torch.randn(4, WIDTH)).backward()
    if rank == (0 if stage == "a" else n - 1):
        model.get_submodule(stage).register_forward_pre_hook(lambda *_: _refuse(torch.ones(())))
    model(torch.randn(4, WIDTH)).backward()


@pytest.mark.parametrize(("n", "stage"), [(3, "a"), (3, "c"), (6, "c")])
@pytest.mark.matrix(keep=0)
def test_a_tie_makes_no_error_wait(n: int, stage: str) -> None:
    """Ranks that wait for each other's messages come to no reduction."""
    ended = outcomes(n, _breaks_a_tie, stage, timeout=60.0)
    assert max(outcome.seconds for outcome in ended) < LONG + START
    assert isinstance(ended[0 if stage == "a" else n - 1].error, ValueError)
    assert sum(isinstance(outcome.error, CommError) for outcome in ended) == n - 1


def _said(outcome: Outcome) -> str:
    return "" if outcome.error is None else str(outcome.error)


@pytest.mark.parametrize(("how", "limit"), [("raise", PROMPT), ("backward", PROMPT), ("die", PROMPT), ("stall", LONG)])
@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.matrix(keep=0)
def test_every_rank_ends_and_says_why(how: str, limit: float, n: int) -> None:
    ended = outcomes(n, _broken, how, timeout=60.0)
    victim = n // 4  # the first rank of the second stage
    others = [outcome for outcome in ended if outcome.rank != victim]
    if how in ("raise", "backward"):
        assert "a bad" in _said(ended[victim])
    for outcome in others:
        text = _said(outcome)
        assert isinstance(outcome.error, CommError), outcome
        assert "micro-batch" in text or "of a pipeline" in text or "gradient" in text
        assert outcome.seconds < limit + START
    told = [text for text in map(_said, others) if f"rank {victim} " in text or f"ranks [{victim}" in text]
    assert told, [_said(outcome) for outcome in others]


def _other_batch(rank: int, n: int) -> None:
    model: Any = Chain()
    wh.annotate(model, {name: wh.stage() for name in "abcd"}, inside=wh.pipeline(num_micro_batches=4))  # type: ignore[call-overload]
    wh.parallelize(model, timeout=TIMEOUT)
    x = torch.ones(8 if rank < 2 else 6, WIDTH)
    model(x, torch.zeros(len(x), dtype=torch.int64))


def test_ranks_of_one_pipeline_that_are_fed_different_batches_say_so() -> None:
    with pytest.raises(
        wh.LayoutError, match=r"ranks \[0, 1, 2, 3\] are one pipeline but were fed .*rows \[8, 8, 6, 6\]"
    ):
        world(4, _other_batch)
