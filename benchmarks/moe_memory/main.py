"""The memory of one step of a layer of experts on two ranks: `python -m benchmarks.moe_memory`.

The variants of benchmarks.moe_layer, float32, each in processes of its own: first the resident set of a rank is
watched over some steps, then the tensors that are alive over one more.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cluster import Cluster
from benchmarks.harness import Report, add_arguments, whole_numbers
from benchmarks.live_bytes import SHARED, LiveBytes
from benchmarks.moe_layer.main import SIZES, layer_of

__all__ = ["main"]

_VARIANTS = ("dense", "gloo", "memory", "chain", "fairscale")
_FEW_TOKENS = 64  # of a step that comes before those measured, so that libraries are loaded and their threads there
_OVER_CHAIN = 1.1
_FAIRSCALE_OVER = {1: 2.0, 4: 6.0}
"""By how many times the tokens."""


def _measure(rank: int, name: str, size: str, times: int, steps: int) -> dict[str, float]:
    """Bytes of one rank: tensors alive at most, gradients of them, shared memory, growth of the resident set."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    live = LiveBytes(shared=False)
    tokens, dim = SIZES[size][0] * times, SIZES[size][1]
    torch.manual_seed(rank)
    with live:
        layer = layer_of(name, size, torch.float32)
        x, upstream = torch.randn(tokens, dim, requires_grad=True), torch.randn(tokens, dim)
    leaves = [x, *layer.parameters()]
    _step(layer, x[:_FEW_TOKENS], upstream[:_FEW_TOKENS])
    _forget(leaves)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's record of the largest resident set begins anew
    resident = _status("VmRSS")
    for _ in range(steps):
        _step(layer, x, upstream)
        _forget(leaves)
    resident = _status("VmHWM") - resident
    with live:
        live.most = before = live.now
        _step(layer, x, upstream)
    gradients = sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)
    return {"live": live.most - before, "gradients": gradients, "shared": _shared(), "resident": resident}


def _step(layer: nn.Module, x: Tensor, upstream: Tensor) -> None:
    layer(x).backward(upstream)


def _forget(leaves: list[Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None
    gc.collect()


def _shared() -> int:
    """Bytes of this rank's part of the memory that the node's ranks share."""
    sizes = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *path = line.split()
        if path and path[0].startswith(SHARED):
            first, last = (int(end, 16) for end in span.split("-"))
            sizes[inode] = max(sizes.get(inode, 0), last - first)
    return sum(sizes.values()) // dist.get_world_size()


def _status(field: str) -> int:
    """Bytes that the kernel tells of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moe_memory", description=__doc__)
    parser.add_argument("--times", type=whole_numbers, default=[1, 4], help="so many times size A's tokens")
    add_arguments(parser, _VARIANTS, steps=2)
    options = parser.parse_args()
    report = Report("moe_memory", "The memory of forward and backward of a layer of experts on two ranks.")
    tokens, dim, hidden, num_experts, top_k = SIZES["A"]
    rows: list[list[Any]] = []
    with Cluster(1, 2) as cluster:
        for times in options.times:
            found = {}
            for name in options.variants:
                ranks = cluster.run(_measure, name, "A", times, options.steps)
                found[name] = {key: max(of[key] for of in ranks) / 1e6 for key in ranks[0]}
                numbers = [f"{found[name][key]:.1f}" for key in ("live", "gradients", "shared", "resident")]
                rows.append([tokens * times, name, *numbers])
            _bars(report, times, {name: own["live"] for name, own in found.items()})
            report.data(**{f"times_{times}": found})
    headers = [
        "tokens",
        "variant",
        "MB of tensors, most",
        "of these gradients",
        "MB shared",
        "MB of the resident set, growth",
    ]
    report.table(f"A rank's step: width {dim}, {num_experts} experts of {hidden}, top-{top_k}", headers, rows)
    report.note(
        "of both ranks the one with more; memory that they share is one for all layers, each rank's half is shown, and "
        "the resident sets of both have it whole"
    )
    return report.finish(options)


def _bars(report: Report, times: int, most: dict[str, float]) -> None:
    for name in [name for name in ("gloo", "memory") if name in most]:
        if "chain" in most:
            report.bar(f"{times} x A, {name}: over the chain", most[name] / most["chain"], at_most=_OVER_CHAIN)
        if "fairscale" in most and times in _FAIRSCALE_OVER:
            ratio, bound = most["fairscale"] / most[name], _FAIRSCALE_OVER[times]
            report.bar(f"{times} x A, {name}: fairscale over it", ratio, at_least=bound)
