"""BatchNorm in a split: its statistics are those of all rows of the region, or, where asked, of all regions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale_torch.comm.collectives import all_gather_rows
from whale_torch.comm.columns import Columns
from whale_torch.comm.rows import partial_parameter
from whale_torch.mesh import Group
from whale_torch.strategies.batch_norm import SyncedBatchNorm1d, SyncedBatchNorm2d, SyncedBatchNorm3d, normalised
from whale_torch.strategies.split_rules import SplitModule, joined_class, register_class

__all__ = ["SplitBatchNorm"]


class SplitBatchNorm(SplitModule):
    """Columns stay Columns: each rank normalises its features of all rows. Own rows stay so: moments are exchanged.

    Joined with the form of BatchNorm that does the latter. Parameters and running statistics stay whole, and equal on
    the region's ranks. In a wh.replica(sync_batch_norm=True) statistics are those of all feeds.
    Raises ValueError as torch does, for one value a feature in training.
    """

    _added = ("_group", "_regions")
    _regions: Group | None
    eps: float
    momentum: float | None
    track_running_stats: bool
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def _prepare(self) -> None:
        self.__dict__["_group"] = self._region.rows

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, Columns):
            out: Tensor = super().forward(input)
            return out
        place = input.place
        if place.widths != self._cut.widths or len(place.lead) != 1:
            return self.forward(input.implicit_rows(f"{self._get_name()} over other columns"))
        self._check_input_dim(input)  # type: ignore[operator]
        return Columns.of(self._of_columns(input.local), place)

    def _of_columns(self, x: Tensor) -> Tensor:
        """[N, K, ...]: all rows, this rank's features."""
        here = slice(self._first, self._first + self._width)
        weight, bias = (
            None if p is None else partial_parameter(p, self._region)[here] for p in (self.weight, self.bias)
        )
        by_batch = self.training or self.running_mean is None or self.running_var is None
        mean = None if self.running_mean is None else self.running_mean[here].clone()
        var = None if self.running_var is None else self.running_var[here].clone()
        kept = (None, None) if by_batch and not self.training else (mean, var)
        momentum = self._momentum()
        if self._width and by_batch and self._regions is not None:
            out, of = normalised(x, weight, bias, self.eps, self._regions)
            if mean is not None and var is not None and self.training:
                of.track(mean, var, momentum)
        elif self._width:
            out = F.batch_norm(x, *kept, weight, bias, by_batch, momentum, self.eps)
        else:
            out = x + sum(p.sum() for p in (weight, bias) if p is not None)
        if self.training and mean is not None and var is not None:
            self._track_all(torch.stack([mean, var], 1))
        return out

    @torch.no_grad()
    def _track_all(self, mine: Tensor) -> None:
        """Running statistics of all features from those of each rank's, [K, 2]."""
        assert self.running_mean is not None and self.running_var is not None
        columns = self._region.columns
        every = all_gather_rows(mine, self._cut.widths, columns, name="running statistics of a split")
        self.running_mean.copy_(every[:, 0])
        self.running_var.copy_(every[:, 1])

    def _momentum(self) -> float:
        """The weight of this batch in the running statistics; counts the batch."""
        if not (self.training and self.track_running_stats and self.num_batches_tracked is not None):
            return 0.0 if self.momentum is None else self.momentum
        self.num_batches_tracked.add_(1)
        if self.num_batches_tracked.is_meta:
            return 1.0
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum


_SYNCED: dict[Any, Any] = {
    nn.BatchNorm1d: SyncedBatchNorm1d,
    nn.BatchNorm2d: SyncedBatchNorm2d,
    nn.BatchNorm3d: SyncedBatchNorm3d,
}


def _joined(module_type: type[nn.Module]) -> Any:
    return joined_class(SplitBatchNorm, _SYNCED[module_type])


for _type in _SYNCED:
    register_class(_type.__name__, "channels", _joined)
