"""BatchNorm over all replicas: the statistics, and the gradient through them, of the whole batch.

One all-gather of (mean, variance, count) forward and one all-gather of two sums backward. Gradients run in one scale on
all feeds (docs/design.md 5.3), so their sums over ranks need no factor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale_torch.comm.collectives import gather_equal
from whale_torch.errors import LossError, PlanError
from whale_torch.mesh import Group, Mesh
from whale_torch.planning.plan import Plan
from whale_torch.planning.taskgraph import TaskGraph
from whale_torch.strategies.copies import Replacement

__all__ = [
    "Statistics",
    "SyncedBatchNorm1d",
    "SyncedBatchNorm2d",
    "SyncedBatchNorm3d",
    "check_batch_norm",
    "normalised",
    "sync_batch_norm",
]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _dims(x: Tensor) -> list[int]:
    """All dims but that of the channels."""
    return [0, *range(2, x.dim())]


def _per_channel(v: Tensor, like: Tensor) -> Tensor:
    return v.view(1, -1, *[1] * (like.dim() - 2))


def _statistics(x: Tensor, group: Group) -> tuple[Tensor, Tensor, float]:
    """Mean and biased variance of each channel over the group's samples, float64, and how many values they are of."""
    num_channels, count = x.shape[1], x.numel() // max(x.shape[1], 1)
    if count:
        var, mean = torch.var_mean(_wide(x), _dims(x), correction=0)
        mine = torch.cat([mean.double(), var.double(), mean.new_tensor([count]).double()])
    else:
        mine = x.new_zeros(2 * num_channels + 1, dtype=torch.float64)
    every = gather_equal(mine, group, name="batch norm statistics")
    counts, means, variances = every[:, -1:], every[:, :num_channels], every[:, num_channels:-1]
    total = counts.sum().clamp(min=1.0)
    mean = (counts * means).sum(0) / total
    var = (counts * (variances + (means - mean) ** 2)).sum(0) / total
    return mean, var, float(counts.sum())


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of each channel over all samples: mean, biased variance, and how many values they are of."""

    mean: Tensor
    var: Tensor
    count: float
    eps: float

    @torch.no_grad()
    def track(self, running_mean: Tensor, running_var: Tensor, factor: float) -> None:
        """Running statistics as one process has them: of the unbiased variance of the whole batch."""
        if self.count:
            unbiased = self.var * (self.count / (self.count - 1))
            running_mean.lerp_(self.mean.to(running_mean.dtype), factor)
            running_var.lerp_(unbiased.to(running_var.dtype), factor)


def normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group
) -> tuple[Tensor, Statistics]:
    """x normalised over the samples of a group, and by what.

    Raises ValueError as torch does, for one value a channel in all.
    """
    with torch.no_grad():
        mean, var, count = _statistics(x, group)
    if count == 1.0:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got 1 on all ranks, here {tuple(x.shape)}"
        )
    dtype = _wide(x).dtype
    of = Statistics(mean.to(dtype), var.to(dtype), count, eps)
    out: Tensor = _SyncBatchNorm.apply(x, weight, bias, of, group)  # type: ignore[no-untyped-call]
    return out, Statistics(mean, var, count, eps)


class _SyncBatchNorm(torch.autograd.Function):
    """x normalised by given statistics that depend on x on every rank of the group."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, of: Statistics, group: Group
    ) -> Tensor:
        ctx.save_for_backward(x, weight, of.mean, (of.var + of.eps).rsqrt())
        ctx.count, ctx.group = of.count, group
        return F.batch_norm(x, of.mean, of.var, weight, bias, False, 0.0, of.eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise LossError(
                "a second derivative (create_graph=True) was asked for through a BatchNorm over all replicas.",
                fix="take such derivatives without sync_batch_norm, or leave create_graph out",
            )
        x, weight, mean, inverse = ctx.saved_tensors
        wide_grad = _wide(grad)
        normal = (_wide(x) - _per_channel(mean, x)) * _per_channel(inverse, x)
        mine = torch.stack([wide_grad.sum(_dims(x)), (wide_grad * normal).sum(_dims(x))])
        total = gather_equal(mine, ctx.group, name="batch norm's backward").sum(0) / max(ctx.count, 1.0)
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        out = _per_channel(scale, x) * (wide_grad - _per_channel(total[0], x) - normal * _per_channel(total[1], x))
        if weight is None:
            return out.to(x.dtype), None, None, None, None
        return out.to(x.dtype), mine[1].to(weight.dtype), mine[0].to(weight.dtype), None, None


class _Synced(Replacement, nn.Module):
    """What the three classes below put before torch's.

    _group: one rank of each feed. _regions: of a split, the ranks that hold the same part in all of its regions.
    """

    _added = ("_group", "_regions")
    _group: Group
    _regions: Group | None = None
    _check_input_dim: Callable[[Tensor], None]
    weight: nn.Parameter
    bias: nn.Parameter
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    track_running_stats: bool
    momentum: float | None
    eps: float

    def _get_name(self) -> str:
        return type(self).__name__.removeprefix("Synced")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            known: Tensor = super().forward(input)
            return known
        out, of = normalised(input, self.weight, self.bias, self.eps, self._group)
        if self.training and self.track_running_stats:
            self._track(of)
        return out

    @torch.no_grad()
    def _track(self, of: Statistics) -> None:
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        factor = self.momentum or 0.0
        if self.momentum is None and self.num_batches_tracked is not None:
            factor = 1.0 / float(self.num_batches_tracked)
        if self.running_mean is not None and self.running_var is not None:
            of.track(self.running_mean, self.running_var, factor)


class SyncedBatchNorm1d(_Synced, nn.BatchNorm1d):
    """nn.BatchNorm1d over all replicas."""


class SyncedBatchNorm2d(_Synced, nn.BatchNorm2d):
    """nn.BatchNorm2d over all replicas."""


class SyncedBatchNorm3d(_Synced, nn.BatchNorm3d):
    """nn.BatchNorm3d over all replicas."""


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SyncedBatchNorm1d,
    nn.BatchNorm2d: SyncedBatchNorm2d,
    nn.BatchNorm3d: SyncedBatchNorm3d,
}


def _is_batch_norm(module: nn.Module) -> bool:
    """Also one of the user's own: torch's common base has no public name."""
    return any(kind.__name__ == "_BatchNorm" for kind in type(module).__mro__)


def _asked(model: nn.Module, plan: Plan) -> list[tuple[TaskGraph, list[tuple[str, nn.Module]]]]:
    """TaskGraphs in a wh.replica(sync_batch_norm=True), splits inside it included, and their BatchNorms by name."""
    graphs = [graph for graph in plan.taskgraphs if graph.option("replica", "sync_batch_norm", False)]
    found: dict[int, list[tuple[str, nn.Module]]] = {graph.index: [] for graph in graphs}
    for name, module in model.named_modules() if graphs else ():
        if _is_batch_norm(module) and (index := plan.taskgraph_of(name).index) in found:
            found[index].append((name, module))
    return [(graph, found[graph.index]) for graph in graphs]


def check_batch_norm(model: nn.Module, plan: Plan) -> None:
    """Raises PlanError where sync_batch_norm=True finds nothing to act on, or a BatchNorm it has no form of."""
    asked = _asked(model, plan)
    for graph, members in asked:
        for name, module in members:
            if type(module) not in _CLASSES:
                raise PlanError(
                    f"{graph.label}: sync_batch_norm=True has no form of {type(module).__name__} '{name}'.",
                    where=graph.site, fix="use nn.BatchNorm1d, 2d or 3d, or leave sync_batch_norm out",
                )  # fmt: skip
    if asked and not any(members for _, members in asked):
        graph = asked[0][0]
        raise PlanError(
            f"{graph.label}: sync_batch_norm=True, but it holds no BatchNorm.",
            where=graph.site,
            fix="leave sync_batch_norm out",
        )


def sync_batch_norm(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Lets the BatchNorms of wh.replica(sync_batch_norm=True) take their statistics over all feeds."""
    asked = _asked(model, plan)
    if not asked or plan.num_feeds == 1:
        return
    one_of_each_feed = tuple(tuple(range(place, plan.world, plan.feed_size)) for place in range(plan.feed_size))
    group = mesh.group("one rank of each feed", one_of_each_feed, channel="batch norm")
    for graph, members in asked:
        copies = plan.device(graph.device).copies
        for _, module in members:
            if not isinstance(module, _Synced):
                module.__class__ = _CLASSES[type(module)]
            elif len(copies[0]) > 1:
                module.__dict__["_regions"] = mesh.group(f"{graph.device} copies", copies, channel="batch norm")
            module.__dict__["_group"] = group
