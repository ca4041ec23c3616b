"""Time lines in letters, for a terminal; and what all drawings say in words."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING

from whale_torch.errors import PlanError
from whale_torch.planning.schedules.actions import KIND_NAMES, Action, Kind

if TYPE_CHECKING:
    from whale_torch.planning.schedules.simulate import Timeline

__all__ = ["draw_text", "kinds", "label", "summary", "told"]

_FILLS: dict[Kind, str] = {"F": "-", "B": "=", "I": "~", "W": "+"}
_LEAST_WIDTH = 40


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
    end = told(timeline, timeline.makespan)
    lines = textwrap.wrap(summary(timeline), width)
    lines.append(f"{'':{left}}  0{end:>{columns - 1}}  {'keeps':>{right}}")
    for name, row, peak in zip(names, rows, peaks, strict=True):
        text = "".join(_cell(action, length, form) for action, length in row)
        lines.append(f"{name:<{left}} |{text}| {peak:>{right}}")
    legend = "  ".join(f"{kind}{_FILLS[kind]} {KIND_NAMES[kind]}" for kind in kinds(timeline))
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


def summary(timeline: Timeline) -> str:
    """The schedule, how long it takes, and the idle share."""
    return f"{timeline.schedule}: {told(timeline, timeline.makespan)}, {timeline.bubble_share:.1%} idle"


def kinds(timeline: Timeline) -> list[Kind]:
    """The kinds of actions that are there."""
    used = {action.kind for action in timeline.spans}
    return [kind for kind in KIND_NAMES if kind in used]


def _has_stages(timeline: Timeline) -> bool:
    """Whether a rank has several stages, so that a label must name them."""
    return timeline.schedule.num_stages > timeline.schedule.num_ranks


def label(timeline: Timeline, action: Action) -> str:
    """The micro-batch, with its stage where a rank has several."""
    return f"{action.stage}.{action.micro_batch}" if _has_stages(timeline) else str(action.micro_batch)


def told(timeline: Timeline, time: float) -> str:
    """A time to three digits, in seconds or the largest part of one that keeps a digit before the point."""
    if timeline.unit != "s":
        return f"{time:.3g} {timeline.unit}"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        value = time / size
        if value >= 0.9995 or (value and unit == "µs"):
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    return "0 s"
