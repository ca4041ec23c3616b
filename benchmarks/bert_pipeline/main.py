"""BERT-large on 8 nodes x 8 ranks, data parallelism against pipelines: `python -m benchmarks.bert_pipeline`.

Compute is modelled as a V100's, communication is real; sizes and times are scaled together (see sizes.py). All variants
alternate step by step in one world and see the same sequences; figures are real milliseconds, scaled back.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import whale_torch as wh
from benchmarks.bert_pipeline.sizes import GPUS_PER_NODE, LINK_BITS, NODES, PUBLISHED, Scale, limit_ms
from benchmarks.bert_pipeline.variants import PLACES, VARIANTS, make, micro_batches_of
from benchmarks.cluster import Cluster
from benchmarks.harness import Report, Step, Summary, Trace, add_arguments, interleave, summarize, whole_numbers

__all__ = ["main"]

_FULL_SPEED = "10gbit"
_BAR_SEQUENCES = 8


def _measure(
    rank: int, cluster: Cluster, scale: Scale, names: list[str], sequences: int, slow: int, steps: int
) -> dict[str, Trace]:
    dist.init_process_group("gloo")
    made = {name: make(name, scale, sequences) for name in names}

    def numbered(name: str, first: int) -> Step:
        return lambda number: made[name](_batch(scale, sequences, PLACES.get(name, 1), rank, first + number))

    traces = interleave({name: numbered(name, 0) for name in names}, steps=0, warmup=1)  # pipelines record at first
    dist.barrier()
    if rank == 0:
        cluster.set_rate(scale.rate)
    dist.barrier()
    traces = interleave({name: numbered(name, 1) for name in names}, steps=slow, warmup=0)
    fast = {name: numbered(name, 1 + slow) for name in names if name in PLACES}
    if fast and steps > slow:
        for name, trace in interleave(fast, steps=steps - slow, warmup=0).items():
            traces[name].seconds += trace.seconds
            traces[name].sent_bytes += trace.sent_bytes
            traces[name].cpu_seconds += trace.cpu_seconds
    return traces


def _batch(scale: Scale, sequences: int, places: int, rank: int, number: int) -> Tensor:
    """The sequences of a rank, or of all ranks of its pipeline, whose ranks are world / places apart."""
    width = dist.get_world_size() // places
    ranks = [rank] if places == 1 else [rank % width + width * place for place in range(places)]
    parts = []
    for each in ranks:
        generator = torch.Generator().manual_seed(number * 1000 + each)
        parts.append(torch.randn(sequences, scale.width, generator=generator))
    return torch.cat(parts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bert_pipeline", description=__doc__)
    parser.add_argument("--sequences", type=whole_numbers, default="4,8,16,32", help="a GPU")
    parser.add_argument("--size-scale", type=int, default=32, help="tensors are this many times smaller")
    parser.add_argument("--time-scale", type=float, default=60.0)
    parser.add_argument("--slow-steps", type=int, default=2, help="steps of data-parallel variants")
    add_arguments(parser, VARIANTS, steps=4)
    options = parser.parse_args()
    report = Report("bert_pipeline", "BERT-large on 64 GPUs: data parallelism against pipelines with data parallelism.")
    best: dict[int, float] = {}
    scale = Scale(options.size_scale, options.time_scale)
    for sequences in options.sequences:
        with Cluster(NODES, GPUS_PER_NODE, rate=_FULL_SPEED, timeout=5400) as cluster:
            summaries = summarize(
                cluster.run(_measure, cluster, scale, options.variants, sequences, options.slow_steps, options.steps)
            )
        best[sequences] = _report(report, scale, sequences, summaries)
    paying = [sequences for sequences, gain in best.items() if gain > 1.0]
    if best:
        report.note(
            f"pipelines are faster than whale's data parallelism up to {max(paying)} sequences a GPU"
            if paying
            else "pipelines are faster than whale's data parallelism at no number of sequences measured"
        )
    report.note(f"links of {LINK_BITS / 1e9:g} Gbit/s a node of {GPUS_PER_NODE}, 19.7 ms a sequence of 128 in fp32")
    report.note(f"published, 64 GPUs: {PUBLISHED}; whale_torch {getattr(wh, '__version__', '')}")
    return report.finish(options)


def _report(report: Report, scale: Scale, sequences: int, summaries: dict[str, Summary]) -> float:
    """Adds one table; how many times faster the best pipeline is than the best data parallelism of whale's."""
    flat, rows = summaries.get("flat"), []
    for name, own in summaries.items():
        places = PLACES.get(name, 1)
        limit = limit_ms(
            sequences,
            places=places,
            num_micro_batches=micro_batches_of(places, sequences),
            wire_bytes=2 if name in PLACES or name.endswith("half") else 4,
            flat=name == "flat",
        )
        real = own.minimum_s / scale.time * 1e3
        over: Any = f"{flat.minimum_s / own.minimum_s:.2f}x" if flat else ""
        sent = f"{own.sent_bytes * scale.size / 1e6:.0f}"
        rows.append([VARIANTS[name], f"{real:.1f}", f"{limit:.1f}", f"{real / limit:.2f}x", over, sent])
    headers = ["variant", "ms, min", "limit ms", "over limit", "x flat", "MB sent a node"]
    report.table(f"{sequences} sequences a GPU (sizes / {scale.size}, times x {scale.time:g})", headers, rows)
    report.data(**{f"sequences{sequences}": summaries})
    plans = {name: own.minimum_s for name, own in summaries.items() if name in PLACES}
    whale = {name: own.minimum_s for name, own in summaries.items() if name.startswith("whale")}
    if sequences == _BAR_SEQUENCES and flat:
        if whale:
            ratio = flat.minimum_s / min(whale.values())
            report.bar("8 sequences: whale data parallelism over flat", ratio, at_least=1.74)
        if plans:
            report.bar("8 sequences: best pipeline over flat", flat.minimum_s / min(plans.values()), at_least=2.32)
    return min(whale.values()) / min(plans.values()) if whale and plans else 0.0
