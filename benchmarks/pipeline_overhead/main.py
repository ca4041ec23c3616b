"""What a pipeline costs a step in CPU time of the main thread: `python -m benchmarks.pipeline_overhead`.

Two stages of four linear layers each on two ranks of loopback, 8 micro-batches, 1F1B, plain SGD: whale and torch's
Schedule1F1B, alternating in one world, on the same weights and data.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import whale_torch as wh
from benchmarks.cluster import Cluster
from benchmarks.harness import Report, Step, Trace, add_arguments, interleave, summarize, whole_numbers

__all__ = ["main"]

_MICRO_BATCHES, _LAYERS, _LEARNING_RATE = 8, 4, 0.05
_BARS = {512: 1.15, 64: 1.35}


def _stage(width: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(_LAYERS)))


class _Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = _stage(width), _stage(width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.second(self.first(x)), y)


def _whale(width: int) -> Callable[[Tensor, Tensor], Tensor]:
    model: Any = _Model(width)
    scope = wh.pipeline(num_micro_batches=_MICRO_BATCHES, schedule="1f1b")
    wh.annotate(model, {"first": wh.stage(), "second": wh.stage()}, inside=scope)
    wh.parallelize(model)
    optimizer = torch.optim.SGD(model.parameters(), _LEARNING_RATE)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _torch(width: int, rank: int, world: int) -> Callable[[Tensor, Tensor], Tensor]:
    model = _Model(width)
    mine = (model.first, model.second)[rank]
    stage = PipelineStage(mine, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, _MICRO_BATCHES, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(mine.parameters(), _LEARNING_RATE)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        optimizer.step()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, world - 1)  # whale's loss is equal on all ranks too
        return loss

    return step


def _measure(rank: int, names: list[str], width: int, rows: int, steps: int, warmup: int) -> dict[str, Trace]:
    generator = torch.Generator().manual_seed(7)
    data = torch.randn(2, 8, rows, width, generator=generator)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    made = {name: _whale(width) if name == "whale" else _torch(width, rank, 2) for name in names}

    def numbered(name: str) -> Step:
        return lambda number: made[name](data[0, number % 8], data[1, number % 8])

    return interleave({name: numbered(name) for name in names}, steps=steps, warmup=warmup)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline_overhead", description=__doc__)
    parser.add_argument("--widths", type=whole_numbers, default="512,64")
    parser.add_argument("--rows", type=int, default=64)
    add_arguments(parser, ("torch", "whale"), steps=100)
    options = parser.parse_args()
    report = Report("pipeline_overhead", "CPU time of a step of a pipeline, against torch's Schedule1F1B.")
    rows = []
    with Cluster(1, 2) as cluster:
        for width in options.widths:
            summaries = summarize(
                cluster.run(_measure, options.variants, width, options.rows, options.steps, options.warmup)
            )
            for name, own in summaries.items():
                over = own.cpu_minimum_s / summaries["torch"].cpu_minimum_s if "torch" in summaries else float("nan")
                times = [f"{1e3 * s:.2f}" for s in (own.cpu_minimum_s, own.cpu_median_s, own.minimum_s)]
                rows.append([width, name, *times, f"{over:.2f}x"])
            if {"torch", "whale"} <= summaries.keys():
                error = summaries["whale"].loss_error(summaries["torch"].values)
                report.bar(f"width {width}: loss of whale as torch's", error, at_most=1e-5, exact=True)
                ratio = summaries["whale"].cpu_minimum_s / summaries["torch"].cpu_minimum_s
                if width in _BARS:
                    report.bar(f"width {width}: CPU over torch, minima", ratio, at_most=_BARS[width])
            report.data(**{f"width{width}": summaries})
    headers = ["width", "variant", "CPU ms, min", "CPU ms, median", "wall ms, min", "over torch"]
    report.table(f"Main-thread CPU time of a step: {options.rows} rows in 8 micro-batches, 2 stages", headers, rows)
    return report.finish(options)
