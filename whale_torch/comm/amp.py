"""torch's GradScaler as an optimizer's step sees it: by its frame, as it leaves no other trace."""

from __future__ import annotations

import inspect

import torch

__all__ = ["stepping_scaler"]

_FRAMES = 12  # how far up a GradScaler's step can be: torch's wrappers and a scheduler's


def stepping_scaler() -> torch.amp.GradScaler | None:
    """The scaler that is enabled and runs the optimizer's step from which this is called."""
    frame = inspect.currentframe()
    for _ in range(_FRAMES):
        frame = frame and frame.f_back
        if frame is None:
            return None
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            scaler: torch.amp.GradScaler = frame.f_locals["self"]
            return scaler if scaler.is_enabled() else None
    return None
