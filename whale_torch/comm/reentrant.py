"""Reentrant checkpoints (torch.utils.checkpoint with use_reentrant=True).

Their forward runs without a graph, and once more inside backward, when the model's forward is long over.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from whale_torch.comm.columns import Columns, plain, register_function, user_site
from whale_torch.errors import LossError

__all__ = ["refuse_reentrant"]

_FORWARD = CheckpointFunction.forward.__code__


def refuse_reentrant() -> None:
    """Called by a loss without a graph. Raises LossError inside a reentrant checkpoint's forward.

    There the loss would be taken again within backward, when no forward says any more what it weighs.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code is _FORWARD:
            raise LossError(
                "a loss inside a checkpoint with use_reentrant=True: its gradient could not be weighed.",
                where=user_site(),
                fix="torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or take the loss outside of it",
            )
        frame = frame.f_back


@register_function(torch.autograd.backward)
def _backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A checkpoint's own backward: it hands on gradients of shards, which a split's output is given by the graph."""
    tensors = kwargs.get("tensors", args[0] if args else None)
    grads = kwargs.get("grad_tensors", args[1] if len(args) > 1 else None)
    if not isinstance(tensors, (list, tuple)) or not isinstance(grads, (list, tuple)):
        return NotImplemented
    with torch.enable_grad():
        shards = [plain(x) if isinstance(x, Columns) else x for x in tensors]
    if any(g is None or g.shape != x.shape for x, g in zip(shards, grads, strict=True)):
        return NotImplemented
    rest = {key: value for key, value in kwargs.items() if key not in ("tensors", "grad_tensors")}
    return func(shards, grads, *args[2:], **rest)
