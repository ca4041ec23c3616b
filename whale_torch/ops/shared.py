"""Memory that processes of one host share: copies of many blocks, and flags that say when something is there."""

from __future__ import annotations

import torch
from torch import Tensor

from whale_torch.errors import LayoutError
from whale_torch.ops.library import op

__all__ = ["FLAG_NUMBERS", "await_flags", "copy_blocks", "post_flag"]

_COPY = op("copy_blocks")
_POST = op("post_flag")
_AWAIT = op("await_flags")

FLAG_NUMBERS = 16
"""int32 numbers of a flag: its value, how many processes sleep on it, and the rest of a cache line."""


def copy_blocks(source: Tensor, blocks: Tensor, target: Tensor) -> None:
    """Copies size bytes from source[start] to target[to] for each row (start, to, size) of blocks; none may overlap.

    Shapes: source and target 1-D uint8, blocks [n, 3] int64. Raises LayoutError for a block outside either.
    """
    try:
        _COPY(source, blocks, target)
    except (RuntimeError, ValueError):
        _check_blocks(source, blocks, target)
        raise


def _check_blocks(source: Tensor, blocks: Tensor, target: Tensor) -> None:
    for name, tensor in (("source", source), ("target", target)):
        if tensor.dtype is not torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise LayoutError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; blocks are copied in 1-D bytes")
    if blocks.dtype is not torch.int64 or blocks.dim() != 2 or blocks.shape[1] != 3 or not blocks.is_contiguous():
        raise LayoutError(f"blocks are {blocks.dtype} {tuple(blocks.shape)}, and [n, 3] of int64 are asked for")
    for start, to, size in blocks.tolist():
        if min(start, to, size) < 0 or start + size > source.numel() or to + size > target.numel():
            raise LayoutError(
                f"{size} bytes from {start} of {source.numel()} to {to} of {target.numel()} are outside.",
                fix="make the target larger or the block smaller",
            )


def post_flag(flags: Tensor, place: int, number: int) -> None:
    """Sets a flag, after all that this process wrote before, and wakes who waits for it.

    Shapes: flags [places, FLAG_NUMBERS] int32, in memory of this host. The Python kernel orders writes as the machine
    does: that is enough on x86-64 alone.
    """
    _POST(flags, place, number)


def await_flags(flags: Tensor, places: list[int], number: int, timeout_ms: int) -> int:
    """Waits until the flags at all places have come to a number; the first place whose flag is late, -1 if none is."""
    return int(_AWAIT(flags, places, number, timeout_ms))
