"""The pipeline of a plan: which modules are which stage, on how many ranks, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whale_torch.annotation import Annotation
from whale_torch.cluster import Cluster
from whale_torch.errors import PlanError
from whale_torch.planning.schedules import NAMES
from whale_torch.planning.taskgraph import TaskGraph

__all__ = ["PipelinePlan", "plan_pipeline"]

DEFAULT_MICRO_BATCHES = 4


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A pipeline.

    stages: names of the topmost modules of each. num_ranks: ranks of one pipeline; stage s is on its
    (s % num_ranks)-th. inner: whether the ranks of one pipeline are neighbours, or the ranks of one stage.
    micro_batch_loss: "mean" takes the mean of micro-batches' losses where they are no sums over samples. site: the
    user's line.
    """

    stages: tuple[tuple[str, ...], ...]
    num_ranks: int
    num_micro_batches: int
    schedule: str
    inner: bool
    micro_batch_loss: str | None
    site: str

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def stage_of(self, module: str) -> int | None:
        """The stage that a module belongs to, by its name or by that of what contains it."""
        name = module
        while True:
            for number, names in enumerate(self.stages):
                if name in names:
                    return number
            if not name:
                return None
            name = name.rpartition(".")[0]


def plan_pipeline(graphs: Sequence[TaskGraph], cluster: Cluster) -> PipelinePlan | None:
    """The pipeline that annotations ask for, None where they ask for none.

    Raises PlanError where scopes ask for two, where no module is a stage, and where the ranks do not divide.
    """
    scopes = {a.entry: a for graph in graphs for a in graph.annotations if a.kind == "pipeline"}
    if not scopes:
        return None
    if len(scopes) > 1:
        first, second = list(scopes.values())[:2]
        raise PlanError(
            "a model has one pipeline, and two scopes ask for one.",
            where=f"{first.site} and {second.site}",
            fix="open one wh.pipeline() around all stages",
        )
    scope = next(iter(scopes.values()))
    stages = _stages(graphs, scope)
    num_ranks = _num_ranks(scope, len(stages), cluster.num_ranks)
    schedule = scope.get("schedule")
    if schedule is None:
        schedule = "1f1b" if len(stages) <= num_ranks else "interleaved"
    assert schedule in NAMES
    return PipelinePlan(
        stages=stages,
        num_ranks=num_ranks,
        num_micro_batches=int(str(scope.get("num_micro_batches", DEFAULT_MICRO_BATCHES))),
        schedule=str(schedule),
        inner=False,
        micro_batch_loss=None if scope.get("micro_batch_loss") is None else str(scope.get("micro_batch_loss")),
        site=scope.site,
    )


def _stages(graphs: Sequence[TaskGraph], scope: Annotation) -> tuple[tuple[str, ...], ...]:
    """Modules of each stage, in the order in which their scopes were entered."""
    found: dict[int, list[str]] = {}
    for graph in graphs:
        entry = next((a.entry for a in graph.annotations if a.kind == "stage"), None)
        if entry is not None:
            found.setdefault(entry, []).extend(graph.modules)
    if not found:
        raise PlanError(
            f"{scope.call} holds no wh.stage().",
            where=scope.site,
            fix="put modules into `with wh.stage():` scopes inside it, one a stage",
        )
    asked = scope.get("num_stages")
    if asked is not None and asked != len(found):
        raise PlanError(
            f"{scope.call} asks for {asked} stages, and {len(found)} wh.stage() scopes are inside.",
            where=scope.site,
            fix="leave num_stages out, or the stages",
        )
    return tuple(tuple(_topmost(found[entry])) for entry in sorted(found))


def _topmost(names: list[str]) -> list[str]:
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def _num_ranks(scope: Annotation, num_stages: int, world: int) -> int:
    asked = scope.get("num_ranks")
    if asked is None:
        return max(d for d in range(1, min(num_stages, world) + 1) if world % d == 0)
    number = int(str(asked))
    if world % number or number > num_stages:
        fitting = [d for d in range(1, min(num_stages, world) + 1) if world % d == 0]
        raise PlanError(
            f"{scope.call}: {world} ranks cannot be cut into pipelines of {number} with {num_stages} stages.",
            where=scope.site,
            fix=f"num_ranks divides the ranks and is at most the number of stages: {', '.join(map(str, fitting))}",
        )
    return number
