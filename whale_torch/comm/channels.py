"""Columns of channels: what works on each channel alone keeps them, and flattening makes a channel's pixels columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whale_torch.comm import columnwise  # noqa: F401 - its rules come first, those below fall back to them
from whale_torch.comm.columns import Columns, dropout, register_function, registered_function

__all__ = ["CHANNEL_FUNCTIONS"]

CHANNEL_FUNCTIONS = (
    *(F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool1d, torch.max_pool2d, torch.max_pool3d),
    *(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.lp_pool1d, F.lp_pool2d, F.lp_pool3d, F.interpolate),
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    *(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
)
"""What makes [N, K, *pixels'] of [N, K, *pixels] without letting channels meet."""

_FLATTENING = (torch.flatten, Tensor.flatten, Tensor.view, Tensor.reshape, torch.reshape)
_otherwise = {function: registered_function(function) for function in _FLATTENING}


@register_function(*CHANNEL_FUNCTIONS)
def _pool(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions from [N, K, *pixels] to [N, K, *pixels'] in which channels do not meet."""
    z = args[0] if args else kwargs.get("input")
    if (
        not isinstance(z, Columns)
        or not _channels(z)
        or any(isinstance(a, Tensor) for a in (*args[1:], *kwargs.values()) if a is not z)
    ):
        return NotImplemented
    local = z.local
    if local.numel() == 0:
        return _pool_of_nothing(func, z, args, kwargs)
    out = func(local, *args[1:], **kwargs) if args else func(**{**kwargs, "input": local})
    if not isinstance(out, Tensor):
        return NotImplemented
    return Columns.of(out, replace(z.place, tail=tuple(out.shape[2:])))


def _pool_of_nothing(func: Any, z: Columns, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Without channels or rows here: the shape of the result, and a graph, so that the bridges' backward runs."""
    on_meta = torch.empty((1, 1, *z.place.tail), device="meta")
    out = func(on_meta, *args[1:], **kwargs) if args else func(**{**kwargs, "input": on_meta})
    if not isinstance(out, Tensor):
        return NotImplemented
    local, tail = z.local, tuple(out.shape[2:])
    return Columns.of(local.new_zeros(*local.shape[:2], *tail) + local.sum(), replace(z.place, tail=tail))


def _channels(z: Columns) -> bool:
    return bool(z.place.tail) and len(z.place.lead) == 1


@register_function(F.dropout1d, F.dropout2d, F.dropout3d)
def _channel_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whole channels are dropped: each rank draws for its own."""
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    z = given.get("input")
    if not isinstance(z, Columns) or not _channels(z):
        return NotImplemented
    p, training = float(given.get("p", 0.5)), bool(given.get("training", True))
    if not training or p == 0.0:
        return z
    local = z.local
    mask = dropout(local.new_ones(*local.shape[:2], *[1] * len(z.place.tail)), p, True, z.place.region)
    return Columns.of(local * mask, z.place)


@register_function(*_FLATTENING)
def _flatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """[N, K, *pixels] -> [N, K * pixels]: a channel's pixels lie side by side, so columns stay columns."""
    z = args[0] if args else None
    if not isinstance(z, Columns) or not _channels(z) or (func is Tensor.view and isinstance(args[1], torch.dtype)):
        return _otherwise[func](func, args, kwargs)
    pixels = torch.Size(z.place.tail).numel()
    # a stand-in of the logical shape without memory tells what torch makes of the arguments
    shape = func(torch.empty(z.place.shape, device="meta"), *args[1:], **kwargs).shape
    if tuple(shape) != (z.place.lead[0], sum(z.place.widths) * pixels):
        return NotImplemented
    local = z.local
    place = replace(z.place, widths=tuple(width * pixels for width in z.place.widths), tail=())
    return Columns.of(local.reshape(local.shape[0], local.shape[1] * pixels), place)
