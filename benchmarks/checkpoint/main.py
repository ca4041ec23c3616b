"""Saving and loading on two ranks: whale, torch.distributed.checkpoint, the disk: `python -m benchmarks.checkpoint`.

All variants take turns on the same memory: 805 MB a rank, model and Adam, float32. What is written is on the disk when
a save has ended (fsync, in all variants). Files are read from the page cache, and after their pages were dropped.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.checkpoint.state import WIDTH, as_dtensors, training
from benchmarks.cluster import Cluster
from benchmarks.harness import Report, add_arguments
from whale_torch.checkpoint.load import load
from whale_torch.checkpoint.save import save

__all__ = ["main"]

_VARIANTS = ("disk", "whale", "dcp", "train", "whale async", "dcp async")
_CHUNK = 4 << 20
_BLOCKS = 32  # of 25.2 MB a rank each
_ROWS = 64  # of a micro-batch
_OVER_DCP, _EXTRA_MB, _STALL = 1.5, 64 * 1.048576, 0.1


class _Rank:
    """One rank's side: each variant returns what it measured, seconds and megabytes by name."""

    def __init__(self, folder: Path, num_blocks: int):
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        warnings.simplefilter("ignore")  # torch.distributed.checkpoint's own
        self.rank = dist.get_rank()
        self.folder = folder
        self.model, self.optimizer = training(num_blocks)
        self.shards = as_dtensors(self.model, self.optimizer)
        self.num_bytes = sum(value.to_local().nbytes for value in self.shards.values())
        self.micro_batches = 1
        self.x = torch.randn(_ROWS, WIDTH)
        self.buffer = bytearray(_CHUNK)

    def run(self, names: list[str], steps: int, warmup: int) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {"bytes": [self.num_bytes]}
        for number in range(warmup + steps):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                run: Callable[[], dict[str, float]] = getattr(self, "_" + name.replace(" ", "_"))
                for key, value in run().items():
                    if number >= warmup:
                        found.setdefault(f"{name}: {key}", []).append(value)
            if number < warmup and "whale" in names:
                self._last_save = self._agreed(self._last_save)
                self._calibrate()
        return found

    # -- variants

    def _disk(self) -> dict[str, float]:
        path = self.folder / f"plain-{self.rank}"
        flat = memoryview(bytearray(os.urandom(1 << 20)) * 4)

        def write() -> None:
            with path.open("wb", buffering=0) as file:
                for _ in range(0, self.num_bytes, _CHUNK):
                    file.write(flat)
                os.fsync(file.fileno())

        found = {"save": self._timed(write)[0]}
        for key in ("load, cached", "load, dropped"):
            if key == "load, dropped":
                _drop(path)
            found[key] = self._timed(lambda: self._read(path))[0]
        self._remove(path)
        return found

    def _read(self, path: Path) -> None:
        with path.open("rb", buffering=0) as file:
            while file.readinto(self.buffer):
                pass

    def _whale(self) -> dict[str, float]:
        state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        path = self.folder / "whale"
        saved = self._timed(lambda: save(path, step=1, **state))
        self._last_save = saved[0]
        return self._loads(saved, path, lambda: load(path, **state), lambda: None)

    def _dcp(self) -> dict[str, float]:
        path = self.folder / "dcp"
        saved = self._timed(lambda: dcp.save(self.shards, checkpoint_id=path))
        return self._loads(saved, path, lambda: dcp.load(self.shards, checkpoint_id=path), self._begin)

    def _forget(self) -> None:
        """As where a job is started again: the optimizer has no state."""
        self.optimizer.state.clear()
        self.shards = {}

    def _begin(self) -> None:
        """torch.distributed.checkpoint loads into tensors, which its users make first."""
        for p in self.model.parameters():
            of = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            self.optimizer.state[p] = of
        self.shards = as_dtensors(self.model, self.optimizer)

    def _loads(
        self, saved: tuple[float, float], path: Path, run: Callable[[], object], begin: Callable[[], object]
    ) -> dict[str, float]:
        """begin: what comes before where the optimizer has no state."""
        found = dict(zip(("save", "save, MB"), saved, strict=True))
        found["load, cached"], found["load, MB"] = self._timed(run)
        self._forget()
        found["resume, cached"], _ = self._timed(lambda: (begin(), run()))
        dist.barrier()
        for file in path.rglob("*"):
            _drop(file)
        found["load, dropped"], _ = self._timed(run)
        self.shards = as_dtensors(self.model, self.optimizer)
        self._remove(path)
        return found

    def _train(self) -> dict[str, float]:
        before = self._watch()
        seconds, step = self._train_step(lambda: None)
        return {"all": seconds, "step": step, "MB": (_status("VmHWM") - before) / 1e6}

    def _whale_async(self) -> dict[str, float]:
        path = self.folder / "whale-async"
        state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        return self._async(path, lambda: save(path, step=1, wait=False, **state).wait)  # type: ignore[union-attr]

    def _dcp_async(self) -> dict[str, float]:
        path = self.folder / "dcp-async"
        return self._async(path, lambda: dcp.async_save(self.shards, checkpoint_id=path).result)

    def _async(self, path: Path, begin: Callable[[], Callable[[], object]]) -> dict[str, float]:
        end: list[Callable[[], object]] = []
        begun = 0.0

        def first() -> None:
            nonlocal begun
            start = time.perf_counter()
            end.append(begin())
            begun = time.perf_counter() - start

        before = self._watch()
        start = time.perf_counter()
        seconds, step = self._train_step(first)
        end[0]()
        whole = time.perf_counter() - start
        extra = _status("VmHWM") - before
        self._remove(path)
        return {"all": seconds, "step": step, "call": begun, "until saved": whole, "MB": extra / 1e6}

    def _train_step(self, first: Callable[[], None]) -> tuple[float, float]:
        """Seconds of `first` and a training step, and of its optimizer's step."""
        dist.barrier()
        start = time.perf_counter()
        first()
        for _ in range(self.micro_batches):
            self.model(self.x).square().mean().backward()
        stepped = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        return end - start, end - stepped

    # -- measuring

    def _calibrate(self) -> None:
        """So many micro-batches that forward and backward take as long as a save, and a quarter more."""
        seconds, step = self._train_step(lambda: None)
        each = self._agreed(seconds - step) / self.micro_batches
        self.micro_batches = max(1, round(1.25 * self._last_save / each))

    def _agreed(self, value: float) -> float:
        found = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def _timed(self, run: Callable[[], object]) -> tuple[float, float]:
        """Seconds, and megabytes by which the largest resident set is above that before."""
        before = self._watch()
        dist.barrier()
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        return seconds, (_status("VmHWM") - before) / 1e6

    def _watch(self) -> int:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not there to be taken again unseen
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's record of the largest resident set begins anew
        return _status("VmRSS")

    def _remove(self, path: Path) -> None:
        dist.barrier()
        if path.is_file():
            path.unlink()
        elif self.rank == 0:
            shutil.rmtree(path)
        dist.barrier()


def _drop(path: Path) -> None:
    """Lets the page cache go of a file that is on the disk."""
    if path.is_file():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _status(field: str) -> int:
    """Bytes that the kernel tells of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


def _measure(rank: int, folder: str, names: list[str], blocks: int, steps: int, warmup: int) -> dict[str, list[float]]:
    return _Rank(Path(folder), blocks).run(names, steps, warmup)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary one)")
    parser.add_argument("--blocks", type=int, default=_BLOCKS, help="of 25.2 MB a rank each (default %(default)s)")
    add_arguments(parser, _VARIANTS, steps=10)
    options = parser.parse_args()
    report = Report("checkpoint", "Saving and loading a model and Adam's state on two ranks.")
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.folder) as folder, Cluster(1, 2) as cluster:
        arguments = (folder, options.variants, options.blocks, options.steps, max(1, options.warmup))
        ranks = cluster.run(_measure, *arguments, timeout=3600.0)
    found = {key: [max(step) for step in zip(*(of[key] for of in ranks), strict=True)] for key in ranks[0]}
    size = sum(of["bytes"][0] for of in ranks)
    _tell(report, found, size)
    report.data(bytes=size, measured=found)
    return report.finish(options)


def _tell(report: Report, found: dict[str, list[float]], size: float) -> None:
    best = {key: min(values) for key, values in found.items()}
    rows: list[list[Any]] = []
    for what in ("save", "load, cached", "load, dropped", "resume, cached"):
        for name in ("whale", "dcp", "disk"):
            seconds = best.get(f"{name}: {what}")
            if seconds is not None:
                times = found[f"{name}: {what}"]
                share = f"{best[f'disk: {what}'] / seconds:.2f}" if f"disk: {what}" in best else ""
                extra = found.get(f"{name}: {what.partition(',')[0]}, MB", [])
                rows.append([
                    what, name, f"{seconds:.2f}", f"{statistics.median(times):.2f}", f"{size / seconds / 1e9:.2f}",
                    share, f"{statistics.median(extra):.0f}" if extra else "",
                ])  # fmt: skip
    headers = ["", "", "seconds, minimum", "median", "GB/s", "share of the disk's rate", "extra MB a rank"]
    report.table(f"{size / 1e9:.2f} GB of both ranks", headers, rows)
    for what in ("save", "load, cached", "load, dropped", "resume, cached"):
        if {f"whale: {what}", f"dcp: {what}"} <= best.keys():
            ratio = best[f"dcp: {what}"] / best[f"whale: {what}"]
            report.bar(f"{what}: dcp over whale", ratio, at_least=_OVER_DCP)
    for what in ("save", "load"):
        if f"whale: {what}, MB" in found:
            extra_mb = statistics.median(found[f"whale: {what}, MB"])
            report.bar(f"{what}: extra MB a rank", extra_mb, at_most=_EXTRA_MB)
    _tell_async(report, found, best)
    report.note(
        "of both ranks the slower one, and the one with more memory; every save ends with fsync; cached: the files are "
        "in the page cache; dropped: their pages were dropped (posix_fadvise) before"
    )


def _tell_async(report: Report, found: dict[str, list[float]], best: dict[str, float]) -> None:
    if "train: all" not in best:
        return
    own_mb = statistics.median(found["train: MB"])
    rows: list[list[Any]] = [["no save", f"{best['train: all']:.2f}", "", "", "", ""]]
    for name in ("whale", "dcp"):
        key = f"{name} async"
        if f"{key}: all" not in best or f"{name}: save" not in best:
            continue
        waits = zip(found[f"{key}: call"], found[f"{key}: step"], strict=True)
        blocked = min(call + max(0.0, step - best["train: step"]) for call, step in waits)
        stall = blocked / best[f"{name}: save"]
        rows.append([
            key, f"{best[f'{key}: all']:.2f}", f"{blocked:.3f}", f"{stall:.2f}", f"{best[f'{key}: until saved']:.2f}",
            f"{statistics.median(found[f'{key}: MB']) - own_mb:.0f}",
        ])  # fmt: skip
        if name == "whale":
            report.bar("async: stall as a share of a save", stall, at_most=_STALL)
    headers = [
        "",
        "seconds of the step",
        "of these the training waits",
        "as a share of the save",
        "seconds until all is saved",
        "extra MB a rank, over training's",
    ]
    report.table("A training step during which a save goes on in the background", headers, rows)
    report.note(
        "the training waits in the call that saves and in the optimizer's step, as far as it takes longer than without "
        "a save; forward and backward take a quarter more time than a save, on the cores that also write"
    )
