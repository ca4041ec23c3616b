"""Tensors inside whatever a model takes and returns: nested containers, mappings, dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from whale_torch.errors import LayoutError

__all__ = ["map_tensors", "tensors_in"]

_LEAVES = (type(None), bool, int, float, complex, str, bytes)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a nest of tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest with each tensor changed; containers keep their types.

    Raises LayoutError for an object it cannot look into, since a tensor inside would miss its weight.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, _LEAVES):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: map_tensors(getattr(value, f.name), change) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **changed)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(v, change) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(v, change) for v in value)
    if isinstance(value, dict):
        changed = {k: map_tensors(v, change) for k, v in value.items()}
        return changed if type(value) is dict else type(value)(changed)
    if not _needs_gradient(value, set()):
        return value
    raise LayoutError(
        f"the model returned a {type(value).__name__}, which holds tensors with a gradient that cannot be reached.",
        fix="return tensors, tuples, lists, dicts or dataclasses of them; a transformers model returns no cache with use_cache=False",
    )


def _needs_gradient(value: Any, seen: set[int]) -> bool:
    """Whether an object, looked into through its attributes and containers, holds a tensor that requires a gradient."""
    if id(value) in seen or isinstance(value, _LEAVES):
        return False
    seen.add(id(value))
    if isinstance(value, Tensor):
        return value.requires_grad
    inner: list[Any] = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, Mapping):
        inner += value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner += value
    return any(_needs_gradient(item, seen) for item in inner)
