"""Convolutions split by output channels, input channels or groups."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whale_torch.comm.rows import enter_batch, enter_channels, leave_rows
from whale_torch.errors import LayoutError
from whale_torch.strategies.split_rules import SplitModule, joined_class, register_class

__all__ = ["ColumnConvolution", "Convolution", "GroupConvolution", "RowConvolution"]

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class Convolution(SplitModule):
    """What the cut convolutions share; each is joined with its torch class below."""

    weight: Tensor
    bias: Tensor | None
    padding_mode: str
    groups: int

    def _check(self, input: Tensor) -> None:
        if input.dim() != self.weight.dim():
            raise LayoutError(
                f"split {self._get_name()} '{self._cut.module}' got {input.dim()} dimensions; it takes batches of "
                f"{self.weight.dim()}.",
                fix="add a batch dimension: x.unsqueeze(0)",
            )

    def _convolve(self, x: Tensor, bias: Tensor | None, groups: int = 1) -> Tensor:
        """This rank's share of the convolution: [N, K, *pixels] -> [N, K', *pixels']."""
        if self._width and x.shape[0]:
            return self._run(x, self.weight, bias, groups)
        # no channels or no rows here: the shape of the result, and a graph, so that the bridges' backward runs
        image = torch.empty((1, 1, *x.shape[2:]), device="meta", dtype=x.dtype)
        filters = torch.empty((1, 1, *self.weight.shape[2:]), device="meta", dtype=x.dtype)
        pixels = self._run(image, filters, None, 1).shape[2:]
        nothing = x.sum() + self.weight.sum() * 0.0 + (0.0 if bias is None else bias.sum() * 0.0)
        return x.new_zeros(x.shape[0], self.weight.shape[0], *pixels) + nothing * 0.0

    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        module: Any = self
        padding = module.padding
        if self.padding_mode != "zeros":
            x = F.pad(x, module._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        convolve: Any = _CONVOLVE[x.dim() - 2]
        out: Tensor = convolve(x, weight, bias, module.stride, padding, module.dilation, groups)
        return out


class ColumnConvolution(Convolution):
    """A convolution of which each rank holds some output channels: gives Columns of channels."""

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        x, counts = enter_batch(input, self._region)
        out = self._convolve(x, self.bias)
        return self._columns(out, counts, (input.shape[0],), tail=tuple(out.shape[2:]))


class RowConvolution(Convolution):
    """A convolution of which each rank holds some input channels: takes Columns, gives complete own rows."""

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        x, counts = enter_channels(input, self._cut.widths, self._region)
        out = leave_rows(self._convolve(x, None), counts, (input.shape[0],), self._region)
        return out if self.bias is None else out + self.bias.to(out.dtype).view(-1, *[1] * (out.dim() - 2))


class GroupConvolution(Convolution):
    """A grouped convolution of which each rank holds some groups: takes and gives Columns of channels."""

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        taken = input.shape[1] // self.groups
        x, counts = enter_channels(input, tuple(w * taken for w in self._cut.widths), self._region)
        out = self._convolve(x, self.bias, max(self._width, 1))
        unit = dict(self._cut.shards)["weight"].unit
        return self._columns(
            out, counts, (input.shape[0],), widths=tuple(w * unit for w in self._cut.widths), tail=tuple(out.shape[2:])
        )


for _name in ("Conv1d", "Conv2d", "Conv3d"):
    register_class(_name, "columns", functools.partial(joined_class, ColumnConvolution))
    register_class(_name, "rows", functools.partial(joined_class, RowConvolution))
    register_class(_name, "groups", functools.partial(joined_class, GroupConvolution))
