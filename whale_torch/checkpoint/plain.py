"""Plain weights at build: a state dict of one process, checked against the model before anything changes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from whale_torch.comm.cut_tensor import CutTensor
from whale_torch.errors import CheckpointError

__all__ = ["Weights", "read_weights"]

Weights = Mapping[str, Any] | str | os.PathLike[str]

_MOST = 5  # names an error lists


def read_weights(weights: Weights, model: nn.Module) -> Mapping[str, Any]:
    """The state dict itself, or that in a file that torch.save wrote; a file's tensors stay on disk until they are cut.

    Raises CheckpointError where names or shapes differ from the model's.
    """
    if not isinstance(weights, Mapping):
        weights = torch.load(weights, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(weights, Mapping):
            raise CheckpointError(
                f"the file given as weights holds a {type(weights).__name__}, not a state dict.",
                fix="write it with torch.save(model.state_dict(), path)",
            )
    expected = model.state_dict()
    faults = [_listed("missing", [k for k in expected if k not in weights])]
    faults.append(_listed("unexpected", [k for k in weights if k not in expected]))
    for key, value in expected.items():
        given = weights.get(key)
        if isinstance(given, CutTensor):
            faults.append(f"{key} is one rank's part")
        elif isinstance(value, Tensor) and isinstance(given, Tensor) and given.shape != value.shape:
            faults.append(f"{key} has shape {tuple(given.shape)}, the model {tuple(value.shape)}")
    faults = [fault for fault in faults if fault]
    if faults:
        raise CheckpointError(
            f"the weights given do not fit {type(model).__name__}: {'; '.join(faults[:_MOST])}"
            + (f"; and {len(faults) - _MOST} more." if len(faults) > _MOST else "."),
            fix="give a state dict as one process has it: the plain model's own, or wh.full_state_dict(model)",
        )
    return weights


def _listed(how: str, keys: list[str]) -> str:
    if not keys:
        return ""
    more = f", and {len(keys) - _MOST} more" if len(keys) > _MOST else ""
    return f"{how} {', '.join(keys[:_MOST])}{more}"
