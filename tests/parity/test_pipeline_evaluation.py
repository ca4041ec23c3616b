"""A pipelined model in eval() gives what one process gives for the rank's batch, a loss too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.pipeline_cases import CASES, annotated
from tests.parity.split_case import gradients_of
from tests.world import world

BAR = 1e-5
ROWS = [5, 4]


def _tensors(out: Any) -> dict[str, Tensor | None]:
    return {"loss": out} if isinstance(out, Tensor) else {k: v for k, v in out.items() if isinstance(v, Tensor)}


def _evaluated(rank: int, n: int, name: str) -> tuple[float, float]:
    """Errors of what evaluation returns, and of gradients that are taken in eval()."""
    torch.manual_seed(0)
    model: Any = annotated(CASES[name], num_micro_batches=3)
    alone: Any = copy.deepcopy(model)
    wh.parallelize(model)
    index, count = wh.data_rank(model)
    counts = ROWS[:count]
    here = slice(sum(counts[:index]), sum(counts[: index + 1]))
    torch.manual_seed(1)
    whole = CASES[name].batch(sum(counts))
    mine = {key: value[here] for key, value in whole.items()}
    model.eval()
    alone.eval()
    with torch.no_grad():
        error = relative_error(_tensors(model(**mine)), _tensors(alone(**mine)))
    for m, given in ((model, mine), (alone, whole)):
        out = m(**given)
        (out["loss"] if isinstance(out, dict) else out).backward()
    return error, relative_error(gradients_of(model), gradients_of(alone))


@pytest.mark.parametrize("name", ["chain", "nests"])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.matrix(keep=2)
def test_a_loss_in_eval_is_that_of_the_batch(name: str, n: int) -> None:
    for error, gradients in world(n, _evaluated, name):
        assert error < BAR
        assert gradients < BAR
