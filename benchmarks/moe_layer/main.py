"""A layer of experts on two ranks, forward and backward: `python -m benchmarks.moe_layer`.

All variants alternate in one world of two ranks of loopback, one thread each: a dense layer of equal operations,
whale's MoELayer with its tokens through gloo and through shared memory, a chain of torch's operations, and fairscale's.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import whale_torch as wh
from benchmarks.cluster import Cluster
from benchmarks.harness import Report, Step, Trace, add_arguments, interleave, summarize
from benchmarks.moe_layer import parts
from benchmarks.moe_layer.peers import Chain, Dense, Fairscale
from whale_torch.moe import MoELayer

__all__ = ["SIZES", "layer_of", "main"]

SIZES = {"A": (2048, 512, 1024, 8, 2), "B": (2048, 256, 256, 64, 8)}
"""Tokens of a rank, dim, hidden, experts, top_k."""
_BARS = {
    ("A", "float32"): {"gloo": 1.10, "memory": 1.05},
    ("A", "bfloat16"): {"gloo": 1.30, "memory": 1.15},
    ("B", "float32"): {"gloo": 1.35, "memory": 1.2},
    ("B", "bfloat16"): {"memory": 1.4},
}
"""At most so many times the dense layer."""
_OVER_FAIRSCALE = {"gloo": 2.8, "memory": 3.1}
_OVER_CHAIN = {"gloo": 1.1, "memory": 1.3}


def _whale(size: str, dtype: torch.dtype, *, node_memory: bool) -> nn.Module:
    _, dim, hidden, num_experts, top_k = SIZES[size]
    torch.manual_seed(0)
    with wh.split():
        layer = MoELayer(dim, num_experts, top_k, hidden=hidden, aux_loss_coef=0.0, node_memory=node_memory)
    model = nn.Sequential(layer).to(dtype)
    return wh.parallelize(model)


def layer_of(name: str, size: str, dtype: torch.dtype) -> nn.Module:
    """The variant's layer, from tokens to tokens; all ranks build it."""
    _, dim, hidden, num_experts, top_k = SIZES[size]
    if name == "dense":
        return Dense(dim, hidden, top_k).to(dtype)
    if name in ("gloo", "memory"):
        return _whale(size, dtype, node_memory=name == "memory")
    if name == "chain":
        return Chain(dim, hidden, num_experts, top_k).to(dtype)
    return Fairscale(dim, hidden, num_experts)


def _built(rank: int, names: list[str], size: str, dtype_name: str) -> tuple[dict[str, nn.Module], Tensor, Tensor]:
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dtype: torch.dtype = getattr(torch, dtype_name)
    torch.manual_seed(rank)
    tokens, dim = SIZES[size][:2]
    x = torch.randn(tokens, dim, dtype=dtype, requires_grad=True)
    upstream = torch.randn(tokens, dim, dtype=dtype)
    return {name: layer_of(name, size, dtype) for name in names}, x, upstream


def _measure_parts(
    rank: int, names: list[str], size: str, dtype_name: str, steps: int, warmup: int
) -> dict[str, parts.Seconds]:
    return parts.measure(*_built(rank, names, size, dtype_name), steps, warmup)


def _measure(
    rank: int, names: list[str], size: str, dtype_name: str, steps: int, warmup: int
) -> tuple[dict[str, Trace], float]:
    """(traces, the largest share of all rows that one rank's experts had)"""
    layers, x, upstream = _built(rank, names, size, dtype_name)

    def step(name: str) -> Step:
        leaves = [x, *layers[name].parameters()]

        def run(number: int) -> None:
            for leaf in leaves:
                leaf.grad = None
            layers[name](x).backward(upstream)

        return run

    traces = interleave({name: step(name) for name in names}, steps=steps, warmup=warmup)
    return traces, _imbalance(layers)


def _imbalance(layers: dict[str, Any]) -> float:
    layer = next((layers[name][0] for name in ("gloo", "memory") if name in layers), None)
    if layer is None:
        return 1.0
    counts = layer.load.kept.clone()
    dist.all_reduce(counts)
    of_rank = counts.view(dist.get_world_size(), -1).sum(1)
    return float(of_rank.max() / of_rank.float().mean())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moe_layer", description=__doc__)
    parser.add_argument("--sizes", default="A,B", help="with commas between (default: all)")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="with commas between (default: all)")
    add_arguments(parser, ("dense", "gloo", "memory", "chain", "fairscale"), steps=12)
    parser.add_argument("--parts", action="store_true", help="where whale's time goes, beside the dense layer's")
    options = parser.parse_args()
    report = Report("moe_layer", "A layer of experts on two ranks, against a dense one of equal operations.")
    rows = []
    if options.parts:
        return _report_parts(report, options)
    with Cluster(1, 2) as cluster:
        for size in options.sizes.split(","):
            for dtype in options.dtypes.split(","):
                whole = size == "A" and dtype == "float32"  # fairscale's gate is for top-2, and float32
                names = [name for name in options.variants if name != "fairscale" or whole]
                found = cluster.run(_measure, names, size, dtype, options.steps, options.warmup)
                summaries = summarize([traces for traces, _ in found])
                dense = summaries["dense"].minimum_s
                for name, own in summaries.items():
                    times = [f"{1e3 * s:.1f}" for s in (own.minimum_s, own.median_s)]
                    rows.append([size, dtype, name, *times, f"{own.minimum_s / dense:.3f}x", f"{found[0][1]:.3f}"])
                _bars(report, size, dtype, {name: own.minimum_s for name, own in summaries.items()})
                report.data(**{f"{size}_{dtype}": summaries})
    headers = ["size", "dtype", "variant", "ms, min", "ms, median", "over dense", "fullest rank over mean"]
    report.table("Forward and backward of one layer", headers, rows)
    return report.finish(options)


def _report_parts(report: Report, options: argparse.Namespace) -> int:
    names = [name for name in ("dense", "gloo", "memory") if name in options.variants]
    with Cluster(1, 2) as cluster:
        for size in options.sizes.split(","):
            for dtype in options.dtypes.split(","):
                ranks = cluster.run(_measure_parts, names, size, dtype, options.steps, options.warmup)
                _table_of_parts(report, f"{size}, {dtype}", ranks)
    report.note("least of the steps for each number by itself, mean of the ranks; what runs in no part is the rest")
    return report.finish(options)


def _table_of_parts(report: Report, title: str, ranks: list[dict[str, parts.Seconds]]) -> None:
    mean: dict[tuple[str, str, bool], float] = {
        (name, *key): 1e3 * sum(own[name].get(key, 0.0) for own in ranks) / len(ranks)
        for name in ranks[0]
        for key in set().union(*(own[name] for own in ranks))
    }
    columns = [(name, backward) for name in ranks[0] for backward in (False, True)]
    cells = {part: [mean.get((name, part, back), 0.0) for name, back in columns] for part in parts.PARTS}
    cells["sum"] = [sum(column) for column in zip(*cells.values(), strict=True)]
    cells["a whole step"] = [mean[name, "all", back] for name, back in columns]
    headers = ["part", *(f"{name}, {'backward' if back else 'forward'}" for name, back in columns)]
    rows = [[part, *(f"{ms:.2f}" if ms else "" for ms in numbers)] for part, numbers in cells.items()]
    report.table(f"{title}: ms of a step", headers, rows)
    report.data(**{f"parts_{title.replace(', ', '_')}": {" ".join(map(str, key)): ms for key, ms in mean.items()}})


def _bars(report: Report, size: str, dtype: str, seconds: dict[str, float]) -> None:
    for name, bound in _BARS[size, dtype].items():
        if name in seconds:
            report.bar(f"{size} {dtype}, {name}: over dense", seconds[name] / seconds["dense"], at_most=bound)
    for peer, bounds, wanted in (("fairscale", _OVER_FAIRSCALE, ("A",)), ("chain", _OVER_CHAIN, ("B",))):
        for name, bound in bounds.items():
            if size in wanted and {name, peer} <= seconds.keys():
                report.bar(f"{size} {dtype}, {name}: {peer} over it", seconds[peer] / seconds[name], at_least=bound)
