"""Reads boxes of stored tensors into memory: first every chunk that is touched is checked, then values are copied."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add, mul, sub
from pathlib import Path

import torch
from torch import Tensor

from whale_torch.checkpoint.boxes import Box, blocks, overlap, runs
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.index import CHUNK_BYTES, Chunk, Index, Piece, StoredTensor, chunks_of
from whale_torch.checkpoint.inventory import Held
from whale_torch.checkpoint.payload import ANOTHER, bytes_of, check_file, checksum, open_payload
from whale_torch.errors import CheckpointError

__all__ = ["Reader", "Wanted"]

_DIRECT_BYTES = 1 << 18  # runs from here on are read where they belong, shorter ones by way of a chunk
_AHEAD_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class _Part:
    """A block that a piece has and that is held: where it begins in the piece, and in the memory it goes to."""

    size: tuple[int, ...]
    at: tuple[int, ...]
    to: tuple[int, ...]


@dataclass(frozen=True)
class Wanted:
    """A stored tensor, and the memory that boxes of it go to."""

    key: str
    stored: StoredTensor
    held: Held

    @functools.cached_property
    def pieces(self) -> list[tuple[Piece, list[_Part]]]:
        """The pieces that have some of what is held, by files and offsets, and what each has.

        Raises CheckpointError where they have not all.
        """
        boxes = self.held.boxes
        found, missing = [], [box.numel for box, _ in boxes]
        for piece in sorted(self.stored.pieces, key=lambda piece: (piece.file, piece.offset)):
            parts = []
            for number, (box, local) in enumerate(boxes):
                part = overlap(piece.box, box)
                if part is not None:
                    missing[number] -= part.numel
                    at = tuple(map(sub, part.start, piece.box.start))
                    to = tuple(map(add, map(sub, part.start, box.start), local.start))
                    parts.append(_Part(part.size, at, to))
            if parts:
                found.append((piece, parts))
        if any(missing):
            box = next(box for (box, _), number in zip(boxes, missing, strict=True) if number)
            raise CheckpointError(
                f"the checkpoint's pieces of '{self.key}' do not make up {list(box.size)} from {list(box.start)} on.",
                fix="load another checkpoint",
            )
        return found


class Reader:
    """Reads one checkpoint's files."""

    def __init__(self, files: Files, folder: Path, index: Index):
        self._files, self._folder, self._index = files, folder, index
        self._known: set[str] = set()  # files whose headers were checked
        self._window = memoryview(bytearray(CHUNK_BYTES))

    def check(self, wanted: Sequence[Wanted]) -> None:
        """Raises CheckpointError, naming file, tensor and chunk, for the first chunk that is not as it was written."""
        touched = _touched(wanted)
        ahead = _Ahead(self._files, self._folder, touched)
        for file, chunks in sorted(touched.items()):
            with self._open(file) as fd:
                for start, end, together in _looks(chunks):
                    with self._files.look(fd, start, self._window[: end - start]) as data:
                        for chunk in together:
                            first = chunk.offset - start
                            with data[first : first + chunk.size] as part:  # let go before the mapping ends
                                self._check(chunk, part)
                    ahead.passed(sum(chunk.size for chunk in together))

    def read(self, wanted: Sequence[Wanted], *, check: bool = False) -> None:
        """Copies values, one tensor after the other. check: as `check` does, of memory that is not in use yet."""
        present = [(one, one.held.values) for one in wanted if one.held.values is not None]
        once = {id(one): check and _as_in_a_file(values, one.stored.torch_dtype) for one, values in present}
        if check:
            self.check([one for one, _ in present if not once[id(one)]])
        ahead = _Ahead(self._files, self._folder, _touched([one for one, _ in present if once[id(one)]]))
        for file, parts in itertools.groupby(_in_files(present), key=lambda part: part[0]):
            with self._open(file) as fd:
                for _, pieces, one, values in parts:
                    for piece, of_piece in pieces:
                        self._copy(fd, piece, of_piece, one, values, ahead if once[id(one)] else None)
        torch.autograd.graph.increment_version([values for _, values in present])

    def _copy(
        self, fd: int, piece: Piece, parts: Sequence[_Part], one: Wanted, values: Tensor, ahead: _Ahead | None
    ) -> None:
        """What a piece has of what is held goes there: at once where memory is as the file is, else by way of half the
        window, block by block."""
        dtype = one.stored.torch_dtype
        if _as_in_a_file(values, dtype):
            self._fill(fd, piece, one.key, parts, values, self._window, ahead)
            return
        half = len(self._window) // 2
        for part in parts:
            for block in blocks(Box(part.to, part.size), half // dtype.itemsize):
                at = tuple(p + b - t for p, b, t in zip(part.at, block.start, part.to, strict=True))
                data = torch.frombuffer(self._window[half:], dtype=torch.uint8)[: block.numel * dtype.itemsize]
                made = data.view(dtype).view(block.size)
                here = _Part(block.size, at, (0,) * len(block.size))
                self._fill(fd, piece, one.key, [here], made, self._window[:half], None)
                goal = values
                for dim, (start, size) in enumerate(zip(block.start, block.size, strict=True)):
                    goal = goal.narrow(dim, start, size)
                goal.copy_(made)

    def _fill(
        self,
        fd: int,
        piece: Piece,
        key: str,
        parts: Sequence[_Part],
        memory: Tensor,
        window: memoryview,
        ahead: _Ahead | None,
    ) -> None:
        """Copies parts of a piece, short runs by way of the window, and checks its chunks where `ahead` is given."""
        item, target = memory.element_size(), bytes_of(memory)
        total, unit, in_window = piece.box.numel * item, len(window), -1
        chunks = [] if ahead is None else list(chunks_of(key, piece, item))  # as long as the window
        for part in parts:
            for run in runs(part.size, part.at, piece.box.size, part.to, tuple(memory.shape)):
                first = run.source * item
                goal = target[run.target * item : (run.target + run.length) * item]
                while goal:
                    number, inside = divmod(first, unit)
                    whole = min(unit, total - number * unit)
                    size = min(len(goal), whole - inside)
                    chunk = chunks[number] if chunks else None
                    if size == whole or (chunk is None and size >= _DIRECT_BYTES):
                        self._read(fd, goal[:size], piece, key, first, chunk)
                    else:
                        if in_window != number:
                            self._read(fd, window[:whole], piece, key, number * unit, chunk)
                            in_window = number
                        goal[:size] = window[inside : inside + size]
                    goal, first = goal[size:], first + size
                    if ahead is not None:
                        ahead.passed(size)

    @contextlib.contextmanager
    def _open(self, file: str) -> Iterator[int]:
        path = self._folder / file
        with open_payload(self._files, path) as fd:
            if file not in self._known:
                check_file(self._files, fd, path, self._index)
                self._known.add(file)
            yield fd

    def _read(self, fd: int, into: memoryview, piece: Piece, key: str, first: int, chunk: Chunk | None) -> None:
        """Reads bytes of a piece, from its `first` on. chunk: what they are, to be checked."""
        read = self._files.read(fd, into, piece.offset + first)
        if chunk is not None:
            self._check(chunk, into[:read])
        elif read != len(into):
            raise self._too_short(piece.file, key, piece.offset + first + len(into))

    def _check(self, chunk: Chunk, data: memoryview) -> None:
        if len(data) != chunk.size:
            raise self._too_short(chunk.file, chunk.key, chunk.offset + chunk.size)
        if checksum(data) != chunk.checksum:
            raise CheckpointError(
                f"{self._folder / chunk.file} is damaged: chunk {chunk.number} of '{chunk.key}' (bytes {chunk.offset} "
                f"to {chunk.offset + chunk.size}) is not what was written.",
                fix=ANOTHER,
            )

    def _too_short(self, file: str, key: str, end: int) -> CheckpointError:
        return CheckpointError(f"{self._folder / file} is too short: '{key}' reaches to byte {end} of it.", fix=ANOTHER)


class _Ahead:
    """Lets the disk begin to read chunks before they are asked for, in order, a gigabyte ahead."""

    def __init__(self, files: Files, folder: Path, touched: Mapping[str, Iterable[Chunk]]):
        self._files, self._folder = files, folder
        self._spans = deque((file, *span) for file, chunks in sorted(touched.items()) for span in _spans(chunks))
        self._ahead = 0
        self.passed(0)

    def passed(self, num_bytes: int) -> None:
        """So much of it has been read."""
        self._ahead -= num_bytes
        while self._spans and self._ahead < _AHEAD_BYTES:
            file, start, end = self._spans.popleft()
            if end - start > _AHEAD_BYTES:
                self._spans.appendleft((file, start + _AHEAD_BYTES, end))
                end = start + _AHEAD_BYTES
            with open_payload(self._files, self._folder / file) as fd:
                self._files.begin_read(fd, start, end - start)
            self._ahead += end - start


def _as_in_a_file(values: Tensor, dtype: torch.dtype) -> bool:
    plain = values.is_contiguous() and not values.is_conj() and not values.is_neg()
    return values.device.type == "cpu" and values.dtype is dtype and plain


def _in_files(
    present: Sequence[tuple[Wanted, Tensor]],
) -> Iterator[tuple[str, list[tuple[Piece, list[_Part]]], Wanted, Tensor]]:
    """The pieces of which something is wanted, by file for each tensor, tensors in the order of their first piece."""
    some = [(one, values) for one, values in present if one.pieces]
    for one, values in sorted(some, key=lambda pair: (pair[0].pieces[0][0].file, pair[0].pieces[0][0].offset)):
        for file, pieces in itertools.groupby(one.pieces, key=lambda pair: pair[0].file):
            yield file, list(pieces), one, values


def _touched(wanted: Sequence[Wanted]) -> dict[str, set[Chunk]]:
    """The chunks that have some of what is wanted, by file."""
    found: dict[str, set[Chunk]] = defaultdict(set)
    for one in wanted:
        item = one.stored.torch_dtype.itemsize
        for piece, parts in one.pieces:
            chunks = chunks_of(one.key, piece, item)
            if not any(part.size == piece.box.size for part in parts):
                numbers = _numbers_touched(piece, parts, item)
                chunks = (chunk for chunk in chunks if chunk.number in numbers)
            found[piece.file].update(chunks)
    return found


def _looks(chunks: Iterable[Chunk]) -> Iterator[tuple[int, int, list[Chunk]]]:
    """(start, end, chunks) of what is looked at together: at most as much as a chunk has, side by side."""
    together: list[Chunk] = []
    start = end = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.offset):
        if together and (chunk.offset != end or chunk.offset + chunk.size - start > CHUNK_BYTES):
            yield start, end, together
            together = []
        if not together:
            start = chunk.offset
        end = chunk.offset + chunk.size
        together.append(chunk)
    if together:
        yield start, end, together


def _spans(chunks: Iterable[Chunk]) -> list[tuple[int, int]]:
    """(start, end) of what chunks make without a gap."""
    found: list[tuple[int, int]] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offset):
        end = chunk.offset + chunk.size
        if found and found[-1][1] >= chunk.offset:
            found[-1] = (found[-1][0], end)
        else:
            found.append((chunk.offset, end))
    return found


def _numbers_touched(piece: Piece, parts: Sequence[_Part], item: int) -> set[int]:
    found: set[int] = set()
    strides = _strides(piece.box)
    for part in parts:
        first = sum(map(mul, part.at, strides))
        last = sum((a + n - 1) * s for a, n, s in zip(part.at, part.size, strides, strict=True))
        found.update(range(first * item // CHUNK_BYTES, ((last + 1) * item - 1) // CHUNK_BYTES + 1))
    return found


def _strides(box: Box) -> list[int]:
    strides, stride = [], 1
    for size in reversed(box.size):
        strides.append(stride)
        stride *= size
    return strides[::-1]
