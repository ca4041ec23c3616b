"""What of a recorded forward changes with the batch: two recordings at different batch sizes, compared."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from whale_torch.errors import LossError
from whale_torch.trace.graph import Graph, Node

__all__ = ["Sizes", "called", "differing_dims", "other_number"]

_PRIMES = (1009, 1013)


def other_number(rows: int) -> int:
    """Samples of a second recording: a prime, whose multiples no shape has by chance."""
    return next(prime for prime in _PRIMES if prime != rows)


def differing_dims(x: Tensor, y: Tensor) -> list[int]:
    """Along which dims two tensors of as many dims differ in length."""
    return [dim for dim, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)) if a != b]


@dataclass(frozen=True)
class Sizes:
    """Each Node's pair in a recording at another batch size, and how many times as many samples this one has."""

    pairs: dict[Node, Node]
    ratio: Fraction

    @staticmethod
    def of(graph: Graph, other: Graph) -> Sizes:
        """Raises LossError where the recordings make other calls, ValueError where their inputs have equal sizes."""
        for mine, theirs in zip(graph.nodes, other.nodes, strict=False):
            if not _alike(mine, theirs):
                raise LossError(
                    f"the forward calls {called(mine)} at one batch size and {called(theirs)} at another.",
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
                        return Sizes(pairs, Fraction(size, other_size))
        raise ValueError("the other recording has the same batch size")

    def differ(self, node: Node) -> bool:
        """Whether a tensor's shape changes with the batch."""
        return bool(node.value.shape != self.pairs[node].value.shape)


def _alike(mine: Node, theirs: Node) -> bool:
    same_target = mine.kind == "constant" or mine.target == theirs.target or called(mine) == called(theirs)
    same_names = len(mine.args) == len(theirs.args) and mine.kwargs.keys() == theirs.kwargs.keys()
    same_inputs = len([*mine.inputs()]) == len([*theirs.inputs()])
    return mine.kind == theirs.kind and same_target and same_names and same_inputs


def called(node: Node) -> str:
    """How messages call a Node, without the class of tensors that the function belongs to."""
    if node.kind != "call":
        return node.name
    function = getattr(node.target, "__self__", None)
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        return f"{function.__name__}.apply()"
    return f"{str(getattr(node.target, '__name__', node.target)).strip('_')}()"
