"""Slices of stored tensors that a load takes in the place of whole ones, written as Python writes them: "qkv[0:64]"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from whale_torch.checkpoint.boxes import Box
from whale_torch.checkpoint.inventory import Held
from whale_torch.errors import CheckpointError

__all__ = ["Slice", "split_slice"]

_SLICE = re.compile(r"(.+)\[([\d\s:,]+)\]")
_INDEX = re.compile(r"\s*(?:(\d+)|(\d*)\s*:\s*(\d*))\s*")


@dataclass(frozen=True)
class Slice:
    """text: as it was given. indices: of the first dims, a number, which takes the dim away, or (from, to), of which
    None is the dim's own end.
    """

    text: str
    indices: tuple[int | tuple[int | None, int | None], ...]

    def box(self, shape: Sequence[int]) -> Box:
        """The part of a tensor. Raises CheckpointError where a tensor of this shape has no such part."""
        start, size = [0] * len(shape), list(shape)
        fits = len(self.indices) <= len(shape)
        for dim, index in enumerate(self.indices[: len(shape)]):
            first, last = (index, index + 1) if isinstance(index, int) else index
            first, last = first or 0, shape[dim] if last is None else last
            fits = fits and first <= last <= shape[dim]
            start[dim], size[dim] = first, last - first
        if not fits:
            raise CheckpointError(f"a tensor of shape {tuple(shape)} has no part [{self.text}].", fix="another slice")
        return Box(tuple(start), tuple(size))

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """That of the part, without the dims that a number takes away."""
        gone = self._gone()
        return tuple(size for dim, size in enumerate(self.box(shape).size) if dim not in gone)

    def of_whole(self, held: Held, shape: Sequence[int]) -> Held:
        """What is held of the part, as what is held of the whole, of this shape."""
        start, values = self.box(shape).start, held.values
        for dim in self._gone():
            values = None if values is None else values.unsqueeze(dim)
        boxes = tuple((_moved(self._wider(whole), start), self._wider(local)) for whole, local in held.boxes)
        return replace(held, shape=tuple(shape), values=values, boxes=boxes)

    def _gone(self) -> list[int]:
        return [dim for dim, index in enumerate(self.indices) if isinstance(index, int)]

    def _wider(self, box: Box) -> Box:
        first, size = list(box.start), list(box.size)
        for dim in self._gone():
            first.insert(dim, 0)
            size.insert(dim, 1)
        return Box(tuple(first), tuple(size))


def _moved(box: Box, by: Sequence[int]) -> Box:
    return Box(tuple(a + b for a, b in zip(box.start, by, strict=True)), box.size)


def split_slice(source: str) -> tuple[str, Slice | None]:
    """The name, and the slice that follows it, None for none. Raises CheckpointError for one of another form."""
    found = _SLICE.fullmatch(source)
    if found is None:
        return source, None
    indices: list[int | tuple[int | None, int | None]] = []
    for text in found[2].split(","):
        index = _INDEX.fullmatch(text)
        if index is None:
            raise CheckpointError(
                f"{source!r} ends in no slice.", fix="from:to for each of the first dims, or a number"
            )
        number, first, last = index.groups()
        ends = (int(first) if first else None, int(last) if last else None)
        indices.append(ends if number is None else int(number))
    return found[1], Slice(found[2], tuple(indices))
