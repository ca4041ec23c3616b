"""Gradients of cut parameters that each rank multiplied by another number, as torch's own clip does.

At the end of backward some entries of one gradient are kept. An optimizer's step finds out what that gradient was
multiplied by since: by 1 if nobody wrote to it, which its version counter tells without a look at values. The number
travels with the row counts of the next forward, so that no message is added and every rank raises; on the steps on
which copies are compared it is compared at once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from whale_torch.comm.collectives import gather_equal
from whale_torch.comm.registry import ParameterPlace, by_name, place_of
from whale_torch.errors import CommError

__all__ = ["Witness", "check_scales", "note_scales", "renew_samples"]

_KEY = "_whale_witness"
_ALONG = 16
"""Entries kept along each of the first two dimensions; at most twice as many."""
_LEAST = 8
"""Entries that have to agree on one number."""
_TOLERANCE, _HALF_TOLERANCE = 1e-5, 1e-2
_STEPS = 1e7
_ONE = 1 << 40
"""A positive number x travels as log(x) * _STEPS + _ONE; 0 says that there is none."""


class Witness:
    """The largest cut parameter of a model, whose gradient tells what all were multiplied by.

    of_stage: it is the largest of a pipeline's stage instead, another one on each rank.
    """

    def __init__(self, parameter: Tensor, place: ParameterPlace, *, of_stage: bool = False):
        self.parameter, self.place, self.of_stage = parameter, place, of_stage
        self._kept: tuple[weakref.ref[Tensor], int, Tensor] | None = None
        self._found = math.nan
        setattr(parameter, _KEY, self)

    @property
    def _tolerance(self) -> float:
        return _TOLERANCE if self.parameter.dtype.itemsize >= 4 else _HALF_TOLERANCE

    @staticmethod
    def among(parameters: Iterable[Tensor]) -> Witness | None:
        """The same one on every rank; None where nothing is cut."""
        cut = [(p, place) for p in parameters if (place := place_of(p)) is not None and place.is_cut]
        return (
            Witness(*max(cut, key=lambda pair: math.prod(pair[1].shard.shape if pair[1].shard else ())))
            if cut
            else None
        )

    def keep(self) -> None:
        """Keeps entries of the gradient as backward left it."""
        grad = self.parameter.grad
        if grad is None or grad.layout is not torch.strided:
            self._kept = None
        else:
            self._kept = (weakref.ref(grad), grad._version, _sample(grad))

    def renew(self) -> None:
        """What was done to the gradient since is right."""
        if self._kept is not None:
            self.keep()

    def note(self) -> None:
        """Finds what the gradient was multiplied by since backward.

        NaN where there is no such number: what was clipped by value, say, is right part by part, and not judged.
        """
        if self._kept is None or self.parameter.grad is None:
            return
        kept, version, before = self._kept
        touched = kept() is not self.parameter.grad or self.parameter.grad._version != version
        self._found = _multiplier(before, _sample(self.parameter.grad), self._tolerance) if touched else 1.0
        self._kept = None

    def take(self) -> int:
        """What the last step found, as it travels; it is told once."""
        found, self._found = self._found, math.nan
        return round(math.log(found) * _STEPS) + _ONE if 0.0 < found < math.inf else 0

    def check(self, codes: Sequence[int]) -> None:
        """Compares what the ranks found. Raises CommError naming two that differ."""
        known = {rank: code for rank, code in enumerate(codes) if code}
        if not known:
            return
        low, high = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
        if known[high] - known[low] > self._tolerance * _STEPS + 1:
            least, most = (math.exp((known[rank] - _ONE) / _STEPS) for rank in (low, high))
            whose = "gradients of a pipeline's stages were" if self.of_stage else (
                f"the gradient of '{self.place.name}', which is cut, was"
            )  # fmt: skip
            raise CommError(
                f"between backward and an optimizer's step {whose} multiplied by {least:.6g} on rank {low} and by "
                f"{most:.6g} on rank {high}.",
                where=self.place.site,
                fix="likely torch.nn.utils.clip_grad_norm_, which counts this rank's part only: use wh.clip_grad_norm_",
                ranks=(low, high),
            )


def _witnesses(parameters: Iterable[Tensor]) -> list[Witness]:
    found = [(p, getattr(p, _KEY, None)) for p in parameters]
    ordered = by_name(p for p, witness in found if isinstance(witness, Witness))
    return [getattr(p, _KEY) for p in ordered]


def renew_samples(parameters: Iterable[Tensor]) -> None:
    """What this package did to gradients is right on all ranks, and not asked about."""
    for witness in _witnesses(parameters):
        witness.renew()


def note_scales(parameters: Iterable[Tensor]) -> None:
    """Before an optimizer's step: finds what gradients were multiplied by since backward."""
    for witness in _witnesses(parameters):
        witness.note()


def check_scales(parameters: Iterable[Tensor]) -> None:
    """Compares what was found at once: a collective over all ranks of the model. Raises CommError on all of them."""
    for witness in _witnesses(parameters):
        if witness.of_stage:  # optimizers of some stages alone are known to some ranks alone: told at the next forward
            continue
        mine = torch.tensor([witness.take()])
        witness.check(gather_equal(mine, witness.place.everyone, name="scale of gradients").flatten().tolist())


def _sample(grad: Tensor) -> Tensor:
    grad = grad.detach()
    return grad[tuple(slice(None, None, max(1, size // _ALONG)) for size in grad.shape[:2])].clone()


def _multiplier(before: Tensor, now: Tensor, tolerance: float) -> float:
    """The number that makes `now` of `before`; NaN where there is none, or too few entries tell."""
    if before.shape != now.shape:
        return math.nan
    if before.is_complex():
        before, now = torch.view_as_real(before), torch.view_as_real(now)
    tells = before != 0
    ratios = (now[tells] / before[tells]).double().cpu()
    if ratios.numel() < _LEAST:
        return math.nan
    scale = float(ratios.median())
    return scale if float((ratios - scale).abs().max()) <= tolerance * scale else math.nan
