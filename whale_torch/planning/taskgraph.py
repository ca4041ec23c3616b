"""TaskGraphs: the modules of a model grouped by the annotation that acts on them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import dropwhile

from torch import nn

from whale_torch.annotation import Annotation, effective_annotations
from whale_torch.errors import PlanError

__all__ = ["EXPERTS", "Grouping", "TaskGraph", "group_modules"]

_RUNS = ("replica", "split")
EXPERTS = "whale_torch.moe.layer.MoELayer"
_PLACED = (*_RUNS, "pipeline", "stage")
# What serves a similar end today, by the scope that this version does not run.
_INSTEAD = {
    "auto_parallel": " and choose the scopes yourself: print(wh.plan(model, cluster=...)) says what each would cost",
    "recompute": "; torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False) in forward recomputes",
    "cpu_offload": "; wh.split() lets each rank hold a part only",
}


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """A maximal set of modules under one annotation: the unit of planning and of error messages.

    index: in module order. kind: "replica" or "split". annotations: outer to inner. modules: its topmost names.
    device: name of its VirtualDevice. num_parameters: whole ones, counted once. experts: whether all are layers of
    experts, to which every rank brings rows of its own.
    """

    index: int
    kind: str
    annotations: tuple[Annotation, ...]
    modules: tuple[str, ...]
    device: str = ""
    num_parameters: int = 0
    experts: bool = False

    @property
    def site(self) -> str:
        return self.annotations[-1].site if self.annotations else "the default of wh.parallelize"

    @property
    def label(self) -> str:
        names = ", ".join(self.modules[:3]) + (", ..." if len(self.modules) > 3 else "")
        return (
            f"TaskGraph {self.index} ({self.annotations[-1].call if self.annotations else 'wh.replica()'} of '{names}')"
        )

    def option(self, kind: str, name: str, default: object = None) -> object:
        """An option of the innermost annotation of this kind that says it."""
        found = (dict(a.options) for a in reversed(self.annotations) if a.kind == kind)
        return next((options[name] for options in found if name in options), default)

    @property
    def inner_replica(self) -> Annotation | None:
        """The wh.replica inside a stage of a pipeline under which these modules are."""
        inside = dropwhile(lambda annotation: annotation.kind != "stage", self.annotations)
        return next((annotation for annotation in inside if annotation.kind == "replica"), None)


@dataclass
class Grouping:
    """Modules of each TaskGraph before devices are known: topmost names, and every member's graph."""

    graphs: list[TaskGraph] = field(default_factory=list)
    graph_of: dict[str, int] = field(default_factory=dict)


def group_modules(model: nn.Module, default: tuple[Annotation, ...]) -> Grouping:
    """Groups modules by their effective annotations; what no scope names runs under `default`.

    Raises AnnotationError for scopes that do not nest, PlanError for strategies that this version does not run.
    """
    effective = effective_annotations(model, complete=True)
    modules = dict(model.named_modules(remove_duplicate=False))
    keys: dict[tuple[int, ...], int] = {}
    roots: list[list[str]] = []
    kinds: list[tuple[Annotation, ...]] = []
    grouping = Grouping()
    entries = sorted({annotation.entry for found in effective.values() for annotation in found})
    numbers = {entry: number for number, entry in enumerate(entries)}

    def renumber(annotation: Annotation) -> Annotation:
        """Entries count from 0 in the order in which they were made, whatever a rank built before the model."""
        return replace(annotation, entry=numbers[annotation.entry])

    for name, found in effective.items():
        acting = tuple(renumber(a) for a in found) if found else default
        _check_runs(acting)
        key = tuple(annotation.entry for annotation in found)
        index = keys.setdefault(key, len(keys))
        if index == len(roots):
            roots.append([])
            kinds.append(acting)
        parent = name.rpartition(".")[0]
        if not name or grouping.graph_of[parent] != index:
            roots[index].append(name)
        grouping.graph_of[name] = index
    for index, (names, acting) in enumerate(zip(roots, kinds, strict=True)):
        inner = [a for a in acting if a.kind in _RUNS]
        kind = inner[-1].kind if inner else "replica"
        experts = kind == "split" and all(_of_experts(modules[name]) for name in names)
        grouping.graphs.append(TaskGraph(index, kind, acting, tuple(names), experts=experts))
    return grouping


def _of_experts(module: nn.Module) -> bool:
    return any(f"{kind.__module__}.{kind.__qualname__}" == EXPERTS for kind in type(module).__mro__)


def _check_runs(annotations: tuple[Annotation, ...]) -> None:
    for annotation in annotations:
        if annotation.kind not in _PLACED:
            raise PlanError(
                f"{annotation.call} is annotated, but this version runs wh.replica, wh.split and wh.pipeline only.",
                where=annotation.site,
                fix=f"remove the wh.{annotation.kind} scope{_INSTEAD[annotation.kind]}",
            )
