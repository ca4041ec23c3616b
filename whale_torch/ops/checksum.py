"""CRC32C of bytes: what a file of tensors says of its own chunks (Castagnoli's polynomial, as in RFC 3720)."""

from __future__ import annotations

import torch
from torch import Tensor

from whale_torch.errors import LayoutError
from whale_torch.ops.checksum_reference import power_of_x, times
from whale_torch.ops.library import op

__all__ = ["crc32c", "crc32c_chunks", "crc32c_combine"]

_CRC32C = op("crc32c")


def crc32c(data: Tensor, start: int = 0) -> int:
    """The checksum of data behind bytes whose checksum is `start`: crc32c(a + b) is crc32c(b, crc32c(a)).

    Shape: data 1-D contiguous uint8 of this host. Other Python threads run meanwhile. Raises LayoutError for other
    data.
    """
    checksums = _checksums(data, max(1, data.numel()), start)
    return int(checksums) if data.numel() else start


def crc32c_chunks(data: Tensor, chunk_bytes: int) -> list[int]:
    """The checksum of each chunk of so many bytes, the last of what is left, on torch's threads.

    Shape: data 1-D contiguous uint8 of this host. Raises LayoutError for other data or a size below 1.
    """
    checksums: list[int] = _checksums(data, chunk_bytes, 0).tolist()
    return checksums


def crc32c_combine(first: int, second: int, second_bytes: int) -> int:
    """The checksum of a + b from those of a and b, and b's length in bytes.

    Raises LayoutError for what is no checksum or no length.
    """
    for name, checksum in (("first", first), ("second", second)):
        _check_checksum(name, checksum)
    if second_bytes < 0:
        raise LayoutError(f"second_bytes is {second_bytes}.", fix="pass the number of bytes that `second` is of")
    return times(first, power_of_x(8 * second_bytes)) ^ second


def _checksums(data: Tensor, chunk_bytes: int, start: int) -> Tensor:
    _check(data, chunk_bytes, start)
    checksums: Tensor = _CRC32C(data, chunk_bytes, start)
    return checksums


def _check(data: Tensor, chunk_bytes: int, start: int) -> None:
    if data.dtype is not torch.uint8 or data.dim() != 1 or data.device.type != "cpu" or not data.is_contiguous():
        dense = "" if data.is_contiguous() else ", not contiguous"
        raise LayoutError(
            f"data is {data.dtype} {tuple(data.shape)} on {data.device}{dense}; checksums are of 1-D bytes on cpu.",
            fix="pass tensor.cpu().contiguous().view(-1).view(torch.uint8)",
        )
    if chunk_bytes < 1:
        raise LayoutError(f"chunk_bytes is {chunk_bytes}.", fix="pass 1 or more")
    _check_checksum("start", start)


def _check_checksum(name: str, checksum: int) -> None:
    if not 0 <= checksum < 1 << 32:
        raise LayoutError(f"{name} is {checksum}, not of 32 bits.", fix="pass what crc32c gave")
