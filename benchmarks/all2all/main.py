"""Exchanges of rows on an emulated cluster: `python -m benchmarks.all2all`.

Every rank sends every other equally many bytes, by each route, alternating in one world; and once uneven rows, which
have to come alike by every route.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from benchmarks.cluster import Cluster
from benchmarks.harness import Report, Step, Summary, Trace, add_arguments, interleave, summarize, whole_numbers
from whale_torch.comm.all2all import AllToAll
from whale_torch.comm.splits import Splits
from whale_torch.mesh import start

__all__ = ["main"]

VARIANTS = {
    "flat": "flat",
    "two-level": "two levels",
    "two-level shared": "two levels, shared memory inside",
    "leader": "leader, shared memory",
    "chosen": "chosen",
}
_SIZES = (64, 512, 1024, 2048, 3072, 6144, 12_288, 24_576, 49_152)
_ROW_BYTES = 64


def _measure(
    rank: int, names: list[str], sizes: list[int], steps: int, warmup: int
) -> tuple[bool, dict[int, dict[str, Trace]], dict[str, Any]]:
    mesh = start()
    rows = AllToAll(mesh, "rows", (tuple(range(mesh.world)),))
    same = _same_rows(rows)
    begin = time.perf_counter()
    costs = rows.measure()
    calibrated = time.perf_counter() - begin
    traces, routes = {}, {}
    for size in sizes:
        width = min(size, _ROW_BYTES)
        splits = Splits(torch.full((mesh.world, mesh.world, 1), size // width), rank)
        x = torch.zeros(mesh.world * size // width, width, dtype=torch.uint8)
        routes[size] = rows.route_of(splits, width)

        def step(name: str, x: torch.Tensor = x, splits: Splits = splits) -> Step:
            route = None if name == "chosen" else name
            return lambda number: (rows(x, splits, route=route), None)[1]

        traces[size] = interleave({name: step(name) for name in names}, steps=steps, warmup=warmup)
    counting = interleave({"counts": lambda number: _count(rows)}, steps=steps, warmup=warmup)
    told = {"routes": routes, "costs": costs, "calibrated": calibrated, "refused": rows.refused, "counts": counting}
    return same, traces, told


def _count(rows: AllToAll) -> None:
    rows.splits(torch.zeros(2 * rows.group.size, dtype=torch.int64))


def _same_rows(rows: AllToAll) -> bool:
    """Whether uneven rows, some ranks without any, come alike by every route."""
    size = rows.group.size
    counts = torch.randint(0, 5, (size, size, 1), generator=torch.Generator().manual_seed(1))
    counts[1], counts[:, 2] = 0, 0
    splits = rows.splits(counts[rows.group.rank])
    x = torch.randn(sum(splits.sent), 9, generator=torch.Generator().manual_seed(rows.group.rank))
    straight = rows(x, splits, route="flat")
    return all(rows(x, splits, route=route).equal(straight) for route in rows.routes())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all2all", description=__doc__)
    parser.add_argument("--rate", default="400mbit")
    parser.add_argument("--sizes", type=whole_numbers, default=list(_SIZES), help="bytes for each pair of ranks")
    parser.add_argument("--clusters", type=whole_numbers, default=[4, 8], help="n nodes of n ranks each")
    add_arguments(parser, VARIANTS, steps=10)
    options = parser.parse_args()
    report = Report("all2all", "Rows from every rank to every other: small ones in two levels, through shared memory.")
    for side in options.clusters:
        _compare(report, options, side)
    report.note(
        f"links of {options.rate}; {options.steps} exchanges each, alternating; all ranks of a cluster share the cores "
        "of one machine, so part of what fewer messages save is time that a real node would have"
    )
    return report.finish(options)


def _compare(report: Report, options: argparse.Namespace, side: int) -> None:
    with Cluster(side, side, rate=options.rate, timeout=600) as cluster:
        rate = cluster.measured_rate()
        results: list[Any] = cluster.run(_measure, options.variants, options.sizes, options.steps, options.warmup)
    told = results[0][2]
    report.bar(
        f"{side} x {side}: uneven rows come alike by every route", all(r[0] for r in results), at_least=1, exact=True
    )
    of_size = {size: summarize([traces[size] for _, traces, _ in results]) for size in options.sizes}
    table = []
    for size, summaries in of_size.items():
        floor = side * (side - 1) * side * size * 8 / rate
        times = [f"{1e3 * summaries[name].minimum_s:.2f} ({1e3 * summaries[name].median_s:.1f})" for name in summaries]
        table.append([size, f"{1e3 * floor:.1f}", *times, told["routes"][size]])
    report.table(
        f"{side} nodes x {side} ranks: ms, minimum (median)",
        ["bytes a pair", "wire limit", *(VARIANTS[name] for name in options.variants), "the choice"],
        table,
    )
    counting = summarize([told["counts"] for _, _, told in results])["counts"]
    report.note(
        f"{side} x {side}: routes measured in {told['calibrated']:.1f} s at {', '.join(map(str, told['costs'].sizes))} "
        f"bytes; counts of rows take {1e3 * counting.minimum_s:.1f} ms ({1e3 * counting.median_s:.1f})"
    )
    if told["refused"]:
        report.note(f"{side} x {side}: {told['refused']}")
    report.data(**{f"cluster{side}": of_size, f"choice{side}": told["routes"], f"costs{side}": told["costs"]})
    _bars(report, side, of_size)


def _bars(report: Report, side: int, of_size: dict[int, dict[str, Summary]]) -> None:
    least = {size: {name: own.minimum_s for name, own in summaries.items()} for size, summaries in of_size.items()}
    small, shared, sockets = {8: (1024, 5.0, 1.5), 4: (2048, 2.0, None)}.get(side, (0, 1.0, None))
    names = next(iter(least.values())).keys()
    if "flat" in names:
        for routes, wanted, what in (
            ([name for name in ("two-level shared", "leader") if name in names], shared, "shared memory"),
            ([name for name in ("two-level",) if name in names], sockets, "two levels of sockets"),
        ):
            gains = [
                of["flat"] / min(of[name] for name in routes) for size, of in least.items() if routes and size <= small
            ]
            if gains and wanted:
                report.bar(
                    f"{side} x {side}: {what} over flat up to {small} bytes, minima", min(gains), at_least=wanted
                )
    if "chosen" in names and len(names) > 2:
        best = {size: min(seconds for name, seconds in of.items() if name != "chosen") for size, of in least.items()}
        crossing = next((size for size, of in least.items() if of.get("flat") == best[size]), None)
        regret = {size: of["chosen"] / best[size] for size, of in least.items()}
        away = [r for size, r in regret.items() if crossing is None or not crossing / 4 < size < crossing * 2]
        report.bar(f"{side} x {side}: the choice over the best, far from where it changes", max(away), at_most=1.1)
        report.bar(f"{side} x {side}: the choice over the best, anywhere", max(regret.values()), at_most=1.2)
