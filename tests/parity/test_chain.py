"""What a parallelized model gave goes into one again: rows are weighed once, where the loss is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.metric import gradients, relative_error
from tests.world import outcomes, world
from whale_torch.errors import LayoutError, LossError

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


@pytest.mark.matrix(keep=5)
@pytest.mark.parametrize("kind", ["two models", "one model twice", "recurrent", "both ways"])
@pytest.mark.parametrize(
    ("scope", "rows"),
    [("replica", [3, 1]), ("replica", [2, 0, 1]), ("split", [3, 1]), ("columns", [3, 1]), ("sum", [2, 2])],
)
def test_rows_are_weighed_once(kind: str, scope: str, rows: list[int]) -> None:
    for errors in world(len(rows), _errors, kind, rows, scope):
        assert max(errors) <= BAR


# ---- what the models share out differently ----


def _other_rows(rank: int, n: int, kind: str) -> tuple[float, float]:
    """Generated rows are judged beside real ones, of which the ranks have other numbers."""
    (g, pg), (d, pd) = _models(0, wh.replica), _models(1, wh.replica)
    z, real = torch.randn(8, 4, generator=torch.Generator().manual_seed(2)).split(4)
    fakes, reals = ([3, 1], [1, 3]) if kind == "even judge" else ([2, 2], [3, 1])

    def judged(g: nn.Module, d: nn.Module, z: Tensor, real: Tensor) -> Tensor:
        return F.softplus(d(torch.cat([g(z), real]))).mean()

    judged(g, d, z.split(fakes)[rank], real.split(reals)[rank]).backward()
    judged(pg, pd, z, real).backward()
    return _error(g, pg), _error(d, pd)


@pytest.mark.parametrize("kind", ["even judge", "uneven judge"])
def test_the_model_nearest_to_the_loss_weighs(kind: str) -> None:
    for errors in world(2, _other_rows, kind):
        assert max(errors) <= BAR


def _in_place(rank: int, n: int) -> float:
    """The second model's first layer writes into its input."""
    g, pg = _models(0, wh.replica)
    d = wh.parallelize(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2)))
    pd = nn.Sequential(nn.ReLU(), nn.Linear(4, 2))
    pd.load_state_dict(d.state_dict())
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    d(g(x.split([3, 1])[rank])).square().mean().backward()
    pd(pg(x)).square().mean().backward()
    return _error(g, pg)


def test_a_model_may_write_into_what_another_one_gave() -> None:
    assert max(world(2, _in_place)) <= BAR


def _mixed_weights(rank: int, n: int) -> None:
    (g, _), (d, _) = _models(0, wh.replica), _models(1, wh.replica)
    x = torch.ones(4, 4)
    d(g(x[: 1 + rank]).sum(0) + g(x[: 2 - rank])).sum().backward()


def test_an_input_of_outputs_that_weigh_differently_is_refused() -> None:
    texts = {str(o.error) for o in outcomes(2, _mixed_weights) if isinstance(o.error, LossError)}
    assert len(texts) == 1
    text = texts.pop()
    assert "[0.6667, 1.3333]" in text and "[1.3333, 0.6667]" in text


# ---- a split's output ----


class Head(nn.Module):
    """Ends in a split: gives Columns."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        with wh.split(cut="columns"):
            self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Judge(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        with wh.split() if form == "split" else wh.replica():
            self.last = nn.Linear(5, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.form == "loss":
            return F.cross_entropy(x, y) + self.last.weight.square().sum()
        return self.last(x)


def _columns_into(rank: int, n: int, form: str) -> tuple[float, float]:
    def build() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        return Head(), Judge(form)

    (g, d), (pg, pd) = build(), build()
    g, d = wh.parallelize(g), wh.parallelize(d)
    x, y = torch.randn(4, 4, generator=torch.Generator().manual_seed(2)), torch.tensor([1, 0, 4, 2])

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return out if form == "loss" else F.softplus(out).mean() if form == "replica" else F.cross_entropy(out, y)

    rows = [3, 1]
    here = y.split(rows)[rank]
    loss(d(g(x.split(rows)[rank]), here), here).backward()
    loss(pd(pg(x), y), y).backward()
    return _error(g, pg), _error(d, pd)


@pytest.mark.parametrize("form", ["replica", "split", "loss"])
def test_a_splits_output_goes_into_another_model(form: str) -> None:
    for errors in world(2, _columns_into, form):
        assert max(errors) <= BAR


def _refused_input(rank: int, n: int) -> float:
    """After an input that was refused the model counts rows as before."""
    (g, _), (d, pd) = _models(0, wh.replica), _models(1, wh.replica)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    with pytest.raises(LayoutError, match="took or returned a set"):
        d({g(x)})
    pd(x).square().mean().backward()
    d(x.split([3, 1])[rank]).square().mean().backward()
    return _error(d, pd)


def test_a_refused_input_leaves_no_trace() -> None:
    assert max(world(2, _refused_input)) <= BAR
