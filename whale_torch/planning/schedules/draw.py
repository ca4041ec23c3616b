"""Time lines to look at: SVG, PNG, a trace for chrome://tracing or Perfetto, or text in a file."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from whale_torch.errors import PlanError
from whale_torch.planning.schedules.actions import KIND_NAMES, Action, Kind
from whale_torch.planning.schedules.simulate import Timeline
from whale_torch.planning.schedules.text import draw_text, kinds, label, summary, told

__all__ = ["chrome_trace", "draw", "draw_png", "draw_svg"]

_COLOURS: dict[Kind, str] = {"F": "#3b6fb6", "B": "#3f8f5b", "I": "#2a8c8c", "W": "#b8741a"}


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


# ---- pictures ----


def draw_svg(timeline: Timeline, title: str | None = None, width: int = 960) -> str:
    """The time line as an SVG document: one rectangle an action, with its times as a tooltip."""
    left, right, top, row, bar = 70, 20, 44, 30, 24
    bottom = top + timeline.schedule.num_ranks * row
    scale = (width - left - right) / (timeline.makespan or 1.0)
    body = [f'<text x="{left}" y="24" font-size="15">{escape(title or summary(timeline))}</text>']
    for tick in _ticks(timeline.makespan):
        x = left + tick * scale
        body.append(f'<line x1="{x:.2f}" y1="{top - 4}" x2="{x:.2f}" y2="{bottom + 4}" stroke="#ddd"/>')
        body.append(f'<text x="{x:.2f}" y="{bottom + 20}" text-anchor="middle">{told(timeline, tick)}</text>')
    for rank, actions in enumerate(timeline.schedule.table):
        y = top + rank * row
        body.append(f'<text x="{left - 8}" y="{y + bar / 2 + 4}" text-anchor="end">rank {rank}</text>')
        body += [_bar(timeline, action, left, scale, y, bar) for action in actions]
    for index, kind in enumerate(kinds(timeline)):
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
    title = f"{action}: {KIND_NAMES[action.kind]}, {told(timeline, span.start)} to {told(timeline, span.end)}"
    rect = (
        f'<rect class="{action.kind}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" '
        f'fill="{_COLOURS[action.kind]}" stroke="#fff" stroke-width="0.7"><title>{title}</title></rect>'
    )
    name = label(timeline, action)
    size = _size(name, width, 11)
    if size < 7:
        return rect
    return (
        f'{rect}<text x="{x + width / 2:.2f}" y="{y + height / 2 + 4}" font-size="{size:.3g}" text-anchor="middle" '
        f'fill="#fff" pointer-events="none">{name}</text>'
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
            name = label(timeline, action)
            size = _size(name, points * (end - start), 7)
            if size >= 4.5:
                axes.text((start + end) / 2, rank, name, color="white", size=size, ha="center", va="center")
    used = kinds(timeline)
    handles = [axes.barh(0, 0, color=_COLOURS[kind]) for kind in used]
    figure.legend(handles, [KIND_NAMES[kind] for kind in used], loc="outside lower center", ncols=4, frameon=False)
    axes.set(
        title=title or summary(timeline),
        xlabel="seconds" if timeline.unit == "s" else timeline.unit,
        xlim=(0, timeline.makespan or 1.0),
    )
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


def _ticks(makespan: float) -> list[float]:
    """At most a dozen round times from 0 to the end."""
    if not makespan:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(makespan / 11))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if makespan <= 11 * power * factor)
    return [i * step for i in range(int(makespan / step + 1e-9) + 1)]
