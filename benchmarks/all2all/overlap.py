"""The forward of a layer of experts whose tokens travel in chunks, while its experts, modelled, run on others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import whale_torch as wh
from benchmarks.cluster.compute import ModelledLayer
from benchmarks.harness import Step, Trace, interleave
from whale_torch.moe import MoELayer

__all__ = ["CHUNKS", "COMPUTE_S", "LAYER_BYTES", "WIRES", "measure"]

LAYER_BYTES, COMPUTE_S = 4 << 20, 0.06
"""Rows of a rank, each way, and how long its experts take where all ranks get equally many."""
CHUNKS = (1, 2, 4, 8)
WIRES = {"fp32": None, "bf16": torch.bfloat16}
_WIDTH, _EXPERTS, _TOP_K = 256, 8, 2


def _layer(num_chunks: int, wire_dtype: torch.dtype | None, num_rows: int) -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    with wh.split():
        layer = MoELayer(
            _WIDTH,
            _EXPERTS,
            _TOP_K,
            expert=lambda: ModelledLayer(_WIDTH, COMPUTE_S / num_rows, 0.0),
            aux_loss_coef=0.0,
            chunks=num_chunks,
            wire_dtype=wire_dtype,
        )
    model: Callable[[Tensor], Tensor] = wh.parallelize(nn.Sequential(layer))
    return model


def measure(rank: int, layer_bytes: int, steps: int, warmup: int) -> tuple[dict[str, Trace], dict[str, float]]:
    """(traces, how far a variant's output is from that of one chunk without a cast, in parts of its norm)"""
    num_rows = layer_bytes // (4 * _WIDTH)
    layers = {f"{chunks} {name}": _layer(chunks, dtype, num_rows) for name, dtype in WIRES.items() for chunks in CHUNKS}
    torch.manual_seed(1 + rank)
    x = torch.randn(num_rows // _TOP_K, _WIDTH, requires_grad=True)

    def step(name: str) -> Step:
        def run(number: int) -> None:
            layers[name](x)

        return run

    with torch.no_grad():
        whole = layers["1 fp32"](x)
        errors = {name: float((layer(x) - whole).norm() / whole.norm()) for name, layer in layers.items()}
    return interleave({name: step(name) for name in layers}, steps=steps, warmup=warmup), errors
