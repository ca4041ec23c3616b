"""A plan as text a person can read: repeated layers are one line, whatever their number."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from whale_torch.planning.plan import Plan
    from whale_torch.planning.taskgraph import TaskGraph

__all__ = ["amount", "fold_names", "render"]

_MOST_NAMES = 3
_MOST_ROWS = 30
T = TypeVar("T")


def amount(num_bytes: float) -> str:
    """Bytes in the largest unit that keeps a digit before the point, to three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB" if num_bytes < 999.5 else f"{num_bytes:,.0f} TB"


def render(plan: Plan) -> str:
    """The plan's text: global batch, sizes in today's words, TaskGraphs, cuts, gradients, bytes of a step."""
    parts = [_opening(plan), _taskgraphs(plan), _cuts(plan), _gradients(plan), _traffic(plan), _gathers(plan)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _opening(plan: Plan) -> list[str]:
    sizes = [str(size) for size in sorted({device.size for device in plan.devices}) if size > 1]
    times = "the batch you feed" if plan.num_feeds == 1 else f"{plan.num_feeds} x the batch you feed a rank"
    out = [
        f"Plan for {plan.cluster}",
        f"The global batch is {times}. DP {plan.num_feeds}, TP {' and '.join(sizes) or '1'}, PP 1, EP 1, ZeRO 0.",
    ]
    if plan.feed_size > 1:
        f = plan.feed_size
        blocks = (
            f"Ranks 0-{f - 1}"
            + (f", {f}-{2 * f - 1}" if plan.num_feeds > 1 else "")
            + (", ..." if plan.num_feeds > 2 else "")
        )
        whole = (
            "are one replica: feed all of them the same batch."
            if plan.num_feeds == 1
            else "are one replica each: feed its ranks the same batch."
        )
        out[1] = out[1].replace("you feed a rank", "you feed a replica")
        out.append(f"{blocks} {whole}")
    if plan.batch_dim or plan.world > 1:
        named = (
            f"dimension {plan.batch_dim} of the first input tensor that has it"
            if isinstance(plan.batch_dim, int)
            else _named_dims(plan.batch_dim)
        )
        out.append(f"Samples are counted along {named}.")
    if plan.loss == "sum":
        out.append("The loss is a sum over samples: gradients are summed over the feeds.")
    held = f"A rank holds {amount(plan.parameter_bytes)} of parameters"
    out.append(
        held + (f" and {amount(plan.gradient_bytes)} of gradients." if plan.gradient_bytes else "; none is trained.")
    )
    return out


def _named_dims(batch_dim: tuple[tuple[str, int | None], ...]) -> str:
    counted = ", ".join(f"dimension {dim} of '{name}'" for name, dim in batch_dim if dim is not None)
    none = ", ".join(f"'{name}'" for name, dim in batch_dim if dim is None)
    return f"{counted} (not in {none})" if none else counted


def _taskgraphs(plan: Plan) -> list[str]:
    def key(graph: TaskGraph) -> Hashable:
        return tuple(map(_pattern, graph.modules)), _scope(graph), graph.site, graph.device, graph.num_parameters

    rows = []
    for group in _grouped(plan.taskgraphs, key):
        first = group[0]
        where = plan.device(first.device)
        times = "" if len(group) == 1 else f"{len(group)} x "
        row_mode = where.row_mode if first.kind == "split" else ("shared" if plan.feed_size > 1 else "own")
        index = str(first.index) if len(group) == 1 else f"{first.index}-{group[-1].index}"
        names = _shown(fold_names([name for graph in group for name in graph.modules]))
        rows.append(
            [
                index,
                _scope(first),
                first.site if first.annotations else "",
                names,
                _ranks(where.size, where.world),
                row_mode,
                f"{times}{first.num_parameters:,}",
            ]
        )
    return _table(["TaskGraph", "scope", "at", "modules", "on", "rows", "parameters"], rows)


def _scope(graph: TaskGraph) -> str:
    return " > ".join(annotation.call for annotation in graph.annotations) or "(default)"


def _ranks(size: int, world: int) -> str:
    if size == 1:
        return f"each of {world} ranks" if world > 1 else "1 rank"
    return f"all {world} ranks" if size == world else f"{world // size} groups of {size} ranks"


def _cuts(plan: Plan) -> list[str]:
    rows = []
    for group in _grouped(plan.cuts, lambda cut: (_pattern(cut.module), cut.rule, cut.role, cut.widths)):
        rows.append(
            [_shown(fold_names([cut.module for cut in group])), group[0].rule, group[0].role, _widths(group[0].widths)]
        )
    return _table(["split modules", "rule", "cut by", "units a rank"], rows)


def _gradients(plan: Plan) -> list[str]:
    rows = []
    for reduce in plan.reduces:
        device = plan.device(reduce.device)
        over = (
            f"all {device.num_copies} ranks"
            if device.size == 1
            else f"{device.num_copies} ranks with the same part of {reduce.device}"
        )
        wire = f"{reduce.wire}, {amount(reduce.wire_bytes)}" if reduce.wire else "as they are"
        rows.append(
            [
                over,
                str(len(reduce.parameters)),
                amount(reduce.gradient_bytes),
                wire,
                reduce.algorithm,
                f"{reduce.max_in_flight} x {amount(reduce.bucket_bytes)}",
            ]
        )
    return _table(
        ["gradients averaged over", "parameters", "bytes a rank", "wire", "all-reduce", "buckets in flight"], rows
    )


def _traffic(plan: Plan) -> list[str]:
    if not plan.traffic:
        return [] if plan.world > 1 else ["One rank: nothing is sent."]
    rows = [[t.what, t.where, amount(t.sent_bytes)] for t in sorted(plan.traffic, key=lambda t: -t.sent_bytes)]
    rows.append(["in all", "", amount(plan.sent_bytes)])
    return [*_table(["a rank sends in a training step", "on", "bytes"], rows), f"  ({plan.assumption})"]


def _gathers(plan: Plan) -> list[str]:
    if not plan.gathers:
        return []
    rows = [[g.operation, g.site, str(g.count), amount(g.num_bytes)] for g in plan.gathers]
    return [
        "Outputs of a split that were gathered because an operation needs all columns (z.rows() says it outright):",
        *_table(["operation", "at", "times", "bytes in all"], rows),
    ]


# ---- tables and names ----


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    if not rows:
        return []
    dropped = len(rows) - _MOST_ROWS
    if dropped > 1:
        rows = [*rows[: _MOST_ROWS - 1], [f"... {dropped + 1} more", *[""] * (len(head) - 1)]]
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in kept]
    lines = [[row[i].ljust(width) for i, width in zip(kept, widths, strict=True)] for row in [head, *rows]]
    rule = ["-" * width for width in widths]
    return ["  " + "  ".join(line).rstrip() for line in [lines[0], rule, *lines[1:]]]


def _grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _pattern(name: str) -> str:
    """A name with its numbers left out: equal for the layers of one list."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "#", name)


def fold_names(names: Sequence[str]) -> list[str]:
    """Names that differ in one number become one: blocks.0.fc, blocks.1.fc -> blocks.0-1.fc; "" is the root."""
    out = []
    for group in _grouped(names, _pattern):
        numbers = [[int(piece) if piece.isdecimal() else piece for piece in name.split(".")] for name in group]
        differing = [i for i, values in enumerate(zip(*numbers, strict=True)) if len(set(values)) > 1]
        if len(differing) != 1:
            out += [name or "(root)" for name in group]
            continue
        place = differing[0]
        runs = _runs(sorted(int(pieces[place]) for pieces in numbers))
        pieces = group[0].split(".")
        out.append(".".join([*pieces[:place], runs, *pieces[place + 1 :]]))
    return out


def _runs(numbers: list[int]) -> str:
    """0 1 2 5 6 -> "0-2,5-6"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ",".join(texts if len(texts) < 6 else [*texts[:4], "...", texts[-1]])


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (
        f", and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    )


def _widths(widths: tuple[int, ...]) -> str:
    total = sum(widths)
    if len(set(widths)) == 1:
        return f"{widths[0]} of {total}"
    empty = sum(width == 0 for width in widths)
    spread = (
        f"{min(widths)} to {max(widths)} of {total}" if len(widths) > 4 else f"{', '.join(map(str, widths))} of {total}"
    )
    return spread + (f" (none on {empty} ranks)" if empty else "")
