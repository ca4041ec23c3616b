"""VirtualDevices: named slices of the mesh, as blocks of ranks (docs/design.md 8)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from whale_torch.cluster import Blocks

__all__ = ["Blocks", "VirtualDevice"]


@lru_cache(maxsize=256)
def _neighbours(world: int, size: int) -> Blocks:
    return tuple(tuple(range(first, first + size)) for first in range(0, world, size))


@lru_cache(maxsize=256)
def _strided(world: int, size: int) -> Blocks:
    return tuple(tuple(range(part, world, size)) for part in range(size))


@lru_cache(maxsize=256)
def _places(world: int, size: int, step: int) -> Blocks:
    return tuple(block[place::step] for block in _neighbours(world, size) for place in range(step))


@dataclass(frozen=True, slots=True)
class VirtualDevice:
    """Where a TaskGraph runs: `size` neighbouring ranks hold the parts of its parameters, 1 for a replica.

    world: all ranks, a multiple of size. feed_size: neighbouring ranks that are fed the same rows; it divides size or
    size divides it. num_places: ranks of one pipeline, each of which is one place of it; inner: whether they are
    neighbours, or the ranks of one place are. All blocks lie inside a place.
    """

    name: str
    world: int
    size: int
    feed_size: int
    num_places: int = 1
    inner: bool = False

    @property
    def num_twins(self) -> int:
        """Ranks of one block that are fed the same rows."""
        return min(self.size, self.feed_size)

    @property
    def num_rows(self) -> int:
        """Feeds of one block."""
        return self.size // self.num_twins

    @property
    def num_copies(self) -> int:
        """Ranks that hold the same part."""
        return self.world // self.num_places // self.size

    @property
    def columns(self) -> Blocks:
        """The ranks that hold the parts of one copy."""
        return self._in_each_place(_neighbours(self.ranks_of_a_place, self.size))

    @property
    def twins(self) -> Blocks:
        """Inside a block: the ranks fed the same rows."""
        return self._in_each_place(_neighbours(self.ranks_of_a_place, self.num_twins))

    @property
    def fed_alike(self) -> Blocks:
        """The ranks of a place that are fed the same rows."""
        return self._in_each_place(_neighbours(self.ranks_of_a_place, self.feed_size))

    @property
    def rows(self) -> Blocks:
        """Inside a block: one rank of each feed, at the same place."""
        return self._in_each_place(_places(self.ranks_of_a_place, self.size, self.num_twins))

    @property
    def copies(self) -> Blocks:
        """The ranks that hold the same part."""
        return self._in_each_place(_strided(self.ranks_of_a_place, self.size))

    @property
    def all_rows(self) -> Blocks:
        """Ranks of a place that run each row once together: of those fed alike, one block's, where they share it."""
        number = self.feed_size // self.num_twins
        blocks: list[list[int]] = [[] for _ in range(number)]
        for index in range(self.ranks_of_a_place):
            blocks[index % self.feed_size // self.num_twins].append(index)
        return self._in_each_place(tuple(map(tuple, blocks)))

    @property
    def pipelines(self) -> Blocks:
        """The ranks of each pipeline, in order of their places."""
        return tuple(
            tuple(self._rank(place, index) for place in range(self.num_places))
            for index in range(self.ranks_of_a_place)
        )

    def index_of(self, rank: int) -> int:
        """Number of a rank among those of its place."""
        return rank // self.num_places if self.inner else rank % self.ranks_of_a_place

    def place_of(self, rank: int) -> int:
        """The place of its pipeline that a rank is."""
        return rank % self.num_places if self.inner else rank // self.ranks_of_a_place

    @property
    def ranks_of_a_place(self) -> int:
        return self.world // self.num_places

    def _rank(self, place: int, index: int) -> int:
        return index * self.num_places + place if self.inner else place * self.ranks_of_a_place + index

    def _in_each_place(self, blocks: Blocks) -> Blocks:
        if self.num_places == 1:
            return blocks
        return tuple(
            tuple(self._rank(place, index) for index in block) for place in range(self.num_places) for block in blocks
        )

    @property
    def row_mode(self) -> str:
        """own, shared or mixed rows."""
        if self.num_twins == 1:
            return "own"
        return "shared" if self.num_twins == self.size else "mixed"
