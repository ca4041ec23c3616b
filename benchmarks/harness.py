"""How every benchmark measures and reports: variants interleaved step by step, minima and medians, bytes, load.

`add_arguments` and `run` are what the command lines share, `sgd_loop` is the training loop of one process. In a rank,
`interleave` runs all variants in one world, in an order that rotates, so that a busy moment of the machine hits them
alike. In the owner, `summarize` joins what the ranks saw: a step lasts as long as its slowest rank. A `Report` prints
tables and bars with the machine and its load, and writes them as JSON or into a dated results file.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cluster import ClusterError, sent_bytes

__all__ = [
    "Report",
    "Step",
    "Summary",
    "Trace",
    "add_arguments",
    "interleave",
    "ring_seconds",
    "run",
    "sgd_loop",
    "summarize",
    "whole_numbers",
]

Step = Callable[[int], "Tensor | float | None"]


@dataclass(slots=True)
class Trace:
    """What one rank saw of one variant: `values` from the first warm-up step on, the rest from measured steps."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Summary:
    """One variant over all ranks: a step's seconds are its slowest rank's, its bytes the busiest node's."""

    minimum_s: float
    median_s: float
    maximum_s: float
    cpu_minimum_s: float
    cpu_median_s: float
    sent_bytes: int
    values: tuple[float, ...]

    def loss_error(self, expected: Sequence[float]) -> float:
        """The largest difference between a step's loss and the one expected."""
        return max(abs(value - loss) for value, loss in zip(self.values, expected, strict=True))


def ring_seconds(num_bytes: float, num_ranks: int, bits_per_second: float) -> float:
    """What a ring all-reduce over links of this rate takes at least."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes * 8 / bits_per_second


def sgd_loop(
    module: nn.Module, lr: float, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
) -> Callable[[Tensor, Tensor], Tensor]:
    """The loop of one process around a module, whatever averages its gradients.

    The returned step(inputs, targets) is one of plain SGD on loss(module(inputs), targets), which it returns.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        value = loss(module(inputs), targets)
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def interleave(variants: Mapping[str, Step], *, steps: int, warmup: int = 2) -> dict[str, Trace]:
    """Runs every variant's step number 0, then 1, and so on; the first `warmup` numbers are not timed.

    A step is called with its number, the same for every variant, and may return a loss. Between steps all ranks meet
    twice, so that no rank's bytes are counted before or after their step. The calling thread's CPU time is kept too.
    """
    names, traces = list(variants), {name: Trace() for name in variants}
    for number in range(warmup + steps):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            _barrier()
            sent = sent_bytes()
            _barrier()
            wall, cpu = time.perf_counter(), time.thread_time()
            value = variants[name](number)
            wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
            _barrier()
            sent = sent_bytes() - sent
            trace = traces[name]
            if value is not None:
                trace.values.append(float(value))
            if number >= warmup:
                trace.seconds.append(wall)
                trace.cpu_seconds.append(cpu)
                trace.sent_bytes.append(sent)
    return traces


def summarize(per_rank: Sequence[Mapping[str, Trace]]) -> dict[str, Summary]:
    """Joins the traces of all ranks; values are averaged, so the ranks' mean losses become the world's."""
    summaries = {}
    for name in per_rank[0]:
        traces = [traces[name] for traces in per_rank]
        seconds = [max(step) for step in zip(*(trace.seconds for trace in traces), strict=True)]
        cpu = [max(step) for step in zip(*(trace.cpu_seconds for trace in traces), strict=True)]
        values = zip(*(trace.values for trace in traces), strict=True)
        summaries[name] = Summary(
            minimum_s=min(seconds),
            median_s=statistics.median(seconds),
            maximum_s=max(seconds),
            cpu_minimum_s=min(cpu),
            cpu_median_s=statistics.median(cpu),
            sent_bytes=int(max(statistics.median(trace.sent_bytes) for trace in traces)),
            values=tuple(statistics.fmean(step) for step in values),
        )
    return summaries


def run(main: Callable[[], int]) -> int:
    """The exit status of a benchmark; where its cluster cannot be brought up or a rank fails, the error's words."""
    try:
        return main()
    except ClusterError as error:
        print(error)
        return 1


def _items(text: str) -> list[str]:
    return [item for item in text.split(",") if item]


def whole_numbers(text: str) -> list[int]:
    """An option's numbers with commas between."""
    return [int(item) for item in _items(text)]


def add_arguments(parser: argparse.ArgumentParser, variants: Iterable[str], *, steps: int = 12) -> None:
    """The options that every benchmark has; `variants` is a list of those known, in the order given."""
    known = list(variants)

    def some_known(text: str) -> list[str]:
        names = _items(text)
        if unknown := sorted(set(names) - set(known)):
            raise argparse.ArgumentTypeError(f"unknown variants {unknown}, known are {', '.join(known)}")
        return names

    parser.add_argument("--variants", type=some_known, default=known, help="with commas between (default: all)")
    parser.add_argument("--steps", type=int, default=steps, help="measured steps of each variant (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the measured ones (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--results", action="store_true", help="write a dated section into benchmarks/results/")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a speed bar is missed")


@dataclass(frozen=True, slots=True)
class _Table:
    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def lines(self) -> list[str]:
        widths = [max(len(row[column]) for row in (self.headers, *self.rows)) for column in range(len(self.headers))]
        bars = ["-" * width for width in widths]

        def line(row: Sequence[str]) -> str:
            return "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"

        return [self.title, "", line(self.headers), line(bars), *map(line, self.rows), ""]


@dataclass(frozen=True, slots=True)
class _Bar:
    name: str
    value: float
    bound: float
    at_least: bool
    exact: bool

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def row(self) -> tuple[str, ...]:
        return (
            self.name,
            f"{self.value:.4g}",
            f"{'>=' if self.at_least else '<='} {self.bound:g}",
            "met" if self.met else "MISSED",
        )


class Report:
    """Collects a benchmark's tables, notes and bars, then prints and writes them.

    benchmark: the folder's name. claim: one sentence. The machine's load is read when the report is made and when it
    is finished.
    """

    def __init__(self, benchmark: str, claim: str) -> None:
        self.benchmark, self.claim = benchmark, claim
        self._tables: list[_Table] = []
        self._bars: list[_Bar] = []
        self._notes: list[str] = []
        self._data: dict[str, Any] = {}
        self._load, self._busy, self._start = os.getloadavg()[0], _cpu_seconds(), time.time()

    def table(self, title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Adds a table; cells are printed with str()."""
        self._tables.append(_Table(title, tuple(headers), tuple(tuple(map(str, row)) for row in rows)))

    def note(self, text: str) -> None:
        """Adds a line below the tables."""
        self._notes.append(text)

    def bar(
        self,
        name: str,
        value: float,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        exact: bool = False,
    ) -> None:
        """Adds a bar to pass. exact: about correctness, so missing it always makes the benchmark fail."""
        bound, lower = (at_least, True) if at_least is not None else (at_most, False)
        if bound is None:
            raise ValueError(f"bar {name!r} has neither at_least nor at_most")
        self._bars.append(_Bar(name, value, bound, lower, exact))

    def data(self, **values: Any) -> None:
        """Adds values to the JSON only."""
        self._data.update(values)

    def finish(self, options: argparse.Namespace) -> int:
        """Prints all, writes what the options ask for, and returns the exit status."""
        load, busy, seconds = os.getloadavg()[0], _cpu_seconds(), time.time() - self._start
        share = 100 * (busy[0] - self._busy[0]) / max(busy[1] - self._busy[1], 1e-9)
        environment = {
            "machine": f"{machine()} ({_processor()})",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "load": f"{self._load:.1f} at the start, {load:.1f} at the end; cores busy {share:.0f} % of the time",
            "took": f"{seconds:.0f} s",
        }
        lines = [f"## {self.benchmark}", "", self.claim, ""]
        for table in self._tables:
            lines += table.lines()
        lines += [f"- {note}" for note in self._notes] + [""] * bool(self._notes)
        if self._bars:
            lines += _Table("Bars", ("bar", "measured", "wanted", ""), tuple(bar.row() for bar in self._bars)).lines()
        lines += ["; ".join(f"{name} {value}" for name, value in environment.items()), ""]
        print("\n".join(lines), flush=True)
        if options.json:
            body = {
                "benchmark": self.benchmark,
                "claim": self.claim,
                "date": datetime.date.today().isoformat(),
                "environment": environment,
                "tables": [dataclasses.asdict(table) for table in self._tables],
                "bars": [{**dataclasses.asdict(bar), "met": bar.met} for bar in self._bars],
                "notes": self._notes,
                **self._data,
            }
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(body, indent=1, default=_plain))
        if options.results:
            _write_results(self.benchmark, lines)
        return int(any(not bar.met and (bar.exact or options.strict) for bar in self._bars))


def machine() -> str:
    """The machine in a file name's words: its cores and architecture, and its GPU where there is one."""
    parts = [f"{os.cpu_count()}-core", platform.machine()]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name().replace(" ", "-"))
    return "-".join(parts)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _cpu_seconds() -> tuple[float, float]:
    """(busy, all) CPU seconds of the machine since it started."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], float(sum(ticks))


def _plain(value: object) -> object:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)


def _write_results(benchmark: str, lines: list[str]) -> None:
    """Puts the section of this benchmark into today's file for this machine, in place of an earlier one."""
    today = datetime.date.today().isoformat()
    path = Path(__file__).parent / "results" / f"{today}-{machine()}.md"
    path.parent.mkdir(exist_ok=True)
    head = f"# Results of {today} on {machine()}\n\n"
    text = path.read_text() if path.exists() else head
    first, *sections = text.split("\n## ")
    kept = [section for section in sections if section.splitlines()[0] != benchmark]
    sections = sorted([*kept, "\n".join(lines)[3:].rstrip() + "\n"])
    path.write_text("\n## ".join([first.rstrip() + "\n", *sections]))
    print(f"written to {path}")
