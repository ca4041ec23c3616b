"""Pipeline schedules as data: made, checked, simulated, drawn. One runtime runs them all."""

from __future__ import annotations

from whale_torch.planning.schedules.actions import Action, Edges, Rows, Schedule
from whale_torch.planning.schedules.draw import chrome_trace, draw, draw_png, draw_svg
from whale_torch.planning.schedules.generate import NAMES, gpipe, interleaved, make, one_f_one_b, zero_bubble
from whale_torch.planning.schedules.simulate import Costs, Message, Timeline, simulate
from whale_torch.planning.schedules.text import draw_text
from whale_torch.planning.schedules.theory import bubble_formula
from whale_torch.planning.schedules.validate import from_table, validate

__all__ = [
    "NAMES",
    "Action",
    "Costs",
    "Edges",
    "Message",
    "Rows",
    "Schedule",
    "Timeline",
    "bubble_formula",
    "chrome_trace",
    "draw",
    "draw_png",
    "draw_svg",
    "draw_text",
    "from_table",
    "gpipe",
    "interleaved",
    "make",
    "one_f_one_b",
    "simulate",
    "validate",
    "zero_bubble",
]
