"""Hooks on gradients that keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from whale_torch.comm.registry import place_of
from whale_torch.errors import LossError

__all__ = ["on_gradient"]


def on_gradient(leaf: torch.Tensor, method: Callable[..., None], *first: Any) -> RemovableHandle:
    """Calls method(*first, leaf) whenever a gradient is in leaf.grad; the method's object is held weakly.

    torch keeps hooks where the garbage collector does not look: one that reaches its own leaf would keep both for ever.
    The hook raises LossError for a gradient that comes when the method's object, and with it the model, is gone.
    """
    held = weakref.WeakMethod(method)

    def hook(leaf: torch.Tensor) -> None:
        alive = held()
        if alive is None:
            place = place_of(leaf)
            raise LossError(
                f"a gradient came for '{place.name if place else 'a parameter'}', but the parallelized model it "
                "belongs to is gone: nothing averages it over ranks.",
                fix="keep the model that wh.parallelize returned as long as a part of it trains",
            )
        alive(*first, leaf)

    handle: RemovableHandle = leaf.register_post_accumulate_grad_hook(hook)
    return handle
