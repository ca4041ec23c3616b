"""wh.reduce counts each replica once, and says so where a rank does not take part."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import whale_torch as wh
from tests.world import outcomes, world
from whale_torch.errors import CommError, PlanError


def build(size: int | None) -> nn.Module:
    if size is None:
        return nn.Linear(4, 4)
    with wh.replica(), wh.split(size=size):
        return nn.Sequential(nn.Linear(4, 4))


def metrics(rank: int, n: int) -> dict[str, Any]:
    model = wh.parallelize(build(2))
    feed, feeds = wh.data_rank(model)
    assert feeds == 2
    value = torch.tensor([1.0 + feed, 10.0])
    found = {
        "sum": wh.reduce(value, "sum"),
        "mean": wh.reduce(value),
        "count": wh.reduce(3 + feed, "sum"),
        "weighed": wh.reduce(float(feed), weight=1 + 2 * feed),
        "nan": wh.reduce(float("nan") if feed else 4.0, weight=1 - feed),
        "whole mean": wh.reduce(torch.tensor(3 + feed)),
        "whole sum": wh.reduce(torch.tensor(3 + feed), "sum"),
        "flags": wh.reduce(torch.tensor([True, feed == 1]), "sum"),
        "large sum": wh.reduce(torch.tensor([2**53 + 1, 3]), "sum", weight=1 + feed),
        "complex": wh.reduce(torch.tensor([1 + 2j, 3j]) * (1 + feed)),
        "half": wh.reduce(torch.tensor(1.5, dtype=torch.bfloat16)),
    }
    replicas = wh.parallelize(build(None))
    assert wh.reduce(value).tolist() == [1.5, 10.0]
    with pytest.raises(PlanError, match=r"replicas of \[1, 2\] ranks"):
        wh.reduce(value, "sum")
    assert wh.reduce(1.0, "sum", model=model) == 2.0
    assert wh.reduce(1.0, "sum", model=replicas) == 4.0
    with pytest.raises(PlanError, match="needs a parallelized model"):
        wh.reduce(1.0, "sum", model=nn.Linear(2, 2))
    return found


def test_each_replica_counts_once() -> None:
    for found in world(4, metrics):
        assert found["sum"].tolist() == [3.0, 20.0]
        assert found["mean"].tolist() == [1.5, 10.0]
        assert found["count"] == 7.0
        assert found["weighed"] == 0.75
        assert found["nan"] == 4.0
        assert found["whole mean"].item() == 3.5 and found["whole mean"].dtype == torch.float32
        assert found["whole sum"].item() == 7 and found["whole sum"].dtype == torch.int64
        assert found["flags"].tolist() == [2, 1]
        assert found["large sum"].tolist() == [3 * (2**53 + 1), 9]
        assert found["complex"].tolist() == [1.5 + 3j, 4.5j]
        assert found["half"].dtype == torch.bfloat16 and found["half"].item() == 1.5


def different_values(rank: int, n: int, how: str) -> None:
    wh.parallelize(build(None))
    if how == "shape":
        wh.reduce(torch.ones(2, 3 + rank))
    elif how == "kind":
        wh.reduce(torch.ones(2, dtype=torch.int64 if rank else torch.float32), "sum")
    else:
        wh.reduce(1.0, "sum" if rank else "mean")


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (
            "shape",
            r"the mean of real numbers of shape \[2, 3\], rank 1 with the mean of real numbers of shape \[2, 4\]",
        ),
        ("kind", r"the sum of real numbers of shape \[2\], rank 1 with the sum of whole numbers of shape \[2\]"),
        ("how", r"the mean of real numbers of shape \[\], rank 1 with the sum of real numbers of shape \[\]"),
    ],
)
def test_ranks_come_with_equal_shapes(how: str, text: str) -> None:
    for ended in outcomes(2, different_values, how, timeout=40):
        assert isinstance(ended.error, CommError) and re.search(text, str(ended.error)), ended.error


def of_two_and_three(rank: int, n: int) -> float:
    for size in (2, 3):
        wh.parallelize(build(size))
    return wh.reduce(float(rank // 3))


def test_a_mean_holds_whatever_replicas_the_models_have() -> None:
    assert world(6, of_two_and_three) == [0.5] * 6


def before_any_model(rank: int, n: int) -> Tensor:
    """It joins the ranks itself."""
    out: Tensor = wh.reduce(torch.tensor(float(rank)), "sum")
    return out


def test_without_a_model_every_rank_is_a_replica() -> None:
    assert [float(found) for found in world(2, before_any_model)] == [1.0, 1.0]


def on_rank_0_only(rank: int, n: int) -> None:
    wh.parallelize(build(None), timeout=3.0)
    dist.barrier()
    if rank == 0:
        wh.reduce(1.0)
    dist.barrier()


def test_a_rank_that_does_not_take_part_is_named() -> None:
    mine, _ = outcomes(2, on_rank_0_only, timeout=40)
    assert isinstance(mine.error, CommError), mine.error
    assert "'wh.reduce' over world (ranks [0, 1]) failed on rank 0" in str(mine.error)
