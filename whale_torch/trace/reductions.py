"""The true mean over micro-batches and replicas: means of a recorded forward become sums over counts (design 5.5).

A loss that is linear in sums over the batch is the sum of what its micro-batches give, once each mean divides by the
whole batch's count. Counts depend on the inputs alone, so they are known before the first micro-batch runs.
"""

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
from whale_torch.trace.draft import HALF, Draft, exchange, over, refuse
from whale_torch.trace.graph import Graph, Node
from whale_torch.trace.sizes import Sizes, called

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
    graph: Graph, losses: Sequence[Node], *, micro_batch_loss: Literal["mean"] | None = None, other: Graph | None = None
) -> Reductions:
    """Rewrites the recorded forward of one micro-batch; `graph` stays as it is.

    losses: 0-dim Nodes of the output. micro_batch_loss: "mean" takes those that are not linear as means over the rows.
    other: the same forward recorded at another batch size: shows the batch's dimensions, and numbers that grow with it.
    Without it only reductions to one number are taken as reductions over the batch, a loss with a number that may be
    the number of samples raises, and numbers that meet what each sample has count as constants.
    Raises LossError, naming the user's line, for a loss that is not linear in sums over the batch and for a count that
    depends on activations; ValueError where the other recording has the same batch size.
    """
    try:
        sizes = None if other is None else Sizes.of(graph, other)
    except LossError:
        if micro_batch_loss is None:
            raise
        return Reductions(graph, (), tuple(Loss(node, "rows") for node in losses))
    work = _Rewriting(graph, sizes)
    work.visit_all(losses)
    return work.finished(losses, accept=micro_batch_loss is not None)


State = Literal["rows", "sum", "same", "lost"]


@dataclass(frozen=True)
class _Value:
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


class _Rewriting:
    """The rules: what each call makes of its operands' states."""

    def __init__(self, graph: Graph, sizes: Sizes | None):
        self._graph, self._sizes = graph, sizes
        self._draft = Draft(graph)
        self._values: dict[Node, _Value] = {}
        self._errors: dict[Node, LossError] = {}  # raised if nobody accepts them

    def visit_all(self, losses: Sequence[Node]) -> None:
        """Finds the state of each Node that the losses need."""
        needed = self._graph.needed(losses)
        for node in self._graph.nodes:
            self._draft.add(node)
            if node not in needed:
                continue
            failed = next((source for source in node.inputs() if source in self._errors), None)
            if failed is not None:
                self._errors[node] = self._errors[failed]
                continue
            try:
                self._values[node] = value = self._visit(node)
                self._draft.now[node] = value.node
            except LossError as error:
                self._errors[node] = error

    def finished(self, losses: Sequence[Node], *, accept: bool) -> Reductions:
        """The result. accept: a loss that is not linear stays as it is and combines by rows."""
        results = [self._loss(node, accept) for node in losses]
        ends = dict(zip(losses, (loss.node for loss in results), strict=True))

        def rewritten(node: Node) -> Node:
            value = self._values.get(node)
            same = value is not None and value.state in ("rows", "same")
            return ends.get(node) or (self._draft.now[node] if same else node)

        output = exchange(self._graph.output, rewritten)
        graph, counts = self._draft.finished(output, list(ends.values()))
        return Reductions(graph, tuple(Count(*count) for count in counts), tuple(results))

    def _loss(self, node: Node, accept: bool) -> Loss:
        value = self._values.get(node)
        if value is not None and value.state == "sum":
            return Loss(value.node, "sum")
        if value is not None and value.state == "same":
            return Loss(value.own, "sum") if value.own else Loss(self._draft.shared(value.node, node), "same")
        if accept:
            return Loss(node, "rows")
        if value is None:
            raise self._errors[node]
        _refuse_lost(value.origin or node)

    # ---- one Node

    def _visit(self, node: Node) -> _Value:
        if node.kind not in ("call", "module"):
            return _Value("rows" if self._per_sample(node) else "same", node)
        operands = [self._values[source] for source in node.inputs()]
        states = {value.state for value in operands}
        origin = next((value.origin for value in operands if value.origin), node)
        if "sum" in states:
            return self._of_sums(node, operands)
        if not isinstance(node.value, Tensor):
            state: State = "rows" if "rows" in states else "lost" if "lost" in states else "same"
            return _Value(state, self._moved(node), origin=None if state == "same" else origin)
        if "rows" in states:
            return self._of_rows(node)
        if "lost" in states:
            if node.value.dim() == 0:
                _refuse_lost(origin)
            return _Value("lost", self._moved(node), origin=origin)
        return _Value("rows", self._moved(node)) if self._per_sample(node) else self._of_same(node)

    def _per_sample(self, node: Node) -> bool:
        """Whether a tensor that is not made of rows has entries for each sample, or one that is kept them."""
        if self._sizes is not None:
            return self._sizes.differ(node)
        return bool(node.kind in ("input", "module") and node.value.dim() > 0)

    def _of_same(self, node: Node) -> _Value:
        """Made of what is the same on all micro-batches; a number in it may be the batch's size."""
        if node.kind == "call" and node.value.dim() == 0 and node.target not in linear.ARITHMETIC:
            number, other = _number(node), _number(self._pair(node))
            if number is not None and self._sizes is None:
                self._refuse_suspect(node, number)
            if number is not None and other is not None and number != other:
                if node.target not in linear.MAKERS:
                    self._refuse_number(node, number, other)
                return _Value("same", self._grown(node, number, other))
        return _Value("same", self._moved(node))

    def _of_rows(self, node: Node) -> _Value:
        """Made of what each sample has."""
        kept = self._per_sample(node) if self._sizes or node.kind == "module" else node.value.dim() > 0
        if node.kind == "module":
            return _Value("rows" if kept else "lost", self._moved(node), origin=None if kept else node)
        if node.target in linear.LIKE and not kept:
            return self._of_same(node)
        if self._sizes is None and kept and node.target in linear.SUM | linear.MEAN and 0 in _dims(node):
            refuse(
                node,
                f"{called(node)} over dimension 0 of shape {tuple(_first(node).value.shape)}: whether that is the "
                "batch cannot be told from one recording.",
            )
        if kept or node.target in linear.VIEW:
            return _Value("rows", self._moved(node))
        return self._reduced(node)

    # ---- reductions over the batch

    def _reduced(self, node: Node) -> _Value:
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
            return _Value("sum", self._moved(node), raw=True)
        source = _first(node)
        part = isinstance(source, Node) and not isinstance(source.value, Tensor)
        if node.value.dim() == 0:
            _refuse_lost(source if part else node)
        return _Value("lost", self._moved(node), origin=source if part else node)

    def _sum(self, node: Node) -> _Value:
        own = self._moved(node)
        if node.value.dim() > 0 or self._draft.unknown(own) is not None:
            return _Value("sum", own, raw=True)
        return _Value("same", self._draft.total_tensor(own, node), own=own)

    def _mean(self, node: Node) -> _Value:
        draft, dtype = self._draft, node.value.dtype
        numel = _first(node).value.numel() // max(node.value.numel(), 1)
        kwargs = dict(node.kwargs)
        if dtype in HALF:
            kwargs["dtype"] = torch.float32  # a sum in half precision overflows or loses its last terms
        batch_sum = draft.changed(node, torch.sum, node.args, kwargs)
        if node.value.dim() == 0 and draft.unknown(batch_sum) is None:
            total = draft.total_tensor(batch_sum, node)
            return _Value("same", draft.call(node, over, (total, draft.total(draft.number(numel, node), node), dtype)))
        return _Value("sum", draft.over(batch_sum, draft.number(numel, node), node))

    def _loss_function(self, node: Node) -> _Value:
        draft, arguments = self._draft, linear.bound(node)
        first = next(iter(arguments))  # the predictions
        self._check_growth(node, lambda node: int(linear.bound(node)[first].value.numel()))
        if arguments["reduction"] == "sum":
            return _Value("sum", self._moved(node), raw=True)
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
        return _Value("sum", draft.over(batch_sum, count, node))

    def _check_growth(self, node: Node, size: Callable[[Node], Any]) -> None:
        """A reduction over what does not grow as the batch does mixes samples, or is over something else."""
        if self._sizes is None:
            return
        mine, other, ratio = size(node), size(self._pair(node)), self._sizes.ratio
        if mine != ratio * other:
            refuse(
                node,
                f"{called(node)} is over {mine} entries, but over {other} with {1 / ratio} of the samples: not so many "
                "for each sample, so micro-batches cannot give the whole batch's value.",
            )

    # ---- what is done with sums

    def _of_sums(self, node: Node, operands: list[_Value]) -> _Value:
        sums = [value for value in operands if value.state == "sum"]
        target = node.target if node.kind == "call" else None
        first = self._values.get(_first(node)) if isinstance(_first(node), Node) else None
        if target in linear.LIKE:
            return self._of_same(node)
        if target in linear.CAST and first is not None:  # what it is made like does not count
            if first.state != "sum" or node.value.is_floating_point() or not _first(node).value.is_floating_point():
                return dataclasses.replace(first, node=self._moved(node), own=None)
            self._refuse_nonlinear(node)
        self._refuse_mixture(node, operands)
        raw = any(value.raw for value in sums)
        if target in linear.JOINT:
            return _Value("sum", self._joint(node), raw=raw)
        of_one = len(sums) == 1 and first is not None and first.state == "sum"
        if target in linear.DIVISION and not node.kwargs.get("rounding_mode"):
            if not of_one:
                self._refuse_divisor(node)
            return _Value("sum", self._scaled(node, raw), raw=raw)
        if target in linear.PRODUCT and len(sums) == 1:
            return _Value("sum", self._scaled(node, raw), raw=raw)
        if of_one and target in linear.UNARY | linear.SUM | linear.MEAN:
            return _Value("sum", self._moved(node), raw=raw)
        self._refuse_nonlinear(node)

    def _scaled(self, node: Node, raw: bool) -> Node:
        """A sum times or over what is the same on all micro-batches."""
        number = _number(node)
        if raw and self._sizes is None and number is not None:
            self._refuse_suspect(node, number, certain=True)
        return self._moved(node)

    def _joint(self, node: Node) -> Node:
        """A sum of terms; what is the same on all micro-batches is counted once."""
        places, with_numbers = linear.JOINT[node.target]
        settled_args, settled_kwargs = self._settled(node)
        args, kwargs = list(settled_args), dict(settled_kwargs)

        def once(value: Any) -> Any:
            if isinstance(value, Node):
                known = self._values.get(value)
                if known is not None and known.state == "sum":
                    return known.node
                return self._draft.shared(known.node if known is not None else value, node)
            if isinstance(value, (list, tuple)):
                return type(value)(once(entry) for entry in value)
            return self._draft.shared(value, node) if with_numbers and _is_number(value) and value != 0 else value

        for place in places:
            if isinstance(place, int) and place < len(args):
                args[place] = once(args[place])
            elif isinstance(place, str) and place in kwargs:
                kwargs[place] = once(kwargs[place])
        return self._draft.moved(node, tuple(args), kwargs)

    # ---- numbers

    def _pair(self, node: Node) -> Node:
        return self._sizes.pairs[node] if self._sizes is not None else node

    def _moved(self, node: Node) -> Node:
        return self._draft.moved(node, *self._settled(node))

    def _settled(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with the total in the place of a number that grows as the batch does."""
        if node.kind != "call" or node.target not in linear.ARITHMETIC:
            return node.args, node.kwargs
        if self._sizes is None:
            states = {self._values[source].state for source in node.inputs()}
            for number in (*node.args, *node.kwargs.values()):
                if _is_number(number) and ("sum" in states or (node.value.dim() == 0 and "rows" not in states)):
                    self._refuse_suspect(node, number)
            return node.args, node.kwargs
        pair = self._pair(node)

        def settled(mine: Any, other: Any) -> Any:
            differ = _is_number(mine) and _is_number(other) and mine != other
            return self._grown(node, mine, other) if differ else mine

        args = tuple(settled(mine, other) for mine, other in zip(node.args, pair.args, strict=True))
        return args, {name: settled(mine, pair.kwargs[name]) for name, mine in node.kwargs.items()}

    def _grown(self, node: Node, number: float, other: float) -> Node:
        """The whole batch's value of a number that was another at another batch size."""
        ratio = self._ratio()
        if math.isclose(number, ratio * other, rel_tol=1e-9):
            return self._draft.total_tensor(self._draft.number(number, node), node)
        if number and math.isclose(number * ratio, other, rel_tol=1e-9):
            inverse = self._draft.total_tensor(self._draft.number(1 / number, node), node)
            return self._draft.call(node, torch.reciprocal, (inverse,))
        self._refuse_number(node, number, other)

    def _ratio(self) -> float:
        return float(self._sizes.ratio) if self._sizes is not None else 1.0

    # ---- errors

    def _refuse_nonlinear(self, node: Node) -> NoReturn:
        refuse(
            node,
            f"the loss goes through {called(node)}, which is not linear in sums over the batch, so micro-batches "
            "cannot give the whole batch's value.",
        )

    def _refuse_mixture(self, node: Node, operands: list[_Value]) -> None:
        """Raises where a sum meets what each sample has, or what was lost."""
        lost = next((value.origin for value in operands if value.state == "lost" and value.origin), None)
        if lost is not None:
            _refuse_lost(lost)
        if any(value.state == "rows" for value in operands):
            refuse(
                node,
                f"{called(node)} combines a sum over the batch with values of single samples, so that these depend on "
                "the other micro-batches.",
            )

    def _refuse_divisor(self, node: Node) -> NoReturn:
        divisor = node.args[1] if len(node.args) > 1 else node.kwargs["other"]
        unknown = self._draft.unknown(self._values[divisor].node) if isinstance(divisor, Node) else None
        why = f"depends on {unknown}" if unknown else f"has shape {tuple(divisor.value.shape)}"
        refuse(
            node,
            f"{called(node)} divides by a sum over the batch that {why}, so it is not known before the last "
            "micro-batch has run.",
        )

    def _refuse_suspect(self, node: Node, number: float, *, certain: bool = False) -> None:
        """Of one recording: raises where a number may have been made of the number of samples."""
        rows = {int(x.value.shape[0]) for x in self._graph.nodes if x.kind == "input" and x.value.dim() > 0}
        if certain or any(_may_count(number, size) for size in rows):
            refuse(
                node,
                f"{called(node)} takes the number {number:g}: whether that is a constant or the number of samples "
                "cannot be told from one recording.",
            )

    def _refuse_number(self, node: Node, number: float, other: float) -> NoReturn:
        refuse(
            node,
            f"{called(node)} takes the number {number:g}, which is {other:g} with {1 / self._ratio():g} times the "
            "samples: neither a constant nor a count of the samples.",
        )


def _refuse_lost(origin: Node) -> NoReturn:
    refuse(
        origin,
        f"{called(origin)} makes a value of the whole batch that is not a sum or a mean over its samples, so "
        "micro-batches cannot give it.",
    )


def _first(node: Node) -> Any:
    """A call's first argument."""
    return next(iter((*node.args, *node.kwargs.values())), None)


def _dims(node: Node) -> list[int]:
    """The dimensions that a sum or a mean names, from the front."""
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis"))
    dims = (dims,) if isinstance(dims, int) else dims or ()
    return [dim % _first(node).value.dim() for dim in dims]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _may_count(number: float, size: int) -> bool:
    """Whether a number is a multiple of the size, one over a multiple, or a multiple of one over it."""
    small = abs(number) < 1
    candidates = (1 / number / size, number * size) if number and small else (number / size,)
    return number != 0 and any(math.isclose(x, round(x), rel_tol=1e-9) for x in candidates)


def _number(node: Node) -> float | None:
    """The Python number that a tensor is made of."""
    return next((x for x in (*node.args, *node.kwargs.values()) if _is_number(x)), None)
