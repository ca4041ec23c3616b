"""Payload files: each a valid .safetensors file, written chunk by chunk with a checksum for each, read the same way."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from whale_torch.checkpoint.boxes import Box
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.index import CHUNK_BYTES, Piece
from whale_torch.errors import CheckpointError
from whale_torch.ops import crc32c

__all__ = ["Item", "bytes_of", "checksum", "write_payload"]

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip


@dataclass(frozen=True)
class Item:
    """What one rank writes of a tensor: a box of it, and the values there, of any strides and on any device."""

    key: str
    box: Box
    values: Tensor

    @property
    def num_bytes(self) -> int:
        return self.values.numel() * self.values.element_size()


def checksum(data: memoryview) -> int:
    """CRC32C of bytes."""
    return crc32c(torch.frombuffer(data, dtype=torch.uint8)) if len(data) else 0


def bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    flat = values.detach().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def write_payload(files: Files, path: Path, items: Sequence[Item], name: str, identity: str) -> list[Piece]:
    """Writes a file with the items one after the other, and says where each lies."""
    header = _header(items, identity)
    pieces, offset = [], len(header)
    with files.create(path) as fd:
        files.write(fd, memoryview(header), 0)
        for item in items:
            start, sums = offset, []
            for chunk in _chunks(item.values):
                sums.append(checksum(chunk))
                files.write(fd, chunk, offset)
                offset += len(chunk)
            pieces.append(Piece(name, start, item.box, tuple(sums)))
    return pieces


def _header(items: Sequence[Item], identity: str) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"whale_torch": identity}}
    offset = 0
    for item in items:
        if item.values.dtype not in _CODES:
            raise CheckpointError(f"'{item.key}' is {item.values.dtype}, which the format does not know.")
        where = ",".join(f"{a}:{a + n}" for a, n in zip(item.box.start, item.box.size, strict=True))
        entries[f"{item.key}[{where}]"] = {
            "dtype": _CODES[item.values.dtype],
            "shape": list(item.values.shape),
            "data_offsets": [offset, offset + item.num_bytes],
        }
        offset += item.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _chunks(values: Tensor) -> Iterator[memoryview]:
    """The bytes of values row by row, in chunks; what is not on the CPU, or strided, is copied a chunk at a time."""
    if values.device.type == "cpu" and values.is_contiguous():
        data = bytes_of(values)
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]
        return
    chunk, filled = bytearray(CHUNK_BYTES), 0
    for block in _blocks(values, CHUNK_BYTES):
        data = bytes_of(block.cpu().contiguous())
        while data:
            taken = min(len(data), CHUNK_BYTES - filled)
            chunk[filled : filled + taken] = data[:taken]
            data, filled = data[taken:], filled + taken
            if filled == CHUNK_BYTES:
                yield memoryview(chunk)
                filled = 0
    if filled:
        yield memoryview(chunk)[:filled]


def _blocks(values: Tensor, most: int) -> Iterator[Tensor]:
    """Parts of a tensor in its order, each of at most so many bytes where it has a dim to cut."""
    size = values.numel() * values.element_size()
    if size <= most or not values.dim():
        yield values
        return
    rows = most // (size // values.shape[0])
    if rows:
        yield from values.split(rows)
    else:
        for row in values:
            yield from _blocks(row, most)
