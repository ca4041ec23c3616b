"""Sources: tensors that lie somewhere, each known by its dtype and shape, of which boxes are read when they are asked
for, whatever wrote them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale_torch.checkpoint.boxes import Box, overlap, runs
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.index import CHUNK_BYTES
from whale_torch.checkpoint.payload import bytes_of
from whale_torch.errors import CheckpointError

__all__ = ["Composed", "Entry", "InFiles", "InMemory", "Part", "Range", "Reshaped", "Source", "inside"]

_DIRECT_BYTES = 1 << 8  # runs from here on are read alone, shorter ones by way of a window


class Entry(ABC):
    """A tensor of which boxes can be read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @abstractmethod
    def fill(self, box: Box, into: Tensor) -> None:
        """Reads a box of it into a contiguous CPU tensor of the box's size and its own dtype."""

    def read(self, box: Box | None = None) -> Tensor:
        """A box of it, or all, in memory of its own."""
        box = Box.whole(self.shape) if box is None else box
        found = torch.empty(box.size, dtype=self.dtype, device="cpu")
        if box.numel:
            self.fill(box, found)
        return found

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Range:
    """A box of a tensor in a file, row by row from `offset` on."""

    path: Path
    offset: int
    box: Box


@dataclass
class InFiles(Entry):
    """A tensor whose boxes lie in files as they lie in memory."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    ranges: Sequence[Range]
    files: Files = field(default_factory=Files)

    def fill(self, box: Box, into: Tensor) -> None:
        target, item = bytes_of(into), self.dtype.itemsize
        for one in self.ranges:
            part = overlap(one.box, box)
            if part is None:
                continue
            at = [p - b for p, b in zip(part.start, one.box.start, strict=True)]
            to = [p - b for p, b in zip(part.start, box.start, strict=True)]
            with self.files.open(one.path) as fd:
                window, first, last = memoryview(b""), 0, 0
                end = one.offset + one.box.numel * item
                for run in runs(part.size, at, one.box.size, to, box.size):
                    start, size = one.offset + run.source * item, run.length * item
                    goal = target[run.target * item : run.target * item + size]
                    if size >= _DIRECT_BYTES or run.length == part.numel:
                        self._read(fd, goal, start, one.path)
                        continue
                    if start < first or start + size > last:
                        first, last = start, min(start + CHUNK_BYTES, end)
                        window = window or memoryview(bytearray(min(CHUNK_BYTES, end - start)))
                        self._read(fd, window[: last - first], first, one.path)
                    goal[:] = window[start - first : start - first + size]

    def _read(self, fd: int, into: memoryview, offset: int, path: Path) -> None:
        if self.files.read(fd, into, offset) != len(into):
            raise CheckpointError(
                f"{path} is too short: '{self.name}' reaches to byte {offset + len(into)} of it.",
                fix="write it again, or give another path",
            )


@dataclass
class InMemory(Entry):
    """A tensor that is there, or mapped from a file."""

    values: Tensor

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.values.shape)

    def fill(self, box: Box, into: Tensor) -> None:
        into.copy_(inside(self.values.detach(), box))


@dataclass(frozen=True)
class Part:
    """A box of a tensor that is another entry's, there from `start` on."""

    box: Box
    entry: Entry
    start: tuple[int, ...]


@dataclass
class Composed(Entry):
    """A tensor put together from boxes of others of its dtype."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Sequence[Part]

    def fill(self, box: Box, into: Tensor) -> None:
        for part in self.parts:
            common = overlap(part.box, box)
            if common is None:
                continue
            start = [c - p + s for c, p, s in zip(common.start, part.box.start, part.start, strict=True)]
            source = Box(tuple(start), common.size)
            goal = inside(into, Box(tuple(c - b for c, b in zip(common.start, box.start, strict=True)), common.size))
            if goal.is_contiguous() and part.entry.dtype == into.dtype:
                part.entry.fill(source, goal)
            else:
                goal.copy_(part.entry.read(source))


@dataclass
class Reshaped(Entry):
    """A tensor whose elements lie one after the other in another one, from `offset` of them on."""

    entry: Entry
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.entry.dtype

    @cached_property
    def _flat(self) -> Entry:
        if len(self.entry.shape) != 1:
            raise AssertionError("only a flat tensor is given another shape")
        return self.entry

    def fill(self, box: Box, into: Tensor) -> None:
        flat = into.view(-1)
        if not self.shape:
            self._flat.fill(Box((self.offset,), (1,)), flat)
            return
        for run in runs(box.size, box.start, self.shape, (0,) * len(box.size), box.size):
            self._flat.fill(Box((self.offset + run.source,), (run.length,)), flat[run.target : run.target + run.length])


@dataclass
class Source:
    """What was opened. tensors, ties, values: by the keys of a checkpoint of ours, values as its index has them.

    check: raises CheckpointError where boxes of tensors, by key, are not what was written, as far as that can be told.
    left_out: what lies there and is not read. padded: keys of tensors with more rows than the vocabulary.
    """

    path: Path
    tensors: dict[str, Entry]
    ties: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    step: int | None = None
    check: Callable[[Mapping[str, Sequence[Box]]], None] = lambda boxes: None
    left_out: list[str] = field(default_factory=list)
    padded: set[str] = field(default_factory=set)


def inside(values: Tensor, box: Box) -> Tensor:
    """A view of a box of a tensor."""
    return values[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]
