"""Reads boxes of stored tensors into memory: first every chunk that is touched is checked, then values are copied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from whale_torch.checkpoint.boxes import Box, overlap, runs
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.index import CHUNK_BYTES, Index, Piece, StoredTensor
from whale_torch.checkpoint.inventory import Held
from whale_torch.checkpoint.payload import ANOTHER, bytes_of, checksum, open_payload, told_ahead
from whale_torch.errors import CheckpointError

__all__ = ["Reader", "Wanted"]

_DIRECT_BYTES = 1 << 18  # runs from here on are read where they belong, shorter ones by way of a chunk


@dataclass(frozen=True)
class Wanted:
    """A stored tensor, and the memory that boxes of it go to."""

    key: str
    stored: StoredTensor
    held: Held


class Reader:
    """Reads one checkpoint's files."""

    def __init__(self, files: Files, folder: Path, index: Index):
        self._files, self._folder, self._index = files, folder, index

    def check(self, wanted: Sequence[Wanted]) -> None:
        """Raises CheckpointError, naming file, tensor and chunk, for the first chunk that is not as it was written."""
        touched: dict[str, dict[tuple[int, int], tuple[str, int, int]]] = defaultdict(dict)
        for one in wanted:
            _check_covered(one)
            item = one.stored.torch_dtype.itemsize
            for piece in one.stored.pieces:
                total = piece.box.numel * item
                for chunk in _chunks_touched(one.held, piece, item):
                    start = chunk * CHUNK_BYTES
                    size = min(CHUNK_BYTES, total - start)
                    touched[piece.file][piece.offset + start, size] = (one.key, chunk, piece.checksums[chunk])
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for file, chunks in sorted(touched.items()):
            with open_payload(self._files, self._folder / file, self._index) as fd:
                for (offset, size), (key, chunk, expected) in told_ahead(self._files, fd, sorted(chunks.items())):
                    with self._files.look(fd, offset, buffer[:size]) as data:
                        if len(data) != size:
                            raise self._too_short(file, key, offset + size)
                        found = checksum(data)
                    if found != expected:
                        raise CheckpointError(
                            f"{self._folder / file} is damaged: chunk {chunk} of '{key}' (bytes {offset} to "
                            f"{offset + size}) is not what was written.",
                            fix=ANOTHER,
                        )

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Copies values, one tensor after the other; what was checked before is not checked again."""
        window = memoryview(bytearray(CHUNK_BYTES))
        present = [(one, one.held.values) for one in wanted if one.held.values is not None]
        for one, values in sorted(present, key=lambda pair: _first_piece(pair[0])):
            dtype = one.stored.torch_dtype
            plain = values.is_contiguous() and not values.is_conj() and not values.is_neg()
            direct = values.device.type == "cpu" and values.dtype is dtype and plain
            memory = values if direct else torch.empty(values.shape, dtype=dtype)
            for file, pieces in _by_file(one.stored.pieces):
                if any(overlap(piece.box, box) for piece in pieces for box, _ in one.held.boxes):
                    with self._open(file) as fd:
                        for piece in pieces:
                            self._copy(fd, piece, one, memory, window)
            if memory is not values:
                values.copy_(memory)
        torch.autograd.graph.increment_version([values for _, values in present])

    def _copy(self, fd: int, piece: Piece, one: Wanted, memory: Tensor, window: memoryview) -> None:
        item, target = memory.element_size(), bytes_of(memory)
        end = piece.offset + piece.box.numel * item
        first = last = 0  # bytes of the file that the window has
        for box, local in one.held.boxes:
            part = overlap(piece.box, box)
            if part is None:
                continue
            at = [p - b for p, b in zip(part.start, piece.box.start, strict=True)]
            to = [p - b + at for p, b, at in zip(part.start, box.start, local.start, strict=True)]
            for run in runs(part.size, at, piece.box.size, to, tuple(memory.shape)):
                start, size = piece.offset + run.source * item, run.length * item
                goal = target[run.target * item : run.target * item + size]
                if size >= _DIRECT_BYTES:
                    self._read(fd, goal, start, piece.file, one.key)
                    continue
                if start < first or start + size > last:
                    first, last = start, min(start + len(window), end)
                    self._read(fd, window[: last - first], first, piece.file, one.key)
                goal[:] = window[start - first : start - first + size]

    def _open(self, file: str) -> AbstractContextManager[int]:
        return self._files.open(self._folder / file)

    def _read(self, fd: int, into: memoryview, offset: int, file: str, key: str) -> None:
        if self._files.read(fd, into, offset) != len(into):
            raise self._too_short(file, key, offset + len(into))

    def _too_short(self, file: str, key: str, end: int) -> CheckpointError:
        return CheckpointError(f"{self._folder / file} is too short: '{key}' reaches to byte {end} of it.", fix=ANOTHER)


def _first_piece(one: Wanted) -> tuple[str, int]:
    return min(((piece.file, piece.offset) for piece in one.stored.pieces), default=("", 0))


def _by_file(pieces: Sequence[Piece]) -> list[tuple[str, list[Piece]]]:
    found: dict[str, list[Piece]] = defaultdict(list)
    for piece in sorted(pieces, key=lambda piece: (piece.file, piece.offset)):
        found[piece.file].append(piece)
    return list(found.items())


def _check_covered(one: Wanted) -> None:
    """Raises CheckpointError where the pieces of a tensor have not all that is wanted of it."""
    for box, _ in one.held.boxes:
        parts = [overlap(piece.box, box) for piece in one.stored.pieces]
        if sum(part.numel for part in parts if part is not None) != box.numel:
            raise CheckpointError(
                f"the checkpoint's pieces of '{one.key}' do not make up {list(box.size)} from {list(box.start)} on.",
                fix="load another checkpoint",
            )


def _chunks_touched(held: Held, piece: Piece, item: int) -> set[int]:
    found: set[int] = set()
    for box, _ in held.boxes:
        part = overlap(piece.box, box)
        if part is None:
            continue
        at = [p - b for p, b in zip(part.start, piece.box.start, strict=True)]
        strides = _strides(piece.box)
        first = sum(a * s for a, s in zip(at, strides, strict=True))
        last = sum((a + n - 1) * s for a, n, s in zip(at, part.size, strides, strict=True))
        found.update(range(first * item // CHUNK_BYTES, ((last + 1) * item - 1) // CHUNK_BYTES + 1))
    return found


def _strides(box: Box) -> list[int]:
    strides, stride = [], 1
    for size in reversed(box.size):
        strides.append(stride)
        stride *= size
    return strides[::-1]
