"""Options that hold for a whole model, and options that no module follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whale_torch.errors import PlanError
from whale_torch.planning.rules import ATTENTION, PACKED_ATTENTION, Cut
from whale_torch.planning.taskgraph import TaskGraph

__all__ = ["batch_dim_of", "check_options", "one_option"]

# The roles in which our own rules follow an option.
_EITHER: dict[str, tuple[str, ...]] = {"cut": ("columns", "rows")}
_NEITHER: dict[str, tuple[str, ...]] = {}
_FOLLOWS: dict[str, dict[str, tuple[str, ...]]] = {
    "Linear": {**_EITHER, "chunked_loss": ("columns",)},
    "Conv1D": _EITHER,
    "Conv1d": _EITHER,
    "Conv2d": _EITHER,
    "Conv3d": _EITHER,
    "BatchNorm1d": _NEITHER,
    "BatchNorm2d": _NEITHER,
    "BatchNorm3d": _NEITHER,
    "Embedding": _NEITHER,
    "MultiheadAttention": _NEITHER,
    ATTENTION: _NEITHER,
    PACKED_ATTENTION: _NEITHER,
}
_FIXES = {
    "cut": "leave cut out; linear layers and convolutions without groups follow it",
    "chunked_loss": 'wh.split(cut="columns", chunked_loss=True) around a linear layer, or leave chunked_loss out',
}


def check_options(graphs: Sequence[TaskGraph], cuts: Sequence[Cut], graph_of: Mapping[str, int]) -> None:
    """Raises PlanError for an option of a split that no module of its TaskGraph follows: it would change nothing."""
    for graph in graphs:
        for option, fix in _FIXES.items():
            value = graph.option("split", option)
            if value is None:
                continue
            own = [cut for cut in cuts if graph_of[cut.module] == graph.index]
            if not any(_follows(cut, option) for cut in own):
                told = ", ".join(f"'{cut.module}' ({cut.rule} by {cut.role})" for cut in own[:3]) or "nothing"
                raise PlanError(
                    f"{graph.label}: no module follows {option}={value!r}; "
                    f"what is cut: {told}{', ...' if len(own) > 3 else ''}.",
                    where=graph.site,
                    fix=fix,
                )


def _follows(cut: Cut, option: str) -> bool:
    """A rule of the user's may follow any option."""
    ours = _FOLLOWS.get(cut.rule)
    return ours is None or cut.role in ours.get(option, ())


def batch_dim_of(graphs: Sequence[TaskGraph]) -> Any:
    """Where the inputs of the model have samples, by its replicas or by its pipeline.

    Raises PlanError where they say different things.
    """
    found = one_option(graphs, "batch_dim", 0)
    scopes = [a for graph in graphs for a in graph.annotations if a.kind == "pipeline" and a.get("batch_dim")]
    if not scopes:
        return found
    asked = scopes[0].get("batch_dim")
    if found not in (0, asked):
        other = next(a for graph in graphs for a in graph.annotations if a.kind == "replica" and a.get("batch_dim"))
        raise PlanError(
            f"{other.call} and {scopes[0].call} say otherwise where inputs have samples.",
            where=f"{other.site} and {scopes[0].site}",
            fix="leave one of them out",
        )
    return asked


def one_option(graphs: Sequence[TaskGraph], name: str, default: Any) -> Any:
    """An option that holds for the whole model, of replicas outside of stages. Raises PlanError where scopes differ."""
    found = {
        graph.index: graph.option("replica", name, default)
        for graph in graphs
        if any(a.kind == "replica" and a is not graph.inner_replica for a in graph.annotations)
    }
    values = set(found.values())
    if len(values) > 1:
        (i, a), (j, b) = next((x, y) for x in found.items() for y in found.items() if x[1] != y[1])
        raise PlanError(
            f"{name} is {a!r} at {graphs[i].site} and {b!r} at {graphs[j].site}; a model has one.",
            where=f"{graphs[i].site} and {graphs[j].site}",
            fix=f"give every wh.replica the same {name}",
        )
    return values.pop() if values else default
