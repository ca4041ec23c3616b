"""Time lines as text, SVG, PNG and Chrome trace."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from whale_torch.errors import PlanError
from whale_torch.planning.schedules import (
    NAMES,
    Costs,
    Timeline,
    chrome_trace,
    draw,
    draw_png,
    draw_svg,
    draw_text,
    make,
    simulate,
)

SVG = "{http://www.w3.org/2000/svg}"


def timelines() -> list[Timeline]:
    sizes = [(1, 1, 1), (4, 8, 4), (8, 3, 4), (7, 8, 3), (16, 40, 16)]
    made = [make(name, *size) for name in NAMES for size in sizes]
    return [simulate(schedule, Costs(0.011, 0.019), 0.0003) for schedule in [*made, made[1].forward_only()]]


def test_text_as_it_is_printed() -> None:
    assert draw_text(simulate(make("1f1b", 2, 3)), 60).splitlines() == [
        "1f1b: 2 stages on 2 ranks, 3 micro-batches: 12 s, 25.0% idle",
        "        0                                        12 s  keeps",
        "rank 0 |F0--F1-        B0=====F2--B1======   B2======|     2",
        "rank 1 |    F0-B0======F1--B1=====F2--B2=====        |     1",
        "F- forward  B= backward  (blank: idle; number: micro-batch)",
    ]


@pytest.mark.parametrize("width", [40, 80, 100, 120, 200])
def test_text_fits(width: int) -> None:
    for timeline in timelines():
        lines = draw_text(timeline, width).splitlines()
        assert max(map(len, lines)) <= width and all(line == line.rstrip() for line in lines)
        rows = [line for line in lines if line.startswith("rank")]
        assert len(rows) == timeline.schedule.num_ranks and len(set(map(len, rows))) == 1
        for rank, row in enumerate(rows):
            assert row.startswith(f"rank {rank} ")
            bar = row.split("|")[1]
            share = timeline.busy(rank) / timeline.makespan  # a column is one action or none
            assert abs(sum(c != " " for c in bar) / len(bar) - share) < 0.12


def test_text_names_stages_where_a_rank_has_several() -> None:
    text = draw_text(simulate(make("gpipe", 4, 2, 2)), 120)
    assert "|F0.0===F0.1" in text.replace("-", "=") and "number: stage.micro-batch)" in text
    assert "F2.1" not in (narrow := draw_text(simulate(make("gpipe", 4, 40, 2)), 80)) and "number" not in narrow
    with pytest.raises(PlanError, match="a time line of 39 columns"):
        draw_text(simulate(make("gpipe", 4, 2, 2)), 39)


def test_svg_has_one_rectangle_an_action() -> None:
    for timeline in timelines():
        root = ElementTree.fromstring(draw_svg(timeline, title="a < b & c"))
        width, height = (float(root.attrib[name]) for name in ("width", "height"))
        bars = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") in {"F", "B", "I", "W"}]
        told = [(bar.findtext(f"{SVG}title") or "").partition(":")[0] for bar in bars]
        assert told == [str(action) for action in timeline.schedule.actions]
        assert len({bar.attrib["fill"] for bar in bars}) == len({action.kind for action in timeline.spans})
        for bar in bars:
            x, y, w, h = (float(bar.attrib[name]) for name in ("x", "y", "width", "height"))
            assert 0 <= x and x + w <= width and 0 <= y and y + h <= height and w > 0
        texts = [text.text for text in root.iter(f"{SVG}text")]
        assert texts[0] == "a < b & c" and "rank 0" in texts and "forward" in texts and "0 s" in texts


def test_svg_bars_are_to_scale() -> None:
    root = ElementTree.fromstring(draw_svg(simulate(make("gpipe", 2, 1))))
    bars = {
        (bar.findtext(f"{SVG}title") or "")[:4]: (float(bar.attrib["x"]), float(bar.attrib["width"]))
        for bar in root.iter(f"{SVG}rect")
        if bar.get("class") in ("F", "B")
    }
    unit = bars["F0.0"][1]
    assert bars["F1.0"][0] - bars["F0.0"][0] == pytest.approx(unit, abs=0.02)
    assert bars["B0.0"][0] - bars["F0.0"][0] == pytest.approx(4 * unit, abs=0.02)
    assert bars["B0.0"][1] == pytest.approx(2 * unit, abs=0.02)


def test_chrome_trace_loads() -> None:
    for timeline in timelines():
        trace = json.loads(json.dumps(chrome_trace(timeline)))
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert len(events) == len(timeline.spans)
        for rank, row in enumerate(timeline.schedule.table):
            mine = [event for event in events if event["tid"] == rank]
            assert [event["name"] for event in mine] == [str(action) for action in row]
            ends = [event["ts"] + event["dur"] for event in mine]
            assert all(end <= event["ts"] + 1e-6 for end, event in zip(ends, mine[1:], strict=False))
        assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(timeline.makespan * 1e6)


def test_nothing_takes_time() -> None:
    timeline = simulate(make("1f1b", 2, 2), Costs(0.0, 0.0))
    assert "0 s, 0.0% idle" in draw_text(timeline)
    assert ElementTree.fromstring(draw_svg(timeline)).tag == f"{SVG}svg"
    assert chrome_trace(timeline)["traceEvents"]


def test_files_by_their_ending(tmp_path: Path) -> None:
    timeline = simulate(make("zero_bubble", 3, 4))
    for ending, begins in ((".txt", "zero_bubble: 3 stages"), (".svg", "<svg "), (".json", '{"displayTimeUnit"')):
        draw(timeline, tmp_path / f"line{ending}")
        assert (tmp_path / f"line{ending}").read_text(encoding="utf-8").startswith(begins)
    with pytest.raises(PlanError, match=r"line\.gif: no drawing ends in '\.gif'"):
        draw(timeline, str(tmp_path / "line.gif"))


def test_png_or_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = simulate(make("interleaved", 4, 4, 2))
    if importlib.util.find_spec("matplotlib"):
        draw(timeline, tmp_path / "line.png")
        header = (tmp_path / "line.png").read_bytes()[:24]
        assert header.startswith(b"\x89PNG") and int.from_bytes(header[16:20], "big") == 1500
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlanError, match="matplotlib, which is not installed") as error:
        draw_png(timeline, tmp_path / "line.png")
    extra = re.search(r"whale-torch\[(\w+)\]", error.value.fix or "")
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert extra and re.search(rf'^{extra[1]} = \[.*"matplotlib', project, re.MULTILINE)
