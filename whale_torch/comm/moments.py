"""Mean and variance of each feature over the rows of all feeds of a region."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whale_torch.comm.collectives import gather_equal, reduce_scatter_rows
from whale_torch.comm.region import Region

__all__ = ["moments_of_rows"]


class _OfAllFeeds(torch.autograd.Function):
    """[M] of each feed -> [feeds, M]; backward, each feed gets the sum of what all of them did with its numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Region) -> Tensor:
        ctx.region = region
        return gather_equal(x, region.rows, name="moments")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows = ctx.region.rows
        return reduce_scatter_rows(grad.contiguous(), [1] * rows.size, rows, name="moments' backward")[0], None


def moments_of_rows(x: Tensor, region: Region) -> tuple[Tensor, Tensor, int]:
    """(mean [C], biased variance [C], values of a feature) of [F, C, ...] over the own rows of all feeds, in float32 at least.

    Reference: parallel variance, Chan et al., "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    dims = [d for d in range(x.dim()) if d != 1]
    wide = x if x.dtype == torch.float64 else x.float()
    count = x.numel() // x.shape[1] if x.numel() else 0
    if count:
        var, mean = torch.var_mean(wide, dims, correction=0)
    else:
        mean = var = wide.sum(dims)
    features = x.shape[1]
    counted = torch.full((1,), float(count), dtype=mean.dtype, device=x.device)
    table: Tensor = _OfAllFeeds.apply(torch.cat([mean, var, counted]), region)
    counts = table[:, -1:].detach()
    total = counts.sum()
    means, variances = table[:, :features], table[:, features : 2 * features]
    mean = (means * counts).sum(0) / total
    var = ((variances + (means - mean).square()) * counts).sum(0) / total
    return mean, var, int(total)
