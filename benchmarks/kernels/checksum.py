"""Variants of CRC32C: the compiled kernel on each instruction set, the Python kernel, and a plain read of the bytes."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from benchmarks.kernels.dispatch import Variants
from whale_torch import ops
from whale_torch.ops import checksum_reference, library

__all__ = ["AIM_GB", "checksum"]

AIM_GB = 10.0
"""GB/s of a core that we aim at where it has an instruction for the polynomial."""


def checksum(num_bytes: int, calls: int) -> Variants:
    """So many checksums of the same bytes; zlib's is of another polynomial, amax reads the bytes and no more."""
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    words, buffer = data.view(torch.int64), memoryview(data.numpy())

    def repeated(call: Callable[[], object], isa: str | None = None) -> Callable[[], object]:
        def run() -> None:
            if isa is not None:
                library.use_isa(isa)
            for _ in range(calls):
                call()

        return run

    best = library.isa()
    present = [isa for isa in ("v4", "v3", "baseline") if library.use_isa(isa)]
    if best is not None:
        library.use_isa(best)
    return {
        **{isa: repeated(lambda: ops.crc32c(data), isa) for isa in present},
        "Python": repeated(lambda: checksum_reference.crc32c(data, num_bytes, 0)),
        "zlib.crc32": repeated(lambda: zlib.crc32(buffer)),
        "amax": repeated(words.amax),
    }
