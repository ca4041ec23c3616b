"""Time lines to look at: text for a terminal, SVG, PNG, and a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

import importlib
import json
import math
import textwrap
from collections.abc import Callable
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from whale_torch.errors import PlanError
from whale_torch.planning.schedules.actions import KIND_NAMES, Action, Kind
from whale_torch.planning.schedules.simulate import Timeline

__all__ = ["chrome_trace", "draw", "draw_png", "draw_svg", "draw_text"]

_COLOURS: dict[Kind, str] = {"F": "#3b6fb6", "B": "#3f8f5b", "I": "#2a8c8c", "W": "#b8741a"}
_FILLS: dict[Kind, str] = {"F": "-", "B": "=", "I": "~", "W": "+"}
_LEAST_WIDTH = 40


def draw(timeline: Timeline, path: str | Path) -> None:
    """Writes the time line as the file's ending says: .txt, .svg, .png, or .json for a Chrome trace.

    Raises: PlanError for another ending, and for .png without matplotlib.
    """
    path = Path(path)
    texts: dict[str, Callable[[Timeline], str]] = {
        ".txt": lambda timeline: draw_text(timeline) + "\n",
        ".svg": draw_svg,
        ".json": lambda timeline: json.dumps(chrome_trace(timeline)),
    }
    if path.suffix == ".png":
        draw_png(timeline, path)
    elif path.suffix in texts:
        path.write_text(texts[path.suffix](timeline), encoding="utf-8")
    else:
        raise PlanError(f"{path.name}: no drawing ends in {path.suffix!r}.", fix="end it in .txt, .svg, .png or .json")


# ---- text ----


def draw_text(timeline: Timeline, width: int = 100) -> str:
    """The time line in lines of at most `width` columns: a row a rank, and how many micro-batches it keeps at most.

    Raises: PlanError for less than 40 columns.
    """
    if width < _LEAST_WIDTH:
        raise PlanError(f"a time line of {width} columns.", fix=f"give {_LEAST_WIDTH} or more")
    schedule = timeline.schedule
    names = [f"rank {rank}" for rank in range(schedule.num_ranks)]
    peaks = [str(peak) for peak in timeline.peak_in_flight]
    left, right = max(map(len, names)), max(len("keeps"), *map(len, peaks))
    columns = width - left - right - 4
    rows = [_cells(timeline, rank, columns) for rank in range(schedule.num_ranks)]
    forms: list[Callable[[Action], str]] = [str] if _has_stages(timeline) else []
    forms += [_kind_and_micro_batch, _kind]
    form = next((form for form in forms if _fits_most(form, rows)), _kind)
    end = _seconds(timeline.makespan)
    lines = textwrap.wrap(_summary(timeline), width)
    lines.append(f"{'':{left}}  0{end:>{columns - 1}}  {'keeps':>{right}}")
    for name, row, peak in zip(names, rows, peaks, strict=True):
        text = "".join(_cell(action, length, form) for action, length in row)
        lines.append(f"{name:<{left}} |{text}| {peak:>{right}}")
    legend = "  ".join(f"{kind}{_FILLS[kind]} {KIND_NAMES[kind]}" for kind in _kinds(timeline))
    number = "; number: stage.micro-batch" if form is str else "; number: micro-batch" if form is not _kind else ""
    lines += textwrap.wrap(f"{legend}  (blank: idle{number})", width)
    return "\n".join(lines)


def _cells(timeline: Timeline, rank: int, columns: int) -> list[tuple[Action | None, int]]:
    """What one rank runs, None while it is idle, and in how many columns: each shows the action of its middle."""
    step = timeline.makespan / columns
    running = iter(timeline.schedule.table[rank])
    action = next(running, None)
    shown: list[Action | None] = []
    for column in range(columns):
        middle = (column + 0.5) * step
        while action and timeline.spans[action].end <= middle:
            action = next(running, None)
        shown.append(action if action and timeline.spans[action].start <= middle else None)
    return [(found, len(list(run))) for found, run in groupby(shown)]


def _cell(action: Action | None, length: int, form: Callable[[Action], str]) -> str:
    """The name of an action, filled up so that its kind is seen; the kind alone where the name does not fit."""
    if action is None:
        return " " * length
    name = form(action)
    return (name if len(name) <= length else action.kind).ljust(length, _FILLS[action.kind])


def _fits_most(form: Callable[[Action], str], rows: list[list[tuple[Action | None, int]]]) -> bool:
    fits = [len(form(action)) <= length for row in rows for action, length in row if action]
    return 2 * sum(fits) >= len(fits)


def _kind_and_micro_batch(action: Action) -> str:
    return f"{action.kind}{action.micro_batch}"


def _kind(action: Action) -> str:
    return action.kind


# ---- pictures ----


def draw_svg(timeline: Timeline, title: str | None = None, width: int = 960) -> str:
    """The time line as an SVG document: one rectangle an action, with its times as a tooltip."""
    left, right, top, row, bar = 70, 20, 44, 30, 24
    bottom = top + timeline.schedule.num_ranks * row
    scale = (width - left - right) / (timeline.makespan or 1.0)
    body = [f'<text x="{left}" y="24" font-size="15">{escape(title or _summary(timeline))}</text>']
    for tick in _ticks(timeline.makespan):
        x = left + tick * scale
        body.append(f'<line x1="{x:.2f}" y1="{top - 4}" x2="{x:.2f}" y2="{bottom + 4}" stroke="#ddd"/>')
        body.append(f'<text x="{x:.2f}" y="{bottom + 20}" text-anchor="middle">{_seconds(tick)}</text>')
    for rank, actions in enumerate(timeline.schedule.table):
        y = top + rank * row
        body.append(f'<text x="{left - 8}" y="{y + bar / 2 + 4}" text-anchor="end">rank {rank}</text>')
        body += [_bar(timeline, action, left, scale, y, bar) for action in actions]
    for index, kind in enumerate(_kinds(timeline)):
        x, y = left + 130 * index, bottom + 34
        body.append(f'<rect class="legend" x="{x}" y="{y}" width="14" height="14" fill="{_COLOURS[kind]}"/>')
        body.append(f'<text x="{x + 20}" y="{y + 11}">{KIND_NAMES[kind]}</text>')
    height = bottom + 62
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" fill="#222">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#fff"/>', *body, "</svg>", ""])


def _bar(timeline: Timeline, action: Action, left: float, scale: float, y: float, height: float) -> str:
    span = timeline.spans[action]
    x, width = left + span.start * scale, (span.end - span.start) * scale
    told = f"{action}: {KIND_NAMES[action.kind]}, {_seconds(span.start)} to {_seconds(span.end)}"
    rect = (
        f'<rect class="{action.kind}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" '
        f'fill="{_COLOURS[action.kind]}" stroke="#fff" stroke-width="0.7"><title>{told}</title></rect>'
    )
    label = _label(timeline, action)
    size = _size(label, width, 11)
    if size < 7:
        return rect
    return (
        f'{rect}<text x="{x + width / 2:.2f}" y="{y + height / 2 + 4}" font-size="{size:.3g}" text-anchor="middle" '
        f'fill="#fff" pointer-events="none">{label}</text>'
    )


def _size(label: str, width: float, most: float) -> float:
    """The font size at which a label of digits fits into a width of the same unit."""
    return min(most, (width - 2) / (0.58 * len(label)))


def draw_png(timeline: Timeline, path: str | Path, title: str | None = None) -> None:
    """The time line as a PNG file, by matplotlib.

    Raises: PlanError where matplotlib is not installed.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise PlanError(
            "a time line as PNG is drawn by matplotlib, which is not installed.",
            fix='pip install "whale-torch[bench]", or draw it as .svg',
        ) from error
    num_ranks = timeline.schedule.num_ranks
    figure = figures.Figure(figsize=(10, 1.4 + 0.36 * num_ranks), layout="constrained")
    axes, points = figure.subplots(), 670 / (timeline.makespan or 1.0)  # what the margins leave of ten inches
    for rank, row in enumerate(timeline.schedule.table):
        for action in row:
            start, end = timeline.spans[action]
            axes.barh(rank, end - start, 0.8, start, color=_COLOURS[action.kind], edgecolor="white", linewidth=0.5)
            label = _label(timeline, action)
            size = _size(label, points * (end - start), 7)
            if size >= 4.5:
                axes.text((start + end) / 2, rank, label, color="white", size=size, ha="center", va="center")
    kinds = _kinds(timeline)
    handles = [axes.barh(0, 0, color=_COLOURS[kind]) for kind in kinds]
    figure.legend(handles, [KIND_NAMES[kind] for kind in kinds], loc="outside lower center", ncols=4, frameon=False)
    axes.set(title=title or _summary(timeline), xlabel="seconds", xlim=(0, timeline.makespan or 1.0))
    axes.title.set_size(9)
    axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    axes.invert_yaxis()
    figure.savefig(path, format="png", dpi=150)


# ---- traces ----


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The time line as Chrome trace events, microseconds: one thread a rank, one complete event an action."""
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": str(timeline.schedule)}}
    ]
    for rank, row in enumerate(timeline.schedule.table):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        for action in row:
            start, end = timeline.spans[action]
            events.append(
                {
                    "name": str(action),
                    "cat": KIND_NAMES[action.kind],
                    "ph": "X",
                    "pid": 0,
                    "tid": rank,
                    "ts": start * 1e6,
                    "dur": (end - start) * 1e6,
                    "args": {"stage": action.stage, "micro_batch": action.micro_batch},
                }
            )
    return {"displayTimeUnit": "ms", "traceEvents": events}


# ---- words ----


def _summary(timeline: Timeline) -> str:
    return f"{timeline.schedule}: {_seconds(timeline.makespan)}, {timeline.bubble_share:.1%} idle"


def _kinds(timeline: Timeline) -> list[Kind]:
    used = {action.kind for action in timeline.spans}
    return [kind for kind in KIND_NAMES if kind in used]


def _has_stages(timeline: Timeline) -> bool:
    """Whether a rank has several stages, so that a label must name them."""
    return timeline.schedule.num_stages > timeline.schedule.num_ranks


def _label(timeline: Timeline, action: Action) -> str:
    return f"{action.stage}.{action.micro_batch}" if _has_stages(timeline) else str(action.micro_batch)


def _seconds(seconds: float) -> str:
    """Three digits in the largest unit that keeps one before the point."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        value = seconds / size
        if value >= 0.9995 or (value and unit == "µs"):
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    return "0 s"


def _ticks(makespan: float) -> list[float]:
    """At most a dozen round times from 0 to the end."""
    if not makespan:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(makespan / 11))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if makespan <= 11 * power * factor)
    return [i * step for i in range(int(makespan / step + 1e-9) + 1)]
