"""Ranks that are fed the same rows must bring the same labels, also where several feeds meet in a region."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from tests.parity.split_case import build
from tests.world import outcomes


def _step(rank: int, n: int, count: int) -> None:
    case = build(rank, n, "mixed", 11, [count, 3])
    y = case.y[case.here].clone()
    if rank == 1:
        y[0] = (y[0] + 1) % 11
    F.cross_entropy(case.model(case.x[case.here]), y).backward()


@pytest.mark.parametrize("count", [3, 80])
def test_labels_that_differ_between_twins_are_refused(count: int) -> None:
    for outcome in outcomes(4, _step, count):
        assert "ranks [0, 1] are one replica" in str(outcome.error), outcome
