"""Dropout in a split: masks differ where memory differs, streams agree where rows are shared, recomputation replays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whale_torch as wh
from tests.parity.compare import SCOPES
from tests.parity.metric import gradients
from tests.world import world

WIDTH, HEADS, LENGTH, ROWS = 16, 4, 6, 4


class Net(nn.Module):
    def __init__(self, scope: Any, recompute: bool = False):
        super().__init__()
        with scope():
            self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.4, batch_first=True)
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5, batch_first=True)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = checkpoint(self.layer, x, use_reentrant=False) if self.recompute else self.layer(x)
        return h + self.attention(h, h, h)[0]


def draw(rank: int, n: int, mode: str) -> dict[str, Tensor]:
    """What the kernel would draw on each rank, the zeros of the weights, and the stream afterwards."""
    torch.manual_seed(0)
    model: Any = wh.parallelize(Net(SCOPES[mode]))
    drawn = []
    kernel = F.scaled_dot_product_attention

    def recording(*args: Any, **kwargs: Any) -> Tensor:
        drawn.append(torch.rand(8))
        return kernel(*args, **kwargs)

    F.scaled_dot_product_attention = recording
    x = torch.randn(
        ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(rank // 2 if mode == "shared" else rank)
    )
    model.layer(x)
    weights = model.attention(x, x, x, average_attn_weights=False)[1]
    F.scaled_dot_product_attention = kernel
    return {"kernel": drawn[0], "weights": weights.detach(), "after": torch.rand(8)}


@pytest.mark.parametrize(("mode", "n"), [("shared", 2), ("own", 2)])
def test_masks_differ_where_memory_differs(mode: str, n: int) -> None:
    first, second = world(n, draw, mode, timeout=180)
    assert not torch.equal(first["kernel"], second["kernel"])
    zeros = first["weights"] == 0
    assert zeros.any()
    assert not torch.equal(zeros[:, :2], zeros[:, 2:])  # heads 0 and 1 live on rank 0, heads 2 and 3 on rank 1
    if mode == "shared":
        assert torch.equal(first["weights"], second["weights"])
        assert torch.equal(first["after"], second["after"])


def recomputed_or_not(rank: int, n: int, mode: str, recompute: bool) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model: Any = wh.parallelize(Net(SCOPES[mode], recompute))
    torch.manual_seed(10 if mode == "shared" else 10 + rank)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0 if mode == "shared" else rank))
    model(x).square().mean().backward()
    return gradients(model)


@pytest.mark.parametrize("mode", ["shared", "own"])
def test_a_recomputation_replays_the_masks(mode: str) -> None:
    plain, recomputed = (world(2, recomputed_or_not, mode, recompute, timeout=180)[0] for recompute in (False, True))
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, msg=name)
