"""New Nodes in the place of recorded ones: counts, shares and calls of other functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from whale_torch.errors import LossError
from whale_torch.trace import linear
from whale_torch.trace.graph import Graph, Node, map_nodes, nodes_in
from whale_torch.trace.sizes import called

__all__ = ["HALF", "Draft", "over", "refuse", "shared", "whole"]

HALF = (torch.float16, torch.bfloat16)


def whole(total: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A count of the whole batch as the tensor that a micro-batch's own would have been."""
    return torch.as_tensor(total, dtype=dtype, device=device).clone()  # may be changed in place


def over(batch_sum: Tensor, total: float | Tensor, dtype: torch.dtype) -> Tensor:
    """A batch sum divided by a count of the whole batch."""
    return torch.div(batch_sum, total).to(dtype)


def shared(value: float | Tensor, share: float) -> float | Tensor:
    """What one micro-batch adds of a value that is the same on all."""
    return value * share


class Draft:
    """A recorded forward that is being rewritten; the recorded Nodes stay as they are.

    now: of a recorded Node, what takes its place. counts: results of sub-graphs, by number. totals: their Nodes in the
    rewritten forward.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.now: dict[Node, Node] = {}
        self.counts: list[Node] = []
        self.totals: list[Node] = []
        self._share: Node | None = None
        self._order: list[Node] = []

    def add(self, node: Node) -> Node:
        self._order.append(node)
        return node

    # ---- calls

    def call(
        self, like: Node, target: Callable[..., Any], args: Any, kwargs: dict[str, Any] | None = None, value: Any = ...
    ) -> Node:
        """A new call in the place of a Node, of the same value unless another one is given."""
        value = like.value if value is ... else value
        new: dict[str, Any] = {"kind": "call", "target": target, "args": args, "kwargs": kwargs or {}, "value": value}
        return self.add(dataclasses.replace(like, draws=False, writes=None, **new))

    def changed(self, node: Node, target: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Node:
        """A recorded call of another function or with other arguments."""
        args, kwargs = self.exchanged((args, kwargs))
        return self.add(dataclasses.replace(node, target=target, args=args, kwargs=kwargs))

    def moved(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Node:
        """A recorded Node on what took its inputs' places; itself where nothing changes."""
        return self._moved(node, *self.exchanged((args, kwargs)))

    def _moved(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Node:
        target = linear.OUT_OF_PLACE.get(node.target, node.target) if _is_scalar(node.value) else node.target
        if target is node.target and list(nodes_in((args, kwargs))) == list(node.inputs()):
            return node
        made = self.add(dataclasses.replace(node, target=target, args=args, kwargs=kwargs))
        if target is node.target or all(source.value.dtype == node.value.dtype for source in node.inputs()):
            return made
        return self.call(node, Tensor.to, (made, node.value.dtype))  # in place the first one's dtype stays

    def kept(self, result: Node) -> Node:
        """A recorded result as it is, but for numbers changed in place, which rewritten Nodes may read."""
        needed, now = self.graph.needed([result]), dict[Node, Node]()
        for node in self.graph.nodes:
            if node in needed:
                nest = map_nodes((node.args, node.kwargs), lambda source: now.get(source, source), make=False)
                now[node] = self._moved(node, *nest)
        return now[result]

    def exchanged(self, nest: Any) -> Any:
        return map_nodes(nest, lambda source: self.now.get(source, source), make=False)

    # ---- counts

    def number(self, number: float, like: Node) -> Node:
        return self.add(Node("constant", number, value=number, where=like.where, stage=like.stage))

    def total(self, result: Node, like: Node) -> Node:
        """The whole batch's value of what a sub-graph counts in a micro-batch.

        Raises LossError where it is not known before the first micro-batch runs.
        """
        why = self.unknown(result)
        if why is not None:
            refuse(
                like,
                f"the count that {called(like)} divides by depends on {why}, so it is not known before the first "
                "micro-batch runs.",
            )
        self.counts.append(result)
        self.totals.append(Node("count", len(self.totals)))
        return self.totals[-1]

    def total_tensor(self, result: Node, like: Node) -> Node:
        dtype = torch.float32 if like.value.dtype in HALF else like.value.dtype
        return self.call(like, whole, (self.total(result, like), dtype, like.value.device))

    def over(self, batch_sum: Node, count: Node, like: Node) -> Node:
        return self.call(like, over, (batch_sum, self.total(count, like), like.value.dtype))

    def shared(self, value: Any, like: Node) -> Node:
        """One micro-batch's part of a value that is the same on all: a Node's or a number's."""
        if self._share is None:
            self._share = Node("count", "share")
        return self.call(like, shared, (value, self._share), value=value.value if isinstance(value, Node) else None)

    def unknown(self, result: Node) -> str | None:
        """What keeps a value from being known before the first micro-batch, or None."""
        needed = self.graph.needed([result])
        kinds = {node.kind for node in needed}
        if any(node.draws and node.kind == "call" for node in needed):
            return "random numbers"
        if "module" in kinds:
            return "activations"
        return "parameters" if "parameter" in kinds else "another count" if "count" in kinds else None

    # ---- the end

    def finished(self, output: Any, ends: list[Node]) -> tuple[Graph, list[tuple[tuple[Node, ...], Node]]]:
        """The rewritten forward with all modules and draws, and each count that it reads: sub-graph and result."""
        order = [*self.totals, *([self._share] if self._share else []), *self._order]
        stay = [node for node in order if node.kind == "module" or node.draws]
        stay = [node for node in stay if self.now.get(node, node) is node]
        live = self.graph.needed([*nodes_in(output), *ends, *stay])
        used = [(result, total) for result, total in zip(self.counts, self.totals, strict=True) if total in live]
        for number, (_, total) in enumerate(used):
            total.target = number
        graph = Graph([node for node in order if node in live], output, self.graph.value, self.graph.ambient)
        counts = []
        for result, _ in used:
            needed = self.graph.needed([result])
            counts.append((tuple(node for node in order if node in needed), result))
        return graph, counts


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def refuse(node: Node, what: str) -> NoReturn:
    """Raises LossError at the line of a Node."""
    raise LossError(
        what,
        where=node.where,
        fix="write it as sums and means over the batch, or take the mean of the micro-batches' losses, weighted by "
        'their rows: wh.pipeline(micro_batch_loss="mean")',
    )
