"""CRC32C in plain torch: the specification of the compiled kernel, and what runs where none is loaded.

Bytes are one polynomial over {0, 1}, and a checksum is what it leaves modulo Castagnoli's P. A number's lowest bit is
its highest power of x (RFC 3720).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["crc32c", "power_of_x", "times"]

_CASTAGNOLI = 0x82F63B78  # x^32 modulo P
_ONE, _ONES = 1 << 31, 0xFFFFFFFF

# P divides x^6777 + x^484 + x^100 + 1, so its square and every later one: with 64 times the exponents words of 64 bits
# can be added, by exclusive or, to the words so far behind them, and then are done with.
_WINDOW = 6777
_BEHIND = (_WINDOW - 484, _WINDOW - 100, _WINDOW)
_PIECE_WORDS = 1 << 17  # 1 MiB, which a core's cache holds


def times(a: int, b: int) -> int:
    """The product of two polynomials modulo P."""
    product = 0
    for bit in range(31, -1, -1):
        product ^= a if b >> bit & 1 else 0
        a = a >> 1 ^ (_CASTAGNOLI if a & 1 else 0)
    return product


@functools.lru_cache(maxsize=1024)
def power_of_x(exponent: int) -> int:
    """x^exponent modulo P."""
    power, square = _ONE, _ONE >> 1
    while exponent:
        power = times(power, square) if exponent & 1 else power
        square = times(square, square)
        exponent >>= 1
    return power


@functools.cache
def _powers() -> Tensor:
    """x^32 times each bit of a window of bytes, [bytes, 8] int64: the last byte's highest bit is the constant 1."""
    power, powers = power_of_x(32), []
    for _ in range(8 * _WINDOW):
        powers.append(power)
        power = power >> 1 ^ (_CASTAGNOLI if power & 1 else 0)
    return torch.tensor(powers, device="cpu").flip(0).view(_WINDOW, 8)


def _fold(words: Tensor) -> Tensor:
    """The last window of words of any size, with all that stood before it added where it belongs."""
    first, step = 0, _BEHIND[0]
    while (left := len(words) - _WINDOW - first) > 0:
        block = words[first : first + min(step, left)]
        for behind in _BEHIND:
            words[first + behind :][: len(block)].bitwise_xor_(block)
        first += len(block)
    return words[first:]


def _window_of(data: Tensor) -> Tensor:
    """A window of bytes that leaves the same as these bytes; what is missing in front is zeros."""
    words = torch.zeros(_WINDOW + min(_PIECE_WORDS, -(-len(data) // 8)), dtype=torch.int64, device="cpu")
    piece = words[_WINDOW:].view(torch.uint8)
    done = 0
    while done < len(data):
        size = (len(data) - done) % len(piece) or len(piece)  # the first is the one that is not full
        piece[len(piece) - size :] = data[done : done + size]
        done += size
        words[:_WINDOW] = _fold(words).clone()
    return _fold(words[:_WINDOW].view(torch.uint8))


def _exclusive_or(values: Tensor) -> int:
    while len(values) > 1:
        half = len(values) // 2
        rest = values[2 * half :]
        values = torch.cat((values[:half] ^ values[half : 2 * half], rest))
    return int(values)


def _checksum(data: Tensor, start: int) -> int:
    bits = _window_of(data)[:, None] >> torch.arange(8, dtype=torch.uint8, device="cpu") & 1
    of_zeros = times(start ^ _ONES, power_of_x(8 * len(data)))
    return _exclusive_or((_powers() * bits).view(-1)) ^ of_zeros ^ _ONES


def crc32c(data: Tensor, chunk_bytes: int, start: int) -> Tensor:
    """The checksum of each chunk of data, the last may be smaller, [chunks] int64; start stood before the first."""
    chunks = data.split(chunk_bytes) if len(data) else ()
    sums = [_checksum(chunk, 0 if i else start) for i, chunk in enumerate(chunks)]
    return torch.tensor(sums, dtype=torch.int64, device="cpu")
