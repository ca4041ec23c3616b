"""The time line of a plan: its schedule, with what the plan knows of its stages and of the cluster's links."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from whale_torch.errors import PlanError
from whale_torch.planning.schedules import Costs, Timeline, simulate

if TYPE_CHECKING:
    from whale_torch.planning.plan import Plan

__all__ = ["timeline_of"]


def timeline_of(plan: Plan) -> Timeline:
    """A training step of one of the plan's pipelines. Raises PlanError where it has none."""
    pipeline = plan.pipeline
    if pipeline is None:
        raise PlanError(
            "the plan has no pipeline, so there is no time line to draw.", fix="wh.pipeline() around wh.stage() scopes"
        )
    flops, batches = pipeline.stage_flops, pipeline.num_micro_batches
    average = sum(flops) / max(len(flops), 1)
    rate = plan.cluster.flops_per_s if average else None
    one = rate * batches if rate else average  # of a second, or of a forward of an average stage
    forward = [own / one for own in flops] if average else [1.0] * pipeline.num_stages
    line = simulate(
        pipeline.order(),
        Costs(forward, [2 * seconds for seconds in forward]),
        partial(_seconds, plan) if rate else 0.0,
        [(moved.source, moved.goal) for moved in pipeline.moved] or None,
    )
    return line if rate else replace(line, unit="forwards")


def _seconds(plan: Plan, start: int, end: int) -> float:
    """Of a micro-batch's message from stage to stage, beside those of the other pipelines that share its link."""
    pipeline, nodes, cluster = plan.pipeline, plan.cluster.nodes, plan.cluster
    assert pipeline is not None
    moved = next(m for m in pipeline.moved if {m.source, m.goal} == {start, end})
    size = (moved.activation_bytes if start < end else moved.gradient_bytes) / pipeline.num_micro_batches
    pipelines = plan.device("replica").pipelines
    source, goal = (nodes[pipelines[0][pipeline.place_of(stage)]] for stage in (start, end))
    rate = cluster.intra_node_bytes_per_s
    if source != goal:
        rate = cluster.inter_node_bytes_per_s
        size *= sum(nodes[ranks[pipeline.place_of(start)]] == source for ranks in pipelines)
    return (cluster.latency_s or 0.0) + (size / rate if rate else 0.0)
