"""What a shard of a parameter is: a pure description, cut and joined on plain tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Shard", "balanced"]


def balanced(total: int, size: int) -> tuple[int, ...]:
    """Widths of `size` parts of `total`, the larger ones first; parts may be empty."""
    quotient, rest = divmod(total, size)
    return tuple(quotient + (i < rest) for i in range(size))


@dataclass(frozen=True, slots=True)
class Shard:
    """Where the local parts of a parameter lie in the full one.

    The full tensor is `blocks` equal blocks along `dim`; each block is cut into `widths[i] * unit` entries for the
    i-th rank of the group. Attention's packed projection is three blocks cut by heads: blocks=3, unit=head_dim.
    """

    dim: int
    widths: tuple[int, ...]
    shape: tuple[int, ...]
    blocks: int = 1
    unit: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.dim < len(self.shape):
            raise AssertionError(f"dimension {self.dim} of a parameter of shape {self.shape}")
        total = sum(self.widths) * self.unit * self.blocks
        if total != self.shape[self.dim]:
            raise AssertionError(
                f"widths {self.widths} x unit {self.unit} x blocks {self.blocks} != {self.shape}[{self.dim}]"
            )

    @property
    def num_ranks(self) -> int:
        return len(self.widths)

    def local_shape(self, index: int) -> tuple[int, ...]:
        """Shape of the part of the `index`-th rank."""
        shape = list(self.shape)
        shape[self.dim] = self.widths[index] * self.unit * self.blocks
        return tuple(shape)

    def cut(self, full: torch.Tensor, index: int) -> torch.Tensor:
        """The part of the `index`-th rank: a copy that shares nothing with `full`."""
        start, length = sum(self.widths[:index]) * self.unit, self.widths[index] * self.unit
        parts = [block.narrow(self.dim, start, length) for block in full.chunk(self.blocks, self.dim)]
        return (
            torch.cat(parts, self.dim).contiguous()
            if self.blocks > 1
            else parts[0].clone(memory_format=torch.contiguous_format)
        )

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The full tensor from the parts of all ranks, in their order."""
        if self.blocks == 1:
            return torch.cat(parts, self.dim)
        by_rank = [self._blocks_of(part, i) for i, part in enumerate(parts)]
        return torch.cat([blocks[b] for b in range(self.blocks) for blocks in by_rank], self.dim)

    def _blocks_of(self, part: torch.Tensor, index: int) -> list[torch.Tensor]:
        return (
            list(part.split(self.widths[index] * self.unit, self.dim)) if self.widths[index] else [part] * self.blocks
        )

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Shard:
        """A shard from what dataclasses.asdict gave."""
        return Shard(**{**data, "widths": tuple(data["widths"]), "shape": tuple(data["shape"])})
