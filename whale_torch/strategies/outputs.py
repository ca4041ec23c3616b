"""Tensors inside whatever a model takes and returns: nested containers, mappings, dataclasses, plain objects."""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set, ValuesView
from typing import Any

import torch
from torch import Tensor, nn

from whale_torch.errors import LayoutError

__all__ = ["PARTS", "is_array", "leaves_in", "map_tensors", "tensors_in"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size)
_CLOSED = (
    *(enum.Enum, type, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, nn.Module),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, range, slice),
)  # fmt: skip
"""What holds no output of a forward, or keeps it to itself."""
PARTS = "_whale_parts"
"""An attribute of objects whose tensors are this rank's parts only: no input that ranks could compare."""

_SEQUENCES = (tuple, list, Set, ValuesView, deque)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a nest of tuples, lists, mappings, dataclasses and plain objects, in order."""
    return (leaf for leaf in leaves_in(value) if isinstance(leaf, Tensor))


def leaves_in(value: Any) -> Iterator[Any]:
    """Every tensor and numpy array in such a nest, and every number and text that is not an object's own affair."""
    return _leaves(value, frozenset(), True)


def is_array(value: Any) -> bool:
    """Whether it is a numpy array or a number of one."""
    return type(value).__module__ == "numpy" and hasattr(value, "__array_interface__")


def _leaves(value: Any, above: frozenset[int], plain: bool) -> Iterator[Any]:
    if isinstance(value, Tensor) or (plain and isinstance(value, _PLAIN)) or is_array(value):
        yield value
        return
    if isinstance(value, (*_PLAIN, *_CLOSED)) or id(value) in above or PARTS in getattr(value, "__dict__", {}):
        return
    if type(value) is tuple and all(isinstance(item, Tensor) for item in value):
        yield from value
        return
    inside = above | {id(value)}
    if isinstance(value, Mapping):
        items: Iterable[Any] = value.values()
    elif isinstance(value, _SEQUENCES):
        items = value
    else:
        items, plain = _fields(value).values(), plain and dataclasses.is_dataclass(value)
    for item in items:
        yield from _leaves(item, inside, plain)


def _fields(value: Any) -> dict[str, Any]:
    """The attributes of an object that are its own."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)
        }
    slots = [name for kind in type(value).__mro__ for name in _slot_names(kind)]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | dict(getattr(value, "__dict__", {}))


def _slot_names(kind: type) -> tuple[str, ...]:
    names = kind.__dict__.get("__slots__", ())
    return (
        (names,) if isinstance(names, str) else tuple(name for name in names if name not in ("__dict__", "__weakref__"))
    )


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest with each tensor changed; containers and objects keep their types, and stay if nothing changed.

    Raises LayoutError for an iterator, and for a set, deque or view with tensors: they would miss their weight.
    """
    return _map(value, change, {})


def _map(value: Any, change: Callable[[Tensor], Tensor], done: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, _PLAIN) or isinstance(value, _CLOSED):
        return value
    if id(value) not in done:
        done[id(value)] = value  # an object that holds itself is met again inside
        done[id(value)] = _map_inside(value, change, done)
    return done[id(value)]


def _map_inside(value: Any, change: Callable[[Tensor], Tensor], done: dict[int, Any]) -> Any:
    if isinstance(value, (tuple, list)):
        items = [_map(item, change, done) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict) and not dataclasses.is_dataclass(value):
        changed = {key: _map(item, change, done) for key, item in value.items()}
        if all(changed[key] is value[key] for key in changed):
            return value
        out = copy.copy(value)
        out.update(changed)
        return out
    if isinstance(value, Iterator) or (isinstance(value, _SEQUENCES) and any(True for _ in tensors_in(value))):
        raise LayoutError(
            f"the model took or returned a {type(value).__name__}, which may hold tensors that cannot be reached.",
            fix="use tensors, or tuples, lists, dicts, dataclasses or plain objects of them",
        )
    before = _fields(value)
    after = {name: _map(item, change, done) for name, item in before.items()}
    changed = {name: item for name, item in after.items() if item is not before[name]}
    if not changed:
        return value
    out = copy.copy(value)
    for name, item in changed.items():
        _set(out, name, item)
    return out


def _set(target: Any, name: str, item: Any) -> None:
    if dataclasses.is_dataclass(target) and getattr(target, "__dataclass_params__").frozen:  # noqa: B009
        object.__setattr__(target, name, item)
    else:
        setattr(target, name, item)
