"""How long the ranks of a pipeline are idle, beside the formula: `python -m benchmarks.pipeline_bubble`.

Stages of equal modelled compute (benchmarks/cluster/compute.py), a backward twice as long as a forward, on ranks of
loopback. Sleeping uses no core, so ranks compute at the same time on however few: what a step lasts beyond a rank's own
compute is the schedule's idle time and the runtime's. A layer's weight part sleeps in the runtime's weight part.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import whale_torch as wh
from benchmarks.cluster import Cluster, ModelledLayer
from benchmarks.harness import Report, Step, Trace, add_arguments, interleave, summarize
from whale_torch.planning.schedules import bubble_formula, make
from whale_torch.strategies.pipeline.weight_store import WeightStore

__all__ = ["VARIANTS", "Shape", "idle_share", "main"]

_WIDTH, _ROWS = 16, 2
_BAR = 0.03


@dataclass(frozen=True, slots=True)
class Shape:
    """A pipeline: of how many stages on how many ranks, and into how many micro-batches a batch is cut."""

    num_stages: int
    num_ranks: int
    num_micro_batches: int

    def formula(self, schedule: str) -> float:
        share = bubble_formula(schedule, self.num_stages, self.num_micro_batches, self.num_ranks)
        assert share is not None
        return share

    def __str__(self) -> str:
        return f"{self.num_stages} stages on {self.num_ranks} ranks, {self.num_micro_batches} micro-batches"


_PLAIN = (Shape(4, 4, 8), Shape(2, 2, 8))
VARIANTS: dict[str, tuple[Shape, ...]] = {
    "gpipe": _PLAIN,
    "1f1b": _PLAIN,
    "interleaved": (Shape(8, 4, 8),),
    "zero_bubble": _PLAIN,
}


class _Chain(nn.Module):
    """Stages one after the other, each a small linear layer and what a large one would take."""

    def __init__(self, num_stages: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Linear(_WIDTH, _WIDTH), ModelledLayer(0, forward_s / _ROWS, backward_s / _ROWS))
            for _ in range(num_stages)
        )

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.square().mean()


@contextmanager
def _weight_parts(seconds: float) -> Iterator[None]:
    """Weight parts take so long."""
    finish = WeightStore.finish

    def slow(self: WeightStore, stage: int, micro_batch: int) -> None:
        time.sleep(seconds)
        finish(self, stage, micro_batch)

    WeightStore.finish = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        WeightStore.finish = finish  # type: ignore[method-assign]


def _trainer(schedule: Any, shape: Shape, forward_s: float) -> Callable[[Tensor], Tensor]:
    splits = schedule == "zero_bubble"
    model: Any = _Chain(shape.num_stages, forward_s, forward_s if splits else 2 * forward_s)
    stages = {f"stages.{number}": wh.stage() for number in range(shape.num_stages)}
    scope = wh.pipeline(num_micro_batches=shape.num_micro_batches, schedule=schedule, num_ranks=shape.num_ranks)
    wh.parallelize(wh.annotate(model, stages, inside=scope))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        with _weight_parts(forward_s):
            loss: Tensor = model(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _measure(rank: int, names: list[str], shape: Shape, forward_s: float, steps: int, warmup: int) -> dict[str, Trace]:
    """Traces of the schedules that have this shape."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(_ROWS * shape.num_micro_batches, _WIDTH, generator=generator)
    made = {name: _trainer(name, shape, forward_s) for name in names}

    def numbered(name: str) -> Step:
        return lambda number: made[name](x)

    return interleave({name: numbered(name) for name in names}, steps=steps, warmup=warmup)


def idle_share(seconds: float, shape: Shape, forward_s: float) -> float:
    """The part of a step in which a rank does not compute."""
    return 1 - 3 * forward_s * shape.num_micro_batches * shape.num_stages / shape.num_ranks / seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline_bubble", description=__doc__)
    parser.add_argument("--forward-ms", type=float, default=50.0, help="of a stage (default %(default)s)")
    add_arguments(parser, VARIANTS, steps=4)
    options = parser.parse_args()
    forward_s = options.forward_ms / 1e3
    report = Report("pipeline_bubble", "The idle share of a pipeline's ranks is what its schedule's formula says.")
    rows = []
    for shape in dict.fromkeys(shape for name in options.variants for shape in VARIANTS[name]):
        names = [name for name in options.variants if shape in VARIANTS[name]]
        with Cluster(1, shape.num_ranks) as cluster:
            summaries = summarize(cluster.run(_measure, names, shape, forward_s, options.steps, options.warmup))
        for name, own in summaries.items():
            found, expected = idle_share(own.minimum_s, shape, forward_s), shape.formula(name)
            kept = max(make(name, shape.num_stages, shape.num_micro_batches, shape.num_ranks).peak_in_flight)
            times = [f"{1e3 * s:.0f}" for s in (own.minimum_s, own.median_s)]
            rows.append([shape, name, *times, f"{found:.1%}", f"{expected:.1%}", kept])
            report.bar(f"{name}, {shape}: idle share less the formula's", abs(found - expected), at_most=_BAR)
            error = own.loss_error(summaries[names[0]].values)
            report.bar(f"{name}, {shape}: loss as {names[0]}'s", error, at_most=1e-5, exact=True)
        report.data(**{f"{shape}": summaries})
    headers = ["pipeline", "schedule", "step ms, min", "step ms, median", "idle", "formula", "micro-batches kept"]
    report.table(f"Idle share of the ranks, {options.forward_ms:g} ms a forward, twice that a backward", headers, rows)
    report.note("the idle share is taken of the shortest step; formulas: whale_torch/planning/schedules/theory.py")
    return report.finish(options)
