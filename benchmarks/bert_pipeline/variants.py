"""Flat data parallelism, whale's data parallelism, and whale's pipelines of several sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import whale_torch as wh
from benchmarks.bert_pipeline.sizes import Scale
from benchmarks.handwritten import share_buffers
from whale_torch.comm.registry import place_of

__all__ = ["INSIDE", "PLACES", "VARIANTS", "Variant", "make", "micro_batches_of"]

PLACES = {"pipeline2": 2, "pipeline4": 4, "pipeline8": 8}
VARIANTS = {
    "flat": "flat data parallelism, fp32",
    "whale_dp": "whale data parallelism, fp32",
    "whale_dp_half": "whale data parallelism, half wire",
    "pipeline2": "whale pipelines of 2, half wire",
    "pipeline4": "whale pipelines of 4, half wire",
    "pipeline8": "whale pipelines of 8, half wire",
}
INSIDE = "inside a node"
_LEARNING_RATE, _MOST_MICRO_BATCHES = 0.1, 32


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to train on this rank.

    step: one of SGD on the sequences (rows, width) that it is fed. places: ranks that are fed together, the feed-th
    such group in the world. where: how its stages lie.
    """

    step: Callable[[Tensor], Tensor]
    parameters: dict[str, nn.Parameter]
    places: int = 1
    feed: int = 0
    where: str = ""

    def held(self) -> dict[str, Tensor]:
        """A copy of the parameters that this rank has."""
        found = {name: (place_of(p), p.detach().clone()) for name, p in self.parameters.items()}
        return {name: value for name, (place, value) in found.items() if place is None or place.held}

    def batch(self, scale: Scale, sequences: int, number: int) -> Tensor:
        """What it is fed in a step: over the world all variants see the same."""
        ranks = range(self.feed * self.places, (self.feed + 1) * self.places)
        parts = []
        for rank in ranks:
            generator = torch.Generator().manual_seed(number * 1000 + rank)
            parts.append(torch.randn(sequences, scale.width, generator=generator))
        return torch.cat(parts)


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


def make(name: str, scale: Scale, sequences: int) -> Variant:
    """A variant on this rank."""
    rank = dist.get_rank()
    if name == "flat":
        return _flat(scale, rank)
    options = {"reduce_dtype": None if name == "whale_dp" else torch.bfloat16, "bucket_bytes": scale.bucket_bytes}
    if name not in PLACES:
        with wh.replica(**options):
            model: Any = _Bert(scale)
        wh.parallelize(model)
        return Variant(_loop(model), dict(model.named_parameters()), feed=rank)
    places = PLACES[name]
    model = _Bert(scale)
    cut = [round(i * len(model.layers) / places) for i in range(places + 1)]
    stages = {
        "|".join(rf"layers\.{n}" for n in range(first, last)): wh.stage() for first, last in itertools.pairwise(cut)
    }
    scope = wh.pipeline(num_micro_batches=micro_batches_of(places, sequences), num_ranks=places)
    wh.annotate(model, stages, inside=(wh.replica(**options), scope))
    wh.parallelize(model, sample_inputs=torch.zeros(places * sequences, scale.width))
    plan = wh.plan(model)
    assert plan.pipeline is not None
    where = INSIDE if plan.pipeline.inner else "on different nodes"
    return Variant(_loop(model), dict(model.named_parameters()), places, plan.feed_of(rank), where)


def _flat(scale: Scale, rank: int) -> Variant:
    """One ring over all ranks after backward, of all gradients in one buffer."""
    model = _Bert(scale)
    (buffer,) = share_buffers(list(model.parameters()), 1 << 60)

    def average() -> None:
        dist.all_reduce(buffer)
        buffer.div_(dist.get_world_size())

    return Variant(_loop(model, average), dict(model.named_parameters()), feed=rank)


def _loop(model: nn.Module, average: Callable[[], None] | None = None) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), _LEARNING_RATE)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=average is None)  # else gradients stay where they are
        loss: Tensor = model(x)
        loss.backward()
        if average is not None:
            average()
        optimizer.step()
        return loss.detach()

    return step
