"""Plain weights at build: a state dict of one process, checked against the model before anything changes."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from whale_torch.checkpoint.safetensors import SafeTensors, is_safetensors
from whale_torch.comm.cut_tensor import CutTensor
from whale_torch.errors import CheckpointError

__all__ = ["Weights", "load_weights", "read_weights"]

Weights = Mapping[str, Any] | str | os.PathLike[str]

_MOST = 5  # names an error lists


def read_weights(weights: Weights, model: nn.Module) -> Mapping[str, Any]:
    """The state dict itself, or that in a file of torch.save or safetensors, whose tensors stay on disk until they are
    read.

    A name that is missing has the values of one that shares its tensor: safetensors write ties once.
    Raises CheckpointError where names or shapes differ from the model's.
    """
    if not isinstance(weights, Mapping):
        weights = _opened(weights)
        if not isinstance(weights, Mapping):
            raise CheckpointError(
                f"the file given as weights holds a {type(weights).__name__}, not a state dict.",
                fix="write it with torch.save(model.state_dict(), path)",
            )
    expected = model.state_dict()
    weights = _with_ties(weights, model)
    faults = [_listed("missing", [k for k in expected if k not in weights])]
    faults.append(_listed("unexpected", [k for k in weights if k not in expected]))
    for key, value in expected.items():
        given = weights.get(key)
        if isinstance(given, CutTensor):
            faults.append(f"{key} is one rank's part")
        elif isinstance(value, Tensor) and key in weights:
            faults.append(_misfit(key, value, given))
    faults = [fault for fault in faults if fault]
    if faults:
        raise CheckpointError(
            f"the weights given do not fit {type(model).__name__}: {'; '.join(faults[:_MOST])}"
            + (f"; and {len(faults) - _MOST} more." if len(faults) > _MOST else "."),
            fix="give a state dict as one process has it: the plain model's own, or wh.full_state_dict(model)",
        )
    return weights


def _misfit(key: str, value: Tensor, given: Any) -> str:
    """What keeps a value from being copied into a tensor of the model, "" where nothing does."""
    if not isinstance(given, Tensor):
        return f"{key} is a {type(given).__name__}, not a tensor"
    if given.shape != value.shape:
        return f"{key} has shape {tuple(given.shape)}, the model {tuple(value.shape)}"
    if given.is_meta or given.layout is not value.layout:
        return f"{key} " + ("is on the meta device, without values" if given.is_meta else f"is {given.layout}")
    return ""


def _opened(path: str | os.PathLike[str]) -> Any:
    if is_safetensors(path):
        return SafeTensors(path)
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


class _WithTies(Mapping[str, Any]):
    """A state dict with further names for some of its tensors."""

    def __init__(self, weights: Mapping[str, Any], names: Mapping[str, str]):
        self._weights, self._names = weights, names

    def __getitem__(self, name: str) -> Any:
        return self._weights[self._names.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        yield from self._weights
        yield from self._names

    def __len__(self) -> int:
        return len(self._weights) + len(self._names)


def _with_ties(weights: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    names: dict[str, str] = {}
    for tied in groups.values():
        given = next((name for name in tied if name in weights), None)
        if given is not None:
            names |= {name: given for name in tied if name not in weights}
    return _WithTies(weights, names) if names else weights


def load_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Loads what `read_weights` gave; what another rank of a pipeline holds is not read."""
    own = model.state_dict()
    state: OrderedDict[str, Any] = OrderedDict()
    for name, value in own.items():
        state[name] = value if isinstance(value, CutTensor) and not value.place.held else weights[name]
    if hasattr(weights, "_metadata"):  # versions of modules, by which load_state_dict reads older files
        state._metadata = weights._metadata  # type: ignore[attr-defined]
    model.load_state_dict(state)


def _listed(how: str, keys: list[str]) -> str:
    if not keys:
        return ""
    more = f", and {len(keys) - _MOST} more" if len(keys) > _MOST else ""
    return f"{how} {', '.join(map(str, keys[:_MOST]))}{more}"
