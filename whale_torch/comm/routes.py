"""Two ways of uneven rows from rank to rank: straight, or inside the node first and then between nodes.

Rows are bytes here, [rows, bytes of a row]. Both ways give the same rows in the same order: those of the group's first
rank first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from whale_torch.comm.collectives import all_to_all_rows, all_to_all_rows_async
from whale_torch.comm.splits import Splits
from whale_torch.mesh import Group

__all__ = ["Arrival", "begin_flat", "begin_two_levels", "node_matrix"]

Arrival = Callable[[], Tensor]
"""Waits for the rows that this rank receives."""


def begin_flat(x: Tensor, splits: Splits, group: Group, name: str) -> Arrival:
    """One message from every rank to every other: [sum(sent), bytes] -> [sum(received), bytes]."""
    return all_to_all_rows_async(x, splits.sent, splits.received, group, name=name)


def node_matrix(splits: Splits, group: Group) -> tuple[Tensor, int, int]:
    """Rows by [source node, source place, goal node, goal place], and this rank's node and place."""
    assert group.levels is not None
    nodes, places = group.levels.between.size, group.levels.inside.size
    return splits.matrix.view(nodes, places, nodes, places), group.levels.between.index, group.levels.inside.index


def begin_two_levels(x: Tensor, splits: Splits, group: Group, name: str) -> Arrival:
    """Rows go to the rank of this node at their goal's place, and from there to their goal.

    A rank's messages to other nodes are one a node, each with the rows of a whole node for one rank of it. The part
    inside the node is over when this returns, the other is under way.
    """
    assert group.levels is not None
    inside, between = group.levels.inside, group.levels.between
    matrix, node, place = node_matrix(splits, group)
    own, through = matrix[node, place], matrix[node, :, :, place]  # [goal node, goal place], [source place, goal node]
    by_place = _reorder(x, own)
    here = all_to_all_rows(by_place, own.sum(0).tolist(), through.sum(1).tolist(), inside, name=f"{name} inside a node")
    by_node = _reorder(here, through)
    received = matrix[:, :, node, place].sum(1)
    return all_to_all_rows_async(
        by_node, through.sum(0).tolist(), received.tolist(), between, name=f"{name} between nodes"
    )


def _reorder(x: Tensor, counts: Tensor) -> Tensor:
    """Blocks of rows in the order of counts [a, b] -> in the order of [b, a]."""
    first, second = counts.shape
    parts = x.split(counts.flatten().tolist())
    return torch.cat([parts[a * second + b] for b in range(second) for a in range(first)])
