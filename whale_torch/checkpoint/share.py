"""Which rank writes what: of boxes that several hold, a part to each, so that all write about as much."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from whale_torch.checkpoint.boxes import Box, split_rows

__all__ = ["share"]

_PART_BYTES = 16 << 20


def share(told: Sequence[Sequence[Any]]) -> list[list[tuple[str, Box]]]:
    """Of each rank the boxes that it writes, from what every rank holds: [key, bytes of an element, boxes, alike].

    alike: whether all that hold a box have the same values; of others the first rank's are written.
    """
    holders: dict[tuple[str, Box], list[int]] = defaultdict(list)
    itemsize: dict[str, int] = {}
    for rank, tensors in enumerate(told):
        for key, item, boxes, alike in tensors:
            itemsize[key] = item
            for box in boxes:
                ranks = holders[key, Box.from_json(box)]
                if alike or not ranks:
                    ranks.append(rank)
    loads = [0] * len(told)
    found: list[list[tuple[str, Box]]] = [[] for _ in told]
    for (key, box), ranks in sorted(holders.items(), key=lambda one: len(one[1])):
        item = itemsize[key]
        for part in [box] if len(ranks) == 1 else split_rows(box, max(1, _PART_BYTES // item)):
            rank = min(ranks, key=lambda place: loads[place])
            loads[rank] += part.numel * item
            found[rank].append((key, part))
    return found
