"""Values of states as JSON, and back: what Python's state_dicts hold beside tensors, and nothing that runs code."""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from whale_torch.comm.absent import Placed
from whale_torch.errors import CheckpointError

__all__ = ["KINDS", "decode", "encode", "not_dense", "tensors_in"]

_KIND = "__kind__"
_LISTS = {"tuple": tuple, "set": set, "frozenset": frozenset}
_DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_FACTORIES: dict[str, Callable[[], Any]] = {f.__name__: f for f in (int, float, str, list, dict, set)}
KINDS = frozenset({*_LISTS, *_DICTS, "defaultdict", "float", "dtype", "bytes", "numpy", "tensor"})
"""What a value that JSON does not have is written as."""


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON holds it; tensors in it go to `tensors`, under the path that they have in it.

    Raises CheckpointError for what is no plain data, named by its path.
    """
    try:
        return _encode(value, path, tensors, set())
    except RecursionError:
        raise CheckpointError(f"'{path}' is nested too deep to be written.", fix="flatten it") from None


def _encode(value: Any, path: str, tensors: dict[str, Tensor], around: set[int]) -> Any:
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_KIND: "float", "value": repr(float(value))}
    if isinstance(value, Tensor):
        return _tensor(value, path, tensors)
    if isinstance(value, torch.dtype):
        return {_KIND: "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, bytes | bytearray):
        return {_KIND: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple | set | frozenset | Mapping):
        if id(value) in around:
            raise CheckpointError(f"'{path}' holds itself.", fix="break the circle")
        return _nest(value, path, tensors, around | {id(value)})
    if type(value).__module__ == "numpy":
        return _of_numpy(value, path, tensors)
    raise _refused(path, value)


def _tensor(value: Tensor, path: str, tensors: dict[str, Tensor]) -> dict[str, str]:
    if isinstance(value, Placed):
        raise CheckpointError(
            f"'{path}' is one rank's part of '{value.place.name}'.",
            fix="give the module that holds it: wh.save(..., name=module)",
        )
    what = not_dense(value)
    if what is not None:
        raise CheckpointError(f"'{path}' is {what}.", fix="a dense tensor with values")
    while path in tensors:  # {"a/b": x, "a": {"b": y}}
        path += "'"
    tensors[path] = value.detach().resolve_conj().resolve_neg()
    return {_KIND: "tensor", "key": path}


def not_dense(value: Tensor) -> str | None:
    """What keeps a tensor's own memory from being its values, None for nothing."""
    if value.is_meta:
        return "on the meta device, without values"
    if value.is_quantized or value.is_nested:
        return "quantized" if value.is_quantized else "nested"
    if value.layout is not torch.strided:
        return f"{value.layout}, not dense"
    if type(value.as_subclass(Tensor)) is not Tensor:
        return f"a {type(value).__name__}, which has no memory of its own"
    return None


def _nest(value: Any, path: str, tensors: dict[str, Tensor], around: set[int]) -> Any:
    def each(values: Any) -> list[Any]:
        return [_encode(one, f"{path}/{index}", tensors, around) for index, one in enumerate(values)]

    if type(value) is list:
        return each(value)
    if type(value) in (tuple, torch.Size):
        return {_KIND: "tuple", "value": each(value)}
    if type(value) in (set, frozenset):
        return {_KIND: type(value).__name__, "value": each(sorted(value, key=repr))}
    if not isinstance(value, Mapping):
        raise _refused(path, value)
    kind: dict[str, Any] = {_KIND: "dict"}
    if type(value) is defaultdict:
        factory = value.default_factory
        if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
            raise _refused(path, value)
        kind = {_KIND: "defaultdict", "factory": None if factory is None else factory.__name__}
    elif type(value) in (OrderedDict, Counter):
        kind = {_KIND: "ordered" if type(value) is OrderedDict else "counter"}
    elif all(isinstance(key, str) for key in value) and _KIND not in value:
        return {str(key): _encode(one, f"{path}/{key}", tensors, around) for key, one in value.items()}
    pairs = [[_encode(x, f"{path}/{key}", tensors, around) for x in (key, one)] for key, one in value.items()]
    return {**kind, "value": pairs}


def _of_numpy(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if not hasattr(value, "dtype"):
        raise _refused(path, value)
    if type(value).__name__ not in ("ndarray", "memmap"):
        number = value if hasattr(value, "__array_finalize__") else value.item()
        if type(number).__module__.partition(".")[0] == "numpy":  # a matrix, say, or more than a float holds
            raise _refused(path, value)
        return _encode(number, path, tensors, set())
    try:
        made = torch.from_numpy(value.copy())
    except (TypeError, ValueError):  # ValueError: of another byte order
        raise _refused(path, value) from None
    return {_KIND: "numpy", "value": _tensor(made, path, tensors)}


def _refused(path: str, value: Any) -> CheckpointError:
    of = f" of {value.dtype}" if type(value).__name__ == "ndarray" else ""
    return CheckpointError(
        f"'{path}' is a {type(value).__name__}{of}, which cannot be written without pickle.",
        fix="numbers, strings, bytes, lists, tuples, sets, dicts, tensors and arrays; turn it into those",
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `encode` was given. Raises CheckpointError for what `encode` does not make."""
    try:
        return _decode(value, tensors)
    except RecursionError:
        raise CheckpointError("a value of the checkpoint is nested too deep to be read.") from None


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: _decode(one, tensors) for key, one in value.items()}
    try:
        return _of_kind(value[_KIND], value, tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"a value of the checkpoint is none that is written here: kind {value[_KIND]!r:.60}, "
            f"{type(error).__name__}: {error!s:.80}.",
            fix="load another checkpoint",
        ) from error


def _of_kind(kind: Any, value: dict[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    if kind == "tensor":
        return tensors[value["key"]]
    held = value["value"]
    if kind in _LISTS:
        return _LISTS[kind](_decode(_is(list, held), tensors))
    if kind in _DICTS or kind == "defaultdict":
        pairs = [(_decode(k, tensors), _decode(v, tensors)) for k, v in _is(list, held)]
        if kind == "counter":
            return Counter(dict(pairs))
        if kind != "defaultdict":
            return _DICTS[kind](pairs)
        name = value["factory"]
        return defaultdict(None if name is None else _FACTORIES[name], pairs)
    if kind == "float":
        return float(_is(str, held))
    if kind == "dtype":
        return _is(torch.dtype, getattr(torch, _is(str, held)))
    if kind == "bytes":
        return base64.b64decode(_is(str, held), validate=True)
    if kind == "numpy":
        return _is(Tensor, _decode(held, tensors)).numpy()
    raise ValueError("not known")


def _is(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} for {kind.__name__}")
    return value


def tensors_in(value: Any) -> Iterator[str]:
    """The keys of the tensors in an encoded value."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            key = one.get("key")
            if one.get(_KIND) == "tensor" and isinstance(key, str):
                yield key
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
