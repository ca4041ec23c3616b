"""Which Nodes of a recorded forward are sums over the batch, and what means and numbers become (docs/design.md 5.5)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from whale_torch.errors import LossError
from whale_torch.trace import linear
from whale_torch.trace.draft import HALF, Draft, over, refuse
from whale_torch.trace.graph import Graph, Node
from whale_torch.trace.sizes import Sizes, called

__all__ = ["Linearity", "Value", "refuse_lost"]

State = Literal["rows", "sum", "same", "lost"]


@dataclass(frozen=True)
class Value:
    """What a Node is to the whole batch.

    state: "rows": each sample has its own; "sum": the whole batch's is the sum over micro-batches; "same": equal on all
    micro-batches; "lost": of a micro-batch, and the whole batch's does not follow from it (origin: where it was lost).
    node: the rewritten Node. raw: a sum that no count divides yet. own: of a total, the micro-batch's part.
    """

    state: State
    node: Node
    raw: bool = False
    own: Node | None = None
    origin: Node | None = None


class Linearity:
    """The rules: what each call makes of its operands' states.

    values: of each Node that the losses need, or errors: raised if nobody accepts them. draft: the rewritten forward.
    """

    def __init__(self, graph: Graph, sizes: Sizes):
        self._graph, self._sizes = graph, sizes
        self.draft = Draft(graph)
        self.values: dict[Node, Value] = {}
        self.errors: dict[Node, LossError] = {}

    def visit_all(self, losses: Sequence[Node]) -> None:
        """Finds the state of each Node that the losses need."""
        needed = self._graph.needed(losses)
        for node in self._graph.nodes:
            self.draft.add(node)
            if node not in needed:
                continue
            failed = next((source for source in node.inputs() if source in self.errors), None)
            if failed is not None:
                self.errors[node] = self.errors[failed]
                continue
            try:
                self.values[node] = value = self._visit(node)
                self.draft.now[node] = value.node
            except LossError as error:
                self.errors[node] = error

    # ---- one Node

    def _visit(self, node: Node) -> Value:
        if node.kind not in ("call", "module"):
            return Value("rows" if self._sizes.differ(node) else "same", node)
        operands = [self.values[source] for source in node.inputs()]
        states = {value.state for value in operands}
        origin = next((value.origin for value in operands if value.origin), node)
        if "sum" in states:
            return self._of_sums(node, operands)
        if not isinstance(node.value, Tensor):
            state: State = "rows" if "rows" in states else "lost" if "lost" in states else "same"
            return Value(state, self._moved(node), origin=None if state == "same" else origin)
        if "rows" in states:
            return self._of_rows(node)
        if "lost" in states:
            if node.value.dim() == 0:
                refuse_lost(origin)
            return Value("lost", self._moved(node), origin=origin)
        return Value("rows", self._moved(node)) if self._sizes.differ(node) else self._of_same(node)

    def _of_same(self, node: Node) -> Value:
        """Made of what is the same on all micro-batches; a number in it may be the batch's size."""
        if node.kind == "call" and node.value.dim() == 0 and node.target not in linear.ARITHMETIC:
            number, other = _number(node), _number(self._sizes.pairs[node])
            if number is not None and other is not None and number != other:
                if node.target not in linear.MAKERS:
                    self._refuse_number(node, number, other)
                return Value("same", self._grown(node, number, other))
        return Value("same", self._moved(node))

    def _of_rows(self, node: Node) -> Value:
        """Made of what each sample has."""
        kept = self._sizes.differ(node)
        if node.kind == "module":
            return Value("rows" if kept else "lost", self._moved(node), origin=None if kept else node)
        if node.target in linear.LIKE and not kept:
            return self._of_same(node)
        if kept or node.target in linear.VIEW:
            return Value("rows", self._moved(node))
        return self._reduced(node)

    # ---- reductions over the batch

    def _reduced(self, node: Node) -> Value:
        if node.target in linear.LOSSES and linear.bound(node)["reduction"] != "none":
            return self._loss_function(node)
        dot = node.target in linear.DOT and node.value.dim() == 0
        if dot or node.target in linear.SUM | linear.COUNT | linear.MEAN:
            self._check_growth(node, lambda node: int(_first(node).value.numel()))
        if node.target in linear.SUM | linear.COUNT:
            return self._sum(node)
        if node.target in linear.MEAN:
            return self._mean(node)
        if dot:
            return Value("sum", self._moved(node), raw=True)
        source = _first(node)
        part = isinstance(source, Node) and not isinstance(source.value, Tensor)
        if node.value.dim() == 0:
            refuse_lost(source if part else node)
        return Value("lost", self._moved(node), origin=source if part else node)

    def _sum(self, node: Node) -> Value:
        own = self._moved(node)
        if node.value.dim() > 0 or self.draft.unknown(own) is not None:
            return Value("sum", own, raw=True)
        return Value("same", self.draft.total_tensor(own, node), own=own)

    def _mean(self, node: Node) -> Value:
        draft, dtype = self.draft, node.value.dtype
        numel = _first(node).value.numel() // max(node.value.numel(), 1)
        kwargs = dict(node.kwargs)
        if dtype in HALF:
            kwargs["dtype"] = torch.float32  # a sum in half precision overflows or loses its last terms
        batch_sum = draft.changed(node, torch.sum, node.args, kwargs)
        if node.value.dim() == 0 and draft.unknown(batch_sum) is None:
            total = draft.total_tensor(batch_sum, node)
            return Value("same", draft.call(node, over, (total, draft.total(draft.number(numel, node), node), dtype)))
        return Value("sum", draft.over(batch_sum, draft.number(numel, node), node))

    def _loss_function(self, node: Node) -> Value:
        draft, arguments = self.draft, linear.bound(node)
        first = next(iter(arguments))  # the predictions
        self._check_growth(node, lambda node: int(linear.bound(node)[first].value.numel()))
        if arguments["reduction"] == "sum":
            return Value("sum", self._moved(node), raw=True)
        divisor = linear.divisor_of_mean(node)
        if isinstance(divisor, int):
            self._check_growth(node, linear.divisor_of_mean)
            count = draft.number(divisor, node)
        else:
            function, args = divisor
            count = draft.call(node, function, draft.exchanged(args), value=None)
        if node.value.dtype in HALF:
            entries = draft.changed(node, node.target, (), arguments | {"reduction": "none"})
            batch_sum = draft.call(node, torch.sum, (entries,), {"dtype": torch.float32})
        else:
            batch_sum = draft.changed(node, node.target, (), arguments | {"reduction": "sum"})
        return Value("sum", draft.over(batch_sum, count, node))

    def _check_growth(self, node: Node, size: Callable[[Node], Any]) -> None:
        """A reduction over what does not grow as the batch does mixes samples, or is over something else."""
        mine, other, ratio = size(node), size(self._sizes.pairs[node]), self._sizes.ratio
        if mine != ratio * other:
            refuse(
                node,
                f"{called(node)} is over {mine} entries, but over {other} with {1 / ratio} of the samples: not so many "
                "for each sample, so micro-batches cannot give the whole batch's value.",
            )

    # ---- what is done with sums

    def _of_sums(self, node: Node, operands: list[Value]) -> Value:
        sums = [value for value in operands if value.state == "sum"]
        target = node.target if node.kind == "call" else None
        first = self.values.get(_first(node)) if isinstance(_first(node), Node) else None
        if target in linear.LIKE:
            return self._of_same(node)
        if target in linear.CAST and first is not None:  # what it is made like does not count
            if first.state != "sum" or node.value.is_floating_point() or not _first(node).value.is_floating_point():
                return dataclasses.replace(first, node=self._moved(node), own=None)
            self._refuse_nonlinear(node)
        self._refuse_mixture(node, operands)
        raw = any(value.raw for value in sums)
        if target in linear.JOINT:
            return Value("sum", self._joint(node), raw=raw)
        of_one = len(sums) == 1 and first is not None and first.state == "sum"
        if target in linear.DIVISION and not node.kwargs.get("rounding_mode"):
            if not of_one:
                self._refuse_divisor(node)
            return Value("sum", self._moved(node), raw=raw)
        if target in linear.PRODUCT and len(sums) == 1:
            return Value("sum", self._moved(node), raw=raw)
        if of_one and target in linear.UNARY | linear.SUM | linear.MEAN:
            return Value("sum", self._moved(node), raw=raw)
        self._refuse_nonlinear(node)

    def _joint(self, node: Node) -> Node:
        """A sum of terms; what is the same on all micro-batches is counted once."""
        places, with_numbers = linear.JOINT[node.target]
        settled_args, settled_kwargs = self._settled(node)
        args, kwargs = list(settled_args), dict(settled_kwargs)

        def once(value: Any) -> Any:
            if isinstance(value, Node):
                known = self.values.get(value)
                if known is not None and known.state == "sum":
                    return known.node
                return self.draft.shared(known.node if known is not None else value, node)
            if isinstance(value, (list, tuple)):
                return type(value)(once(entry) for entry in value)
            return self.draft.shared(value, node) if with_numbers and _is_number(value) and value != 0 else value

        for place in places:
            if isinstance(place, int) and place < len(args):
                args[place] = once(args[place])
            elif isinstance(place, str) and place in kwargs:
                kwargs[place] = once(kwargs[place])
        return self.draft.moved(node, tuple(args), kwargs)

    # ---- numbers

    def _moved(self, node: Node) -> Node:
        return self.draft.moved(node, *self._settled(node))

    def _settled(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with the total in the place of a number that grows as the batch does."""
        if node.kind != "call" or node.target not in linear.ARITHMETIC:
            return node.args, node.kwargs
        pair = self._sizes.pairs[node]

        def settled(mine: Any, other: Any) -> Any:
            differ = _is_number(mine) and _is_number(other) and mine != other
            return self._grown(node, mine, other) if differ else mine

        args = tuple(settled(mine, other) for mine, other in zip(node.args, pair.args, strict=True))
        return args, {name: settled(mine, pair.kwargs[name]) for name, mine in node.kwargs.items()}

    def _grown(self, node: Node, number: float, other: float) -> Node:
        """The whole batch's value of a number that was another at another batch size."""
        ratio = float(self._sizes.ratio)
        if math.isclose(number, ratio * other, rel_tol=1e-9):
            return self.draft.total_tensor(self.draft.number(number, node), node)
        if number and math.isclose(number * ratio, other, rel_tol=1e-9):
            inverse = self.draft.total_tensor(self.draft.number(1 / number, node), node)
            return self.draft.call(node, torch.reciprocal, (inverse,))
        self._refuse_number(node, number, other)

    # ---- errors

    def _refuse_nonlinear(self, node: Node) -> NoReturn:
        refuse(
            node,
            f"the loss goes through {called(node)}, which is not linear in sums over the batch, so micro-batches "
            "cannot give the whole batch's value.",
        )

    def _refuse_mixture(self, node: Node, operands: list[Value]) -> None:
        """Raises where a sum meets what each sample has, or what was lost."""
        lost = next((value.origin for value in operands if value.state == "lost" and value.origin), None)
        if lost is not None:
            refuse_lost(lost)
        if any(value.state == "rows" for value in operands):
            refuse(
                node,
                f"{called(node)} combines a sum over the batch with values of single samples, so that these depend on "
                "the other micro-batches.",
            )

    def _refuse_divisor(self, node: Node) -> NoReturn:
        divisor = node.args[1] if len(node.args) > 1 else node.kwargs["other"]
        unknown = self.draft.unknown(self.values[divisor].node) if isinstance(divisor, Node) else None
        why = f"depends on {unknown}" if unknown else f"has shape {tuple(divisor.value.shape)}"
        refuse(
            node,
            f"{called(node)} divides by a sum over the batch that {why}, so it is not known before the last "
            "micro-batch has run.",
        )

    def _refuse_number(self, node: Node, number: float, other: float) -> NoReturn:
        times = float(1 / self._sizes.ratio)
        refuse(
            node,
            f"{called(node)} takes the number {number:g}, which is {other:g} with {times:g} times the samples: neither "
            "a constant nor a count of the samples.",
        )


def refuse_lost(origin: Node) -> NoReturn:
    refuse(
        origin,
        f"{called(origin)} makes a value of the whole batch that is not a sum or a mean over its samples, so "
        "micro-batches cannot give it.",
    )


def _first(node: Node) -> Any:
    """A call's first argument."""
    return next(iter((*node.args, *node.kwargs.values())), None)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(node: Node) -> float | None:
    """The Python number that a tensor is made of."""
    return next((x for x in (*node.args, *node.kwargs.values()) if _is_number(x)), None)
