"""Bringing rows into a region and out of it: what a split module asks of its input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whale_torch.comm.bridge import Enter, Leave, RowsToColumns, ScaleBackward, Shared, gather_feeds
from whale_torch.comm.columns import Columns
from whale_torch.comm.region import Region

__all__ = [
    "Rows",
    "agree_on_samples",
    "enter_batch",
    "enter_channels",
    "enter_columns",
    "enter_rows",
    "enter_samples",
    "enter_shared",
    "gather_plain",
    "leave_rows",
    "partial_parameter",
]

Rows = tuple[Tensor, tuple[int, ...], tuple[int, ...]]
_INPUT = "the input of a split layer"


def _counts(
    x: Tensor, region: Region, operation: str, detail: str, fix: str = "give all ranks of the split one kind of input"
) -> tuple[int, ...]:
    """Rows of each feed. Raises on every rank where ranks come with different dtypes or `detail`."""
    region.check_eager()
    return region.agree(operation, x.shape[0], f"{x.dtype}{detail}", fix) if region.rows.size > 1 else (x.shape[0],)


def _plain_rows(x: Tensor) -> Tensor:
    return x.implicit_rows(_INPUT) if isinstance(x, Columns) else x


def enter_rows(x: Tensor, region: Region) -> Rows:
    """Own rows of any leading shape -> (rows of all feeds [N, D], rows of each feed, own leading shape).

    Gathered once for all modules that read the same tensor.
    """
    region.check_eager()
    x = _plain_rows(x)
    lead = tuple(x.shape[:-1])
    known = region.recall(x, "rows")
    if known is None:
        flat = x.reshape(torch.Size(lead).numel(), x.shape[-1])
        counts = _counts(flat, region, "rows of a split's input", f" of width {flat.shape[1]}")
        known = (Enter.apply(flat, counts, region), counts)  # type: ignore[no-untyped-call]
        region.remember(x, "rows", known)
    return known[0], known[1], lead


def agree_on_samples(x: Tensor, region: Region, operation: str) -> tuple[int, ...]:
    """Samples of each feed, along dim 0 of x.

    Raises LayoutError on every rank where the samples of the ranks have different shapes or dtypes.
    """
    fix = "pad the batch to one length on all ranks of the split"
    return _counts(x, region, operation, f" of shape {tuple(x.shape[1:])}", fix)


def enter_samples(x: Tensor, counts: tuple[int, ...], region: Region, dim: int = 0) -> Tensor:
    """Own samples along `dim` -> samples of all feeds along dim 0; the ranks have agreed on counts and shapes.

    Gathered once for all modules that read the same tensor.
    """
    x = _plain_rows(x)
    known: Tensor | None = region.recall(x, f"batch {dim}")
    if known is None:
        known = Enter.apply(x.movedim(dim, 0), counts, region)  # type: ignore[no-untyped-call]
        assert known is not None
        region.remember(x, f"batch {dim}", known)
    return known


def enter_batch(x: Tensor, region: Region) -> tuple[Tensor, tuple[int, ...]]:
    """Own samples along dim 0 -> (samples of all feeds along dim 0, samples of each feed).

    Raises LayoutError where the ranks' samples have different shapes.
    """
    x = _plain_rows(x)
    counts = agree_on_samples(x, region, "samples of a split's input")
    return enter_samples(x, counts, region), counts


def enter_columns(x: Tensor, widths: Sequence[int], region: Region) -> Rows:
    """Input of a layer cut by rows -> (all rows, this rank's columns [N, K]; rows of each feed; own leading shape).

    A split's output with the same cut is taken as it lies; anything else moves once.
    """
    region.check_eager()
    if (
        isinstance(x, Columns)
        and x.place.region.columns is region.columns
        and x.place.widths == tuple(widths)
        and not x.place.tail
    ):
        if x.place.applied:
            x.place.agree("columns of a split's input")
        return x.local, x.place.counts, x.place.lead
    x = _plain_rows(x)
    lead = tuple(x.shape[:-1])
    flat = x.reshape(torch.Size(lead).numel(), x.shape[-1])
    counts = _counts(flat, region, "columns of a split's input", f" of width {flat.shape[1]}")
    return RowsToColumns.apply(flat, counts, tuple(widths), region), counts, lead  # type: ignore[no-untyped-call]


def enter_channels(x: Tensor, widths: Sequence[int], region: Region) -> tuple[Tensor, tuple[int, ...]]:
    """Own samples [B, C, *pixels] -> (all samples, this rank's channels [N, K, *pixels]; samples of each feed).

    A split's output with the same cut is taken as it lies; anything else moves once.
    Raises LayoutError where the ranks' samples have different shapes.
    """
    if (
        isinstance(x, Columns)
        and x.place.region.columns is region.columns
        and x.place.widths == tuple(widths)
        and len(x.place.lead) == 1
    ):
        if x.place.applied:
            x.place.agree("channels of a split's input")
        return x.local, x.place.counts
    x = _plain_rows(x)
    counts = agree_on_samples(x, region, "channels of a split's input")
    pixels = tuple(x.shape[2:])
    size = torch.Size(pixels).numel()
    flat = x.reshape(x.shape[0], x.shape[1] * size)
    out = RowsToColumns.apply(flat, counts, tuple(width * size for width in widths), region)  # type: ignore[no-untyped-call]
    return out.reshape(sum(counts), widths[region.columns.index], *pixels), counts


def leave_rows(part: Tensor, counts: Sequence[int], lead: Sequence[int], region: Region) -> Tensor:
    """Partial sums of all rows [N, D] -> complete own rows [*lead, D]."""
    out: Tensor = Leave.apply(part, tuple(counts), region)  # type: ignore[no-untyped-call]
    return out.reshape(*lead, *part.shape[1:])


def gather_plain(x: Tensor, counts: Sequence[int], region: Region, name: str) -> Tensor:
    """Own samples of a tensor without gradient (masks, ids) -> samples of all feeds, along dim 0."""
    region.check_eager()
    with torch.no_grad():
        if x.dtype == torch.bool:
            return gather_feeds(x.to(torch.uint8), counts, region, name).bool()
        return gather_feeds(x, counts, region, name)


def enter_shared(x: Tensor, region: Region) -> Tensor:
    """A tensor equal on all ranks that belongs to no sample (an attention bias), read by each rank for its part."""
    if region.columns.size == 1 or not x.requires_grad:
        return x
    out: Tensor = Shared.apply(x, region)  # type: ignore[no-untyped-call]
    return out


def partial_parameter(parameter: Tensor, region: Region) -> Tensor:
    """A whole parameter as a rank of a region uses it for its part of the features or heads of all rows.

    The reducer takes the mean over all copies, which are in equal shares on the region's ranks: hence their number.
    """
    if region.columns.size == 1 or not parameter.requires_grad:
        return parameter
    out: Tensor = ScaleBackward.apply(parameter, lambda: region.columns.size)  # type: ignore[no-untyped-call]
    return out
