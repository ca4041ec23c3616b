"""What of a Python value a recording may depend on, as something that can be compared."""

from __future__ import annotations

import contextlib
import enum
import functools
import types
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from whale_torch.trace.graph import PLAIN

__all__ = ["frozen"]

_MOST = 10_000
"""Parts of a value that are looked at."""


def frozen(value: Any, *, objects: bool = True) -> Any:
    """The form of a value, hashable: of tensors shape and dtype, of modules nothing. objects: also what they hold."""
    return _Form(objects).of(value)


class _Form:
    def __init__(self, objects: bool):
        self._objects, self._left = objects, _MOST
        self._around: set[int] = set()

    def of(self, value: Any) -> Any:
        if isinstance(value, float):
            return float, repr(value)  # equal to itself where it is no number
        if isinstance(value, (*PLAIN, enum.Enum)):
            return type(value), value
        if isinstance(value, Tensor):
            return "tensor", tuple(value.shape), value.dtype
        self._left -= 1
        if isinstance(value, nn.Module) or id(value) in self._around or self._left < 0:
            return None
        self._around.add(id(value))
        try:
            return type(value), self._inside(value)
        finally:
            self._around.discard(id(value))

    def _inside(self, value: Any) -> Any:
        if isinstance(value, (tuple, list, deque)):
            return tuple(map(self.of, value))
        if isinstance(value, dict):
            return tuple((key, self.of(item)) for key, item in value.items())
        if isinstance(value, (set, frozenset)):
            return frozenset(value)
        if hasattr(value, "__array_interface__") and hasattr(value, "tobytes"):  # numpy's
            bits = repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
            return value.shape, value.dtype.str, zlib.crc32(bits)
        if isinstance(value, types.FunctionType):
            return id(value), self.of(value.__defaults__), tuple(map(self.of, _cells(value)))
        if isinstance(value, types.BuiltinFunctionType):
            return id(value)
        if not self._objects:
            return None
        if isinstance(value, functools.partial):
            return self.of(value.func), self.of(value.args), self.of(value.keywords)
        if isinstance(value, types.MethodType):
            return self.of(value.__func__), self.of(value.__self__)
        parts = list(_attributes(value))
        return tuple((key, self.of(item)) for key, item in parts) if parts else repr(value)


def _cells(function: types.FunctionType) -> Iterator[Any]:
    """What a function closes over."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # nothing yet
            yield cell.cell_contents


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)
