"""Measures the compiled kernels against torch's own ops: buckets, cross-entropy, linear and loss in chunks, dispatch to
experts, checksums.

Variants take turns in one process and each keeps its shortest time, so other load on the machine hits all alike.
Run: python -m benchmarks.kernels [--threads 1] [--rounds 20] [--quick] [--only buckets,...,checksums]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import platform
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels import dispatch
from benchmarks.kernels.checksum import AIM_GB, checksum
from benchmarks.kernels.dispatch import Size, Variants
from whale_torch import ops
from whale_torch.ops import library


def shortest(variants: Variants, rounds: int) -> dict[str, float]:
    """Seconds of each variant: the minimum over rounds in which each ran once, in a drawn order."""
    for run in variants.values():
        run()
    times = dict.fromkeys(variants, float("inf"))
    order, names = random.Random(0), list(variants)
    for _ in range(max(10, rounds)):
        order.shuffle(names)  # what runs before leaves its data in the cache
        for name in names:
            begin = time.perf_counter()
            variants[name]()
            times[name] = min(times[name], time.perf_counter() - begin)
    return times


def _met(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def show(title: str, times: dict[str, float], bars: dict[str, float]) -> None:
    """One line: times in ms; for each peer how many times ours it takes, and the ratio that we aim at."""
    ours = times["whale"]
    cells = [f"{name} {seconds * 1e3:.3f}" for name, seconds in times.items()]
    for name, seconds in times.items():
        if name in bars:
            cells.append(
                f"| {name}/whale {seconds / ours:.2f} (aim {bars[name]:.2f}: {_met(seconds / ours >= bars[name])})"
            )
        elif name != "whale":
            cells.append(f"| {name}/whale {seconds / ours:.2f}")
    print(f"{title:38} ms: {'  '.join(cells)}   load {os.getloadavg()[0]:.1f}", flush=True)


def bucket(numels: list[int], dtype: torch.dtype) -> Variants:
    """Gradients of these sizes into a bucket, scaled; the views that torch's way needs are made outside the time."""
    grads = [torch.randn(numel) for numel in numels]
    offsets = [sum(numels[:i]) for i in range(len(numels))]
    flat = torch.empty(sum(numels), dtype=dtype)
    views = [flat[o : o + n] for o, n in zip(offsets, numels, strict=True)]

    def foreach() -> None:
        torch._foreach_copy_(views, grads)
        flat.mul_(0.5)

    def loop() -> None:
        for view, grad in zip(views, grads, strict=True):
            view.copy_(grad)
        flat.mul_(0.5)

    def cat() -> None:
        torch.cat(grads, out=flat)
        flat.mul_(0.5)

    whale = partial(ops.bucket_pack, grads, offsets, flat, 0.5)
    return {"whale": whale, "foreach": foreach, "cat": cat, "loop": loop}


def sharded_chain(logits: Tensor, target: Tensor) -> Tensor:
    """Vocabulary-parallel cross-entropy as usually written in torch ops, float32 inside; collectives left out."""
    z = logits.float()
    z = z - z.amax(1, keepdim=True)
    inside = (target >= 0) & (target < z.shape[1])
    local = torch.where(inside, target, 0)[:, None]
    at_target = torch.where(inside, z.gather(1, local)[:, 0], 0.0)
    exp = z.exp()
    total = exp.sum(1, keepdim=True)
    loss = (total.log()[:, 0] - at_target).mean()
    grad = exp.div_(total)
    grad.scatter_add_(1, local, -inside.to(grad.dtype)[:, None])
    grad.mul_(1 / z.shape[0])
    return grad.to(logits.dtype) * loss.isfinite()


def narrow_chain(logits: Tensor, target: Tensor) -> Tensor:
    """The same in logits' own dtype throughout: faster and, in bfloat16, with sums of 8 bits."""
    z = logits - logits.amax(1, keepdim=True)
    at_target = z.gather(1, target[:, None])
    exp = z.exp()
    total = exp.sum(1, keepdim=True)
    loss = (total.log() - at_target).mean()
    grad = exp.div_(total)
    grad.scatter_add_(1, target[:, None], torch.full_like(at_target, -1.0))
    return grad.mul_(1 / z.shape[0]) * loss.isfinite()


def loss(n: int, k: int, dtype: torch.dtype) -> Variants:
    logits, target = torch.randn(n, k).to(dtype), torch.randint(0, k, (n,))
    ours, theirs = logits.clone(), logits.clone().requires_grad_()
    share = torch.full((n,), 1 / n)

    def whale() -> Tensor:
        stats = ops.softmax_stats(ours, target, 0, None, False)
        lse = stats[0] + stats[1].log()
        (lse - stats[2]).mean()
        return ops.softmax_grad(ours, lse, target, 0, share, share, None, None, inplace=True)

    def cross_entropy() -> None:
        theirs.grad = None
        F.cross_entropy(theirs, target).backward()

    variants: Variants = {"whale": whale, "chain": lambda: sharded_chain(logits, target), "torch": cross_entropy}
    if dtype != torch.float32:
        variants["narrow chain"] = lambda: narrow_chain(logits, target)
    return variants


def _status_mb(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024


def peak_mb(run: Callable[[], object]) -> float:
    """How far resident memory rises above what is held before, while this runs."""
    run()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps of the first run is not held
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_mb("VmRSS")
    run()
    return _status_mb("VmHWM") - before


def linear_and_loss(n: int, d: int, k: int, dtype: torch.dtype, chunk: int) -> Variants:
    x = torch.randn(n, d).to(dtype).requires_grad_()
    weight = (torch.randn(k, d) * 0.05).to(dtype).requires_grad_()
    bias = torch.zeros(k, dtype=dtype, requires_grad=True)
    target = torch.randint(0, k, (n,))
    inputs = (x, weight, bias)

    def whale() -> object:
        return torch.autograd.grad(ops.linear_cross_entropy(*inputs, target, chunk=chunk), inputs)

    def whole() -> object:
        return torch.autograd.grad(F.cross_entropy(F.linear(*inputs), target), inputs)

    return {"whale": whale, "torch": whole}


@dataclass(frozen=True)
class Sizes:
    """What each part measures."""

    buckets: dict[str, list[int]]
    losses: list[tuple[int, int]]
    linears: list[tuple[int, int, int, int]]
    dispatches: list[Size]
    checksums: dict[str, int]


FULL = Sizes(
    {"60 of 109 k": [(25 << 20) // 4 // 60] * 60, "400 of 100": [100] * 400},
    [(128, 25_000), (128, 100_000)],
    [(512, 512, 32_000, 2048), (2048, 768, 32_000, 2048)],
    [Size(2048, 512, 8, 2), Size(2048, 256, 64, 8)],
    {"512 KiB": 512 << 10, "64 MiB": 64 << 20},
)
QUICK = Sizes(
    {"60 of 1 k": [1000] * 60}, [(128, 1000)], [(32, 16, 500, 100)], [Size(64, 16, 8, 2)], {"64 KiB": 64 << 10}
)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def buckets(sizes: Sizes, dtype: torch.dtype, rounds: int) -> None:
    for name, numels in sizes.buckets.items():
        aim = {"400 of 100": 8.0}.get(name, 1.6 if dtype == torch.float32 else 2.0)
        show(f"pack {name} to {name_of(dtype)}", shortest(bucket(numels, dtype), rounds), {"foreach": aim})


def losses(sizes: Sizes, dtype: torch.dtype, rounds: int) -> None:
    for n, k in sizes.losses:
        show(f"loss {n} x {k} {name_of(dtype)}", shortest(loss(n, k, dtype), rounds), {"chain": 3.0, "torch": 1.5})


def linears(sizes: Sizes, dtype: torch.dtype, rounds: int) -> None:
    for n, d, k, chunk in sizes.linears:
        variants = linear_and_loss(n, d, k, dtype, chunk)
        aim = 1 / 1.2 if dtype == torch.float32 else 1 / 0.9
        show(f"linear + loss {n} x {d} x {k} {name_of(dtype)}", shortest(variants, rounds), {"torch": aim})
        held = (n * d + k * d + k) * dtype.itemsize / 2**20
        extra = {name: peak_mb(run) - held for name, run in variants.items()}
        print(f"{'':38} MB beyond the {held:.0f} of gradients: {extra['whale']:.0f}, torch {extra['torch']:.0f}")


def dispatches(sizes: Sizes, dtype: torch.dtype, rounds: int) -> None:
    for size in sizes.dispatches:
        if dtype == torch.float32:
            show(f"route {size}", shortest(dispatch.route(size), rounds), {"chain": 2.5})
        ended = f"{size} {name_of(dtype)}"
        aims = {"index_add": 3.0, "bmm": 3.0, "gather + sum": 3.0}
        show(f"combine {ended}", shortest(dispatch.combine(size, dtype), rounds), aims)
        show(f"  out= {ended}", shortest(dispatch.combine_into(size, dtype), rounds), {"index_add": 3.0})
        show(f"  backward {ended}", shortest(dispatch.combine_backward(size, dtype), rounds), {})
        show(f"permute {ended}", shortest(dispatch.permute(size, dtype), rounds), {})
        show(f"  out= {ended}", shortest(dispatch.permute_into(size, dtype), rounds), {})


def checksums(sizes: Sizes, dtype: torch.dtype, rounds: int) -> None:
    if dtype != torch.float32:
        return  # bytes have none
    best = library.isa()
    for name, num_bytes in sizes.checksums.items():
        calls = max(1, (16 << 20) // num_bytes)
        times = shortest(checksum(num_bytes, calls), rounds)
        rates = {variant: calls * num_bytes / seconds / 1e9 for variant, seconds in times.items()}
        verdict = "" if best is None else f"| {best} (aim {AIM_GB:.0f}: {_met(rates[best] >= AIM_GB)})"
        cells = "  ".join(f"{variant} {rate:.1f}" for variant, rate in rates.items())
        print(f"{f'crc32c {name}':38} GB/s: {cells}  {verdict}   load {os.getloadavg()[0]:.1f}", flush=True)
        if best is not None:
            library.use_isa(best)


PARTS = {"buckets": buckets, "losses": losses, "linears": linears, "dispatch": dispatches, "checksums": checksums}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20, help="at least 10 are run")
    parser.add_argument("--quick", action="store_true", help="small sizes; the aims are not meant for them")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by comma")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    kernel = ops.backend()["softmax_stats"]["cpu"]
    print(f"torch {torch.__version__}, {kernel}, {arguments.threads} thread(s), {platform.processor() or 'CPU'}")
    for part in arguments.only.split(","):
        if part == "dispatch":
            dispatch.keep_memory()
        for dtype in (torch.float32, torch.bfloat16):
            PARTS[part](QUICK if arguments.quick else FULL, dtype, arguments.rounds)
