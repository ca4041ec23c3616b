"""Values of states as JSON, and back: what Python's state_dicts hold beside tensors, and nothing that runs code."""

from __future__ import annotations

import base64
import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from whale_torch.errors import CheckpointError

__all__ = ["decode", "encode"]

_KIND = "__kind__"


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON holds it; tensors in it go to `tensors`, under the path that they have in it.

    Raises CheckpointError for what is no plain data, named by its path.
    """
    if value is None or isinstance(value, bool | str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_KIND: "float", "value": repr(value)}
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {_KIND: "tensor", "key": path}
    if isinstance(value, torch.dtype):
        return {_KIND: "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, bytes | bytearray):
        return {_KIND: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [encode(one, f"{path}/{index}", tensors) for index, one in enumerate(value)]
    if isinstance(value, tuple | set | frozenset):
        kind = "tuple" if isinstance(value, tuple) else "set"
        listed = list(value) if kind == "tuple" else sorted(value, key=repr)
        return {_KIND: kind, "value": [encode(one, f"{path}/{index}", tensors) for index, one in enumerate(listed)]}
    if isinstance(value, Mapping):
        plain = isinstance(value, dict | OrderedDict | defaultdict) or type(value).__name__ == "mappingproxy"
        if plain and all(isinstance(key, str) for key in value) and _KIND not in value:
            return {key: encode(one, f"{path}/{key}", tensors) for key, one in value.items()}
        pairs = [[encode(k, f"{path}/{k}", tensors), encode(v, f"{path}/{k}", tensors)] for k, v in value.items()]
        return {_KIND: "dict", "value": pairs}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of numpy
        return encode(value.item(), path, tensors)
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        return {_KIND: "numpy", "value": encode(torch.from_numpy(value.copy()), path, tensors)}
    raise CheckpointError(
        f"'{path}' is a {type(value).__name__}, which cannot be written without pickle.",
        fix="numbers, strings, bytes, lists, tuples, sets, dicts, tensors and arrays; turn it into those",
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `encode` was given."""
    if isinstance(value, list):
        return [decode(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: decode(one, tensors) for key, one in value.items()}
    if kind == "tensor":
        return tensors[value["key"]]
    held = value["value"]
    if kind == "float":
        return float(held)
    if kind == "dtype":
        return getattr(torch, held)
    if kind == "bytes":
        return base64.b64decode(held)
    if kind == "numpy":
        return decode(held, tensors).numpy()
    if kind == "dict":
        return {_hashable(decode(k, tensors)): decode(v, tensors) for k, v in held}
    found = [decode(one, tensors) for one in held]
    return tuple(found) if kind == "tuple" else set(found)


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
