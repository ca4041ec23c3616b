"""The model's own class after parallelize: the same name, the same signature, a forward that counts rows and weighs outputs."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from torch import nn

from whale_torch.strategies.runtime import KEY, Runtime, runtime_of

__all__ = ["make_root"]


@functools.cache
def _root_class(base: type[nn.Module]) -> type[nn.Module]:
    original = base.forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[KEY].run(original, self, args, kwargs)

    def no_sync(self: nn.Module) -> contextlib.AbstractContextManager[None]:
        """As whale_torch.no_sync(model)."""
        return runtime_of(self, "no_sync").no_sync()

    def reduce_ex(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        return _rebuild, (base,), {k: v for k, v in self.__dict__.items()}

    def get_name(self: nn.Module) -> str:
        return base._get_name(self) if base._get_name is not nn.Module._get_name else base.__name__

    body = {
        "forward": forward, "no_sync": no_sync, "__reduce_ex__": reduce_ex, "_get_name": get_name,
        "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__,
    }  # fmt: skip
    return type(base.__name__, (base,), body)


def _rebuild(base: type[nn.Module]) -> nn.Module:
    swapped = _root_class(base)
    model: nn.Module = swapped.__new__(swapped)
    return model


def make_root(model: nn.Module, runtime: Runtime) -> None:
    """Lets the model's forward run under its runtime."""
    model.__dict__[KEY] = runtime
    model.__class__ = _root_class(type(model))
