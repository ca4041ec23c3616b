"""Metrics over all replicas: values of the ranks as one number, equal on each of them."""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from numbers import Real
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whale_torch.comm.collectives import all_reduce, gather_equal
from whale_torch.comm.columns import user_site
from whale_torch.errors import CommError, PlanError
from whale_torch.mesh import Group, Mesh, start, world_now
from whale_torch.strategies.runtime import runtime_of

__all__ = ["note_replicas", "reduce"]

Value = TypeVar("Value", float, Tensor)


class _Ranks(NamedTuple):
    """All ranks, without the mesh, which would keep the groups of a model that is gone."""

    everyone: Group
    device_type: str

    @staticmethod
    def of(mesh: Mesh) -> _Ranks:
        return _Ranks(mesh.everyone(), mesh.device.type)


Feeds = tuple[int, ...]
"""Of each rank the number of the batch that it is fed: ranks of one number are one replica."""


class _Replicas:
    """What the models of this process's world say of its ranks: the groups, and which ranks are fed alike."""

    def __init__(self) -> None:
        self.world: weakref.ref[dist.ProcessGroup] | None = None
        self.ranks: _Ranks | None = None
        self.feeds: set[Feeds] = set()

    def of_this_world(self) -> _Replicas:
        if self.world != (world := world_now()):
            self.world, self.ranks, self.feeds = world, None, set()
        return self


_replicas = _Replicas()


def note_replicas(mesh: Mesh, feeds: Feeds) -> None:
    """Called for every parallelized model, on all ranks: wh.reduce counts each replica of it once."""
    known = _replicas.of_this_world()
    known.ranks = _Ranks.of(mesh)
    known.feeds.add(feeds)


def reduce(value: Value, how: str = "mean", *, weight: float = 1.0, model: nn.Module | None = None) -> Value:
    """A metric over all replicas, equal on every rank: a collective, called on every rank.

    how: "mean" of the replicas' values, weighed by `weight` (the number of samples behind this value; with 0 the value,
    even NaN, has no part), or "sum". The ranks that are fed the same batch (those of a split that shares rows, those of
    a pipeline) are one replica: the first one's value counts. model: whose replicas are meant, where the models of this
    process differ in that. A tensor keeps its dtype, but for the mean of whole numbers, of default dtype, and the sum
    of bools, int64.
    Raises PlanError for any other `how`, for a value that is neither number nor tensor, and for a sum where models
    differ and none is named; CommError where a rank does not take part or comes with another shape or kind of numbers.
    """
    if how not in ("mean", "sum"):
        raise PlanError(f'wh.reduce knows "mean" and "sum", got {how!r}.', fix='wh.reduce(value, "mean")')
    known = _replicas.of_this_world()
    ranks, feeds = known.ranks, known.feeds
    if model is not None:
        runtime = runtime_of(model, "wh.reduce")
        ranks, feeds = _Ranks.of(runtime.mesh), {runtime.plan.feeds}
    if how == "sum" and len(feeds) > 1:
        sizes = sorted(found.count(0) for found in feeds)
        other = "" if len(set(sizes)) > 1 else ", made of different ranks"
        raise PlanError(
            f"the models of this process have replicas of {sizes} ranks{other}; wh.reduce cannot tell whose "
            "value it sums.",
            fix='wh.reduce(value, "sum", model=model)',
        )
    x = value.detach() if isinstance(value, Tensor) else _number(value)
    ranks = ranks or _Ranks.of(start())
    total = _over_replicas(x, how, weight if _counts(ranks.everyone.rank, feeds) else 0.0, ranks)
    return total if isinstance(value, Tensor) else float(total)


def _number(value: object) -> Tensor:
    """Raises PlanError for what is no number, before any rank waits for another."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # of numpy
        value = value.item()
    if not isinstance(value, Real):
        told = f"{value!r}"
        raise PlanError(
            f"wh.reduce takes a number or a tensor, got {type(value).__name__} {told[:40]}{'...' * (len(told) > 40)}.",
            where=user_site(),
            fix="reduce one value at a time: {name: wh.reduce(value) for name, value in metrics.items()}; "
            "several numbers at once as torch.tensor([...])",
        )
    return torch.tensor(float(value), dtype=torch.float64)


def _counts(rank: int, feeds: set[Feeds]) -> bool:
    """Whether a rank's value is one of those summed: the first's of each replica.

    Where models differ, the first's of the ranks that all of them feed alike; every rank's where those are not equally
    many, since a mean is the same over equally many copies of each replica's value.
    """
    if not feeds:
        return True
    together = list(zip(*feeds, strict=True))
    alike = len(set(Counter(together).values())) == 1
    return not alike or together.index(together[rank]) == rank


def _over_replicas(x: Tensor, how: str, weight: float, ranks: _Ranks) -> Tensor:
    whole = not (x.dtype.is_floating_point or x.is_complex())
    wide = torch.complex128 if x.is_complex() else torch.int64 if how == "sum" and whole else torch.float64
    _agree(ranks.everyone, how, wide, x.shape)
    if not weight:
        mine = torch.zeros_like(x, dtype=wide)
    elif wide is torch.int64 and float(weight).is_integer():
        mine = x.to(wide) * int(weight)  # exact, which float64 is up to 2^53
    else:
        mine = (x.to(torch.float64 if wide is torch.int64 else wide) * weight).to(wide)
    both = torch.stack([mine, torch.full_like(mine, weight)])
    device = both.device
    if device.type != ranks.device_type:
        both = both.cpu()
    all_reduce(torch.view_as_real(both) if both.is_complex() else both, ranks.everyone, name="wh.reduce")
    total = both.to(device)
    if how == "mean":
        return (total[0] / total[1]).to(torch.get_default_dtype() if whole else x.dtype)
    return total[0].to(torch.int64 if x.dtype is torch.bool else x.dtype)


_DIMS = 8
_KINDS = (torch.float64, torch.int64, torch.complex128)


def _agree(everyone: Group, how: str, wide: torch.dtype, shape: torch.Size) -> None:
    """Raises CommError, on every rank, where ranks come with different values."""
    if everyone.size == 1:
        return
    told = [how == "sum", _KINDS.index(wide), len(shape), *shape[:_DIMS], *[0] * (_DIMS - len(shape))]
    code = float(zlib.crc32(repr(told).encode()))
    # no all-to-all: where another rank is in one of other parts, gloo ends the process
    ends = torch.tensor([-code, code], dtype=torch.float64, device="cpu")
    if all_reduce(ends, everyone, op=dist.ReduceOp.MAX, name="wh.reduce").tolist() == [-code, code]:
        return
    table = gather_equal(torch.tensor(told, device="cpu"), everyone, name="wh.reduce").tolist()
    odd = next((rank for rank, row in enumerate(table) if row != table[0]), None)
    if odd is not None:
        raise CommError(
            f"wh.reduce: rank 0 comes with {_told(table[0])}, rank {odd} with {_told(table[odd])}.",
            fix="reduce values of one shape and kind, in one order, on every rank",
            ranks=(0, odd),
        )


def _told(row: list[int]) -> str:
    how, kind = ("mean", "sum")[row[0]], ("real", "whole", "complex")[row[1]]
    return f"the {how} of {kind} numbers of shape {row[3 : 3 + min(row[2], _DIMS)]}"
