"""BERT-large on 8 nodes x 8 ranks, data parallelism against pipelines: `python -m benchmarks.bert_pipeline`.

Compute is modelled as a V100's, communication is real; sizes and times are scaled together (see sizes.py). All variants
alternate step by step in one world and see the same sequences; figures are real milliseconds, scaled back.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from benchmarks.bert_pipeline.sizes import GPUS_PER_NODE, LINK_BITS, NODES, PUBLISHED, SEQUENCE_S, Scale, limit_ms
from benchmarks.bert_pipeline.variants import INSIDE, PLACES, VARIANTS, make, micro_batches_of
from benchmarks.cluster import Cluster
from benchmarks.harness import Report, Step, Summary, Trace, add_arguments, interleave, summarize, whole_numbers

__all__ = ["main"]

_FULL_SPEED = "10gbit"
_BAR_SEQUENCES = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: sequences a rank, the scale, and how many steps data parallelism and pipelines get."""

    sequences: int
    scale: Scale
    names: tuple[str, ...]
    slow_steps: int
    steps: int


def _measure(rank: int, cluster: Cluster, cell: Cell) -> tuple[dict[str, Trace], dict[str, float], dict[str, str]]:
    """Traces, how far each variant's parameters are from those of `flat` after as many steps, and where stages lie."""
    dist.init_process_group("gloo")
    variants = {name: make(name, cell.scale, cell.sequences) for name in cell.names}

    def step_of(name: str, first: int) -> Step:
        own = variants[name]
        return lambda number: own.step(own.batch(cell.scale, cell.sequences, first + number))

    dist.barrier()
    if rank == 0:  # groups are made at full speed: scaled links would need minutes for all addresses
        cluster.set_rate(cell.scale.rate(LINK_BITS))
    dist.barrier()
    traces = interleave({name: step_of(name, 0) for name in variants}, steps=cell.slow_steps, warmup=0)
    flat = variants["flat"].held()
    errors = {name: _error(variant.held(), flat) for name, variant in variants.items()}
    fast = {name: step_of(name, cell.slow_steps) for name in variants if name in PLACES}
    if fast and cell.steps > cell.slow_steps:
        for name, trace in interleave(fast, steps=cell.steps - cell.slow_steps, warmup=0).items():
            traces[name].seconds += trace.seconds
            traces[name].sent_bytes += trace.sent_bytes
            traces[name].cpu_seconds += trace.cpu_seconds
    return traces, errors, {name: variant.where for name, variant in variants.items()}


def _error(held: dict[str, Tensor], flat: dict[str, Tensor]) -> float:
    """The largest difference of a parameter, as a part of its largest value."""
    return max(((value - flat[name]).abs().max() / flat[name].abs().max()).item() for name, value in held.items())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bert_pipeline", description=__doc__)
    parser.add_argument("--sequences", type=whole_numbers, default="4,8,16,32", help="a GPU")
    parser.add_argument("--size-scale", type=int, default=64, help="tensors are this many times smaller")
    parser.add_argument("--time-scale", type=float, default=60.0, help="up to 8 sequences, less in proportion above")
    parser.add_argument("--slow-steps", type=int, default=2, help="steps of data-parallel variants")
    add_arguments(parser, VARIANTS, steps=4)
    options = parser.parse_args()
    if "flat" not in options.variants:
        parser.error("variant flat is what the others are compared with")
    report = Report("bert_pipeline", "BERT-large on 64 GPUs: data parallelism against pipelines with data parallelism.")
    gains = {}
    for sequences in options.sequences:
        scale = Scale(options.size_scale, options.time_scale * min(1.0, _BAR_SEQUENCES / sequences))
        cell = Cell(sequences, scale, tuple(options.variants), options.slow_steps, options.steps)
        with Cluster(NODES, GPUS_PER_NODE, rate=_FULL_SPEED, timeout=5400) as cluster:
            results = cluster.run(_measure, cluster, cell)
        errors = {name: max(errors[name] for _, errors, _ in results) for name in cell.names}
        gains[sequences] = _report(
            report, cell, summarize([traces for traces, _, _ in results]), errors, where=results[0][2]
        )
    report.note(_paying(gains))
    report.note(
        f"links of {LINK_BITS / 1e9:g} Gbit/s a node of {GPUS_PER_NODE}, {SEQUENCE_S * 1e3:g} ms a sequence of 128 in "
        "fp32; published over Horovod, 64 GPUs: " + ", ".join(f"{name} {gain}x" for name, gain in PUBLISHED.items())
    )
    return report.finish(options)


def _report(
    report: Report, cell: Cell, summaries: dict[str, Summary], errors: dict[str, float], where: dict[str, str]
) -> float:
    """Adds one table; how many times faster the best pipeline is than the best data parallelism of whale's."""
    flat, rows, scale = summaries["flat"], [], cell.scale
    for name, own in summaries.items():
        places = PLACES.get(name, 1)
        limit = limit_ms(
            cell.sequences,
            places=places,
            num_micro_batches=micro_batches_of(places, cell.sequences),
            wire_bytes=2 if name in PLACES or name.endswith("half") else 4,
            flat=name == "flat",
            inner=where[name] == INSIDE,
        )
        real = own.minimum_s / scale.time * 1e3
        over = f"{flat.minimum_s / own.minimum_s:.2f}x"
        sent = f"{own.sent_bytes * scale.size / 1e6:.0f}"
        title = f"{VARIANTS[name]}, stages {where[name]}" if where[name] else VARIANTS[name]
        rows.append([title, f"{real:.1f}", f"{limit:.1f}", f"{real / limit:.2f}x", over, sent, f"{errors[name]:.1e}"])
        exact = name in ("flat", "whale_dp")
        report.bar(
            f"{cell.sequences} sequences: parameters of {name}",
            errors[name],
            at_most=1e-3 if exact else 3e-2,
            exact=True,
        )
    headers = ["variant", "ms, min", "limit ms", "over limit", "x flat", "MB sent a node", "error"]
    report.table(f"{cell.sequences} sequences a GPU (sizes / {scale.size}, times x {scale.time:g})", headers, rows)
    report.data(**{f"sequences{cell.sequences}": summaries})
    plans = {name: own.minimum_s for name, own in summaries.items() if name in PLACES}
    whale = {name: own.minimum_s for name, own in summaries.items() if name.startswith("whale")}
    if cell.sequences == _BAR_SEQUENCES and whale:
        ratio = flat.minimum_s / min(whale.values())
        report.bar("8 sequences: whale data parallelism over flat", ratio, at_least=1.74)
    if cell.sequences == _BAR_SEQUENCES and plans:
        report.bar("8 sequences: best pipeline over flat", flat.minimum_s / min(plans.values()), at_least=2.32)
    return min(whale.values()) / min(plans.values()) if whale and plans else 0.0


def _paying(gains: dict[int, float]) -> str:
    """Up to how many sequences pipelines pay, between two measured ones by a straight line."""
    told = ", ".join(f"{sequences}: {gain:.2f}x" for sequences, gain in gains.items())
    text = f"the best pipeline over whale's best data parallelism, by sequences a GPU: {told}"
    numbers = sorted(gains)
    for below, above in itertools.pairwise(numbers):
        if gains[below] > 1 >= gains[above]:
            crossing = below + (above - below) * (gains[below] - 1) / (gains[below] - gains[above])
            return f"{text}; pipelines stop paying at about {crossing:.0f}"
    return f"{text}; pipelines {'pay' if gains[numbers[-1]] > 1 else 'do not pay'} at all of them"
