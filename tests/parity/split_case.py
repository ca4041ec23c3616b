"""A split classifier on n ranks beside one process: what parity tests of Columns and its losses share.

A feed is the rows that a rank (or the ranks of one replica) is given. One process has them all and trains the sum of
the feeds' losses, weighed by their rows, or one loss of the whole batch.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.metric import relative_error
from whale_torch.state import full_tensor

Use = Callable[[Tensor, Tensor], Tensor]

BAR = 2e-5
WIDTH = 6


class Classifier(nn.Module):
    """Replicated features, a split classifier; with a loss of its own if `use` is set. layout: see `build`."""

    def __init__(self, layout: str, num_classes: int, *, bias: bool = True, summed: bool = False, **options: Any):
        super().__init__()
        with wh.replica(loss="sum") if summed else wh.replica():
            self.features = nn.Linear(5, WIDTH)
        self.use: Use | None = None
        if layout == "mixed":  # twins that share a feed, and several feeds, in the region of fc
            with wh.replica(), wh.split(size=2):
                self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        options["cut"] = "columns"
        sizes: dict[str, dict[str, Any]] = {
            "own": {},
            "mixed": {"rows": "own"},
            "groups": {"size": 2},
            "shared": {"size": 2, "rows": "shared"},
        }
        with wh.replica() if layout == "replica" else wh.split(**sizes[layout], **options):
            self.fc = nn.Linear(WIDTH, num_classes, bias=bias)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = self.features(x).tanh()
        if hasattr(self, "first"):
            h = h + self.second(F.gelu(self.first(h)))
        z = self.fc(h)
        return z if self.use is None or y is None else self.use(z, y)


@dataclass
class Case:
    """One rank's model, its one-process twin, and the whole batch."""

    model: nn.Module
    alone: nn.Module
    counts: list[int]
    feed: int
    x: Tensor
    y: Tensor

    @property
    def here(self) -> slice:
        start = sum(self.counts[: self.feed])
        return slice(start, start + self.counts[self.feed])

    def slices(self) -> list[slice]:
        starts = [sum(self.counts[:k]) for k in range(len(self.counts))]
        return [slice(start, start + count) for start, count in zip(starts, self.counts, strict=True)]


def build(
    rank: int,
    n: int,
    layout: str,
    num_classes: int,
    counts: list[int],
    *,
    dtype: torch.dtype = torch.float32,
    timeout: float = 20.0,
    bias: bool = True,
    lead: tuple[int, ...] = (),
    frozen: str = "",
    compiled: tuple[str, Any] = ("", None),
    **options: Any,
) -> Case:
    """A case of one rank.

    layout: "own" (one region), "groups" (regions of 2), "shared" (of 2 that are one feed), "mixed" (feeds of 2),
    "replica" (no split).

    counts: rows of each feed, taken in turn; lead: further dimensions of a row; frozen: a pattern of names;
    compiled: a member to compile first, and with which backend.
    """
    torch.manual_seed(7)
    model: nn.Module = Classifier(layout, num_classes, bias=bias, **options).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.data.mul_(2)
        parameter.requires_grad_(not re.fullmatch(frozen, name))
    alone = copy.deepcopy(model)
    feed_size = 2 if layout in ("shared", "mixed") and n > 1 else 1
    feeds = n // feed_size
    counts = [counts[k % len(counts)] for k in range(feeds)]
    x = torch.randn(sum(counts), *lead, 5, dtype=dtype)
    y = torch.randint(num_classes, (sum(counts), *lead))
    if compiled[0]:
        setattr(model, compiled[0], torch.compile(getattr(model, compiled[0]), backend=compiled[1]))
    wh.parallelize(model, timeout=timeout)
    return Case(model, alone, counts, rank // feed_size, x, y)


def number(value: Tensor) -> float:
    return float(value.detach())


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by name (a collective on a parallelized model); zero where there is none."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found[name.replace("_orig_mod.", "")] = full_tensor(parameter, grad)
    return found


def feed_losses(case: Case, use: Use) -> list[Tensor]:
    """Each feed's own loss in one process."""
    z = case.alone(case.x)
    return [use(z[here].clone(), case.y[here]) for here in case.slices()]


def weighed(case: Case, losses: list[Tensor]) -> Tensor:
    """The sum of the feeds' losses by their share of rows; feeds without rows have no part, whatever their loss."""
    total = sum(case.counts)
    parts = [loss * (count / total) for loss, count in zip(losses, case.counts, strict=True) if count]
    return torch.stack(parts).sum()


def compare(case: Case, use: Use, *, whole_batch: bool, inside: bool = False) -> float:
    """The worst gradient of one backward, beside one process. whole_batch: the loss is one of all rows together."""
    case.model.zero_grad()
    case.alone.zero_grad()
    case.model.use = use if inside else None  # type: ignore[assignment]
    x, y = case.x[case.here], case.y[case.here]
    out = case.model(x, y)
    loss = out if inside else use(out, y)
    del out
    loss.backward()
    expected = use(case.alone(case.x), case.y) if whole_batch else weighed(case, feed_losses(case, use))
    expected.backward()
    return relative_error(gradients_of(case.model), gradients_of(case.alone))
