"""Linear layers split by output features (columns) or input features (rows); transformers' Conv1D likewise."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale_torch.comm.columns import Columns, ColumnsPlace, Deferred
from whale_torch.comm.rows import enter_columns, enter_rows, leave_rows
from whale_torch.strategies.delayed import Delay, delayed_linear
from whale_torch.strategies.split_rules import SplitModule, joined_class, register_class

__all__ = ["ColumnLinear", "RowLinear"]


class ColumnLinear(SplitModule, nn.Linear):
    """A linear layer of which each rank holds some output features: gives Columns."""

    _delay: Delay | None = None

    def forward(self, input: Tensor) -> Tensor:
        x, counts, lead = enter_rows(input, self._region)
        if self._options.get("chunked_loss") and torch.is_grad_enabled() and self.training:
            place = ColumnsPlace(self._region, counts, self._cut.widths, lead)
            return Columns.put_off(Deferred(x, self.weight, self.bias), place)
        return self._columns(delayed_linear(x, self.weight, self.bias, self._delay), counts, lead, fresh=True)


class RowLinear(SplitModule, nn.Linear):
    """A linear layer of which each rank holds some input features: takes Columns, gives complete own rows."""

    def forward(self, input: Tensor) -> Tensor:
        x, counts, lead = enter_columns(input, self._cut.widths, self._region)
        out = leave_rows(F.linear(x, self.weight), counts, lead, self._region)
        return out if self.bias is None else out + self.bias.to(out.dtype)  # under autocast out is narrow


class _TransposedColumns(SplitModule):
    """transformers' Conv1D (weight [in, out]) of which each rank holds some output features."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        rows, counts, lead = enter_rows(x, self._region)
        return self._columns(torch.addmm(self.bias, rows, self.weight), counts, lead, fresh=True)


class _TransposedRows(SplitModule):
    """transformers' Conv1D of which each rank holds some input features."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        columns, counts, lead = enter_columns(x, self._cut.widths, self._region)
        out = leave_rows(columns @ self.weight, counts, lead, self._region)
        return out + self.bias.to(out.dtype)


register_class("Linear", "columns", ColumnLinear)
register_class("Linear", "rows", RowLinear)
register_class("Conv1D", "columns", functools.partial(joined_class, _TransposedColumns))
register_class("Conv1D", "rows", functools.partial(joined_class, _TransposedRows))
