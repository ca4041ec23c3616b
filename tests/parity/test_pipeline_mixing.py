"""Samples that meet between stages: refused, or accepted, and then each micro-batch is a batch of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.pipeline_cases import Chain
from tests.parity.split_case import gradients_of
from tests.world import world

STAGES = ("a", "b", "c", "d")


class Contrastive(Chain):
    """Every sample against all others of the batch."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.features(x)
        return F.cross_entropy(z @ z.t(), torch.arange(len(z), device=z.device))


class Centred(Chain):
    """Features without their mean over the batch; the loss is the user's."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return self.d(self.c(h - h.mean(0)))


class Sized(Chain):
    """Makes other calls with many samples than with few."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.features(x)
        return F.cross_entropy(h.abs().neg() if len(x) > 100 else h, y)


KINDS: dict[str, Any] = {"contrastive": Contrastive, "centred": Centred, "sized": Sized}


def _annotated(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return wh.annotate(
        KINDS[name](),
        {p: wh.stage() for p in STAGES},
        inside=(wh.replica(), wh.pipeline(num_micro_batches=3, **options)),
    )


def _loss(name: str, out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y) if name == "centred" else out


def _errors(rank: int, n: int, name: str, options: dict[str, Any]) -> tuple[float, float]:
    """(of the loss, of gradients) against one process that accumulates the micro-batches, weighed by rows."""
    model = _annotated(name, **options)
    alone = copy.deepcopy(model)
    wh.parallelize(model)
    index, count = wh.data_rank(model)
    torch.manual_seed(1)  # replicas draw streams of their own
    rows = [7, 5][:count]
    batch = torch.randn(sum(rows), 8), torch.randint(5, (sum(rows),))
    x, y = (part.split(rows)[index] for part in batch)
    loss = _loss(name, model(x, y), y)
    loss.backward()
    expected = torch.zeros(())
    for x, y in zip(*(part.split(rows) for part in batch), strict=True):
        for xs, ys in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
            expected = expected + _loss(name, alone(xs, ys), ys) * (len(xs) / sum(rows))
    expected.backward()  # type: ignore[no-untyped-call]
    inside = name != "centred"
    return float((loss - expected).abs().detach()) if inside else 0.0, relative_error(
        gradients_of(model), gradients_of(alone)
    )


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("name", ["contrastive", "centred"])
@pytest.mark.matrix(keep=1)
def test_accepted_it_is_accumulated_micro_batches(name: str, n: int) -> None:
    for errors in world(n, _errors, name, {"mixing": "accept"}):
        assert max(errors) < 1e-5


def test_an_accepted_mean_accepts_other_calls_at_another_size() -> None:
    for errors in world(2, _errors, "sized", {"micro_batch_loss": "mean"}):
        assert max(errors) < 1e-5


def _refused_loss(rank: int, n: int) -> None:
    model = _annotated("contrastive")
    wh.parallelize(model)
    model(torch.randn(7, 8), torch.randint(5, (7,)))


def test_a_loss_over_pairs_of_samples_raises_unless_accepted() -> None:
    with pytest.raises(wh.LossError, match=r"micro-batches cannot give the whole batch's value"):
        world(1, _refused_loss)


def _refused(rank: int, n: int, name: str, options: dict[str, Any], train: bool) -> str:
    model = _annotated(name, **options).train(train)
    wh.parallelize(model)
    with pytest.raises(wh.TraceError, match="mixes samples") as caught, torch.set_grad_enabled(train):
        model(torch.randn(7, 8), torch.randint(5, (7,)))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "train"),
    [("centred", {}, True), ("centred", {"micro_batch_loss": "mean"}, False)],
)
def test_not_accepted_it_raises(name: str, options: dict[str, Any], train: bool) -> None:
    for text in world(1, _refused, name, options, train):
        assert 'wh.pipeline(mixing="accept")' in text
