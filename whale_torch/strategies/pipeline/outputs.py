"""What a pipelined model returns: numbers, of which each micro-batch gives a part, and in training placeholders for the
rest.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NoReturn

from torch import Tensor

from whale_torch.errors import LayoutError, LossError, TraceError
from whale_torch.trace.graph import Graph, Made, Node, is_scalar, like_dict, map_nodes

__all__ = ["Placeholder", "losses_of", "numbers_of", "numbers_that_grow", "training_results"]


class Placeholder:
    """Stands for an output of a pipelined model in training that is no scalar: its rows lie on the last stage only."""

    def __init__(self, shape: tuple[int, ...]):
        object.__setattr__(self, "_shape", shape)

    def __repr__(self) -> str:
        return f"Placeholder(an output of shape {self._shape} that stays on a pipeline's last stage)"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise LayoutError(
            f"an output of shape {self._shape} of a pipelined model was used; in training a pipeline with its loss "
            "inside returns scalars only.",
            fix="evaluate (model.eval(), torch.no_grad()) to get it, or return only it and take the loss outside",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __int__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __neg__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next(value for value in args if isinstance(value, cls))
        first._refuse()


def losses_of(graph: Graph) -> tuple[Node | None, list[Node]]:
    """The loss of a recorded forward, None where it returns none, and all its floating-point scalars.

    The loss is the field or key `loss` of what the model returns, else its only differentiable scalar.
    Raises LossError where several could be it.
    """
    scalars = graph.scalars
    candidates = [node for node in scalars if node.value.requires_grad]
    if not candidates:
        return None, scalars
    named = _named_loss(graph.output)
    if named in candidates:
        return named, scalars
    if len(candidates) > 1:
        raise LossError(
            f"the model returns {len(candidates)} differentiable scalars and calls none of them `loss`.",
            where=candidates[1].where,
            fix="return one of them, their sum, or a dict or dataclass with a `loss`",
        )
    return candidates[0], scalars


def numbers_of(graph: Graph) -> list[Node]:
    """The numbers that a model returns, of which each micro-batch gives a part."""
    return [node for node in graph.returned if isinstance(node.value, Tensor) and node.value.dim() == 0]


def training_results(output: Any) -> Any:
    """The nest that a model returns, with Nodes for its scalars and placeholders for its other tensors."""

    def told(node: Node) -> Any:
        kept = is_scalar(node.value) or not isinstance(node.value, Tensor)
        return node if kept else Placeholder(tuple(node.value.shape))

    return map_nodes(output, told, make=False)


def _named_loss(output: Any) -> Node | None:
    fields = output.fields if isinstance(output, Made) else output if isinstance(output, dict) else {}
    found = fields.get("loss")
    return found if isinstance(found, Node) else None


def numbers_that_grow(output: Any, other: Any, rows: int, other_rows: int) -> tuple[Any, dict[Node, Fraction]]:
    """What the model returns, with a Node for each Python number that counts samples, and how many it is for each.

    output, other: of recordings of so many rows. Raises TraceError for a number that is neither a constant nor so many
    for each sample.
    """
    found: dict[Node, Fraction] = {}

    def walk(mine: Any, theirs: Any) -> Any:
        if isinstance(mine, Node) or type(mine) is not type(theirs):
            return mine
        if isinstance(mine, Made):
            return Made(mine.cls, {name: walk(part, theirs.fields.get(name)) for name, part in mine.fields.items()})
        if isinstance(mine, dict):
            return like_dict(mine, {key: walk(part, theirs.get(key)) for key, part in mine.items()})
        if isinstance(mine, (tuple, list)):
            items = [walk(*pair) for pair in zip(mine, theirs, strict=False)]
            if len(items) != len(mine):
                return mine
            return type(mine)(*items) if hasattr(mine, "_fields") else type(mine)(items)
        if not isinstance(mine, (int, float)) or isinstance(mine, bool) or mine == theirs or mine != mine:
            return mine
        number = Node("constant", mine, value=mine)
        found[number] = Fraction(mine) / rows
        if found[number] * other_rows != Fraction(theirs):
            raise TraceError(
                f"the model returns the number {mine:g} for {rows} samples, which is not so many for each of them.",
                fix="return tensors, or numbers that do not depend on how many samples there are",
            )
        return number

    return walk(output, other), found
