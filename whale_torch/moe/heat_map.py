"""Pictures of the load of experts over steps: SVG written here, PNG by matplotlib."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from whale_torch.errors import PlanError

__all__ = ["draw_loads"]

_COLUMNS = 160
"""Most columns of a picture; a longer run shows means of neighbouring steps."""
_LESS, _EVEN, _MORE = (33, 102, 172), (247, 247, 247), (178, 24, 43)
_WIDTH, _LEFT, _RIGHT, _TOP, _HEAD, _FOOT = 900, 56, 110, 44, 24, 30


def draw_loads(history: Sequence[Mapping[str, Mapping[str, Any]]], path: str | Path, *, title: str = "") -> None:
    """Writes a heat map, expert by step, for each MoE layer: white is an even share, red more, blue less.

    history: what wh.moe.load gave, step by step: wh.moe.on_load(model, history.append). path: ends in .svg or .png.
    Raises PlanError for an empty history, one that is no list of loads, steps of other layers, another ending, and for
    .png without matplotlib.
    """
    path = Path(path)
    panels = {name: _columns(rows) for name, rows in _by_layer(history).items()}
    title = title or f"Load of experts over {len(history)} steps"
    if path.suffix == ".svg":
        path.write_text(_svg(panels, len(history), title), encoding="utf-8")
    elif path.suffix == ".png":
        _png(panels, len(history), title, path)
    else:
        raise PlanError(f"{path.name}: no picture ends in {path.suffix!r}.", fix="end it in .svg or .png")


def _by_layer(history: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, list[list[float]]]:
    """Of each layer, of each step, the load of each expert in even shares: 1 is even."""
    listed = isinstance(history, Sequence) and all(
        isinstance(step, Mapping) and all(isinstance(of, Mapping) and "load" in of for of in step.values())
        for step in history
    )
    if not history or not listed:
        what = "this is no list of loads" if history else "there is nothing to draw"
        raise PlanError(f"{what}.", fix="history = []; wh.moe.on_load(model, history.append)")
    forms = [{name: len(values["load"]) for name, values in step.items()} for step in history]
    odd = next((number for number, form in enumerate(forms) if form != forms[0]), None)
    if odd is not None:
        raise PlanError(
            f"step 0 has the layers and experts {forms[0]}, step {odd} has {forms[odd]}.",
            fix="one history a model",
        )
    return {name: [[x * size for x in step[name]["load"]] for step in history] for name, size in forms[0].items()}


def _columns(rows: list[list[float]]) -> list[list[float]]:
    """Means of neighbouring steps, as many as there are columns."""
    number = min(len(rows), _COLUMNS)
    ends = [len(rows) * index // number for index in range(number + 1)]
    groups = [rows[start:end] for start, end in itertools.pairwise(ends)]
    return [[sum(column) / len(group) for column in zip(*group, strict=True)] for group in groups]


def _place(share: float) -> float:
    """From -1, nothing, over 0, an even share, to 1, four even shares or more."""
    return max(share - 1, -1.0) if share < 1 else min(math.log(share, 4), 1.0)


def _colour(share: float) -> str:
    at = round(24 * _place(share)) / 24  # few colours: neighbours of one make one rectangle
    end = _MORE if at > 0 else _LESS
    mixed = [round(even + abs(at) * (one - even)) for even, one in zip(_EVEN, end, strict=True)]
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _svg(panels: Mapping[str, list[list[float]]], steps: int, title: str) -> str:
    inner = _WIDTH - _LEFT - _RIGHT
    body = [f'<text x="{_LEFT}" y="26" font-size="15">{escape(title)}</text>', *_legend()]
    y = _TOP
    for name, columns in panels.items():
        experts = len(columns[0])
        cell, width = max(3.0, min(16.0, 200 / experts)), inner / len(columns)
        body.append(f'<text x="{_LEFT}" y="{y + 15}">{escape(name or "layer")}</text>')
        y += _HEAD
        bottom = y + cell * experts
        body.append(f'<g shape-rendering="crispEdges">{"".join(_cells(columns, width, cell, y))}</g>')
        body.append(_frame(y, inner, cell * experts))
        for expert in range(0, experts, max(1, math.ceil(12 / cell))):
            middle = y + (expert + 0.5) * cell + 4
            body.append(f'<text x="{_LEFT - 6}" y="{middle:.1f}" text-anchor="end">{expert}</text>')
        for step in _ticks(steps):
            x = _LEFT + inner * (step + 0.5) / steps
            body.append(f'<text x="{x:.1f}" y="{bottom + 14:.1f}" text-anchor="middle">{step + 1}</text>')
        y = math.ceil(bottom) + _FOOT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" viewBox="0 0 {_WIDTH} {y}" '
        'font-family="sans-serif" font-size="11" fill="#222">'
    )
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{y}" fill="#fff"/>', *body, "</svg>", ""])


def _cells(columns: list[list[float]], width: float, height: float, top: float) -> list[str]:
    """A rectangle for each run of one colour in a row."""
    found = []
    for expert in range(len(columns[0])):
        colours = [_colour(column[expert]) for column in columns]
        start = 0
        for end in range(1, len(colours) + 1):
            if end < len(colours) and colours[end] == colours[start]:
                continue
            x, wide = _LEFT + start * width, (end - start) * width
            found.append(
                f'<rect x="{x:.2f}" y="{top + expert * height:.2f}" width="{wide:.2f}" height="{height:.2f}" '
                f'fill="{colours[start]}"/>'
            )
            start = end
    return found


def _frame(y: float, width: float, height: float) -> str:
    return f'<rect x="{_LEFT}" y="{y}" width="{width}" height="{height:.1f}" fill="none" stroke="#999"/>'


def _legend() -> list[str]:
    x, found = _WIDTH - _RIGHT + 16, []
    for number, share in enumerate((4.0, 2.0, 1.0, 0.5, 0.0)):
        y = _TOP + _HEAD + 18 * number
        found.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{_colour(share)}" stroke="#999"/>')
        text = "even" if share == 1 else f"{share:g} x even" + (" or more" if share == 4 else "")
        found.append(f'<text x="{x + 19}" y="{y + 11}" font-size="10">{text}</text>')
    return found


def _ticks(steps: int) -> list[int]:
    """About eight steps, from the first to the last."""
    number = min(8, steps)
    return sorted({round(index * (steps - 1) / max(1, number - 1)) for index in range(number)})


def _png(panels: Mapping[str, list[list[float]]], steps: int, title: str, path: Path) -> None:
    try:
        figures = importlib.import_module("matplotlib.figure")
        colours = importlib.import_module("matplotlib.colors")
    except ImportError as error:
        raise PlanError(
            "a heat map as PNG is drawn by matplotlib, which is not installed.",
            fix='pip install "whale-torch[bench]", or draw it as .svg',
        ) from error
    shades = [tuple(value / 255 for value in colour) for colour in (_LESS, _EVEN, _MORE)]
    scale = colours.LinearSegmentedColormap.from_list("load", shades)
    figure = figures.Figure(figsize=(9, 0.8 + 2 * len(panels)), layout="constrained")
    for axes, (name, columns) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        image = axes.imshow(
            [[_place(share) for share in row] for row in zip(*columns, strict=True)],
            aspect="auto", interpolation="nearest", cmap=scale, vmin=-1, vmax=1,
            extent=(0.5, steps + 0.5, len(columns[0]) - 0.5, -0.5),
        )  # fmt: skip
        axes.set_title(name or "layer", size=9, loc="left")
        axes.set(ylabel="expert", xlabel="step")
    bar = figure.colorbar(image, ax=figure.axes, ticks=[-1, -0.5, 0, 0.5, 1])
    bar.set_ticklabels(["0", "0.5 x", "even", "2 x", "4 x"])
    figure.suptitle(title, size=10)
    figure.savefig(path, format="png", dpi=130)
