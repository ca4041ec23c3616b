"""Boxes: the parts of a tensor that ranks hold and files store, as numbers alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from whale_torch.planning.layout import Shard

__all__ = ["Box", "Run", "blocks", "boxes_of", "in_local", "overlap", "runs", "split_rows"]


@dataclass(frozen=True, order=True, slots=True)
class Box:
    """A block of a tensor: from `start` on, `size` entries along each dim."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return Box((0,) * len(shape), tuple(shape))

    @staticmethod
    def from_json(data: Sequence[Sequence[int]]) -> Box:
        start, size = data
        return Box(tuple(start), tuple(size))

    def to_json(self) -> list[list[int]]:
        return [list(self.start), list(self.size)]

    @property
    def numel(self) -> int:
        return math.prod(self.size)


@dataclass(frozen=True, slots=True)
class Run:
    """Elements that lie side by side in two boxes: where they begin in each, counted in elements, and how many."""

    source: int
    target: int
    length: int


def boxes_of(shard: Shard, index: int) -> list[Box]:
    """What the `index`-th rank holds of a cut parameter: one box for each of its blocks, in the part's order."""
    width = shard.widths[index] * shard.unit
    before = sum(shard.widths[:index]) * shard.unit
    block = shard.shape[shard.dim] // shard.blocks
    found = []
    for number in range(shard.blocks):
        start, size = [0] * len(shard.shape), list(shard.shape)
        start[shard.dim], size[shard.dim] = number * block + before, width
        found.append(Box(tuple(start), tuple(size)))
    return found


def in_local(shard: Shard, index: int) -> list[Box]:
    """Where those boxes lie in the part itself."""
    width = shard.widths[index] * shard.unit
    found = []
    for number in range(shard.blocks):
        start, size = [0] * len(shard.shape), list(shard.local_shape(index))
        start[shard.dim], size[shard.dim] = number * width, width
        found.append(Box(tuple(start), tuple(size)))
    return found


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes of a tensor have in common, None for nothing."""
    start, size = [], []
    for a, n, b, m in zip(one.start, one.size, other.start, other.size, strict=True):
        first = a if a > b else b
        length = (a + n if a + n < b + m else b + m) - first
        if length <= 0:
            return None
        start.append(first)
        size.append(length)
    return Box(tuple(start), tuple(size))


def split_rows(box: Box, most: int) -> list[Box]:
    """A box in boxes of at most so many elements where its first dim allows."""
    if not box.size or box.numel <= most or not box.size[0]:
        return [box]
    rows = max(1, most // (box.numel // box.size[0]))
    return [
        Box((box.start[0] + first, *box.start[1:]), (min(rows, box.size[0] - first), *box.size[1:]))
        for first in range(0, box.size[0], rows)
    ]


def blocks(box: Box, most: int) -> Iterator[Box]:
    """A box in boxes of at most so many elements, each as wide as can be; in the order of their elements."""
    if box.numel <= most:
        yield box
        return
    dim = next(d for d, n in enumerate(box.size) if n > 1)
    rows = max(1, most // (box.numel // box.size[dim]))
    for first in range(0, box.size[dim], rows):
        start, size = list(box.start), list(box.size)
        start[dim], size[dim] = start[dim] + first, min(rows, size[dim] - first)
        yield from blocks(Box(tuple(start), tuple(size)), most)


def runs(
    size: Sequence[int], at: Sequence[int], source: Sequence[int], to: Sequence[int], target: Sequence[int]
) -> Iterator[Run]:
    """A block of `size` that begins at `at` in a tensor of shape `source` and at `to` in one of shape `target`, each
    stored row by row, in runs that lie side by side in both."""
    dims = len(size)
    joined = dims  # dims from here on are whole in both, so one run covers them
    while joined and size[joined - 1] == source[joined - 1] == target[joined - 1]:
        joined -= 1
    if not joined:
        yield Run(0, 0, math.prod(size))
        return
    inner = joined - 1
    length = math.prod(size[inner:])
    strides = [[math.prod(shape[d + 1 :]) for d in range(dims)] for shape in (source, target)]
    firsts = [
        sum(p * s for p, s in zip(start, stride, strict=True)) for start, stride in zip((at, to), strides, strict=True)
    ]

    def walk(dim: int, first: int, goal: int) -> Iterator[Run]:
        if dim >= inner:
            yield Run(first, goal, length)
            return
        for number in range(size[dim]):
            yield from walk(dim + 1, first + number * strides[0][dim], goal + number * strides[1][dim])

    yield from walk(0, *firsts)
