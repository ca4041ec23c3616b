"""Bringing rows into a region and out of it: what a split module asks of its input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whale_torch.comm.bridge import Enter, Leave, RowsToColumns, gather_feeds
from whale_torch.comm.columns import Columns
from whale_torch.comm.region import Region

__all__ = ["Rows", "enter_batch", "enter_columns", "enter_rows", "gather_plain", "leave_rows", "own_slice"]

Rows = tuple[Tensor, tuple[int, ...], tuple[int, ...]]


def _counts(x: Tensor, region: Region, operation: str, detail: str = "") -> tuple[int, ...]:
    """Rows of each feed. Raises on every rank where ranks come with different dtypes or `detail`."""
    return region.agree(operation, x.shape[0], f"{x.dtype}{detail}") if region.rows.size > 1 else (x.shape[0],)


def enter_rows(x: Tensor, region: Region) -> Rows:
    """Own rows of any leading shape -> (rows of all feeds [N, D], rows of each feed, own leading shape).

    Gathered once for all modules that read the same tensor.
    """
    if isinstance(x, Columns):
        x = x.implicit_rows("the input of a split layer")
    lead = tuple(x.shape[:-1])
    known = region.recall(x, "rows")
    if known is None:
        flat = x.reshape(-1, x.shape[-1])
        counts = _counts(flat, region, "rows of a split's input", f" of width {flat.shape[1]}")
        known = (Enter.apply(flat, counts, region), counts)
        region.remember(x, "rows", known)
    return known[0], known[1], lead


def enter_batch(x: Tensor, region: Region, dim: int = 0) -> tuple[Tensor, tuple[int, ...]]:
    """Own samples along `dim` -> (samples of all feeds along dim 0, samples of each feed).

    Raises LayoutError where the ranks' samples have different shapes.
    """
    if isinstance(x, Columns):
        x = x.implicit_rows("the input of a split layer")
    known = region.recall(x, f"batch {dim}")
    if known is None:
        first = x.movedim(dim, 0)
        counts = _counts(first, region, "samples of a split's input")
        if region.rows.size > 1:
            region.check_equal(tuple(first.shape[1:]), "shape of a sample", "pad the batch to one length on all ranks of the split")
        known = (Enter.apply(first, counts, region), counts)
        region.remember(x, f"batch {dim}", known)
    return known[0], known[1]


def enter_columns(x: Tensor, widths: Sequence[int], region: Region) -> Rows:
    """Input of a layer that is cut by rows -> (all rows, this rank's columns [N, K]; rows of each feed; own leading shape).

    A split's output with the same cut is taken as it lies; anything else moves once.
    """
    if isinstance(x, Columns) and x.place.region.columns is region.columns and x.place.widths == tuple(widths) and not x.place.tail:
        if x.place.applied:
            x.place.agree("columns of a split's input")
        return x.local, x.place.counts, x.place.lead
    if isinstance(x, Columns):
        x = x.implicit_rows("the input of a split layer")
    lead = tuple(x.shape[:-1])
    flat = x.reshape(-1, x.shape[-1])
    counts = _counts(flat, region, "columns of a split's input")
    return RowsToColumns.apply(flat, counts, tuple(widths), region), counts, lead


def leave_rows(part: Tensor, counts: Sequence[int], lead: Sequence[int], region: Region) -> Tensor:
    """Partial sums of all rows [N, D] -> complete own rows [*lead, D]."""
    out: Tensor = Leave.apply(part, tuple(counts), region)
    return out.reshape(*lead, *part.shape[1:])


def own_slice(counts: Sequence[int], region: Region) -> slice:
    """Where the own feed's rows lie among the rows of all feeds."""
    start = sum(counts[: region.rows.index])
    return slice(start, start + counts[region.rows.index])


def gather_plain(x: Tensor, counts: Sequence[int], region: Region, name: str) -> Tensor:
    """Own samples of a tensor without gradient (masks, ids) -> samples of all feeds, along dim 0."""
    with torch.no_grad():
        if x.dtype == torch.bool:
            return gather_feeds(x.to(torch.uint8), counts, region, name).bool()
        return gather_feeds(x, counts, region, name)
