"""What the library costs a step in CPU time of the main thread: `python -m benchmarks.overhead`.

A small model with every kind of bridge: replicated features, an MLP pair split inside a replica, a split classifier. It
runs in worlds of 1 and 2 on loopback, annotated and with the same collectives written by hand, alternating.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from benchmarks.cluster import Cluster
from benchmarks.harness import (
    Report,
    Step,
    Trace,
    add_arguments,
    interleave,
    sgd_loop,
    summarize,
    whole_numbers,
)
from benchmarks.overhead.handwritten import ByHand

__all__ = ["main"]

_CLASSES, _LEARNING_RATE = 1000, 0.05
_BARS = {256: 1.15, 64: 1.5}


def _features(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU())


class _Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(x)))
        return y


class _Plain(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.features, self.pair, self.fc = _features(width), _Pair(width), nn.Linear(width, _CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.pair(self.features(inputs)))
        return logits


class _Annotated(_Plain):
    """The same model; the pair is split over the ranks of one replica, so all ranks are fed the same rows."""

    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        with wh.replica():
            self.features = _features(width)
            with wh.split():
                self.pair = _Pair(width)
        with wh.split():
            self.fc = nn.Linear(width, _CLASSES)


def _measure(
    rank: int, names: list[str], world: int, width: int, rows: int, steps: int, warmup: int
) -> dict[str, Trace]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(8, rows, width, generator=generator)
    labels = torch.randint(0, _CLASSES, (8, rows), generator=generator)

    def build(name: str) -> Callable[[Tensor, Tensor], Tensor]:
        torch.manual_seed(0)
        if name == "whale":
            return sgd_loop(wh.parallelize(_Annotated(width)), _LEARNING_RATE)
        plain = _Plain(width)
        if name == "plain":
            return sgd_loop(plain, _LEARNING_RATE)
        parts = (plain.features, plain.pair.up, plain.pair.down, plain.fc)
        return ByHand(*parts, rank, world, _LEARNING_RATE, checked=name == "same").step

    if "whale" not in names:
        dist.init_process_group("gloo")
    # whale first: it starts the group
    steps_by_name = {name: build(name) for name in sorted(names, key="whale".__ne__)}

    def numbered(name: str) -> Step:
        return lambda number: steps_by_name[name](inputs[number % 8], labels[number % 8])

    return interleave({name: numbered(name) for name in names}, steps=steps, warmup=warmup)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--widths", type=whole_numbers, default="256,64")
    parser.add_argument("--rows", type=int, default=64)
    add_arguments(parser, ("plain", "hand", "same", "whale"), steps=200)
    options = parser.parse_args()
    report = Report(
        "overhead", "CPU time that the library itself takes in a step, against the same collectives by hand."
    )
    rows = []
    for world in (1, 2):
        with Cluster(1, world) as cluster:
            for width in options.widths:
                rows += _compare(report, cluster, options, width)
    headers = ["world", "width", "variant", "CPU ms, min", "CPU ms, median", "wall ms, min", "over hand", "over same"]
    report.table(
        f"Main-thread CPU time of a step: {options.rows} rows, {_CLASSES} classes, {options.steps} steps each",
        headers,
        rows,
    )
    report.note(
        "plain: the model on one process, no split; hand: as few exchanges as the mathematics needs; same: by hand "
        "with every exchange of whale's; the loop, the optimizer and the rows are the same everywhere"
    )
    return report.finish(options)


def _compare(report: Report, cluster: Cluster, options: argparse.Namespace, width: int) -> list[list[object]]:
    world, names = cluster.world_size, options.variants
    summaries = summarize(cluster.run(_measure, names, world, width, options.rows, options.steps, options.warmup))
    rows = []
    for name, own in summaries.items():
        ratios = [
            f"{own.cpu_minimum_s / summaries[by].cpu_minimum_s:.2f}x" if by in summaries else ""
            for by in ("hand", "same")
        ]
        times = [f"{1e3 * s:.2f}" for s in (own.cpu_minimum_s, own.cpu_median_s, own.minimum_s)]
        rows.append([world, width, name, *times, *ratios])
        if "plain" in summaries:
            error = own.loss_error(summaries["plain"].values)
            report.bar(f"world {world}, width {width}: loss of {name} as plain's", error, at_most=1e-4, exact=True)
    for by in ("same", "hand"):
        if by in summaries and "whale" in summaries and width in _BARS:
            ratio = summaries["whale"].cpu_minimum_s / summaries[by].cpu_minimum_s
            report.bar(f"world {world}, width {width}: CPU over {by}, minima", ratio, at_most=_BARS[width])
    report.data(**{f"world{world}_width{width}": summaries})
    return rows
