"""A plan as a table a person can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whale_torch.planning.plan import Plan

__all__ = ["amount", "render"]


def amount(num_bytes: float) -> str:
    """Bytes in the largest unit that keeps one digit before the point."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [head, *rows]]
    rule = ["-" * width for width in widths]
    return ["  " + "  ".join(line).rstrip() for line in [lines[0], rule, *lines[1:]]]


def render(plan: Plan) -> str:
    """The plan's text: global batch, sizes in today's words, TaskGraphs, cuts, gradients, bytes of a step."""
    splits = sorted({device.size for device in plan.devices if device.size > 1})
    tensor = " and ".join(map(str, splits)) or "1"
    out = [
        f"Plan for {plan.cluster}",
        f"The global batch is {plan.num_feeds} x the batch you feed"
        + (f"; ranks {plan.feed_size} by {plan.feed_size} are one replica and are fed the same batch." if plan.feed_size > 1 else "."),
        f"DP {plan.num_feeds}, TP {tensor}, PP 1, EP 1, ZeRO 0",
        "",
        *_table(
            ["TaskGraph", "scope", "modules", "on", "rows", "parameters"],
            [
                [
                    str(graph.index),
                    " > ".join(a.call for a in graph.annotations) or "(default)",
                    _names(graph.modules),
                    graph.device,
                    plan.device(graph.device).row_mode if graph.kind == "split" else ("shared" if plan.feed_size > 1 else "own"),
                    f"{graph.num_parameters:,}",
                ]
                for graph in plan.taskgraphs
            ],
        ),
    ]
    if plan.cuts:
        rows = [[cut.module or "(root)", cut.rule, cut.role, _widths(cut.widths)] for cut in plan.cuts]
        out += ["", *_table(["split module", "rule", "cut by", "units a rank"], rows)]
    if plan.reduces:
        rows = [
            [r.device, str(len(r.parameters)), amount(r.gradient_bytes), r.wire or "as they are", r.algorithm, f"{amount(r.bucket_bytes)} x {r.max_in_flight}"]
            for r in plan.reduces
            if r.gradient_bytes
        ]
        out += ["", *_table(["gradients on", "parameters", "bytes", "wire", "all-reduce", "staging"], rows)]
    rows = [[t.what, t.where, amount(t.sent_bytes)] for t in plan.traffic]
    out += ["", *_table(["sent by a rank in a step", "where", "bytes"], [*rows, ["total", f"at {plan.rows_per_rank} rows a rank", amount(plan.sent_bytes)]])]
    out += ["", f"Held by a rank: parameters {amount(plan.parameter_bytes)}, gradients {amount(plan.gradient_bytes)}."]
    if plan.gathers:
        rows = [[g.operation, g.site, str(g.count), amount(g.num_bytes)] for g in plan.gathers]
        out += ["", "Gathered without being asked to:", *_table(["operation", "at", "times", "bytes"], rows)]
    return "\n".join(out)


def _names(names: tuple[str, ...], most: int = 3) -> str:
    shown = [name or "(root)" for name in names[:most]]
    return ", ".join(shown) + (f", and {len(names) - most} more" if len(names) > most else "")


def _widths(widths: tuple[int, ...]) -> str:
    return f"{len(widths)} x {widths[0]}" if len(set(widths)) == 1 else f"{max(widths)}..{min(widths)} on {len(widths)} ranks, {sum(widths)} in all"
