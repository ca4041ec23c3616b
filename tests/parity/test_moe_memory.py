"""No tensor of a layer of experts grows with tokens x experts x capacity, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import whale_torch as wh
from benchmarks.live_bytes import LiveBytes
from tests.world import world
from whale_torch import moe

TOKENS, DIM, HIDDEN, EXPERTS, TOP_K = 512, 16, 32, 8, 2
CAPACITY = TOKENS * TOP_K * 5 // 4 // EXPERTS
BOUND = 4 * (4 * TOKENS * TOP_K * HIDDEN)
"""Bytes: what experts make of all routes of a rank, and room for a rank that gets more of them."""
LAYERS: dict[str, dict[str, Any]] = {
    "nothing dropped": {},
    "through gloo": {"node_memory": False},
    "in chunks": {"chunks": 3},
    "dropped by position": {"capacity_factor": 1.25},
    "dropped by priority": {"capacity_factor": 1.25, "drop": "priority", "renormalize": "after"},
    "experts of the user's": {"expert": lambda: nn.Sequential(nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM))},
}


def _largest(layer: Any, tokens: int = TOKENS) -> int:
    x = torch.randn(tokens, DIM, requires_grad=True)
    layer(x).square().sum().backward()  # what is made once is made here
    with LiveBytes(shared=False) as live:
        layer(x).square().sum().backward()
    return live.largest


def _layer(options: dict[str, Any]) -> moe.MoELayer:
    wide = {} if "expert" in options else {"hidden": HIDDEN}
    return moe.MoELayer(DIM, EXPERTS, TOP_K, z_loss_coef=0.01, **wide, **options)


def _split(rank: int, n: int) -> int:
    with wh.split():
        layers = [_layer(options) for options in LAYERS.values()]
    return _largest(wh.parallelize(nn.Sequential(*layers)))


def test_tensors_are_as_large_as_the_rows_of_the_routes() -> None:
    for largest in world(2, _split):
        assert 4 * TOKENS * TOP_K * DIM <= largest <= BOUND
    for name, options in LAYERS.items():
        assert _largest(_layer(options)) <= BOUND, name


def _by_one_hot(x: Tensor) -> Tensor:
    """A dispatch by products with [token, expert, place], as GShard has it."""
    probs = (x @ x[:EXPERTS].t()).softmax(1)
    chosen = nn.functional.one_hot(probs.argmax(1), EXPERTS)
    place = (chosen.cumsum(0) * chosen).sum(1).clamp(max=CAPACITY) - 1
    mask = chosen[:, :, None] * nn.functional.one_hot(place, CAPACITY)[:, None]
    weights = probs[:, :, None] * mask
    return torch.einsum("sec,ecm->sm", weights, torch.einsum("sec,sm->ecm", mask.float(), x))


def test_a_tensor_of_tokens_experts_and_places_is_found() -> None:
    assert _largest(_by_one_hot) >= 4 * TOKENS * EXPERTS * CAPACITY > BOUND
