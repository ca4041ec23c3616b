"""Exchanges of rows on an emulated cluster: `python -m benchmarks.all2all`.

Every rank sends every other equally many bytes, by each route, alternating in one world; and once uneven rows, which
have to come alike by every route. Then the forward of a layer of experts, whose tokens travel whole and in chunks.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from benchmarks.all2all import overlap
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
_ROW_BYTES, _SMALL = 64, 4096
_SHARED = ("two-level shared", "leader")
_GAINS = {
    4: [("shared memory", _SHARED, 2048, 2.0)],
    8: [("two levels of sockets", ("two-level",), 1024, 1.5), ("shared memory", _SHARED, 1024, 5.0)],
}
"""What is compared with flat, the routes of it, up to how many bytes for a pair of ranks, how much faster."""


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

        def step(name: str, size: int = size, x: torch.Tensor = x, splits: Splits = splits) -> Step:
            route = None if name == "chosen" else name

            def exchanges(number: int) -> None:
                for _ in range(_repeats(size)):
                    rows(x, splits, route=route)

            return exchanges

        traces[size] = interleave({name: step(name) for name in names}, steps=steps, warmup=warmup)
    counting = interleave({"counts": lambda number: _count(rows)}, steps=steps, warmup=warmup)
    told = {"routes": routes, "costs": costs, "calibrated": calibrated, "refused": rows.refused, "counts": counting}
    return same, traces, told


def _repeats(size: int) -> int:
    """Exchanges in a row of one measurement: as many as a layer of experts has, forward and backward, of small ones.

    Ranks do not leave a barrier together, and what that takes counts once a measurement.
    """
    return 4 if size <= _SMALL else 1


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
    parser.add_argument("--clusters", type=whole_numbers, default=[4, 8], help="n nodes of n ranks each, '' for none")
    parser.add_argument("--skip-overlap", action="store_true", help="no layer whose tokens travel in chunks")
    add_arguments(parser, VARIANTS, steps=10)
    options = parser.parse_args()
    report = Report("all2all", "Rows from every rank to every other: small ones in two levels, through shared memory.")
    for side in options.clusters:
        _compare(report, options, side)
    if not options.skip_overlap:
        _report_overlap(report, options)
    report.note(
        f"links of {options.rate}; {options.steps} times each, alternating, 4 exchanges in a row up to {_SMALL} bytes; "
        "all ranks of a cluster share the cores of one machine, so part of what fewer messages save is time that a "
        "real node would have"
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
        each = 1e3 / _repeats(size)
        floor = side * (side - 1) * side * size * 8 / rate
        times = [f"{own.minimum_s * each:.2f} ({own.median_s * each:.1f})" for own in summaries.values()]
        table.append([size, f"{1e3 * floor:.1f}", *times, told["routes"][size]])
    report.table(
        f"{side} nodes x {side} ranks: ms of an exchange, minimum (median)",
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
    _bars(report, side, of_size, told["routes"])


def _report_overlap(report: Report, options: argparse.Namespace) -> None:
    with Cluster(4, rate=options.rate, timeout=600) as cluster:
        found = cluster.run(overlap.measure, overlap.LAYER_BYTES, options.steps, options.warmup)
    own = summarize([traces for traces, _ in found])
    report.table(
        f"A layer of experts on 4 nodes x 1 rank: ms of its forward, {overlap.LAYER_BYTES / 1e6:.1f} MB there, "
        f"{1e3 * overlap.COMPUTE_S:.0f} ms of computation, and back: minimum (median)",
        ["wire", *(f"{c} chunk{'s' * (c > 1)}" for c in overlap.CHUNKS)],
        [
            [wire, *(f"{1e3 * s.minimum_s:.0f} ({1e3 * s.median_s:.0f})" for s in of_wire)]
            for wire in overlap.WIRES
            for of_wire in [[own[f"{c} {wire}"] for c in overlap.CHUNKS]]
        ],
    )
    whole, cut, both = (own[name].minimum_s for name in ("1 fp32", "4 fp32", "4 bf16"))
    report.bar("4 chunks over 1, minima", whole / cut, at_least=1.5)
    report.bar("4 chunks and a bf16 wire over 1 chunk of fp32, minima", whole / both, at_least=2.2)
    for wire, bound in {"fp32": 1e-6, "bf16": 1e-2}.items():
        worst = max(errors[f"{c} {wire}"] for _, errors in found for c in overlap.CHUNKS)
        report.bar(f"{wire} wire: difference from 1 chunk of fp32", worst, at_most=bound, exact=True)
    report.data(overlap=own)


def _bars(report: Report, side: int, of_size: dict[int, dict[str, Summary]], routes: dict[int, str]) -> None:
    names = next(iter(of_size.values())).keys()
    least = {size: _least(summaries, routes[size]) for size, summaries in of_size.items()}
    for what, of, up_to, wanted in _GAINS.get(side, ()):
        gains = [
            seconds["flat"] / min(seconds[name] for name in of)
            for size, seconds in least.items()
            if size <= up_to and {"flat", *of} <= names
        ]
        if gains:
            report.bar(f"{side} x {side}: {what} over flat up to {up_to} bytes, minima", min(gains), at_least=wanted)
    if not {"flat", "leader", "two-level shared", "chosen"} <= names:
        return
    regrets = {size: seconds[routes[size]] / min(seconds.values()) for size, seconds in least.items()}
    crossing = next((size for size, seconds in least.items() if min(seconds, key=seconds.__getitem__) == "flat"), 0)
    away = [regret for size, regret in regrets.items() if not crossing / 4 < size < crossing * 2]
    report.bar(
        f"{side} x {side}: the choice over the best route, away from the crossing", max(away, default=1.0), at_most=1.1
    )
    report.bar(f"{side} x {side}: the choice over the best route, anywhere", max(regrets.values()), at_most=1.2)


def _least(summaries: dict[str, Summary], route: str) -> dict[str, float]:
    """Each route's minimum; what is measured as chosen is the chosen route once more."""
    seconds = {name: own.minimum_s for name, own in summaries.items() if name != "chosen"}
    if "chosen" in summaries and route in seconds:
        seconds[route] = min(seconds[route], summaries["chosen"].minimum_s)
    return seconds
