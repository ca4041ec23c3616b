"""VirtualDevices: named slices of the mesh, as blocks of ranks (docs/design.md 8)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Blocks", "VirtualDevice"]

Blocks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class VirtualDevice:
    """Where a TaskGraph runs: `size` neighbouring ranks hold the parts of its parameters, 1 for a replica.

    world: all ranks. feed_size: neighbouring ranks that are fed the same rows.
    """

    name: str
    world: int
    size: int
    feed_size: int

    @property
    def num_twins(self) -> int:
        """Ranks of one block that are fed the same rows."""
        return min(self.size, self.feed_size)

    @property
    def columns(self) -> Blocks:
        """The ranks that hold the parts of one copy."""
        return tuple(tuple(range(first, first + self.size)) for first in range(0, self.world, self.size))

    @property
    def twins(self) -> Blocks:
        """Inside a block: the ranks fed the same rows."""
        return tuple(tuple(range(first, first + self.num_twins)) for first in range(0, self.world, self.num_twins))

    @property
    def rows(self) -> Blocks:
        """Inside a block: one rank of each feed, at the same place."""
        return tuple(block[place :: self.num_twins] for block in self.columns for place in range(self.num_twins))

    @property
    def copies(self) -> Blocks:
        """The ranks that hold the same part."""
        return tuple(tuple(range(part, self.world, self.size)) for part in range(self.size))

    @property
    def row_mode(self) -> str:
        """own, shared or mixed rows."""
        if self.num_twins == 1:
            return "own"
        return "shared" if self.num_twins == self.size else "mixed"
