"""Calls of modules and of custom autograd.Functions, led through a recorder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["patched"]

Call = Callable[[Callable[..., Any], nn.Module, Any, Any], Any]
Apply = Callable[[type[torch.autograd.Function], Callable[..., Any], Any], Any]


@contextlib.contextmanager
def patched(root: nn.Module, call: Call, apply: Apply) -> Iterator[None]:
    """While it lasts, a module of `root` runs call(its class's own __call__, module, args, kwargs), and an
    autograd.Function apply(function, its own apply, args)."""
    classes = {
        cls
        for module in root.modules()
        for cls in type(module).__mro__
        if "__call__" in vars(cls) and issubclass(cls, nn.Module)
    }
    calls = {cls: vars(cls)["__call__"] for cls in classes}
    plain = vars(torch.autograd.Function)["apply"]

    def through(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda module, *args, **kwargs: call(original, module, args, kwargs)

    def apply_through(function: Any, *args: Any) -> Any:
        return apply(function, plain.__get__(None, function), args)

    try:
        for cls, original in calls.items():
            cls.__call__ = through(original)  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(apply_through)  # type: ignore[assignment, method-assign]
        yield
    finally:
        torch.autograd.Function.apply = plain  # type: ignore[method-assign]
        for cls, original in calls.items():
            cls.__call__ = original  # type: ignore[method-assign]
