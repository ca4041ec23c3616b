"""What a plan moves: bytes that one rank sends in a training step."""

from __future__ import annotations

from whale_torch.planning.placement import VirtualDevice
from whale_torch.planning.rules import Cut

__all__ = ["all_reduce_bytes", "split_bytes"]


def all_reduce_bytes(num_bytes: float, num_ranks: int) -> float:
    """Sent by one rank in a ring all-reduce."""
    return 2 * num_bytes * (num_ranks - 1) / num_ranks


def split_bytes(cut: Cut, device: VirtualDevice, rows: int, element_bytes: int) -> float:
    """Sent by one rank to bring rows into and out of one split module, forward and backward.

    rows: of one feed. Own rows enter by all-gather and leave by reduce-scatter, shared rows pay all-reduces of the same size.
    """
    num_feeds = device.size // device.num_twins
    elements = (cut.elements_in + cut.elements_out) * rows * element_bytes
    over_feeds = 2 * elements * (num_feeds - 1)
    over_twins = all_reduce_bytes(elements, device.num_twins)
    return over_feeds + over_twins
