"""Payload files: each a valid .safetensors file, written chunk by chunk with a checksum for each, read the same way."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from whale_torch.checkpoint.boxes import Box
from whale_torch.checkpoint.dtypes import CODES
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.index import CHUNK_BYTES, Index, Piece, StoredFile
from whale_torch.errors import CheckpointError
from whale_torch.ops import crc32c

__all__ = [
    "ANOTHER",
    "Item",
    "blocks_of",
    "bytes_of",
    "check_file",
    "checksum",
    "in_pages",
    "open_payload",
    "write_payload",
]

ANOTHER = "load another checkpoint, by its folder; `python -m whale_torch verify` names all that is damaged"
_MOST_HEADER_BYTES = 100 << 20  # as of safetensors
_BLOCK_BYTES = CHUNK_BYTES // 4  # of values that are copied together
_PAGE_BYTES, _LARGE_PAGE_BYTES, _LARGE_BYTES = 4 << 10, 2 << 20, 64 << 20
_SYNC_BYTES = 32 << 20  # so many at a time the disk is told to write while the next ones are prepared
_IDENTITY = "whale_torch"  # the metadata of a file that say to which checkpoint it belongs


@dataclass(frozen=True)
class Item:
    """What one rank writes of a tensor: a box of it, and the values there, of any strides and on any device."""

    key: str
    box: Box
    values: Tensor

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes


def checksum(data: memoryview) -> int:
    """CRC32C of bytes."""
    return crc32c(torch.frombuffer(data, dtype=torch.uint8)) if len(data) else 0


def bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    if not values.numel():
        return memoryview(b"")
    flat = values.detach().as_strided((values.numel(),), (1,))  # a dim of 1 may have any stride
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def blocks_of(item: Item) -> Iterator[Tensor]:
    """Its values in order, in blocks: a chunk where they lie side by side; less elsewhere, as these are copied."""
    values = item.values
    if values.is_contiguous() and item.num_bytes <= CHUNK_BYTES:
        yield values
    elif values.is_contiguous():
        yield from values.reshape(-1).split(max(1, CHUNK_BYTES // values.element_size()))
    else:
        yield from _blocks(values, _BLOCK_BYTES)


def in_pages(items: Iterable[Item]) -> list[Item]:
    """Items in an order in which most begin in a file where a page does, and large ones where a large page does.

    Such files are mapped and copied in half the time.
    """

    def key(item: Item) -> tuple[bool, bool]:
        size = item.num_bytes
        return size % _LARGE_PAGE_BYTES != 0, size % _PAGE_BYTES != 0

    return sorted(items, key=key)


def write_payload(
    files: Files,
    path: Path,
    items: Sequence[Item],
    identity: str,
    blocks: Callable[[Item], Iterable[Tensor]] = blocks_of,
) -> tuple[list[Piece], StoredFile]:
    """Writes a file with the items one after the other, and says where each lies. blocks: the values of an item."""
    header = _header(items, path.name, identity)
    pieces, offset, begun = [], len(header), 0
    with files.create(path) as fd:
        files.write(fd, memoryview(header), 0)
        for item in items:
            start, sums = offset, []
            for chunk in _chunks(item, blocks(item)):
                sums.append(checksum(chunk))
                files.write(fd, chunk, offset)
                offset += len(chunk)
                if offset - begun >= _SYNC_BYTES:
                    files.begin_sync(fd, begun, offset - begun)
                    begun = offset
            pieces.append(Piece(path.name, start, item.box, tuple(sums)))
    return pieces, StoredFile(offset, len(header), checksum(memoryview(header)))


@contextlib.contextmanager
def open_payload(files: Files, path: Path) -> Iterator[int]:
    """A file of a checkpoint, to read. Raises CheckpointError for one that is missing."""
    with contextlib.ExitStack() as stack:
        try:
            fd = stack.enter_context(files.open(path))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing.", fix=ANOTHER) from error
        yield fd


def check_file(files: Files, fd: int, path: Path, index: Index) -> None:
    """Raises CheckpointError for an open file that is not of this checkpoint, cut short, or has a damaged header."""
    stored = index.files[path.name]
    size = files.size(fd)
    header = bytearray(min(stored.header_bytes, size))
    files.read(fd, memoryview(header), 0)
    if size == stored.num_bytes and checksum(memoryview(header)) == stored.checksum:
        return
    found = _metadata(files, fd, size)
    if (identity := found.get(_IDENTITY, index.id)) != index.id:
        text = f"belongs to another checkpoint: its id is {identity}, and the index has {index.id}"
    elif (name := found.get("file", path.name)) != path.name:
        text = f"is this checkpoint's {name} under another name"
    elif size != stored.num_bytes:
        text = f"has {size} bytes, and {stored.num_bytes} were written"
    else:
        text = f"is damaged: its header, the first {stored.header_bytes} bytes, is not what was written"
    raise CheckpointError(f"{path} {text}.", fix=ANOTHER)


def _metadata(files: Files, fd: int, size: int) -> dict[str, str]:
    """What a file says of itself; nothing where that cannot be read."""
    length = bytearray(8)
    files.read(fd, memoryview(length), 0)
    text = bytearray(max(0, min(int.from_bytes(length, "little"), size - 8, _MOST_HEADER_BYTES)))
    files.read(fd, memoryview(text), 8)
    try:
        return dict(json.loads(text)["__metadata__"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def _header(items: Sequence[Item], name: str, identity: str) -> bytearray:
    entries: dict[str, object] = {"__metadata__": {_IDENTITY: identity, "file": name}}
    offset = 0
    for item in items:
        if item.values.dtype not in CODES:
            raise CheckpointError(
                f"'{item.key}' is {item.values.dtype}, which the format does not know.",
                fix=f"one of {', '.join(str(dtype).removeprefix('torch.') for dtype in CODES)}",
            )
        where = ",".join(f"{a}:{a + n}" for a, n in zip(item.box.start, item.box.size, strict=True))
        entries[f"{item.key}[{where}]"] = {
            "dtype": CODES[item.values.dtype],
            "shape": list(item.values.shape),
            "data_offsets": [offset, offset + item.num_bytes],
        }
        offset += item.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    unit = _PAGE_BYTES if offset < _LARGE_BYTES else _LARGE_PAGE_BYTES
    header = bytearray(b" ") * (-(-(8 + len(text)) // unit) * unit)
    header[:8] = (len(header) - 8).to_bytes(8, "little")
    header[8 : 8 + len(text)] = text
    return header


def _chunks(item: Item, blocks: Iterable[Tensor]) -> Iterator[memoryview]:
    """The bytes of an item's blocks, chunk by chunk; what is not on the CPU, or strided, is copied a block at a time.

    A block is asked for once those before it have been read.
    """
    if item.values.is_contiguous():
        yield from (bytes_of(block.cpu()) for block in blocks)
        return
    room, filled = torch.empty(CHUNK_BYTES + _BLOCK_BYTES, dtype=torch.uint8, device="cpu"), 0
    for block in blocks:
        end = filled + block.numel() * block.element_size()
        room[filled:end].view(block.dtype).view(block.shape).copy_(block)
        filled = end
        if filled >= CHUNK_BYTES:
            yield bytes_of(room[:CHUNK_BYTES])
            filled -= CHUNK_BYTES
            room[:filled] = room[CHUNK_BYTES:end]
    if filled:
        yield bytes_of(room[:filled])


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
