"""Pickles that others wrote, read without running what they name: known classes are records, the rest is refused."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from whale_torch.errors import CheckpointError

__all__ = ["Record", "RestrictedUnpickler", "read_pickle", "restricted"]


class Record:
    """Stands for an object of a class that is not imported: what it was made of, and its fields as attributes."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, Mapping):
                self.__dict__.update(part)
        self.__dict__.setdefault("arguments", state if isinstance(state, tuple) else ())

    def __getattr__(self, name: str) -> Any:
        raise CheckpointError(f"a {type(self).__name__} has no '{name}'.", fix="another version may have written it")


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f"'{name}' is no layout")
    return found


_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "bytearray"): bytearray,
    ("builtins", "complex"): complex,
    ("builtins", "slice"): slice,
    ("builtins", "list"): list,
    ("builtins", "dict"): dict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.serialization", "_get_layout"): _layout,
}


class RestrictedUnpickler(pickle.Unpickler):
    """Classes of `inert` modules and packages become Records; anything else but plain data raises UnpicklingError."""

    inert: Sequence[str] = ()
    further: Mapping[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        found = self.further.get((module, name), _PLAIN.get((module, name)))
        if found is not None:
            return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if any(module == one or module.startswith(f"{one}.") for one in self.inert):
            return type(name.rpartition(".")[2], (Record,), {})
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def restricted(*inert: str, further: Mapping[tuple[str, str], Any] | None = None) -> type[RestrictedUnpickler]:
    """An unpickler for which classes of these packages are records."""
    return type("Unpickler", (RestrictedUnpickler,), {"inert": inert, "further": further or {}})


def read_pickle(data: bytes, what: str, unpickler: Callable[[io.BytesIO], pickle.Unpickler]) -> Any:
    """What a pickle holds. Raises CheckpointError for what is none, or names anything else than was allowed."""
    try:
        return unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a hostile or broken pickle may raise anything
        raise CheckpointError(
            f"{what} holds more than it should, and reading it could run code, or it is damaged: "
            f"{type(error).__name__}: {error}.",
            fix="do not trust it, or write it again",
        ) from error
