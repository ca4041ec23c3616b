"""Flat data parallelism, whale's data parallelism, and whale's pipelines of several sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import whale_torch as wh
from benchmarks.bert_pipeline.sizes import Scale
from benchmarks.handwritten import share_buffers

__all__ = ["PLACES", "VARIANTS", "make", "micro_batches_of"]

PLACES = {"pipeline2": 2, "pipeline4": 4, "pipeline8": 8}
VARIANTS = {
    "flat": "flat data parallelism, fp32",
    "whale_dp": "whale data parallelism, fp32",
    "whale_dp_half": "whale data parallelism, half wire",
    "pipeline2": "whale pipelines of 2, half wire",
    "pipeline4": "whale pipelines of 4, half wire",
    "pipeline8": "whale pipelines of 8, half wire",
}
_LEARNING_RATE, _MOST_MICRO_BATCHES = 0.1, 32

Stepping = Callable[[Tensor], Tensor]


class _Bert(nn.Module):
    """The layers one after the other; the loss is the mean square of what comes out."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.layers = nn.ModuleList(scale.layers())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def micro_batches_of(places: int, sequences: int) -> int:
    """Of a pipeline that is fed as many sequences as its ranks would be alone: of one sequence each, 32 at most."""
    return min(_MOST_MICRO_BATCHES, places * sequences)


def _loop(model: Any, finish: Callable[[], None] = lambda: None) -> Stepping:
    optimizer = torch.optim.SGD(model.parameters(), _LEARNING_RATE)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=not hasattr(model, "buffer"))
        loss: Tensor = model(x)
        loss.backward()
        finish()
        optimizer.step()
        return loss.detach()

    return step


def _flat(scale: Scale) -> Stepping:
    model: Any = _Bert(scale)
    (buffer,) = share_buffers(list(model.parameters()), 1 << 60)
    model.buffer = None  # gradients stay where they are

    def finish() -> None:
        dist.all_reduce(buffer)
        buffer.div_(dist.get_world_size())

    return _loop(model, finish)


def make(name: str, scale: Scale, sequences: int) -> Stepping:
    """A variant on this rank: a step on its sequences (rows, width)."""
    if name == "flat":
        return _flat(scale)
    options = {"reduce_dtype": None if name == "whale_dp" else torch.bfloat16, "bucket_bytes": scale.bucket_bytes}
    if name not in PLACES:
        with wh.replica(**options):
            model = _Bert(scale)
        return _loop(wh.parallelize(model))
    places = PLACES[name]
    model = _Bert(scale)
    cut = [round(i * len(model.layers) / places) for i in range(places + 1)]
    stages = {
        "|".join(rf"layers\.{n}" for n in range(first, last)): wh.stage() for first, last in itertools.pairwise(cut)
    }
    scope = wh.pipeline(num_micro_batches=micro_batches_of(places, sequences), num_ranks=places)
    wh.annotate(model, stages, inside=(wh.replica(**options), scope))
    return _loop(wh.parallelize(model))
