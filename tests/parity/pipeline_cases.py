"""Models for pipelines: each with its stages, a batch of any size, and a loss inside or outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import whale_torch as wh

__all__ = ["CASES", "WIDTH", "Case"]

WIDTH = 8
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """make: the plain model. stages: patterns of module names, in order. batch: inputs by name for a number of rows.

    outside: of the model's output and the batch, where the model returns no loss of its own. update: buffers change in
    training, micro-batch by micro-batch.
    """

    make: Callable[[], nn.Module]
    stages: tuple[str, ...]
    batch: Callable[[int], Batch]
    outside: Callable[[Any, Batch], Tensor] | None = None
    updates: bool = False


def _features(rows: int) -> Batch:
    return {"x": torch.randn(rows, WIDTH), "y": torch.randint(5, (rows,))}


def _ignored(rows: int) -> Batch:
    batch = _features(rows)
    batch["y"][: max(1, rows // 2)] = -100
    return batch


class Chain(nn.Module):
    """Four layers, one after the other."""

    def __init__(self, middle: Callable[[], nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), middle())
        self.c, self.d = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def features(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x).relu())).tanh())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.features(x), y)


class Outputs(Chain):
    """The loss is the user's."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.features(x)


class Skips(Chain):
    """A tensor goes past stages, one is read by three, and one that depends on inputs only is read everywhere."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale = x.square().mean(1, keepdim=True)
        h = self.a(x).relu()
        i = self.b(h) * scale
        j = self.c(i + h) * scale
        return F.cross_entropy(self.d(j + h), y)


@dataclasses.dataclass
class Pair:
    first: Tensor
    rest: dict[str, tuple[Tensor, ...]]


class Nests(Chain):
    """Stages hand on dataclasses, dicts and tuples, with whole numbers and flags among them."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.a(x)
        order = h.argsort(1)
        pair = Pair(self.b(h), {"all": (h, order, h > 0)})
        first, chosen, positive = pair.rest["all"]
        z = self.d(self.c(pair.first).gather(1, chosen) * positive + first)
        return {"logits": z, "loss": F.cross_entropy(z, y), "accuracy": (z.argmax(1) == y).float().mean()}


class Twice(Chain):
    """A module is called twice in one stage, and another one in two stages."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(self.a(x).relu()).tanh()
        return F.cross_entropy(self.d(self.b(self.c(self.b(h)))), y)


class Tied(nn.Module):
    """The first and the last stage share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.d = nn.Linear(WIDTH, 11, bias=False)
        self.d.weight = self.a.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.d(self.c(self.b(self.a(x)).relu()).tanh())
        return F.cross_entropy(z.flatten(0, 1), y.flatten())


class Losses(Chain):
    """Several terms: a masked mean by hand, weighted classes, a penalty on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.linspace(0.5, 2.0, 5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.b(self.a(x).relu())
        mask = (y >= 0).float()
        masked = (h.square().mean(1) * mask).sum() / mask.sum()
        z = self.d(self.c(h).tanh())
        penalty = self.a.weight.square().sum()
        return F.cross_entropy(z, y, weight=self.weights) + 0.5 * masked + 0.01 * penalty + 0.1 * h.abs().mean()


class Recurrent(nn.Module):
    """An LSTM, weight_norm and a mask as a keyword argument of a later stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.LSTM(WIDTH, WIDTH, batch_first=True), weight_norm(nn.Linear(WIDTH, WIDTH))
        self.c, self.d = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, y: Tensor, padding: Tensor) -> Tensor:
        h, _ = self.a(x)
        h = self.b(h).tanh()
        h, _ = self.c(h, h, h, key_padding_mask=padding, need_weights=False)
        return F.cross_entropy(self.d(h).flatten(0, 1), y.flatten())


def _sequences(rows: int) -> Batch:
    padding = torch.zeros(rows, 4, dtype=torch.bool)
    padding[::2, 3] = True
    return {"x": torch.randn(rows, 4, WIDTH), "y": torch.randint(5, (rows, 4)), "padding": padding}


class Recomputed(Chain):
    """Layers that checkpoint themselves, without reentrance."""

    def __init__(self) -> None:
        super().__init__(_Recompute)


class _Recompute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(lambda x: self.layer(x).tanh(), x, use_reentrant=False)
        return out


class InPlace(Chain):
    """Stages that write into what they are given, and glue that writes into what stages gave."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.ReLU(inplace=True))
        self.b = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.c(self.b(self.a(x)))
        h[:, 0] = 1.0
        h += 0.5
        return F.cross_entropy(self.d(h), y)


class Normalized(Chain):
    """Running statistics in the second stage."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.BatchNorm1d(WIDTH))


_FOUR = ("a", "b", "c", "d")

CASES = {
    "chain": Case(Chain, _FOUR, _features),
    "ignored labels": Case(Chain, _FOUR, _ignored),
    "three stages": Case(Chain, ("a", "b|c", "d"), _features),
    "one stage": Case(Chain, ("a|b|c|d",), _features),
    "loose modules": Case(Chain, ("a", "c"), _features),
    "outputs": Case(Outputs, _FOUR, _features, lambda z, batch: F.cross_entropy(z, batch["y"])),
    "skips": Case(Skips, _FOUR, _features),
    "nests": Case(Nests, _FOUR, _features),
    "twice": Case(Twice, _FOUR, _features),
    "tied": Case(
        Tied, _FOUR, lambda rows: {"x": torch.randint(11, (rows, 3)), "y": torch.randint(11, (rows, 3))}
    ),
    "losses": Case(Losses, _FOUR, _features),
    "recurrent": Case(Recurrent, _FOUR, _sequences),
    "recomputed": Case(Recomputed, _FOUR, _features),
    "normalized": Case(Normalized, _FOUR, _features, updates=True),
    "in place": Case(InPlace, _FOUR, _features),
}  # fmt: skip


def annotated(case: Case, **options: Any) -> nn.Module:
    """The case's model with its stages in a pipeline, inside a replica."""
    model = case.make()
    return wh.annotate(model, {p: wh.stage() for p in case.stages}, inside=(wh.replica(), wh.pipeline(**options)))
