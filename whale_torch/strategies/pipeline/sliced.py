"""A module of a stage that runs on this rank's slice of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whale_torch.comm.columns import Columns
from whale_torch.comm.local_random import LocalRandom
from whale_torch.comm.slices import join, run_whole, take
from whale_torch.errors import LayoutError
from whale_torch.mesh import Group
from whale_torch.trace.graph import leaves_in, map_leaves
from whale_torch.trace.slices import Slices

__all__ = ["OnSlices"]


class OnSlices:
    """Called like the module, with whole tensors, it gives what the module gives; every rank of the group calls it.

    A micro-batch with fewer samples than ranks is run whole by all of them. random: whether the module draws numbers,
    which are others on every slice.
    """

    def __init__(self, module: Callable[..., Any], slices: Slices, group: Group, device: torch.device, *, random: bool):
        self._module, self._slices, self._group = module, slices, group
        self._device, self._random = device, random

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._slices.rows < self._group.size:
            with run_whole(self._group.size):
                return self._module(*args, **kwargs)
        args, kwargs = self._exchanged((args, kwargs), self._slices.given, cut=True)
        if self._random:
            with LocalRandom(self._group.rank, self._device):
                out = self._module(*args, **kwargs)
        else:
            out = self._module(*args, **kwargs)
        return self._exchanged(out, self._slices.gives, cut=False)

    def _exchanged(self, nest: Any, dims: tuple[int | None, ...], *, cut: bool) -> Any:
        leaves = list(leaves_in(nest))
        if len(leaves) != len(dims):
            raise LayoutError(
                f"a {self._module} that runs on slices of a micro-batch gave {len(leaves)} values, and "
                f"{len(dims)} when this kind of call was recorded.",
                fix="what a module of a stage gives may depend on the shapes of its inputs, but on no other state",
            )
        places = [p for p, (x, dim) in enumerate(zip(leaves, dims, strict=True)) if _travels(x, dim, cut)]
        tensors = [_plain(leaves[place]) for place in places]
        if cut:
            found = take(tensors, [dims[place] for place in places], self._slices.rows, self._group)
        else:
            along = [dim for place in places if (dim := dims[place]) is not None]
            found = join(tensors, along, self._slices.rows, self._group)
        for place, x in zip(places, found, strict=True):
            leaves[place] = x
        now = iter(leaves)
        return map_leaves(nest, lambda _: next(now))


def _plain(x: Tensor) -> Tensor:
    return x.implicit_rows("a module on slices") if isinstance(x, Columns) else x


def _travels(x: Any, dim: int | None, cut: bool) -> bool:
    return isinstance(x, Tensor) and (cut or dim is not None)
