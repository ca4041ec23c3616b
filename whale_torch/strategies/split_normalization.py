"""BatchNorm in a split: its statistics are those of all rows of the region."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale_torch.comm.collectives import all_gather_rows
from whale_torch.comm.columns import Columns
from whale_torch.comm.moments import moments_of_rows
from whale_torch.comm.rows import partial_parameter
from whale_torch.strategies.split_rules import SplitModule, register_class

__all__: list[str] = []


class _BatchNorm(SplitModule):
    """Columns stay Columns: each rank normalises its features of all rows. Own rows stay own rows: the ranks exchange moments.

    Parameters and running statistics stay whole, and equal on the region's ranks.
    Raises ValueError as torch does, for one value a feature in training.
    """

    eps: float
    momentum: float | None
    track_running_stats: bool
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)  # type: ignore[operator]
        if isinstance(input, Columns):
            place = input.place
            if place.widths == self._cut.widths and len(place.lead) == 1:
                return Columns.of(self._of_columns(input.local), place)
            input = input.implicit_rows(f"{self._get_name()} over other columns")
        return self._of_rows(input)

    def _of_columns(self, x: Tensor) -> Tensor:
        """[N, K, ...]: all rows, this rank's features."""
        here = slice(self._first, self._first + self._width)
        weight, bias = (None if p is None else partial_parameter(p, self._region)[here] for p in (self.weight, self.bias))
        tracked = self._tracked()
        mean, var = (None, None) if tracked is None else (tracked[0][here].clone(), tracked[1][here].clone())
        by_batch = self.training or tracked is None
        momentum = self._momentum()
        if self._width:
            kept = (None, None) if by_batch and not self.training else (mean, var)
            out = F.batch_norm(x, *kept, weight, bias, by_batch, momentum, self.eps)
        else:
            out = x + sum(p.sum() for p in (weight, bias) if p is not None)
        if self.training and mean is not None and var is not None and tracked is not None:
            widths, columns = self._cut.widths, self._region.columns
            everyone = all_gather_rows(torch.stack([mean, var], 1), widths, columns, name="running statistics of a split")
            tracked[0].copy_(everyone[:, 0])
            tracked[1].copy_(everyone[:, 1])
        return out

    def _of_rows(self, x: Tensor) -> Tensor:
        """[F, C, ...]: own rows, all features."""
        tracked = self._tracked()
        by_batch = self.training or tracked is None
        momentum = self._momentum()
        if not by_batch or self._region.rows.size == 1:
            kept = (None, None) if tracked is None else tracked
            return F.batch_norm(x, *kept, self.weight, self.bias, by_batch, momentum, self.eps)
        mean, var, count = moments_of_rows(x, self._region)
        if count < 2:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
        if self.training and tracked is not None:
            with torch.no_grad():
                tracked[0].lerp_(mean.to(tracked[0].dtype), momentum)
                tracked[1].lerp_((var * (count / (count - 1))).to(tracked[1].dtype), momentum)
        shape = (1, -1, *[1] * (x.dim() - 2))
        scale = torch.rsqrt(var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        return (x * scale.view(shape) + shift.view(shape)).to(x.dtype)

    def _tracked(self) -> tuple[Tensor, Tensor] | None:
        """Running mean and variance, None where it keeps none."""
        return None if self.running_mean is None or self.running_var is None else (self.running_mean, self.running_var)

    def _momentum(self) -> float:
        """The weight of this batch in the running statistics; counts the batch."""
        if not (self.training and self.track_running_stats and self.num_batches_tracked is not None):
            return 0.0 if self.momentum is None else self.momentum
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum


@functools.cache
def _joined(module_type: type[nn.Module]) -> type[SplitModule]:
    body = {"__module__": module_type.__module__, "__doc__": _BatchNorm.__doc__}
    return type(f"Split{module_type.__name__}", (_BatchNorm, module_type), body)


for _name in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"):
    register_class(_name, "channels", _joined)
