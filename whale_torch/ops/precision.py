"""Which dtype an op computes in."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FLOATS", "arithmetic_dtype", "autocast_dtype", "cast_of", "statistics_dtype"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def statistics_dtype(logits: torch.dtype | None) -> torch.dtype:
    """Statistics are float32, and float64 for float64 logits."""
    return torch.float64 if logits == torch.float64 else torch.float32


def arithmetic_dtype(source: torch.dtype, destination: torch.dtype) -> torch.dtype:
    """A cast with scale multiplies in float64 if either side is float64, else in float32."""
    return torch.float64 if torch.float64 in (source, destination) else torch.float32


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast makes of float32 on a device now; None where it is off or, as on meta, does not exist."""
    kind = device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def cast_of(x: Tensor) -> torch.dtype | None:
    """What autocast makes of a tensor of floats now; None where it leaves it as it is, as float64."""
    return None if x.dtype == torch.float64 else autocast_dtype(x.device)
