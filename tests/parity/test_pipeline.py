"""Pipelines on n ranks beside one process: loss, all gradients, one SGD step, evaluation; for every schedule."""

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


def _loss(out: Any) -> Tensor:
    return out["loss"] if isinstance(out, dict) else out


def _parts(num: int, rows: str) -> list[int]:
    return ([4] * 8 if rows == "even" else [7, 6, 3, 1, 6, 4, 2, 8])[:num]


def _in_turn(model: Any, batch: dict[str, Tensor], counts: list[int], number: int) -> Tensor:
    """One process on the micro-batches one after the other, as statistics of a batch are those of a micro-batch.

    Running ones are the first replica's, so its micro-batches come last and the others leave no trace.
    """
    total = sum(counts)
    starts = [sum(counts[:k]) for k in range(len(counts))]
    loss = torch.zeros((), dtype=next(model.parameters()).dtype)
    for start, count in reversed(list(zip(starts, counts, strict=True))):
        state = {key: value.clone() for key, value in model.named_buffers()}
        for rows in torch.arange(start, start + count).tensor_split(min(number, count)):
            loss = loss + model(**{key: value[rows] for key, value in batch.items()}) * (len(rows) / total)
        if start:
            for key, value in model.named_buffers():
                value.data.copy_(state[key])
    return loss


def _trained(
    rank: int, n: int, name: str, rows: str, steps: int, options: dict[str, Any]
) -> tuple[list[float], list[float], float, int]:
    """(errors of the loss, of gradients, of parameters after the steps, programs)"""
    case = CASES[name]
    torch.manual_seed(0)
    dtype = torch.float64 if case.updates else torch.float32  # statistics of few rows magnify what rounding does
    if case.updates:
        options = options | {"num_micro_batches": 2}
    model: Any = annotated(case, **options).to(dtype)
    alone: Any = copy.deepcopy(model)
    wh.parallelize(model)
    index, count = wh.data_rank(model)
    counts = _parts(count, rows)
    torch.manual_seed(1)
    batches = [case.batch(sum(counts)) for _ in range(steps)]
    batches = [{k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()} for batch in batches]
    here = slice(sum(counts[:index]), sum(counts[: index + 1]))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    losses, gradients = [], []
    for batch in batches:
        mine = {key: value[here] for key, value in batch.items()}
        values = []
        for m, given in ((model, mine), (alone, batch)):
            m.zero_grad()
            if case.updates and m is alone:
                loss = _in_turn(m, given, counts, options["num_micro_batches"])
            else:
                out = m(**given)
                loss = _loss(out) if case.outside is None else case.outside(out, given)
            loss.backward()
            values.append(loss.detach())
        if case.outside is None:
            losses.append(float((values[0] - values[1]).abs()))
        gradients.append(relative_error(gradients_of(model), gradients_of(alone)))
        for optimizer in optimizers:
            optimizer.step()
    state, expected = wh.full_state_dict(model), alone.state_dict()
    return losses, gradients, relative_error(state, expected), len(model._whale_runtime.programs)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rows", ["even", "uneven"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
@pytest.mark.matrix(keep=60)
def test_a_pipeline_is_one_process(name: str, n: int, rows: str, schedule: str) -> None:
    options = {"num_micro_batches": 3, "schedule": schedule}
    for losses, gradients, state, _ in world(n, _trained, name, rows, 2, options):
        assert max([*losses, *gradients, state]) < BAR
