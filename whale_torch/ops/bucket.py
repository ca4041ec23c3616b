"""Flat buckets of gradients: pack with cast and scale, unpack, largest magnitude. None of them is differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from whale_torch.errors import LayoutError
from whale_torch.ops.library import op, run, written
from whale_torch.ops.precision import FLOATS

__all__ = ["bucket_amax", "bucket_pack", "bucket_unpack"]

_PACK = op("bucket_pack")
_UNPACK = op("bucket_unpack")
_AMAX = op("bucket_amax")


def _check_floats(tensors: list[Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        if tensor.dtype not in FLOATS:
            raise LayoutError(
                f"tensors[{index}] is {tensor.dtype}, and a bucket holds {', '.join(map(str, FLOATS))}",
                fix="leave it out of the bucket",
            )
        if tensor.device != tensors[0].device:
            raise LayoutError(f"tensors[{index}] is on {tensor.device}, tensors[0] on {tensors[0].device}")


def _check_bucket(flat: Tensor, offsets: list[int], tensors: list[Tensor]) -> None:
    _check_floats([flat, *tensors])
    if len(offsets) != len(tensors):
        raise LayoutError(f"{len(offsets)} offsets for {len(tensors)} tensors", fix="give one offset a tensor")
    if flat.dim() != 1 or not flat.is_contiguous():
        raise LayoutError(f"flat has shape {tuple(flat.shape)} and strides {flat.stride()}; a bucket is 1-D contiguous")
    for index, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
        if not 0 <= offset <= flat.numel() - tensor.numel():
            raise LayoutError(
                f"tensors[{index}] takes elements {offset}..{offset + tensor.numel()} of a bucket of {flat.numel()}",
                fix="make the bucket larger or the offset smaller",
            )


def bucket_pack(tensors: list[Tensor], offsets: list[int], flat: Tensor, scale: float = 1.0) -> None:
    """Writes tensors, cast and scaled, into a bucket: flat[offsets[i] : offsets[i] + numel] = cast(tensors[i] * scale).

    Shapes: tensors of any shape and strides, in logical (row-major) order; flat 1-D. Each any of the four float dtypes.
    Raises: LayoutError if a tensor does not fit where its offset says.
    """
    run(_PACK, lambda: _check_bucket(flat, offsets, tensors), tensors, offsets, flat, scale)
    written(flat)


def bucket_unpack(flat: Tensor, offsets: list[int], tensors: list[Tensor], scale: float = 1.0) -> Tensor:
    """Writes a bucket's values, cast and scaled, into tensors; returns a float32 scalar: 1.0 if any was not finite.

    Shapes: as `bucket_pack`. The values looked at are those read, before cast and scale.
    Raises: LayoutError if a tensor does not fit where its offset says.
    """
    found: Tensor = run(_UNPACK, lambda: _check_bucket(flat, offsets, tensors), flat, offsets, tensors, scale)
    written(tensors)
    return found


def bucket_amax(tensors: list[Tensor]) -> Tensor:
    """The largest |x| over all tensors, a float32 scalar: 0 for none, inf or NaN if there is one (NaN wins).

    Raises: LayoutError if a tensor is not floating point or on another device than the first.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float32)
    largest: Tensor = run(_AMAX, lambda: _check_floats(tensors), tensors)
    return largest
