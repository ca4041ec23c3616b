"""Modules that run on a slice of each micro-batch: along which dims their arguments and outputs have samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from whale_torch.errors import TraceError
from whale_torch.trace.graph import Graph, Node, leaves_in, map_nodes
from whale_torch.trace.sizes import Sizes, differing_dims

__all__ = ["Slices", "mark_slices"]


@dataclass(frozen=True, slots=True)
class Slices:
    """How a module is called with a part of its `rows` samples.

    given, gives: of every leaf of its arguments and of what it returns, in order, the dim along which it has samples,
    None for what has none.
    """

    rows: int
    given: tuple[int | None, ...]
    gives: tuple[int | None, ...]


def mark_slices(graph: Graph, other: Graph, sliced: Callable[[str], bool], rows: int) -> None:
    """Gives the Nodes of modules that run on slices their Slices.

    other: the same forward recorded at another number of samples. sliced: of a module's name. rows: samples of `graph`.
    Raises TraceError for a module that does not treat samples one by one, as far as its arguments, its outputs and its
    buffers tell.
    """
    nodes = [node for node in graph.nodes if node.kind == "module" and sliced(node.target)]
    if not nodes:
        return
    sizes = Sizes.of(graph, other)
    for node in nodes:
        for name in graph.written:
            if name.startswith(f"{node.target}."):
                raise _refused(node, f"writes into its buffer '{name}', with other values on every slice")
        if node.changes:
            raise _refused(node, "changes its input in place")
        node.slices = Slices(rows, tuple(_given(node, sizes, rows)), tuple(_gives(node, sizes, rows)))


def _given(node: Node, sizes: Sizes, rows: int) -> Iterator[int | None]:
    pair = sizes.pairs[node]
    mine, theirs = (leaves_in(map_nodes((n.args, n.kwargs), lambda part: part.value)) for n in (node, pair))
    for x, y in zip(mine, theirs, strict=True):
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            if isinstance(x, (int, float)) and x != y:
                raise _refused(node, f"is given a number that changes with the samples, {x!r}")
            yield None
        elif x.shape == y.shape:
            yield None
        else:
            yield _dim(node, "is given", x, y, rows)


def _gives(node: Node, sizes: Sizes, rows: int) -> Iterator[int | None]:
    for x, y in zip(leaves_in(node.value), leaves_in(sizes.pairs[node].value), strict=True):
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            yield _dim(node, "gives", x, y, rows)
        elif isinstance(x, (int, float)) and x != y:
            raise _refused(node, f"gives a number that changes with the samples, {x!r}")
        else:
            yield None


def _dim(node: Node, what: str, x: Tensor, y: Tensor, rows: int) -> int:
    dims = differing_dims(x, y) if x.dim() == y.dim() else []
    if len(dims) != 1 or x.shape[dims[0]] != rows:
        raise _refused(node, f"{what} a tensor of shape {tuple(x.shape)} that has not one row for each sample")
    return dims[0]


def _refused(node: Node, why: str) -> TraceError:
    return TraceError(
        f"module '{node.target}' is in a wh.replica inside a stage, where each rank runs it on a slice of the "
        f"micro-batch, but it {why}.",
        where=node.where,
        fix="leave this module out of the replica: it then runs whole on every rank of the split",
    )
