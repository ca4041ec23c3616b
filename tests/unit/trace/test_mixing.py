"""Glue in which samples meet is found; glue in which they do not is let pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale_torch.errors import TraceError
from whale_torch.trace.mixing import refuse_mixing
from whale_torch.trace.sizes import Sizes
from whale_torch.trace.tracer import record
from whale_torch.trace.twin import Twin

Glue = Callable[[Tensor], Tensor]

MIXED: dict[str, Glue] = {
    "mean": lambda h: h - h.mean(0),
    "kept mean": lambda h: h - h.mean(0, keepdim=True),
    "contrast": lambda h: h @ h.t(),
    "softmax": lambda h: h.softmax(0),
    "softmax by name": lambda h: F.softmax(h, dim=-2),
    "cumulated": lambda h: torch.cumsum(h, 0),
    "flipped": lambda h: h.flip(0),
    "rolled": lambda h: torch.roll(h, 1, 0),
    "sorted": lambda h: h.sort(dim=0)[0],
    "distance": lambda h: torch.cdist(h, h),
    "outer": lambda h: h[:, None] - h[None],
    "largest": lambda h: h - h.max(0).values,
    "largest so far": lambda h: h.cummax(0).values,
    "normalized": lambda h: F.normalize(h, dim=0),
}
APART: dict[str, Glue] = {
    "softmax": lambda h: h.softmax(-1),
    "flattened": lambda h: h.reshape(-1, 2).relu().reshape(h.shape),
    "transposed": lambda h: (h.t() * 2).t(),
    "own mean": lambda h: h - h.mean(1, keepdim=True),
    "chunks": lambda h: torch.cat(h.chunk(2, dim=1), dim=1),
    "norm": lambda h: F.layer_norm(h, h.shape[1:]),
    "largest": lambda h: h - h.max(1, keepdim=True).values,
    "normalized": lambda h: F.normalize(h),
    "fresh": lambda h: h * h.new_ones(4),
    "split": lambda h: h.split(1, dim=1)[0] * h.max(1).values[:, None],
}


class _Model(nn.Module):
    def __init__(self, glue: Glue) -> None:
        super().__init__()
        self.a, self.glue = nn.Linear(4, 4), glue

    def forward(self, x: Tensor) -> Tensor:
        return self.glue(self.a(x))


def _look(glue: Glue) -> None:
    twin = Twin.of(_Model(glue), torch.device("cpu"))
    first = record(twin, (torch.zeros(3, 4),), {}, lambda name, module: 0 if name else None)
    other = record(twin, (torch.zeros(3, 4),), {}, lambda name, module: 0 if name else None, dims=(0,), rows=1009)
    refuse_mixing(first.nodes, Sizes.of(first, other))


@pytest.mark.parametrize("name", MIXED)
def test_samples_that_meet_are_found(name: str) -> None:
    with pytest.raises(TraceError, match=r"between stages mixes samples: it.* the batch's dimension") as caught:
        _look(MIXED[name])
    assert "test_mixing.py:" in str(caught.value)


@pytest.mark.parametrize("name", APART)
def test_samples_that_stay_apart_pass(name: str) -> None:
    _look(APART[name])
