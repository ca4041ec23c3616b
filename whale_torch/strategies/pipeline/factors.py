"""By what the losses of a pipeline were multiplied: by the same numbers on all ranks of all pipelines.

Gradients are averaged before the user's backward scales them, so ranks that scale them otherwise would train other
models from here on. The numbers travel with the row counts of the next forward, so that no message is added.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whale_torch.errors import CommError

__all__ = ["Factors"]


class Factors:
    """What flowed into a model's losses since its last training forward."""

    def __init__(self) -> None:
        self._found: list[tuple[Tensor, Any]] = []

    def note(self, grad: Tensor) -> None:
        """A backward begins with this number, which may still be computed on its device."""
        if grad.device.type == "cpu":
            self._found.append((grad.detach().clone(), None))
            return
        copied = torch.empty((), dtype=grad.dtype, pin_memory=True)
        copied.copy_(grad.detach(), non_blocking=True)
        ready = torch.get_device_module(grad.device).Event()
        ready.record()
        self._found.append((copied, ready))

    def take(self) -> int:
        """Their sum as it travels, an int of as many bits; it is told once."""
        found, self._found = self._found, []
        for _, ready in found:
            if ready is not None:
                ready.synchronize()
        total = sum(float(x) for x, _ in found)
        return int(struct.unpack("<q", struct.pack("<d", total))[0])

    @staticmethod
    def check(codes: Sequence[int], ranks: Sequence[int]) -> None:
        """Raises CommError where two ranks took different sums."""
        odd = next((rank for rank, code in zip(ranks, codes, strict=True) if code != codes[0]), None)
        if odd is not None:
            first, other = (_number(code) for code in (codes[0], codes[ranks.index(odd)]))
            raise CommError(
                f"the loss of a pipeline was multiplied by {first:.6g} on rank {ranks[0]} and by {other:.6g} on rank "
                f"{odd}, in all backwards since the last call; it is the mean over all samples already.",
                fix="call backward() on the loss as it is, or multiplied by one number on all ranks",
                ranks=(ranks[0], odd),
            )


def _number(code: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", code))[0])
