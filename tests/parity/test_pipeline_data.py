"""Metrics and samples around a pipeline: its ranks are one replica, whose value counts once and who read one batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import whale_torch as wh
from tests.parity.pipeline_cases import CASES, annotated
from tests.world import world

SAMPLES = 22


def pipelined(num_ranks: int) -> Any:
    torch.manual_seed(0)
    return annotated(CASES["chain"], num_ranks=num_ranks, num_micro_batches=2)


def _metrics(rank: int, n: int, num_ranks: int) -> dict[str, float]:
    model = wh.parallelize(pipelined(num_ranks))
    index, count = wh.data_rank(model)
    assert count == n // num_ranks
    value = 1.0 + index
    found = {
        "sum": wh.reduce(value, "sum"),
        "mean": wh.reduce(value),
        "weighed": wh.reduce(value, weight=1 + index),
        "rows": wh.reduce(3, "sum"),
    }
    return {**found, "count": float(count)}


@pytest.mark.parametrize(("n", "num_ranks"), [(4, 1), (4, 2), (4, 4), (8, 2), (8, 4)])
@pytest.mark.matrix(keep=2)
def test_a_pipeline_counts_once(n: int, num_ranks: int) -> None:
    values = [1.0 + index for index in range(n // num_ranks)]
    for found in world(n, _metrics, num_ranks):
        assert found["sum"] == sum(values)
        assert found["mean"] == pytest.approx(sum(values) / len(values))
        assert found["weighed"] == pytest.approx(sum(v * v for v in values) / sum(values))
        assert found["rows"] == 3 * len(values)


def _two_models(rank: int, n: int) -> tuple[float, float, float, float, str]:
    """A pipeline of 2 over 4 ranks (feeds 0 1 0 1) beside plain replicas, and beside a split (feeds 0 0 1 1)."""
    pipeline = wh.parallelize(pipelined(2))
    plain = wh.parallelize(nn.Linear(2, 2))
    index, _ = wh.data_rank(pipeline)
    mean = wh.reduce(float(index))
    sums = wh.reduce(1.0, "sum", model=pipeline), wh.reduce(1.0, "sum", model=plain)
    with wh.replica(), wh.split(size=2):
        head = nn.Sequential(nn.Linear(4, 4))
    split = wh.parallelize(head)
    feed, _ = wh.data_rank(split)
    with pytest.raises(wh.PlanError) as caught:
        wh.reduce(1.0, "sum")
    return mean, *sums, wh.reduce(float(feed)), str(caught.value)


def test_a_pipeline_beside_other_models() -> None:
    for mean, piped, plain, split_mean, text in world(4, _two_models):
        assert (mean, piped, plain, split_mean) == (0.5, 2.0, 4.0, 0.5)
        assert "replicas of [1, 2, 2] ranks" in text


def _read(rank: int, n: int, num_ranks: int) -> tuple[list[list[int]], list[float], float]:
    """Sample numbers of each batch, losses, and the mean loss over the epoch by wh.reduce."""
    model = wh.parallelize(pipelined(num_ranks))
    data = dataset()
    batches = wh.batch_sampler(model, data, 3, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_sampler=batches)
    numbers, losses, total, rows = [], [], 0.0, 0
    for number, x, y in loader:
        loss = model(x, y)
        loss.backward()
        numbers.append(number.tolist())
        losses.append(float(loss.detach()))
        total, rows = total + losses[-1] * len(x), rows + len(x)
    return numbers, losses, wh.reduce(total, "sum") / wh.reduce(rows, "sum")


def dataset() -> TensorDataset:
    torch.manual_seed(3)
    batch = CASES["chain"].batch(SAMPLES)
    return TensorDataset(torch.arange(SAMPLES), batch["x"], batch["y"])


@pytest.mark.parametrize(("n", "num_ranks"), [(4, 2), (4, 4), (8, 4)])
@pytest.mark.matrix(keep=1)
def test_ranks_of_a_pipeline_read_one_batch_and_together_all(n: int, num_ranks: int) -> None:
    found = world(n, _read, num_ranks)
    plan = wh.plan(pipelined(num_ranks), cluster=wh.Cluster.of(1, n))
    by_feed: dict[int, list[list[int]]] = {}
    for rank, (numbers, losses, mean) in enumerate(found):
        assert by_feed.setdefault(plan.feed_of(rank), numbers) == numbers
        assert losses == pytest.approx(found[0][1]) and mean == pytest.approx(found[0][2])
    read = [number for numbers in by_feed.values() for batch in numbers for number in batch]
    assert len(read) == len(set(read)) == SAMPLES // (3 * plan.num_feeds) * 3 * plan.num_feeds
    alone: Any = CASES["chain"].make()
    alone.load_state_dict(pipelined(num_ranks).state_dict())
    data, losses = dataset(), []
    for step in zip(*by_feed.values(), strict=True):
        rows = torch.tensor([number for batch in step for number in batch])
        losses.append(float(alone(data.tensors[1][rows], data.tensors[2][rows]).detach()))
    assert found[0][1] == pytest.approx(losses, rel=1e-5)
    assert found[0][2] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def _sampled(rank: int, n: int) -> tuple[int, list[int], Tensor]:
    model = wh.parallelize(pipelined(2))
    drawn = torch.rand(1)
    sampler = wh.sampler(model, dataset(), shuffle=False)
    return wh.data_rank(model)[0], list(sampler), drawn


def test_a_sampler_and_the_random_state_are_those_of_the_pipeline() -> None:
    found = world(4, _sampled)
    assert [feed for feed, _, _ in found] == [0, 1, 0, 1]
    assert found[0][1] == found[2][1] != found[1][1]
    assert found[0][2] == found[2][2] != found[1][2]
