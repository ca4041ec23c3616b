"""Which modules run on slices of a micro-batch: those in a replica inside a stage, beside a split."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from whale_torch.errors import PlanError
from whale_torch.names import outward
from whale_torch.planning.taskgraph import TaskGraph

__all__ = ["SlicedModules"]


_OF_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class SlicedModules:
    """The ranks of a split share each micro-batch; a replica beside it gives every one of them a slice.

    Without a split every rank of a stage has a batch of its own already, and nothing is sliced.
    """

    def __init__(self, graphs: Sequence[TaskGraph]):
        beside_split = any(_splits(graph) for graph in graphs)
        self._graph_of = {name: graph for graph in graphs for name in graph.modules} if beside_split else {}

    def __bool__(self) -> bool:
        return any(map(_is_sliced, self._graph_of.values()))

    def __contains__(self, name: str) -> bool:
        """Whether the module of this name runs on slices."""
        graph = self._around(name)
        return graph is not None and _is_sliced(graph)

    def divide(self, name: str) -> bool:
        """Whether some of a module's members run on slices and others, or the module itself, do not."""
        inside = [found for found in self._graph_of if found.startswith(f"{name}." if name else "")]
        return any((member in self) != (name in self) for member in inside)

    def check(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Raises PlanError for a module, by name, that does not treat samples one by one."""
        if not self:
            return
        for name, module in modules:
            graph = self._around(name)
            if isinstance(module, _OF_STATISTICS) and graph is not None and _is_sliced(graph):
                raise PlanError(
                    f"'{name}' is a {type(module).__name__} in a wh.replica inside a stage, beside a split: it would "
                    "take its statistics of one rank's slice of the micro-batch.",
                    where=graph.site,
                    fix="leave it out of the replica, or use nn.GroupNorm",
                )

    def _around(self, name: str) -> TaskGraph | None:
        return next((self._graph_of[outer] for outer in outward(name) if outer in self._graph_of), None)


def _splits(graph: TaskGraph) -> bool:
    return any(annotation.kind == "split" for annotation in graph.annotations)


def _is_sliced(graph: TaskGraph) -> bool:
    return graph.inner_replica is not None and not _splits(graph)
