"""The true mean over micro-batches and replicas: means of a recorded forward become sums over counts (design 5.5).

A loss that is linear in sums over the batch is the sum of what its micro-batches give, once each mean divides by the
whole batch's count. Counts depend on the inputs alone, so they are known before the first micro-batch runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from whale_torch.errors import LossError
from whale_torch.trace import linear
from whale_torch.trace.graph import Graph, Made, Node, nodes_in

__all__ = ["Combine", "Count", "Loss", "Reductions", "rewrite"]

Combine = Literal["sum", "same", "rows"]

_FIX = (
    "write it as sums and means over the batch, or take the mean of the micro-batches' losses, weighted by their rows: "
    'wh.pipeline(micro_batch_loss="mean")'
)


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

    losses: 0-dim Nodes of the output. micro_batch_loss: "mean" takes what is not linear as a mean over the rows.
    other: the same forward recorded at another batch size. By it the batch's dimensions and Python numbers that grow
    with the batch are known; without it only reductions to one number are taken as reductions over the batch, and sums
    multiplied or divided by a number raise.
    Raises LossError, naming the user's line, for a loss that is not linear in sums over the batch and for a count that
    depends on activations; ValueError for another recording of the same batch size.
    """
    try:
        sizes = None if other is None else _Sizes.of(graph, other)
    except LossError:
        if micro_batch_loss is None:
            raise
        return Reductions(graph, (), tuple(Loss(node, "rows") for node in losses))
    work = _Rewriting(graph, sizes)
    work.visit_all(losses)
    return work.finished(losses, accept=micro_batch_loss is not None)


# ---- what rewritten graphs call


def whole(total: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A count of the whole batch as the tensor that a micro-batch's own would have been."""
    return torch.as_tensor(total, dtype=dtype, device=device).clone()  # may be changed in place


def over(batch_sum: Tensor, total: float | Tensor, dtype: torch.dtype) -> Tensor:
    """A batch sum divided by a count of the whole batch."""
    return torch.div(batch_sum, total).to(dtype)


def shared(value: float | Tensor, share: float) -> float | Tensor:
    """What one micro-batch adds of a value that is the same on all."""
    return value * share


# ---- two recordings


@dataclass(frozen=True)
class _Sizes:
    """What changes with the batch: each Node's pair in a recording at another batch size, and the sizes' ratio."""

    pairs: dict[Node, Node]
    ratio: Fraction

    @staticmethod
    def of(graph: Graph, other: Graph) -> _Sizes:
        for mine, theirs in zip(graph.nodes, other.nodes, strict=False):
            same_target = mine.kind == "constant" or mine.target == theirs.target
            if mine.kind != theirs.kind or not same_target or _arity(mine) != _arity(theirs):
                raise LossError(
                    f"the forward calls {_name(mine)} at one batch size and {_name(theirs)} at another.",
                    where=mine.where,
                    fix="make the same calls whatever the number of samples",
                )
        if len(graph.nodes) != len(other.nodes):
            raise LossError(
                f"the forward makes {len(graph.nodes)} calls at one batch size and {len(other.nodes)} at another.",
                where=max(graph.nodes, other.nodes, key=len)[-1].where,
                fix="make the same calls whatever the number of samples",
            )
        pairs = dict(zip(graph.nodes, other.nodes, strict=True))
        for node, pair in pairs.items():
            if node.kind == "input":
                for size, other_size in zip(node.value.shape, pair.value.shape, strict=False):
                    if size != other_size:
                        return _Sizes(pairs, Fraction(size, other_size))
        raise ValueError("the other recording has the same batch size")

    def differ(self, node: Node) -> bool:
        """Whether a tensor's shape changes with the batch."""
        return bool(node.value.shape != self.pairs[node].value.shape)


def _arity(node: Node) -> int:
    return sum(1 for _ in node.inputs())


# ---- values


@dataclass(frozen=True)
class _Value:
    """What a Node is to the whole batch.

    state: "rows": each sample has its own; "sum": the whole batch's is the sum over micro-batches; "same": equal on all
    micro-batches; "lost": of a micro-batch, and the whole batch's does not follow from it (origin: where it was lost).
    node: the rewritten Node. raw: a sum that no count divides yet. own: of a total, the micro-batch's part.
    """

    state: Literal["rows", "sum", "same", "lost"]
    node: Node
    raw: bool = False
    own: Node | None = None
    origin: Node | None = None


class _Rewriting:
    def __init__(self, graph: Graph, sizes: _Sizes | None):
        self._graph, self._sizes = graph, sizes
        self._values: dict[Node, _Value | LossError] = {}
        self._counts: list[Node] = []
        self._totals: list[Node] = []
        self._share: Node | None = None
        self._order: list[Node] = []

    def visit_all(self, losses: Sequence[Node]) -> None:
        """Gives each Node that the losses need its value, or the error that is raised if nobody accepts it."""
        needed = self._graph.needed(losses)
        for node in self._graph.nodes:
            self._order.append(node)
            if node not in needed:
                continue
            failed = next((v for v in map(self._values.get, node.inputs()) if isinstance(v, LossError)), None)
            try:
                self._values[node] = failed or self._visit(node)
            except LossError as error:
                self._values[node] = error

    def finished(self, losses: Sequence[Node], *, accept: bool) -> Reductions:
        """The result. accept: a loss that is not linear stays as it is and combines by rows."""
        results = [self._loss(node, accept) for node in losses]
        ends = dict(zip(losses, (loss.node for loss in results), strict=True))

        def rewritten(node: Node) -> Node:
            value = self._values.get(node)
            known = isinstance(value, _Value) and value.state in ("rows", "same")
            return ends.get(node) or (value.node if known else node)  # type: ignore[union-attr]

        output = _exchange(self._graph.output, rewritten)
        order = [*self._totals, *([self._share] if self._share else []), *self._order]
        kept = [node for node in order if node.kind == "module" or node.draws]
        superseded = {node for node, value in self._values.items() if isinstance(value, _Value) and value.node != node}
        whole_graph = Graph(order, output, self._graph.value, self._graph.ambient)
        live = whole_graph.needed([*nodes_in(output), *ends.values(), *(n for n in kept if n not in superseded)])
        whole_graph.nodes = [node for node in order if node in live]
        used = [(result, total) for result, total in zip(self._counts, self._totals, strict=True) if total in live]
        for number, (_, total) in enumerate(used):
            total.target = number
        return Reductions(whole_graph, tuple(self._count(order, result) for result, _ in used), tuple(results))

    def _count(self, order: list[Node], result: Node) -> Count:
        needed = self._graph.needed([result])
        return Count(tuple(node for node in order if node in needed), result)

    def _loss(self, node: Node, accept: bool) -> Loss:
        value = self._values[node]
        if isinstance(value, _Value) and value.state == "sum":
            return Loss(value.node, "sum")
        if isinstance(value, _Value) and value.state == "same":
            if value.own is not None:
                return Loss(value.own, "sum")
            return Loss(self._shared(value.node, node), "same")
        if accept:
            return Loss(node, "rows")
        if isinstance(value, LossError):
            raise value
        _refuse_lost(value.origin or node)

    # ---- one Node

    def _visit(self, node: Node) -> _Value:
        if node.kind not in ("call", "module"):
            return _Value("rows" if self._per_sample(node) else "same", node)
        operands = [self._of(source) for source in node.inputs()]
        states = {value.state for value in operands}
        if "sum" in states:
            return self._linear(node, operands)
        if not isinstance(node.value, Tensor):
            parts: Literal["rows", "lost", "same"] = (
                "rows" if "rows" in states else "lost" if "lost" in states else "same"
            )
            return _Value(parts, self._mapped(node), origin=next((v.origin for v in operands if v.origin), node))
        if "rows" in states:
            return self._of_rows(node)
        if "lost" in states:
            origin = next(value.origin for value in operands if value.origin)
            if node.value.dim() == 0:
                _refuse_lost(origin)
            return _Value("lost", self._mapped(node), origin=origin)
        return _Value("rows", self._mapped(node)) if self._per_sample(node) else self._of_same(node)

    def _of(self, node: Node) -> _Value:
        value = self._values[node]
        assert isinstance(value, _Value)
        return value

    def _per_sample(self, node: Node) -> bool:
        """Whether a tensor has entries for each sample."""
        if self._sizes is not None:
            return self._sizes.differ(node)
        return bool(node.kind in ("input", "module") and node.value.dim() > 0)

    def _of_same(self, node: Node) -> _Value:
        """Made of what is the same on all micro-batches; a number in it may be the batch's size."""
        if node.kind == "call" and node.value.dim() == 0 and node.target not in linear.ARITHMETIC:
            number, other = _number(node), _number(self._pair(node))
            if number is not None and other is not None and number != other:
                if node.target not in linear.MAKERS:
                    self._refuse_number(node, number, other)
                return _Value("same", self._grown(node, number, other))
        return _Value("same", self._mapped(node))

    def _of_rows(self, node: Node) -> _Value:
        """Made of what each sample has."""
        if node.kind == "module":
            kept = self._per_sample(node)
            return _Value("rows" if kept else "lost", self._mapped(node), origin=None if kept else node)
        if node.target in linear.LIKE and (node.value.dim() == 0 or (self._sizes and not self._per_sample(node))):
            return self._of_same(node)
        kept = self._per_sample(node) if self._sizes else node.value.dim() > 0
        if self._sizes is None and kept and node.target in linear.SUM | linear.MEAN and 0 in _dims(node):
            raise LossError(
                f"{_name(node)} over dimension 0 of shape {tuple(_first(node).value.shape)}: whether that is the batch "
                "cannot be told from one recording.",
                where=node.where,
                fix=_FIX,
            )
        if kept or node.target in linear.VIEW:
            return _Value("rows", self._mapped(node))
        return self._reduced(node)

    # ---- reductions over the batch

    def _reduced(self, node: Node) -> _Value:
        if node.target in linear.LOSSES and linear.reduction_of(node) != "none":
            return self._loss_function(node)
        dot = node.target in linear.DOT and node.value.dim() == 0
        if dot or node.target in linear.SUM | linear.COUNT | linear.MEAN:
            self._check_growth(node, _first(node).value.numel(), lambda pair: _first(pair).value.numel())
        if node.target in linear.SUM | linear.COUNT:
            return self._sum(node)
        if node.target in linear.MEAN:
            return self._mean(node)
        if dot:
            return _Value("sum", self._mapped(node), raw=True)
        source = _first(node)
        origin = node if isinstance(source, Node) and isinstance(source.value, Tensor) else source
        if node.value.dim() == 0:
            _refuse_lost(origin)
        return _Value("lost", self._mapped(node), origin=origin)

    def _sum(self, node: Node) -> _Value:
        own = self._mapped(node)
        if node.value.dim() > 0 or self._why_unknown(own) is not None:
            return _Value("sum", own, raw=True)
        return _Value("same", self._as_tensor(self._total(own, node), node), own=own)

    def _mean(self, node: Node) -> _Value:
        dtype = node.value.dtype
        numel = _first(node).value.numel() // max(node.value.numel(), 1)
        kwargs = dict(node.kwargs)
        if dtype in (torch.float16, torch.bfloat16):
            kwargs["dtype"] = torch.float32  # a sum in half precision overflows or loses its last terms
        batch_sum = self._made(node, torch.sum, node.args, kwargs)
        if node.value.dim() == 0 and self._why_unknown(batch_sum) is None:
            total = self._as_tensor(self._total(batch_sum, node), node)
            return _Value("same", self._call(node, over, (total, self._total(self._number(numel, node), node), dtype)))
        return _Value("sum", self._over(batch_sum, self._number(numel, node), node))

    def _loss_function(self, node: Node) -> _Value:
        arguments = linear.bound(node)
        reduction = arguments["reduction"]
        by = linear.divisor_of_mean(node)
        if isinstance(by, int):
            self._check_growth(node, by, _number_of_mean)
        else:
            first = next(iter(arguments))
            self._check_growth(
                node, arguments[first].value.numel(), lambda pair: linear.bound(pair)[first].value.numel()
            )
        if reduction == "sum":
            return _Value("sum", self._mapped(node), raw=True)
        if node.value.dtype in (torch.float16, torch.bfloat16):
            entries = self._made(node, node.target, (), arguments | {"reduction": "none"})
            batch_sum = self._call(node, torch.sum, (entries,), {"dtype": torch.float32})
        else:
            batch_sum = self._made(node, node.target, (), arguments | {"reduction": "sum"})
        count = self._number(by, node) if isinstance(by, int) else self._count_of(node, *by)
        return _Value("sum", self._over(batch_sum, count, node))

    def _count_of(self, node: Node, function: Callable[..., Any], args: tuple[Any, ...]) -> Node:
        return self._call(node, function, self._exchanged(args), value=None)

    def _over(self, batch_sum: Node, count: Node, node: Node) -> Node:
        return self._call(node, over, (batch_sum, self._total(count, node), node.value.dtype))

    def _check_growth(self, node: Node, size: int, of_pair: Callable[[Node], int]) -> None:
        """A reduction over what does not grow as the batch does mixes samples, or is over something else."""
        if self._sizes is None:
            return
        other = of_pair(self._pair(node))
        if size != self._sizes.ratio * other:
            ratio = self._sizes.ratio
            raise LossError(
                f"{_name(node)} is over {size} entries, but over {other} with {ratio.denominator}/{ratio.numerator} of "
                "the samples: not so many for each sample, so micro-batches cannot give the whole batch's value.",
                where=node.where,
                fix=_FIX,
            )

    # ---- what is done with sums

    def _linear(self, node: Node, operands: list[_Value]) -> _Value:
        sums = [value for value in operands if value.state == "sum"]
        mixed = next((value for value in operands if value.state in ("rows", "lost")), None)
        target = node.target if node.kind == "call" else None
        first = _first(node)
        if target in linear.LIKE:
            return self._of_same(node)
        if target in linear.CAST and isinstance(first, Node):  # what it is made like does not count
            state = self._of(first)
            if state.state == "sum" and not node.value.is_floating_point() and first.value.is_floating_point():
                self._refuse_nonlinear(node)
            return dataclasses.replace(state, node=self._mapped(node), own=None)
        if mixed is not None and (mixed.state == "lost" or self._grows(node)):
            if mixed.origin is not None:
                _refuse_lost(mixed.origin)
            raise LossError(
                f"{_name(node)} combines a sum over the batch with values of single samples, so that these depend on "
                "the other micro-batches.",
                where=node.where,
                fix=_FIX,
            )
        raw = any(value.raw for value in sums)
        if mixed is None and target is not None:
            if target in linear.JOINT:
                return _Value("sum", self._joint(node), raw=raw)
            if target in linear.PRODUCT and len(sums) == 1:
                return self._scaled(node, raw)
            if target in linear.DIVISION and not node.kwargs.get("rounding_mode"):
                if len(sums) == 1 and isinstance(first, Node) and self._of(first).state == "sum":
                    return self._scaled(node, raw)
                self._refuse_divisor(node)
            one = len(sums) == 1 and isinstance(first, Node) and self._of(first).state == "sum"
            if one and target in linear.UNARY | linear.SUM | linear.MEAN:
                return _Value("sum", self._mapped(node), raw=raw)
        self._refuse_nonlinear(node)

    def _grows(self, node: Node) -> bool:
        arithmetic = node.kind == "call" and node.target in linear.ARITHMETIC
        return arithmetic or self._sizes is None or self._per_sample(node)

    def _scaled(self, node: Node, raw: bool) -> _Value:
        """A sum times or over what is the same on all micro-batches."""
        numbers = [x for x in (*node.args, *node.kwargs.values()) if _is_number(x)]
        if raw and self._sizes is None and numbers:
            raise LossError(
                f"{_name(node)} of a sum over the batch with {numbers[0]:g}: whether that is a constant or the number "
                "of samples cannot be told from one recording.",
                where=node.where,
                fix=_FIX,
            )
        return _Value("sum", self._mapped(node), raw=raw)

    def _joint(self, node: Node) -> Node:
        """A sum of terms; what is the same on all micro-batches is counted once."""
        places, with_numbers = linear.JOINT[node.target]
        settled = self._settled(node)
        args, kwargs = list(settled[0]), dict(settled[1])

        def once(value: Any) -> Any:
            if isinstance(value, Node):
                known = self._values.get(value)
                if isinstance(known, _Value):
                    return known.node if known.state == "sum" else self._shared(known.node, node)
                return self._shared(value, node)
            if isinstance(value, (list, tuple)):
                return type(value)(once(entry) for entry in value)
            return self._shared(value, node) if with_numbers and _is_number(value) and value != 0 else value

        for place in places:
            if isinstance(place, int) and place < len(args):
                args[place] = once(args[place])
            elif isinstance(place, str) and place in kwargs:
                kwargs[place] = once(kwargs[place])
        return self._mapped(node, tuple(args), kwargs)

    # ---- errors

    def _refuse_nonlinear(self, node: Node) -> NoReturn:
        raise LossError(
            f"the loss goes through {_name(node)}, which is not linear in sums over the batch, so micro-batches cannot "
            "give the whole batch's value.",
            where=node.where,
            fix=_FIX,
        )

    def _refuse_divisor(self, node: Node) -> NoReturn:
        divisor = node.args[1] if len(node.args) > 1 else node.kwargs.get("other")
        why = self._why_unknown(self._of(divisor).node) if isinstance(divisor, Node) else None
        why = f"depends on {why}" if why else f"has shape {tuple(divisor.value.shape)}"
        raise LossError(
            f"{_name(node)} divides by a sum over the batch that {why}, so it is not known before the last micro-batch "
            "has run.",
            where=node.where,
            fix=_FIX,
        )

    def _refuse_number(self, node: Node, number: float, other: float) -> NoReturn:
        ratio = float(self._sizes.ratio) if self._sizes is not None else 1.0
        raise LossError(
            f"{_name(node)} takes the number {number:g}, which is {other:g} with {1 / ratio:g} times the samples: "
            "neither a constant nor a count of the samples.",
            where=node.where,
            fix=_FIX,
        )

    # ---- Nodes

    def _pair(self, node: Node) -> Node:
        return self._sizes.pairs[node] if self._sizes is not None else node

    def _call(self, like: Node, target: Callable[..., Any], args: Any, kwargs: Any = None, value: Any = ...) -> Node:
        """A new call in the place of another one."""
        value = like.value if value is ... else value
        made = {"kind": "call", "target": target, "args": args, "kwargs": kwargs or {}, "value": value}
        return self._add(dataclasses.replace(like, draws=False, writes=None, **made))

    def _add(self, node: Node) -> Node:
        self._order.append(node)
        return node

    def _mapped(self, node: Node, args: Any = None, kwargs: Any = None) -> Node:
        """The Node on rewritten Nodes; itself where nothing changes."""
        if args is None:
            args, kwargs = self._settled(node)
        args, kwargs = self._exchanged((args, kwargs))
        if list(nodes_in((args, kwargs))) == list(node.inputs()):
            return node
        return self._made(node, linear.OUT_OF_PLACE.get(node.target, node.target), args, kwargs)

    def _made(self, node: Node, target: Any, args: Any, kwargs: Any) -> Node:
        """A call of another function, or with other arguments, in the place of a Node."""
        args, kwargs = self._exchanged((args, kwargs))
        return self._add(dataclasses.replace(node, target=target, args=args, kwargs=kwargs))

    def _exchanged(self, nest: Any) -> Any:
        def rewritten(source: Node) -> Node:
            value = self._values.get(source)
            return value.node if isinstance(value, _Value) else source

        return _exchange(nest, rewritten)

    def _settled(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with the total in the place of a number that grows as the batch does."""
        if self._sizes is None or node.kind != "call" or node.target not in linear.ARITHMETIC:
            return node.args, node.kwargs
        pair = self._pair(node)

        def settled(mine: Any, theirs: Any) -> Any:
            if _is_number(mine) and _is_number(theirs) and mine != theirs:
                return self._grown(node, mine, theirs)
            return mine

        args = tuple(settled(mine, theirs) for mine, theirs in zip(node.args, pair.args, strict=True))
        return args, {name: settled(mine, pair.kwargs[name]) for name, mine in node.kwargs.items()}

    def _grown(self, node: Node, number: float, other: float) -> Node:
        """The whole batch's value of a number that was another at another batch size."""
        ratio = float(self._sizes.ratio) if self._sizes is not None else 1.0
        if math.isclose(number, ratio * other, rel_tol=1e-9):
            return self._as_tensor(self._total(self._number(number, node), node), node)
        if number and math.isclose(number * ratio, other, rel_tol=1e-9):
            inverse = self._as_tensor(self._total(self._number(1 / number, node), node), node)
            return self._call(node, torch.reciprocal, (inverse,))
        self._refuse_number(node, number, other)

    def _number(self, number: float, node: Node) -> Node:
        return self._add(Node("constant", number, value=number, where=node.where, stage=node.stage))

    def _as_tensor(self, total: Node, node: Node) -> Node:
        dtype = node.value.dtype
        dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        return self._call(node, whole, (total, dtype, node.value.device))

    def _shared(self, value: Any, node: Node) -> Node:
        if self._share is None:
            self._share = Node("count", "share")
        return self._call(node, shared, (value, self._share), value=value.value if isinstance(value, Node) else None)

    def _total(self, result: Node, node: Node) -> Node:
        """A new count, and its Node."""
        why = self._why_unknown(result)
        if why is not None:
            raise LossError(
                f"the count that {_name(node)} divides by depends on {why}, so it is not known before the first "
                "micro-batch runs.",
                where=node.where,
                fix=_FIX,
            )
        self._counts.append(result)
        self._totals.append(Node("count", len(self._totals)))
        return self._totals[-1]

    def _why_unknown(self, result: Node) -> str | None:
        """What keeps a value from being known before the first micro-batch, or None."""
        needed = self._graph.needed([result])
        kinds = {node.kind for node in needed}
        if any(node.draws and node.kind == "call" for node in needed):
            return "random numbers"
        if "module" in kinds or {"parameter", "input"} <= kinds:
            return "activations"
        return "parameters" if "parameter" in kinds else "another count" if "count" in kinds else None


def _refuse_lost(origin: Node) -> NoReturn:
    raise LossError(
        f"{_name(origin)} makes a value of the whole batch that is not a sum or a mean over its samples, so "
        "micro-batches cannot give it.",
        where=origin.where,
        fix=_FIX,
    )


# ---- nests


def _exchange(value: Any, change: Callable[[Node], Any]) -> Any:
    """The nest with each Node exchanged; objects that hold Nodes stay to be made."""
    if isinstance(value, Node):
        return change(value)
    if isinstance(value, Made):
        return Made(value.cls, {name: _exchange(part, change) for name, part in value.fields.items()})
    if type(value) is dict:
        return {key: _exchange(part, change) for key, part in value.items()}
    if type(value) is slice:
        return slice(*(_exchange(part, change) for part in (value.start, value.stop, value.step)))
    if isinstance(value, (tuple, list)):
        parts = [_exchange(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _name(node: Node) -> str:
    return f"{str(getattr(node.target, '__name__', node.target)).strip('_')}()" if node.kind == "call" else node.name


def _first(node: Node) -> Any:
    """A call's first argument."""
    return next(iter((*node.args, *node.kwargs.values())), None)


def _dims(node: Node) -> Iterable[int]:
    """The dimensions that a sum or a mean names, from the front."""
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis"))
    dims = (dims,) if isinstance(dims, int) else dims or ()
    return [dim % _first(node).value.dim() for dim in dims]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(node: Node) -> float | None:
    """The Python number that a tensor is made of."""
    return next((x for x in (*node.args, *node.kwargs.values()) if _is_number(x)), None)


def _number_of_mean(node: Node) -> int:
    by = linear.divisor_of_mean(node)
    return by if isinstance(by, int) else 0
