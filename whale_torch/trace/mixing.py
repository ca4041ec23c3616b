"""Glue that mixes samples gives something else on micro-batches: found by comparing two recordings' shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whale_torch.errors import TraceError
from whale_torch.trace.graph import Node
from whale_torch.trace.sizes import Sizes, called, differing_dims

__all__ = ["refuse_mixing"]

# Functions whose shapes do not tell along which dim they work: the place of `dim` among their arguments.
_ALONG: dict[Any, int] = {}
for _name in ("softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "argsort", "flip", "msort"):
    for _owner in (torch, Tensor, F):
        if hasattr(_owner, _name):
            _ALONG[getattr(_owner, _name)] = 1
for _owner in (torch, Tensor):
    _ALONG |= {_owner.roll: 2, _owner.cummax: 1, _owner.cummin: 1}
_ALONG |= {F.normalize: 2, F.softmin: 1, F.gumbel_softmax: 4}

_FRESH = (Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor)
"""Of what goes in they read dtype and device only."""


def refuse_mixing(nodes: Iterable[Node], sizes: Sizes) -> None:
    """Raises TraceError for an operation between stages in which samples meet: it loses the batch's dimension, has it
    twice, or works along it.

    nodes: those of the glue to look at. What happens inside modules is not seen.
    """
    for node in nodes:
        how = _how(node, sizes) if node.kind == "call" and node in sizes.pairs else ""
        if how:
            raise TraceError(
                f"{called(node)} between stages mixes samples: {how}, so a micro-batch would give something else than "
                "the whole batch.",
                where=node.where,
                fix='wh.pipeline(mixing="accept") if each micro-batch may do it for itself, else outside of the model',
            )


def _how(node: Node, sizes: Sizes) -> str:
    """How samples meet in a call; nothing where they do not."""
    if _works_along(node, sizes):
        return "it works along the batch's dimension"
    if not isinstance(node.value, Tensor) or node.target in _FRESH:
        return ""
    before, after = max((_count(source, sizes) for source in node.inputs()), default=0), _count(node, sizes)
    shape = tuple(node.value.shape)
    if before > 0 and after == 0 and shape:
        return f"its result of shape {shape} has lost the batch's dimension"
    return f"its result of shape {shape} has the batch's dimension twice" if after > max(before, 1) else ""


def _count(node: Node, sizes: Sizes) -> int:
    """How many dimensions of a value change with the batch; of several values that a call gave, what went in."""
    pair = sizes.pairs.get(node)
    if node.kind == "call" and isinstance(node.value, (tuple, list)):
        return max((_count(source, sizes) for source in node.inputs()), default=0)
    if pair is None or not isinstance(node.value, Tensor) or node.value.dim() != pair.value.dim():
        return 0
    return len(differing_dims(node.value, pair.value))


def _works_along(node: Node, sizes: Sizes) -> bool:
    place = _ALONG.get(node.target)
    if place is None or not node.args or not isinstance(node.args[0], Node):
        return False
    dims = node.kwargs.get("dim", node.kwargs.get("dims", node.args[place] if len(node.args) > place else None))
    source, pair = node.args[0].value, sizes.pairs[node.args[0]].value
    listed = dims if isinstance(dims, (tuple, list)) else [dims]
    return any(isinstance(dim, int) and source.shape[dim] != pair.shape[dim] for dim in listed)
