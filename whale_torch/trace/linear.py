"""Which torch functions are linear in sums over the batch, and what the mean of each loss function divides by."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from whale_torch.trace.graph import Node, map_nodes

__all__ = [
    "ARITHMETIC",
    "CAST",
    "COUNT",
    "DIVISION",
    "DOT",
    "JOINT",
    "LIKE",
    "LOSSES",
    "MAKERS",
    "MEAN",
    "OUT_OF_PLACE",
    "PRODUCT",
    "SUM",
    "UNARY",
    "VIEW",
    "bound",
    "divisor_of_mean",
    "num_valid",
]

Function = Callable[..., Any]


def _named(names: str) -> frozenset[Function]:
    """The functions of these names in torch, of a tensor and among Python's operators."""
    spaces = (torch, Tensor, operator)
    found = (getattr(space, name, None) for name in names.split() for space in spaces)
    return frozenset(function for function in found if callable(function))


SUM = _named("sum")
COUNT = _named("count_nonzero")
MEAN = _named("mean")
DOT = _named("dot vdot inner matmul __matmul__")
"""Sums of products over what both tensors share."""

CAST = _named("to type type_as float double half bfloat16")
VIEW = CAST | _named(
    "clone contiguous detach squeeze unsqueeze view view_as reshape reshape_as flatten ravel transpose t permute "
    "movedim expand expand_as broadcast_to alias cpu cuda"
)
"""Every entry stays."""

UNARY = (
    VIEW
    | _named(
        "neg negative __neg__ neg_ positive __pos__ __getitem__ getitem select narrow index_select take unbind "
        "split chunk diagonal"
    )
    | {getattr}
)  # .T
"""Linear in the first argument."""

_SUMS = _named("add __add__ __radd__ __iadd__ add_ sub subtract __sub__ __rsub__ __isub__ sub_ rsub")
PRODUCT = DOT | _named("mul multiply __mul__ __rmul__ __imul__ mul_ mv mm")
DIVISION = _named("div divide true_divide __truediv__ __itruediv__ div_ truediv")
ARITHMETIC = _SUMS | PRODUCT | DIVISION | _named("__rdiv__ __rtruediv__ pow __pow__ __rpow__")
"""Where a Python number is a value, not a shape."""

JOINT: dict[Function, tuple[tuple[int | str, ...], bool]] = {
    **dict.fromkeys(_SUMS, ((0, 1, "input", "other"), True)),
    **dict.fromkeys(_named("where"), ((1, 2, "input", "other"), True)),
    **dict.fromkeys(_named("__setitem__"), ((0, 2), True)),
    **dict.fromkeys(_named("stack cat concat concatenate hstack vstack"), ((0, "tensors"), False)),
}
"""Linear in several arguments at once: which, and whether numbers among them count."""

LIKE = _named("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty new_tensor")
"""Made after a tensor's shape and type, whatever its entries."""

MAKERS = _named("tensor as_tensor scalar_tensor new_tensor full new_full")
"""A Python number becomes a tensor."""

OUT_OF_PLACE: dict[Function, Function] = {
    **dict.fromkeys(_named("__iadd__ add_"), torch.add),
    **dict.fromkeys(_named("__isub__ sub_"), torch.sub),
    **dict.fromkeys(_named("__imul__ mul_"), torch.mul),
    **dict.fromkeys(_named("__itruediv__ div_"), torch.div),
    **dict.fromkeys(_named("neg_"), torch.neg),
}

_LABELS = frozenset({F.cross_entropy, F.nll_loss})
_WEIGHTED = frozenset({F.mse_loss, F.l1_loss})  # their mean divides by the sum of the weights
LOSSES: frozenset[Function] = frozenset(
    {
        *_LABELS,
        *_WEIGHTED,
        *(F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss, F.poisson_nll_loss, F.gaussian_nll_loss, F.kl_div),
        *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.hinge_embedding_loss, F.margin_ranking_loss),
        *(F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.cosine_embedding_loss),
        *(F.triplet_margin_loss, F.triplet_margin_with_distance_loss),
    }
)
"""Loss functions whose mean is their sum over a count."""


def bound(node: Node) -> dict[str, Any]:
    """A loss function's arguments by name, without those that torch deprecated for `reduction`."""
    arguments = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    arguments.apply_defaults()
    found = dict(arguments.arguments)
    average, reduce = found.pop("size_average", None), found.pop("reduce", None)
    if average is not None or reduce is not None:
        found["reduction"] = "none" if reduce is False else "sum" if average is False else "mean"
    return found


def divisor_of_mean(node: Node) -> int | tuple[Function, tuple[Any, ...]]:
    """What a loss function's mean divides its sum by: a number of entries, or a function of Nodes with its arguments.

    source: torch.nn.functional; cross entropy and NLL count the labels that are not ignored, by the class weights.
    """
    arguments = bound(node)
    if node.target in _LABELS and not arguments["target"].value.is_floating_point():
        return num_valid, (arguments["target"], arguments["ignore_index"], arguments["weight"])
    if node.target in _WEIGHTED and arguments["weight"] is not None:
        return torch.sum, (arguments["weight"],)
    if arguments["reduction"] == "batchmean":
        return int(arguments["input"].value.size(0))
    if node.target is F.gaussian_nll_loss:  # reads values
        shapes = [arguments[name].value.shape for name in ("input", "target")]
        return int(torch.broadcast_shapes(*shapes).numel())
    values = map_nodes(arguments | {"reduction": "none"}, lambda source: source.value)
    with torch.no_grad():
        return int(node.target(**values).numel())


def num_valid(target: Tensor, ignore_index: int, weight: Tensor | None) -> Tensor:
    """Number of labels that are not ignored, each counted by its class's weight; 0-dim."""
    valid = target != ignore_index
    if weight is None:
        return valid.sum()
    return (weight[torch.where(valid, target, 0)] * valid).sum()
