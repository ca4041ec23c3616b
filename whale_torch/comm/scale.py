"""Gradients of cut parameters that each rank multiplied by another number, as torch's own clip does.

At the end of backward some entries of one gradient are kept. Before an optimizer's step, and only if that gradient was
written to since, which its version counter tells without a look at values, the ranks with parts compare what it was
multiplied by. A loop that leaves gradients alone, or changes them through this package, sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from whale_torch.comm.collectives import gather_equal
from whale_torch.comm.registry import by_name, place_of
from whale_torch.errors import CommError
from whale_torch.mesh import Group

__all__ = ["check_scales", "keep_samples", "renew_samples", "witnesses"]

_KEPT = "_whale_sample"
_ALONG = 16
"""Entries kept along each of the first two dimensions; at most twice as many."""
_LEAST = 8
"""Entries that have to agree on one number."""
_TOLERANCE = 1e-5
_HALF_TOLERANCE = 1e-2


def witnesses(parameters: Iterable[Tensor]) -> list[Tensor]:
    """One cut parameter for each group of ranks with parts: the largest, the same on every rank."""
    found: dict[Group, Tensor] = {}
    sizes: dict[Group, int] = {}
    for parameter in parameters:
        place = place_of(parameter)
        if place is not None and place.is_cut and place.parts is not None and place.shard is not None:
            size = math.prod(place.shard.shape)
            if size > sizes.get(place.parts, 0):
                found[place.parts], sizes[place.parts] = parameter, size
    return list(found.values())


def keep_samples(parameters: Sequence[Tensor]) -> None:
    """Keeps entries of gradients as backward left them."""
    for parameter in parameters:
        grad = parameter.grad
        kept = None if grad is None or grad.layout is not torch.strided else (grad._version, _sample(grad))
        setattr(parameter, _KEPT, kept)


def renew_samples(parameters: Iterable[Tensor]) -> None:
    """What this package did to the gradients is right on all ranks."""
    keep_samples([parameter for parameter in parameters if getattr(parameter, _KEPT, None) is not None])


def check_scales(parameters: Iterable[Tensor]) -> None:
    """Compares what gradients that were written to since backward were multiplied by.

    A collective over the ranks with parts. Where a rank finds no such number (clipped by value, say), its change is
    right part by part, and is not judged.
    Raises CommError on all these ranks.
    """
    for parameter in by_name(p for p in parameters if _is_touched(p)):
        place = place_of(parameter)
        assert place is not None and place.parts is not None
        assert parameter.grad is not None
        _, before = getattr(parameter, _KEPT)
        setattr(parameter, _KEPT, None)
        tolerance = _TOLERANCE if parameter.dtype.itemsize >= 4 else _HALF_TOLERANCE
        _compare(place.name, place.parts, _multiplier(before, _sample(parameter.grad), tolerance), tolerance)


def _is_touched(parameter: Tensor) -> bool:
    kept = getattr(parameter, _KEPT, None)
    return kept is not None and parameter.grad is not None and parameter.grad._version != kept[0]


def _sample(grad: Tensor) -> Tensor:
    grad = grad.detach()
    return grad[tuple(slice(None, None, max(1, size // _ALONG)) for size in grad.shape[:2])].clone()


def _multiplier(before: Tensor, now: Tensor, tolerance: float) -> float:
    """The number that makes `now` of `before`; NaN where there is none, or too few entries tell."""
    if before.shape != now.shape:
        return math.nan
    before, now = before.abs().double(), now.abs().double()
    tells = before > 0
    ratios = (now[tells] / before[tells]).cpu()
    if ratios.numel() < _LEAST:
        return math.nan
    scale = float(ratios.median())
    return scale if float((ratios - scale).abs().max()) <= tolerance * scale else math.nan


def _compare(name: str, parts: Group, mine: float, tolerance: float) -> None:
    scales = gather_equal(torch.tensor([mine], dtype=torch.float64), parts, name="scale of gradients").flatten()
    known = {rank: scale for rank, scale in zip(parts.ranks, scales.tolist(), strict=True) if math.isfinite(scale)}
    if not known:
        return
    low, high = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    if known[high] - known[low] > tolerance * known[high]:
        raise CommError(
            f"since backward the gradient of '{name}', of which ranks {list(parts.ranks)} hold parts, "
            f"was multiplied by {known[low]:.6g} on rank {low} and by {known[high]:.6g} on rank {high}.",
            fix="likely torch.nn.utils.clip_grad_norm_, which counts this rank's part only: use wh.clip_grad_norm_",
            ranks=(low, high),
        )
