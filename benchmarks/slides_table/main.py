"""ResNet-50 with 100 000 classes on 8, 16, 32, 64 ranks: `python -m benchmarks.slides_table` (`--bar`: one cell).

An emulated cluster of nodes with 8 ranks each; compute modelled as a V100's, communication real; sizes and times scaled
together (see sizes.py). All variants alternate step by step in one world; figures are real milliseconds, scaled back.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cluster import Cluster
from benchmarks.harness import Report, Step, Summary, Trace, add_arguments, interleave, summarize, whole_numbers
from benchmarks.slides_table.plot import plot
from benchmarks.slides_table.sizes import GPUS_PER_NODE, LINK_BITS, PUBLISHED, Scale, limit_ms
from benchmarks.slides_table.variants import FAST, VARIANTS, batch_of, make

__all__ = ["main"]

_FULL_SPEED = "10gbit"
_BAR_BATCH, _BAR_TIME_SCALE = 8, 240.0
_ONCE = ("ddp", "whale_dp_half")  # measured at one batch only: what they do to the others is told by whale_dp


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a world, a batch a rank, the scale, and how many steps slow and fast variants get."""

    ranks: int
    batch: int
    scale: Scale
    names: tuple[str, ...]
    slow_steps: int
    steps: int
    half: torch.dtype


def _measure(
    rank: int, cluster: Cluster, cell: Cell, names: tuple[str, ...], flat: Tensor | None
) -> tuple[dict[str, Trace], dict[str, float], Tensor]:
    """Traces, how far each variant's features are from those of `flat` after the same steps, and flat's features."""
    dist.init_process_group("gloo")
    rows = cell.batch // cell.scale.images_per_row
    variants = {name: make(name, cell.scale, cell.half) for name in names}
    dist.barrier()
    if rank == 0:  # groups are made at full speed: scaled links would need minutes for all addresses
        cluster.set_rate(cell.scale.rate(LINK_BITS))
    dist.barrier()

    def step_of(name: str, first: int) -> Step:
        def step(number: int) -> Tensor:
            return variants[name].step(*batch_of(cell.scale, rows, rank, first + number))

        return step

    # no warm-up: a first step costs little beside a data-parallel one, and the fast variants go on to take more
    traces = interleave({name: step_of(name, 0) for name in variants}, steps=cell.slow_steps, warmup=0)
    moved = {name: variant.features() for name, variant in variants.items()}  # modelled weights start at zero
    base = moved["flat"] if flat is None else flat
    errors = {name: ((value - base).norm() / base.norm()).item() for name, value in moved.items()}
    fast = {name: step_of(name, cell.slow_steps) for name in variants if name in FAST}
    if fast and cell.steps > cell.slow_steps:
        for name, trace in interleave(fast, steps=cell.steps - cell.slow_steps, warmup=0).items():
            traces[name].seconds += trace.seconds
            traces[name].cpu_seconds += trace.cpu_seconds
            traces[name].sent_bytes += trace.sent_bytes
    return traces, errors, base if rank == 0 else base[:0]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slides_table", description=__doc__)
    parser.add_argument("--ranks", type=whole_numbers, default="8,16,32,64")
    parser.add_argument(
        "--batches", type=whole_numbers, default="4,8,16,32", help="images a rank; at most 8, or a multiple of 8"
    )
    parser.add_argument("--half", choices=("bfloat16", "float16"), default="bfloat16", help="the half-precision wire")
    parser.add_argument("--size-scale", type=int, default=32, help="tensors are this many times smaller")
    parser.add_argument("--time-scale", type=float, default=60, help="at 64 ranks, less in proportion below")
    parser.add_argument("--slow-steps", type=int, default=2, help="steps of data-parallel variants")
    parser.add_argument("--bar", action="store_true", help="64 ranks, batch 8, times x 240, without DDP: 12 minutes")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    add_arguments(parser, VARIANTS)
    options = parser.parse_args()
    if options.bar:
        options.ranks, options.batches, options.time_scale = [64], [_BAR_BATCH], _BAR_TIME_SCALE
        options.variants = [name for name in options.variants if name in ("flat", *FAST)]
    if "flat" not in options.variants:
        parser.error("variant flat is what the others are compared with")
    name = "slides_table" + (", one cell" if options.bar else "")
    report = Report(name, "ResNet-50 with 100 000 classes: data parallelism against the split classifier.")
    cells: dict[tuple[int, int], dict[str, Summary]] = {}
    for ranks in options.ranks:
        for batch in options.batches:
            cell = _cell(options, ranks, batch)
            cells[ranks, batch], errors = _run(cell)
            _report_cell(report, cell, cells[ranks, batch], errors)
    return _finish(report, options, cells)


def _cell(options: argparse.Namespace, ranks: int, batch: int) -> Cell:
    names = tuple(name for name in options.variants if batch == _BAR_BATCH or name not in _ONCE)
    scale = Scale(options.size_scale, options.time_scale * ranks / 64, min(batch, 8))
    return Cell(ranks, batch, scale, names, options.slow_steps, options.steps, getattr(torch, options.half))


def _run(cell: Cell) -> tuple[dict[str, Summary], dict[str, float]]:
    with Cluster(cell.ranks // GPUS_PER_NODE, GPUS_PER_NODE, rate=cell.scale.rate(LINK_BITS), timeout=5400) as cluster:
        if cluster.nodes > 1:
            share = cluster.measured_rate() / cluster.bits_per_second
            print(f"{cell.ranks} ranks, batch {cell.batch}: one stream gets {share:.0%} of a link", flush=True)
        summaries, errors, flat = {}, {}, None
        for names in _worlds(cell.names):
            cluster.set_rate(_FULL_SPEED)
            results: list[Any] = cluster.run(_measure, cluster, cell, names, flat)
            flat = results[0][2]
            summaries |= summarize([traces for traces, _, _ in results])
            errors |= {name: max(errors[name] for _, errors, _ in results) for name in names}
    return {name: summaries[name] for name in cell.names}, errors


def _worlds(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Which variants share a world: flat and all that is split; the rest, which hold all on each rank, by twos."""
    slow = [name for name in names if name not in ("flat", *FAST)]
    first = tuple(name for name in names if name not in slow)
    return [first, *(tuple(slow[index : index + 2]) for index in range(0, len(slow), 2))]


def _limit_ms(cell: Cell, name: str) -> float:
    return limit_ms(
        cell.ranks,
        cell.batch,
        split=name in FAST,
        wire_bytes=2 if name.endswith("half") else 4,
        two_level=name not in ("flat", "ddp"),
        overlap=name != "flat",
    )


def _report_cell(report: Report, cell: Cell, summaries: dict[str, Summary], errors: dict[str, float]) -> None:
    flat, rows = summaries["flat"], []
    losses = {name: own.loss_error(flat.values) for name, own in summaries.items()}
    for name, own in summaries.items():
        rows.append(
            [
                VARIANTS[name],
                f"{own.minimum_s / cell.scale.time * 1e3:.1f}",
                f"{own.median_s / cell.scale.time * 1e3:.1f}",
                f"{_limit_ms(cell, name):.1f}",
                f"{flat.minimum_s / own.minimum_s:.2f}x",
                f"{flat.median_s / own.median_s:.2f}x",
                f"{own.sent_bytes * cell.scale.size / 1e6:.0f}",
                f"{losses[name]:.0e}",
                f"{errors[name]:.0e}",
            ]
        )
    where = f"{cell.ranks} ranks, batch {cell.batch}"
    report.bar(f"{where}: worst loss error", max(losses.values()), at_most=1e-3, exact=True)
    for kind, half, bound in (("fp32", False, 1e-4), ("half wire", True, 2e-2)):
        worst = max((errors[name] for name in cell.names if name.endswith("half") is half), default=0.0)
        report.bar(f"{where}: worst update error, {kind}", worst, at_most=bound, exact=True)
    headers = [
        "variant",
        "ms, min",
        "ms, median",
        "limit ms",
        "x flat, min",
        "x flat, median",
        "MB sent a node",
        "loss error",
        "update error",
    ]
    report.table(
        f"{cell.ranks} ranks, {cell.batch} images a rank (sizes / {cell.scale.size}, times x {cell.scale.time:g})",
        headers,
        rows,
    )


def _finish(report: Report, options: argparse.Namespace, cells: dict[tuple[int, int], dict[str, Summary]]) -> int:
    best = "whale_half" if any("whale_half" in cell for cell in cells.values()) else "hand_half"
    ratios = {key: cell["flat"].minimum_s / cell[best].minimum_s for key, cell in cells.items() if best in cell}
    batches = sorted({batch for _, batch in ratios})
    rows = []
    for ranks in sorted({ranks for ranks, _ in ratios}):
        measured = [f"{ratios[ranks, batch]:.2f}x" if (ranks, batch) in ratios else "" for batch in batches]
        rows.append([ranks, *measured, f"{PUBLISHED[ranks]}x" if ranks in PUBLISHED else ""])
    headers = ["ranks", *(f"batch {batch}" for batch in batches), "published"]
    report.table(
        f"{VARIANTS[best]} over flat data parallelism, minima, beside the published figures (batch not given)",
        headers,
        rows,
    )
    report.note(
        f"links of {LINK_BITS / 1e9:g} Gbit/s a node of {GPUS_PER_NODE}, 2.6 ms an image, wire {options.half}; "
        "activations cross as fp32; figures in real ms and MB, scaled back"
    )
    largest = _largest_batch({batch: ratio for (ranks, batch), ratio in ratios.items() if ranks == 64}, PUBLISHED[64])
    if largest:
        report.note(largest)
    if summaries := cells.get((64, _BAR_BATCH)):
        _add_bars(report, summaries)
    report.data(
        ratios={f"{ranks}x{batch}": ratio for (ranks, batch), ratio in ratios.items()},
        cells={f"{r}x{b}": c for (r, b), c in cells.items()},
    )
    if options.plot:
        plot(options.plot, ratios, VARIANTS[best])
        print(f"plotted to {options.plot}")
    return report.finish(options)


def _add_bars(report: Report, summaries: dict[str, Summary]) -> None:
    hands = [summaries[name] for name in ("hand_half", "hand_flat_half") if name in summaries]
    if "whale_half" not in summaries:
        return
    own = summaries["whale_half"]
    report.bar(
        "64 ranks, batch 8: whale split, half wire, over flat, minima",
        summaries["flat"].minimum_s / own.minimum_s,
        at_least=14.0,
    )
    if hands:
        hand = min(summary.minimum_s for summary in hands)
        report.bar(
            "64 ranks, batch 8: whale split over the best hand-written one, minima", hand / own.minimum_s, at_least=0.97
        )


def _largest_batch(ratios: dict[int, float], wanted: float) -> str:
    """Up to which batch the published speed-up holds at 64 ranks, between measured batches by a straight line."""
    batches = sorted(ratios)
    if not batches:
        return ""
    if ratios[batches[0]] < wanted:
        return f"at 64 ranks {wanted}x is not reached: {ratios[batches[0]]:.2f}x at batch {batches[0]}, less above"
    for low, high in itertools.pairwise(batches):
        if ratios[high] < wanted:
            batch = low + (high - low) * (ratios[low] - wanted) / (ratios[low] - ratios[high])
            return f"at 64 ranks {wanted}x holds up to {batch:.1f} images a rank (between {low} and {high})"
    return f"at 64 ranks {wanted}x holds up to the largest batch measured, {batches[-1]}"
