"""Split classifier against data parallelism: `python -m benchmarks.classifier_split`.

Four nodes with one rank each, joined by 400 Mbit/s links; all variants alternate step by step in one world. Compute is
real, on the machine's own cores. Every variant is compared with one process: its losses and how it moved parameters.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.classifier_split.annotated import Annotated
from benchmarks.classifier_split.model import WIDTH, Task, make_features, one_process, update_error
from benchmarks.classifier_split.peers import DataParallel, DTensorSplit, Handwritten
from benchmarks.cluster import Cluster
from benchmarks.handwritten import FlatWire, NoWire
from benchmarks.harness import Report, Summary, Trace, add_arguments, interleave, ring_seconds, summarize

__all__ = ["main"]


class Variant(Protocol):
    def step(self, number: int) -> Tensor: ...

    def values(self) -> dict[str, Tensor]: ...


VARIANTS = {
    "ddp": "DDP",
    "ddp_fp16": "DDP, fp16 hook",
    "dtensor": "DDP + DTensor + loss_parallel",
    "hand": "hand-written",
    "hand_bf16": "hand-written, bf16 wire",
    "whale": "whale fp32",
    "whale_bf16": "whale, bf16 wire",
    "whale_fp16": "whale, fp16 wire",
    "compute": "no communication (floor)",
}
_EXACT = ("ddp", "dtensor", "hand", "whale")


def _make(name: str, task: Task, rank: int) -> Variant:
    dtypes = {"": None, "_bf16": torch.bfloat16, "_fp16": torch.float16}
    if name in ("ddp", "ddp_fp16"):
        return DataParallel(task, rank, half=name == "ddp_fp16")
    if name == "dtensor":
        return DTensorSplit(task, rank)
    if name == "compute":
        return Handwritten(task, rank, NoWire(task.world))
    if name.startswith("hand"):
        return Handwritten(task, rank, FlatWire(dtypes[name.removeprefix("hand")]))
    return Annotated(task, rank, dtypes[name.removeprefix("whale")] or torch.float32)


def _measure(
    rank: int, names: list[str], task: Task, steps: int, warmup: int, reference: Path
) -> tuple[dict[str, Trace], dict[str, float]]:
    dist.init_process_group("gloo")
    variants = {name: _make(name, task, rank) for name in names}
    traces = interleave({name: variant.step for name, variant in variants.items()}, steps=steps, warmup=warmup)
    return traces, {
        name: update_error(variant.values(), reference, rank) for name, variant in variants.items() if name != "compute"
    }


def _count(rank: int, task: Task, steps: int) -> tuple[int, int, list[float]]:
    """Bytes of whale's parameters and gradients on this rank, and the losses of a few steps."""
    variant = Annotated(task, rank)
    losses = [variant.step(number).item() for number in range(steps)]
    parameters = list(variant.model.parameters())
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return sum(p.nbytes for p in parameters), sum(grad.nbytes for grad in grads), losses


def _feature_bytes() -> int:
    return sum(parameter.nbytes for parameter in make_features().parameters())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.classifier_split", description=__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rate", default="400mbit")
    parser.add_argument("--classes", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=32, help="rows a rank")
    parser.add_argument(
        "--count", action="store_true", help="only count bytes of parameters and gradients, as for --classes 1000000"
    )
    add_arguments(parser, VARIANTS)
    options = parser.parse_args()
    task = Task(options.classes, options.rows, options.nodes)
    return _count_bytes(options, task) if options.count else _compare(options, task)


def _compare(options: argparse.Namespace, task: Task) -> int:
    report = Report(
        "classifier_split",
        f"A classifier over {task.classes} classes, split over {task.world} nodes, against data parallelism.",
    )
    with tempfile.TemporaryDirectory() as folder, Cluster(options.nodes, rate=options.rate, timeout=1800) as cluster:
        reference = Path(folder) / "one_process.pt"
        losses = one_process(task, options.warmup + options.steps, reference)
        rate = cluster.measured_rate()
        results = cluster.run(_measure, options.variants, task, options.steps, options.warmup, reference)
    summaries = summarize([traces for traces, _ in results])
    errors = {name: max(errors[name] for _, errors in results) for name in results[0][1]}
    report.note(
        f"{options.nodes} nodes x 1 rank, links of {options.rate} (one stream gets {rate / 1e6:.0f} Mbit/s), "
        f"{task.rows} rows a rank, SGD; {options.steps} steps of each variant, alternating"
    )
    _add_table(report, summaries, errors, losses)
    _add_limits(report, task, summaries, rate)
    _add_bars(report, summaries, errors, losses)
    report.data(summaries=summaries, one_process_losses=losses, update_errors=errors, measured_bits_per_second=rate)
    return report.finish(options)


def _add_table(report: Report, summaries: dict[str, Summary], errors: dict[str, float], losses: list[float]) -> None:
    slow = summaries.get("ddp")
    rows = []
    for name, own in summaries.items():
        rows.append(
            [
                VARIANTS[name],
                f"{own.minimum_s * 1e3:.0f}",
                f"{own.median_s * 1e3:.0f}",
                f"{slow.minimum_s / own.minimum_s:.2f}x" if slow else "",
                f"{slow.median_s / own.median_s:.2f}x" if slow else "",
                f"{own.sent_bytes / 1e6:.2f}",
                f"{own.loss_error(losses):.0e}" if name in errors else "-",
                f"{errors[name]:.0e}" if name in errors else "-",
            ]
        )
    headers = [
        "variant",
        "ms, min",
        "ms, median",
        "x DDP, min",
        "x DDP, median",
        "MB sent a node",
        "loss error",
        "update error",
    ]
    report.table("A step; errors against one process over all steps", headers, rows)


def _add_limits(report: Report, task: Task, summaries: dict[str, Summary], rate: float) -> None:
    """What no implementation can beat: the bytes of the all-reduce over the link, and the compute measured here."""
    floor = summaries["compute"].minimum_s if "compute" in summaries else 0.0
    rows = []
    for name, share in (("whale", 1.0), ("whale_bf16", 0.5), ("whale_fp16", 0.5), ("hand", 1.0), ("hand_bf16", 0.5)):
        if name not in summaries:
            continue
        wire = ring_seconds(_feature_bytes() * share, task.world, rate)
        best = summaries[name].minimum_s
        rows.append(
            [
                VARIANTS[name],
                *(f"{1e3 * value:.0f}" for value in (wire, floor, max(wire, floor), wire + floor, best)),
                f"{best / max(wire, floor):.2f}x",
            ]
        )
    if rows:
        headers = [
            "variant",
            "wire ms",
            "compute ms",
            "all overlapped",
            "nothing overlapped",
            "measured min",
            "x limit",
        ]
        report.table(
            "The limit: features' gradients over the slowest link as measured; compute of a step without communication",
            headers,
            rows,
        )


def _add_bars(report: Report, summaries: dict[str, Summary], errors: dict[str, float], losses: list[float]) -> None:
    for name in _EXACT:
        if name in summaries:
            report.bar(f"{VARIANTS[name]}: loss error", summaries[name].loss_error(losses), at_most=1e-5, exact=True)
            report.bar(f"{VARIANTS[name]}: update error", errors[name], at_most=1e-3, exact=True)
    bars = [
        ("whale", "ddp", 6.5),
        ("whale", "hand", 1.0),
        ("whale", "dtensor", 1.25),
        ("whale_bf16", "ddp", 9.0),
        ("whale_fp16", "ddp", 9.0),
        ("whale_bf16", "hand_bf16", 1.0),
    ]
    for name, peer, bound in bars:
        if name in summaries and peer in summaries:
            report.bar(
                f"{VARIANTS[name]} over {VARIANTS[peer]}, minima",
                summaries[peer].minimum_s / summaries[name].minimum_s,
                at_least=bound,
            )


def _count_bytes(options: argparse.Namespace, task: Task) -> int:
    report = Report("classifier_split bytes", f"What a rank holds for {task.classes} classes on {task.world} ranks.")
    full = _feature_bytes() + 4 * task.classes * (WIDTH + 1)
    with Cluster(options.nodes, rate=options.rate, timeout=1800) as cluster:
        results: list[Any] = cluster.run(_count, task, 2)
    parameters, grads = max(result[0] for result in results), max(result[1] for result in results)
    rows = [
        ["DDP (counted)", f"{full / 1e6:.1f}", f"{full / 1e6:.1f}", f"{full / 1e6:.1f}", ""],
        [
            "whale (held)",
            f"{parameters / 1e6:.1f}",
            f"{grads / 1e6:.1f}",
            "features only",
            f"{2 * full / (parameters + grads):.2f}x",
        ],
    ]
    report.table("MB a rank", ["", "parameters", "gradients", "communication buckets", "less"], rows)
    report.note(f"whale stepped: losses {', '.join(f'{loss:.5f}' for loss in results[0][2])}; DDP was not stepped")
    return report.finish(options)
