"""Replica alone against DDP: `python -m benchmarks.replica`.

Speed: a 24-layer encoder of 84 MB on 4 nodes x 1 rank, 400 Mbit/s, real compute, variants alternating in one world.
Exactness: losses and gradients against one process; gradients of 60000 on every rank, which fp16 cannot add up.
Hierarchy: 4 nodes x 4 ranks with modelled compute, flat against two-level.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import whale_torch as wh
from benchmarks.cluster import Cluster, ModelledLayer
from benchmarks.harness import (
    Report,
    Step,
    Summary,
    Trace,
    add_arguments,
    interleave,
    ring_seconds,
    sgd_loop,
    summarize,
)
from benchmarks.replica.model import LEARNING_RATE, batch_of, gradient_error, make_encoder, one_process, token_loss

__all__ = ["main"]

VARIANTS = {
    "ddp": "DDP",
    "whale": "whale fp32",
    "whale_fp16": "whale, fp16 wire",
    "whale_bf16": "whale, bf16 wire",
    "compute": "no communication (floor)",
}
_DTYPES = {"whale": torch.float32, "whale_fp16": torch.float16, "whale_bf16": torch.bfloat16}
_HIERARCHY = {
    "ddp": "DDP",
    "flat": "whale fp32, flat",
    "hierarchical": "whale fp32, hierarchical",
    "flat_fp16": "whale fp16 wire, flat",
    "hierarchical_fp16": "whale fp16 wire, hierarchical",
}
_LAYERS, _LAYER_PARAMETERS, _WIDTH = 8, 655_360, 64  # 21 MB in all
_OVERFLOW = 60_000.0


def _replicate(build: Callable[[], nn.Module], **options: Any) -> nn.Module:
    with wh.replica(**options):
        model = build()
    module: nn.Module = wh.parallelize(model)
    return module


def _encoder(name: str) -> nn.Module:
    if name == "ddp":
        return DistributedDataParallel(make_encoder())
    return make_encoder() if name == "compute" else _replicate(make_encoder, reduce_dtype=_DTYPES[name])


def _train(model: nn.Module, rank: int, rows: int) -> Step:
    step = sgd_loop(model, LEARNING_RATE, token_loss)
    return lambda number: step(*batch_of(rows, number, rank))


def _speed(
    rank: int, names: list[str], rows: int, steps: int, warmup: int, reference: Path
) -> tuple[dict[str, Trace], dict[str, tuple[float, float]]]:
    dist.init_process_group("gloo")
    models = {name: _encoder(name) for name in names}
    errors = {}
    for name, model in models.items():
        if name != "compute":
            tokens, targets = batch_of(rows, 0, rank)
            token_loss(model(tokens), targets).backward()
            inner = model.module if isinstance(model, DistributedDataParallel) else model
            errors[name] = gradient_error(inner, reference)
            model.zero_grad()
    variants = {name: _train(model, rank, rows) for name, model in models.items()}
    return interleave(variants, steps=steps, warmup=warmup), errors


def _overflow(rank: int) -> dict[str, tuple[bool, float]]:
    """For each half wire: are all gradients finite, and how far are they from their mean of 60000?"""
    results = {}
    for name, dtype in (("whale_fp16", torch.float16), ("whale_bf16", torch.bfloat16)):
        model = _replicate(lambda: nn.Linear(1, 64, bias=False), reduce_dtype=dtype)
        (model(torch.ones(1, 1)).sum() * _OVERFLOW).backward()
        (parameter,) = model.parameters()
        assert parameter.grad is not None
        error = ((parameter.grad - _OVERFLOW).abs().max() / _OVERFLOW).item()
        results[name] = bool(parameter.grad.isfinite().all()), error
    return results


def _modelled() -> nn.Sequential:
    return nn.Sequential(*(ModelledLayer(_LAYER_PARAMETERS, 0.005, 0.01) for _ in range(_LAYERS)))


def _hierarchy(rank: int, names: list[str], steps: int) -> dict[str, Trace]:
    dist.init_process_group("gloo")
    variants: dict[str, Step] = {}
    for name in names:
        if name == "ddp":
            variants[name] = _regress(DistributedDataParallel(_modelled()), rank)
            continue
        dtype = torch.float16 if name.endswith("fp16") else torch.float32
        model = _replicate(_modelled, reduce_dtype=dtype, all_reduce=name.removesuffix("_fp16"), bucket_bytes=4 << 20)
        variants[name] = _regress(model, rank)
    return interleave(variants, steps=steps, warmup=1)


def _regress(model: nn.Module, rank: int) -> Step:
    step = sgd_loop(model, LEARNING_RATE, F.mse_loss)

    def numbered(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number * 1000 + rank)
        return step(*torch.randn(2, 4, _WIDTH, generator=generator))

    return numbered


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replica", description=__doc__)
    parser.add_argument("--rows", type=int, default=2, help="rows of 32 tokens a rank")
    parser.add_argument("--rate", default="400mbit")
    parser.add_argument("--skip-hierarchy", action="store_true")
    add_arguments(parser, VARIANTS, steps=10)
    options = parser.parse_args()
    whale = any(name.startswith("whale") for name in options.variants)
    report = Report("replica", "Replica's gradient reducer against DDP's: an encoder of 84 MB on 4 nodes.")
    _report_speed(report, options)
    if whale:
        _report_overflow(report, options)
    if not options.skip_hierarchy:
        _report_hierarchy(report, options, list(_HIERARCHY) if whale else ["ddp"])
    return report.finish(options)


def _report_speed(report: Report, options: argparse.Namespace) -> None:
    world = 4
    with tempfile.TemporaryDirectory() as folder, Cluster(world, rate=options.rate, timeout=1800) as cluster:
        reference = Path(folder) / "gradients.pt"
        losses = one_process(options.rows, world, options.warmup + options.steps, reference)
        rate = cluster.measured_rate()
        results: list[Any] = cluster.run(
            _speed, options.variants, options.rows, options.steps, options.warmup, reference
        )
    summaries = summarize([traces for traces, _ in results])
    errors = {
        name: tuple(map(max, zip(*(errors[name] for _, errors in results), strict=True))) for name in results[0][1]
    }
    num_bytes = sum(parameter.nbytes for parameter in make_encoder().parameters())
    rows = []
    for name, own in summaries.items():
        share = {"compute": 0.0, "whale_fp16": 0.5, "whale_bf16": 0.5}.get(name, 1.0)
        wrong = (own.loss_error(losses), *errors[name]) if name in errors else ()
        row = _times(VARIANTS[name], own, ring_seconds(num_bytes * share, world, rate))
        rows.append([*row, *([f"{error:.0e}" for error in wrong] or ["-", "-", "-"])])
    report.table(
        f"A step of {num_bytes / 1e6:.0f} MB of parameters, {options.rows} rows a rank; errors against one process",
        [*_TIMES, "loss error", "gradient error", "worst parameter"],
        rows,
    )
    report.note(
        f"4 nodes x 1 rank, {options.rate} (one stream gets {rate / 1e6:.0f} Mbit/s), SGD, "
        f"{options.steps} steps of each variant, alternating"
    )
    report.data(speed=summaries, gradient_errors=errors, one_process_losses=losses)
    _speed_bars(report, summaries, errors, losses)


_TIMES = ("variant", "ms, min", "ms, median", "wire limit ms", "MB sent a node")


def _times(variant: str, own: Summary, wire_s: float) -> list[str]:
    """The columns of _TIMES."""
    milliseconds = (f"{1e3 * seconds:.0f}" for seconds in (own.minimum_s, own.median_s, wire_s))
    return [variant, *milliseconds, f"{own.sent_bytes / 1e6:.1f}"]


def _speed_bars(report: Report, summaries: dict[str, Summary], errors: dict[str, Any], losses: list[float]) -> None:
    for name in ("ddp", "whale"):
        if name in summaries:
            loss = summaries[name].loss_error(losses)
            report.bar(f"{VARIANTS[name]}: loss error", loss, at_most=1e-5, exact=True)
            report.bar(f"{VARIANTS[name]}: gradient error", errors[name][0], at_most=1e-5, exact=True)
    if "whale_fp16" in errors:
        report.bar("whale, fp16 wire: gradient error", errors["whale_fp16"][0], at_most=1e-3, exact=True)
    if "whale" in summaries and "ddp" in summaries:
        report.bar(
            "whale fp32 over DDP, minima", summaries["ddp"].minimum_s / summaries["whale"].minimum_s, at_least=0.97
        )
    for name in ("whale_fp16", "whale_bf16"):
        if name in summaries and "whale" in summaries:
            share = summaries[name].minimum_s / summaries["whale"].minimum_s
            report.bar(f"{VARIANTS[name]}: time as a share of fp32's, minima", share, at_most=0.60)


def _report_overflow(report: Report, options: argparse.Namespace) -> None:
    with Cluster(4, rate=options.rate) as cluster:
        results: list[Any] = cluster.run(_overflow)
    for name, bound in (("whale_fp16", 1e-3), ("whale_bf16", 1e-2)):
        error = (
            max(result[name][1] for result in results) if all(result[name][0] for result in results) else float("inf")
        )
        report.bar(f"{VARIANTS[name]}: error of a gradient of 60000 on every rank", error, at_most=bound, exact=True)


def _report_hierarchy(report: Report, options: argparse.Namespace, names: list[str]) -> None:
    nodes, local, rate = 4, 4, "100mbit"
    with Cluster(nodes, local, rate=rate, timeout=1800) as cluster:
        measured = cluster.measured_rate()
        summaries = summarize(cluster.run(_hierarchy, names, options.steps))
    num_bytes, rows = 4 * _LAYERS * _LAYER_PARAMETERS, []
    for name, own in summaries.items():
        groups, share = nodes if name.startswith("hier") else nodes * local, 0.5 if name.endswith("fp16") else 1.0
        rows.append(_times(_HIERARCHY[name], own, ring_seconds(num_bytes * share, groups, measured)))
    report.table(
        f"{nodes} nodes x {local} ranks, {rate}, {num_bytes / 1e6:.0f} MB in {_LAYERS} modelled layers", _TIMES, rows
    )
    report.data(hierarchy=summaries)
    for suffix in ("", "_fp16"):
        if f"flat{suffix}" in summaries:
            gain = summaries[f"flat{suffix}"].minimum_s / summaries[f"hierarchical{suffix}"].minimum_s
            report.bar(f"hierarchical over flat{suffix.replace('_', ', ')}, minima", gain, at_least=1.0)
