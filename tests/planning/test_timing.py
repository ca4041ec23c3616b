"""The time line of a plan: what stages cost as far as the plan knows it, as text and in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale_torch as wh
from whale_torch.planning.plan import Plan
from whale_torch.planning.schedules import Action, Timeline, draw_text, make, simulate


class Uneven(nn.Module):
    """Two layers, of which the second computes three times as much; a tensor of 8 numbers goes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


def planned(cluster: wh.Cluster, inputs: Tensor | None = None, **options: Any) -> Plan:
    options = {"num_micro_batches": 4} | options
    model = wh.annotate(Uneven(), {"first": wh.stage(), "second": wh.stage()}, inside=wh.pipeline(**options))
    return wh.plan(model, cluster=cluster, sample_inputs=inputs)


def seconds(line: Timeline, action: str) -> float:
    found = Action.parse(action)
    assert found is not None
    span = line.spans[found]
    return span.end - span.start


def test_stages_take_equally_long_where_nothing_is_known() -> None:
    plan = planned(wh.Cluster.of(1, 2, flops_per_s=1e12))
    line = plan.timeline()
    assert line.spans == simulate(make("1f1b", 2, 4)).spans and line.unit == "forwards"
    assert str(line) == draw_text(line)
    assert str(line).startswith("1f1b: 2 stages on 2 ranks, 4 micro-batches: 15 forwards, 20.0% idle\n")
    assert Plan.from_json(plan.to_json()).timeline() == line


def test_stages_take_as_long_as_they_compute() -> None:
    plan = planned(wh.Cluster.of(1, 2), torch.zeros(16, 8), schedule="gpipe")
    assert plan.pipeline is not None and plan.pipeline.stage_flops == (2 * 16 * 64, 2 * 16 * 192)
    line = plan.timeline()
    found = [seconds(line, action) for action in ("F0.0", "B0.0", "F1.0", "B1.0")]
    assert found == pytest.approx([0.5, 1.0, 1.5, 3.0]) and line.unit == "forwards"
    assert f"and {line.bubble_share:.1%} with what these compute" in str(plan).replace("\n   ", " ")
    assert plan.digest() == planned(wh.Cluster.of(1, 2), schedule="gpipe").digest()


def test_seconds_where_rates_are_known() -> None:
    rates = {"flops_per_s": 1e6, "latency_s": 1e-4, "inter_node_bytes_per_s": 1e6, "intra_node_bytes_per_s": 1e9}
    line = planned(wh.Cluster.of(2, 1, **rates), torch.zeros(16, 8)).timeline()
    assert line.unit == "s" and seconds(line, "F0.0") == pytest.approx(2 * 4 * 64 / 1e6)
    sent = 1e-4 + 4 * 8 * 4 / 1e6
    first, second = line.spans[Action("F", 0, 0)], line.spans[Action("F", 1, 0)]
    assert second.start - first.end == pytest.approx(sent)
    assert " ms, " in str(line).splitlines()[0]
    inside = planned(wh.Cluster.of(1, 2, **rates), torch.zeros(16, 8)).timeline()
    assert inside.spans[Action("F", 1, 0)].start - first.end == pytest.approx(1e-4 + 4 * 8 * 4 / 1e9)


def test_a_table_and_backwards_in_two_parts() -> None:
    rows = ["F0.0 F0.1 I0.0 W0.0 I0.1 W0.1", "F1.0 I1.0 F1.1 I1.1 W1.0 W1.1"]
    line = planned(wh.Cluster.of(1, 2), torch.zeros(1, 8), num_micro_batches=None, schedule=rows).timeline()
    assert line.schedule.rows == tuple(rows)
    assert seconds(line, "W1.1") == pytest.approx(seconds(line, "F1.1"))


def test_files_by_their_ending(tmp_path: Path) -> None:
    plan = planned(wh.Cluster.of(1, 2))
    for ending, begins in ((".txt", "1f1b: 2 stages"), (".svg", "<svg "), (".json", '{"displayTimeUnit"')):
        plan.draw(tmp_path / f"line{ending}")
        assert (tmp_path / f"line{ending}").read_text().startswith(begins)
    assert "15 forwards" in (tmp_path / "line.svg").read_text()
    with pytest.raises(wh.PlanError, match=r"line\.gif: no drawing ends in '\.gif'"):
        plan.draw(tmp_path / "line.gif")


def test_a_plan_without_a_pipeline_has_no_time_line() -> None:
    with pytest.raises(wh.PlanError, match="has no pipeline") as error:
        wh.plan(nn.Linear(2, 2)).timeline()
    assert error.value.fix
