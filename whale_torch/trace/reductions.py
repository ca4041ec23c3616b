"""The true mean over micro-batches and replicas: means of a recorded forward become sums over counts (design 5.5).

A loss that is linear in sums over the batch is the sum of what its micro-batches give, once each mean divides by the
whole batch's count. Counts depend on the inputs alone, so they are known before the first micro-batch runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from whale_torch.errors import LossError
from whale_torch.trace.graph import Graph, Node, map_nodes
from whale_torch.trace.linearity import Linearity, refuse_lost
from whale_torch.trace.sizes import Sizes

__all__ = ["Combine", "Count", "Loss", "Reductions", "rewrite"]

Combine = Literal["sum", "same", "rows"]


@dataclass(frozen=True)
class Count:
    """How a micro-batch's count is computed, from inputs, buffers and constants alone.

    nodes: in order, ending with `result`. result: its value is a number or a 0-dim tensor.
    """

    nodes: tuple[Node, ...]
    result: Node


@dataclass(frozen=True)
class Loss:
    """A scalar of the output in the rewritten graph.

    combine: "sum" and "same": the whole batch's value is the sum over micro-batches and replicas ("same": each gives
    `share` of one value); "rows": of values that are first multiplied by the micro-batch's part of all rows.
    """

    node: Node
    combine: Combine


@dataclass(frozen=True)
class Reductions:
    """A micro-batch's forward whose losses add up to the whole batch's.

    graph: with Nodes of kind "count": target k is the sum of counts[k] over all micro-batches and replicas (a number or
    a 0-dim tensor), target "share" the Python number 1 / (micro-batches x replicas).
    counts: by number. losses: in the order they were given in.
    """

    graph: Graph
    counts: tuple[Count, ...]
    losses: tuple[Loss, ...]


def rewrite(
    graph: Graph, losses: Sequence[Node], *, other: Graph, micro_batch_loss: Literal["mean"] | None = None
) -> Reductions:
    """Rewrites the recorded forward of one micro-batch; `graph` stays as it is.

    losses: 0-dim Nodes of the output. other: the same forward recorded at another batch size: shows the batch's
    dimensions, and numbers that grow with it. micro_batch_loss: "mean" takes losses that are not linear as means over
    the rows.
    Raises LossError, naming the user's line, for a loss that is not linear in sums over the batch and for a count that
    depends on activations; ValueError where the other recording has the same batch size.
    """
    try:
        sizes = Sizes.of(graph, other)
    except LossError:
        if micro_batch_loss is None:
            raise
        return Reductions(graph, (), tuple(Loss(node, "rows") for node in losses))
    found = Linearity(graph, sizes)
    found.visit_all(losses)
    results = [_loss(found, node, accept=micro_batch_loss is not None) for node in losses]
    ends = dict(zip(losses, (loss.node for loss in results), strict=True))

    def rewritten(node: Node) -> Node:
        value = found.values.get(node)
        same = value is not None and value.state in ("rows", "same")
        return ends.get(node) or (found.draft.now[node] if same else node)

    output = map_nodes(graph.output, rewritten, make=False)
    whole, counts = found.draft.finished(output, list(ends.values()))
    return Reductions(whole, tuple(Count(*count) for count in counts), tuple(results))


def _loss(found: Linearity, node: Node, *, accept: bool) -> Loss:
    """A scalar's place in the result. accept: one that is not linear stays as it is and combines by rows."""
    value = found.values.get(node)
    if value is not None and value.state == "sum":
        return Loss(value.node, "sum")
    if value is not None and value.state == "same":
        return Loss(value.own, "sum") if value.own else Loss(found.draft.shared(value.node, node), "same")
    if accept:
        return Loss(found.draft.kept(node), "rows")
    if value is None:
        raise found.errors[node]
    refuse_lost(value.origin or node)
