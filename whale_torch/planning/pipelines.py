"""The pipeline of a plan: which modules are which stage, on how many ranks, in which order."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from whale_torch.annotation import Annotation
from whale_torch.cluster import Cluster
from whale_torch.errors import PlanError
from whale_torch.names import containers, outward
from whale_torch.planning.schedules import Schedule, from_table, make
from whale_torch.planning.slices import SlicedModules
from whale_torch.planning.tables import check_table, num_stages_of, table_of
from whale_torch.planning.taskgraph import TaskGraph
from whale_torch.trace.tracer import Leaf, Opened

__all__ = [
    "Links",
    "Moved",
    "PipelinePlan",
    "annotated_stages",
    "leaf_of",
    "plan_pipeline",
    "scope_of",
    "topmost",
]

DEFAULT_MICRO_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Moved:
    """What one stage hands another in a training step of one pipeline, and the gradients that come back, in bytes."""

    source: int
    goal: int
    activation_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class Links:
    """What a training step moves where the ranks of one pipeline are neighbours (inner), or those of one stage are.

    between_bytes: leave the node that sends most. inside_bytes: the rank that sends most sends to its own node.
    """

    inner: bool
    between_bytes: float
    inside_bytes: float


@dataclass(frozen=True)
class PipelinePlan:
    """A pipeline.

    stages: names of the topmost modules of each. num_ranks: ranks of one pipeline. schedule: its name. table: the
    user's own rows, one a rank, which also say where a stage is; without them stage s is on the (s % num_ranks)-th.
    inner: whether the ranks of one pipeline are neighbours, or the ranks of one stage.
    micro_batch_loss: "mean" takes the mean of micro-batches' losses where they are no sums over samples. mixing:
    "accept" lets samples of a micro-batch meet between stages. site: the user's line. chosen: how the planner found
    the stages, "" where scopes say them.

    Predicted, no part of the decision: stage_parameters, stage_bytes: of each stage. moved, output_bytes: of a
    training step on sample inputs; the second is what every rank gets of a model without a loss. sliced_bytes: of the
    tensors that modules on slices are joined to, in each stage. stage_flops: of the stages' modules in its forward.
    elsewhere: stages of parameters that a recording saw on others than their names say. links: of this placement and of
    the other one. recorded: the `digest` of the stages that all but the first two are of, "" where nothing was
    recorded.
    """

    stages: tuple[tuple[str, ...], ...]
    num_ranks: int
    num_micro_batches: int
    schedule: str
    inner: bool
    micro_batch_loss: str | None
    site: str
    table: tuple[str, ...] = ()
    chosen: str = ""
    stage_parameters: tuple[int, ...] = ()
    stage_bytes: tuple[int, ...] = ()
    moved: tuple[Moved, ...] = ()
    output_bytes: int = 0
    sliced_bytes: tuple[int, ...] = ()
    stage_flops: tuple[int, ...] = ()
    elsewhere: tuple[tuple[str, tuple[int, ...]], ...] = ()
    links: tuple[Links, ...] = ()
    recorded: str = ""
    mixing: str | None = None

    @property
    def digest(self) -> str:
        """A hash of the stages."""
        return hashlib.sha256(repr(self.stages).encode()).hexdigest()[:16]

    def without_stale(self) -> PipelinePlan:
        """The same without what was recorded of other stages."""
        if self.recorded == self.digest:
            return self
        return replace(
            self, moved=(), output_bytes=0, sliced_bytes=(), stage_flops=(), elsewhere=(), links=(), recorded=""
        )

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def place_of(self, stage: int) -> int:
        """The rank of a pipeline, counted from its first, that runs a stage."""
        return self.order().rank_of(stage) if self.table else stage % self.num_ranks

    def stages_at(self, place: int) -> tuple[int, ...]:
        """The stages that a rank of a pipeline runs, ascending."""
        return tuple(stage for stage in range(self.num_stages) if self.place_of(stage) == place)

    def order(self, num_micro_batches: int | None = None) -> Schedule:
        """Who runs what when, for a batch of fewer micro-batches, or of all."""
        number = self.num_micro_batches if num_micro_batches is None else num_micro_batches
        return _order(self.schedule, self.num_stages, number, self.num_ranks, self.table)

    @functools.cached_property
    def _stage_of_root(self) -> dict[str, int]:
        return {name: stage for stage, names in enumerate(self.stages) for name in names}

    def stage_of(self, module: str) -> int | None:
        """The stage that a module belongs to, by its name or by that of what contains it."""
        return next((self._stage_of_root[name] for name in outward(module) if name in self._stage_of_root), None)

    def users(self, model: nn.Module) -> dict[str, tuple[int, ...]]:
        """The stages that use each parameter, ascending, by its first name.

        What no stage holds counts as part of the stage before it, or as a recording saw it.
        """
        first = {id(p): name for name, p in model.named_parameters()}
        found: dict[str, set[int]] = {name: set() for name in first.values()}
        before = 0
        for module_name, module in model.named_modules(remove_duplicate=False):
            stage = self.stage_of(module_name)
            before = before if stage is None else stage
            for parameter in module._parameters.values():
                if parameter is not None:
                    found[first[id(parameter)]].add(before)
        return {name: tuple(sorted(stages)) for name, stages in found.items()} | dict(self.elsewhere)


@functools.lru_cache(maxsize=256)
def _order(name: str, num_stages: int, num_micro_batches: int, num_ranks: int, table: tuple[str, ...]) -> Schedule:
    if not table:
        return make(name, num_stages, num_micro_batches, num_ranks)
    return from_table(table, name=name).first(num_micro_batches)


def leaf_of(plan: PipelinePlan, sliced: SlicedModules) -> Leaf:
    """Which modules a recording keeps whole: those of a stage, and others with parameters that hold no stage.

    Of a stage's module that runs on slices in part, the members.
    """
    around = {name for names in plan.stages for root in names for name in containers(root)} | {""}

    def leaf(name: str, module: nn.Module) -> int | Literal["loose"] | Opened | None:
        stage = plan.stage_of(name)
        if stage is not None:
            return Opened(stage) if sliced.divide(name) else stage
        if name in around or next(module.parameters(), None) is None:
            return None
        return "loose"

    return leaf


def scope_of(graphs: Sequence[TaskGraph]) -> Annotation | None:
    """The scope of the model's pipeline, None where it has none. Raises PlanError where scopes ask for two."""
    scopes = {a.entry: a for graph in graphs for a in graph.annotations if a.kind == "pipeline"}
    if len(scopes) > 1:
        first, second = list(scopes.values())[:2]
        raise PlanError(
            "a model has one pipeline, and two scopes ask for one.",
            where=f"{first.site} and {second.site}",
            fix="open one wh.pipeline() around all stages",
        )
    return next(iter(scopes.values()), None)


def plan_pipeline(
    scope: Annotation, stages: Sequence[Sequence[str]], cluster: Cluster, *, chosen: str = ""
) -> PipelinePlan:
    """The pipeline that a scope asks for, of these stages. Raises PlanError where the ranks do not divide.

    The ranks of one stage are neighbours: where a plan is told what goes from stage to stage, it may choose otherwise.
    """
    table = table_of(scope)
    if table is None:
        num_ranks = _num_ranks(scope, len(stages), cluster.num_ranks)
        name = str(scope.get("schedule") or ("1f1b" if len(stages) <= num_ranks else "interleaved"))
        num_micro_batches = int(str(scope.get("num_micro_batches", DEFAULT_MICRO_BATCHES)))
    else:
        check_table(table, scope, len(stages), cluster.num_ranks)
        num_ranks, num_micro_batches, name = table.num_ranks, table.num_micro_batches, table.name
    return PipelinePlan(
        stages=tuple(tuple(names) for names in stages),
        num_ranks=num_ranks,
        num_micro_batches=num_micro_batches,
        schedule=name,
        table=() if table is None else table.rows,
        inner=False,
        micro_batch_loss=None if scope.get("micro_batch_loss") is None else str(scope.get("micro_batch_loss")),
        site=scope.site,
        chosen=chosen,
        mixing=None if scope.get("mixing") is None else str(scope.get("mixing")),
    )


def annotated_stages(graphs: Sequence[TaskGraph], scope: Annotation) -> tuple[tuple[str, ...], ...]:
    """Modules of each stage, in the order in which the stages' scopes were entered; none where there are no scopes.

    Raises PlanError where the pipeline asks for another number of them.
    """
    found: dict[int, list[str]] = {}
    for graph in graphs:
        entry = next((a.entry for a in graph.annotations if a.kind == "stage"), None)
        if entry is not None:
            found.setdefault(entry, []).extend(graph.modules)
    asked = num_stages_of(scope)
    if not found and asked is None:
        raise PlanError(
            f"{scope.call} holds no wh.stage().",
            where=scope.site,
            fix="put modules into `with wh.stage():` scopes inside it, one a stage, or say how many: "
            "wh.pipeline(num_stages=4)",
        )
    if found and scope.get("num_stages") not in (None, len(found)):
        raise PlanError(
            f"{scope.call} asks for {asked} stages, and {len(found)} wh.stage() scopes are inside.",
            where=scope.site,
            fix="leave num_stages out, or the stages",
        )
    return tuple(tuple(topmost(found[entry])) for entry in sorted(found))


def topmost(names: Sequence[str]) -> list[str]:
    """Those that no other one contains."""
    present = set(names)
    return [name for name in names if present.isdisjoint(containers(name))]


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
