"""What a parallelized model gave goes into one again: rows are weighed once, where the loss is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.metric import gradients, relative_error
from tests.world import world

BAR = 2e-5


def _models(seed: int, scope: Callable[[], object]) -> tuple[nn.Module, nn.Module]:
    """The same model twice: annotated, and plain."""

    def build() -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    with scope():  # type: ignore[attr-defined]
        annotated = build()
    return wh.parallelize(annotated, default=wh.replica()), build()


def _chain(g: nn.Module, d: nn.Module, x: Tensor, kind: str) -> Tensor:
    if kind == "two models":
        return d(g(x))
    if kind == "one model twice":
        return d(d(x)) + g(x)
    if kind == "recurrent":
        state = x
        for _ in range(3):
            state = d(state * 0.5 + x)
        return g(state)
    return d(g(x)) + g(x)


def _errors(rank: int, n: int, kind: str, rows: list[int], scope: str) -> tuple[float, float]:
    made = {
        "replica": wh.replica,
        "split": wh.split,
        "columns": lambda: wh.split(cut="columns"),
        "sum": lambda: wh.replica(loss="sum"),
    }[scope]
    (g, pg), (d, pd) = _models(0, made), _models(1, made)
    x = torch.randn(sum(rows), 4, generator=torch.Generator().manual_seed(2))

    def loss(out: Tensor) -> Tensor:
        return F.softplus(out).sum() if scope == "sum" else F.softplus(out).mean()

    loss(_chain(g, d, x.split(rows)[rank], kind)).backward()
    loss(_chain(pg, pd, x, kind)).backward()
    return _error(g, pg), _error(d, pd)


def _error(model: nn.Module, plain: nn.Module) -> float:
    return relative_error(gradients(model), {name: p.grad for name, p in plain.named_parameters()})


@pytest.mark.parametrize("kind", ["two models", "one model twice", "recurrent", "both ways"])
@pytest.mark.parametrize(
    ("scope", "rows"),
    [("replica", [3, 1]), ("replica", [2, 0, 1]), ("split", [3, 1]), ("columns", [3, 1]), ("sum", [2, 2])],
)
def test_rows_are_weighed_once(kind: str, scope: str, rows: list[int]) -> None:
    for errors in world(len(rows), _errors, kind, rows, scope):
        assert max(errors) <= BAR
