"""The other half of each split rule: the classes that run shards. Their instances keep names, isinstance and repr.

A module becomes one by assignment to __class__; its weights are local shards, `_region` and `_cut` say of what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale_torch.comm.columns import Columns, ColumnsPlace, Deferred, Hold
from whale_torch.comm.region import Region
from whale_torch.comm.rows import enter_columns, enter_rows, gather_plain, leave_rows
from whale_torch.planning.rules import Cut, PlanFunction, SplitRule, register_rule
from whale_torch.strategies.copies import Replacement
from whale_torch.strategies.delayed import Delay, delayed_linear

__all__ = ["ColumnEmbedding", "ColumnLinear", "RowLinear", "SplitModule", "VocabularyEmbedding", "register_split_rule", "run_class"]


class SplitModule(Replacement, nn.Module):
    """What the classes of this file have in common.

    _region: the ranks that run it together. _cut: the plan's decision. _options: the scope's options.
    """

    _run_state = ("_region", "_cut", "_options", "_delay")
    _region: Region
    _cut: Cut
    _options: dict[str, Any]

    def _get_name(self) -> str:
        return self._replaced().__name__

    @property
    def _index(self) -> int:
        return self._region.columns.index

    @property
    def _first(self) -> int:
        """Number of this rank's first unit."""
        return sum(self._cut.widths[: self._index])

    def _columns(self, local: Tensor, counts: tuple[int, ...], lead: tuple[int, ...], *, fresh: bool = False) -> Columns:
        place = ColumnsPlace(self._region, counts, self._cut.widths, lead)
        return Columns.of(local, place, Hold(shared=not fresh))


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
        return out if self.bias is None else out + self.bias


class ColumnEmbedding(SplitModule, nn.Embedding):
    """An embedding of which each rank holds some features of every word: only ids travel in; gives Columns."""

    def forward(self, input: Tensor) -> Tensor:
        region, flat = self._region, input.reshape(-1)
        counts = region.agree("ids of a split embedding", flat.shape[0]) if region.rows.size > 1 else (flat.shape[0],)
        ids = gather_plain(flat, counts, region, "ids of a split embedding")
        return self._columns(F.embedding(ids, self.weight, self.padding_idx), counts, tuple(input.shape))


class VocabularyEmbedding(SplitModule, nn.Embedding):
    """An embedding of which each rank holds some words: tied to a head that is cut by columns."""

    def forward(self, input: Tensor) -> Tensor:
        region, flat = self._region, input.reshape(-1)
        counts = region.agree("ids of a split embedding", flat.shape[0]) if region.rows.size > 1 else (flat.shape[0],)
        ids = gather_plain(flat, counts, region, "ids of a split embedding")
        held = self.weight.shape[0]
        here = ids - self._first
        inside = (here >= 0) & (here < held)
        if self.padding_idx is not None:
            frozen = ids == self.padding_idx
        if held == 0:
            part = self.weight.new_zeros(ids.shape[0], self.embedding_dim) + self.weight.sum()
        else:
            part = F.embedding(here.clamp(0, held - 1), self.weight)
            if self.padding_idx is not None:
                part = torch.where(frozen.unsqueeze(1), part.detach(), part)
            part = part * inside.unsqueeze(1)
        return leave_rows(part, counts, tuple(input.shape), region)


_CLASSES: dict[tuple[str, str], type[SplitModule]] = {
    ("Linear", "columns"): ColumnLinear,
    ("Linear", "rows"): RowLinear,
    ("Embedding", "columns"): ColumnEmbedding,
    ("Embedding", "vocabulary"): VocabularyEmbedding,
}


def run_class(cut: Cut) -> type[SplitModule]:
    """The class that runs a cut module."""
    return _CLASSES[cut.rule, cut.role]


def register_split_rule(
    module_type: type[nn.Module], *, plan: PlanFunction, classes: dict[str, type[SplitModule]], name: str | None = None
) -> Callable[[], None]:
    """Teaches wh.split a module type of yours.

    plan(module, name, context) returns the Cuts (which parameters, along which dimension, in which widths); classes gives
    for each role the class that runs the shard: a subclass of (SplitModule, module_type) whose forward asks comm.rows for
    its input. Returns a function that takes the rule back.
    """
    from whale_torch.planning import rules

    name = name or f"{module_type.__module__}.{module_type.__qualname__}"
    before = rules._RULES.get(module_type)
    register_rule(module_type, SplitRule(name, plan))
    _CLASSES.update({(name, role): cls for role, cls in classes.items()})

    def take_back() -> None:
        rules._RULES.pop(module_type)
        if before is not None:
            rules._RULES[module_type] = before
        for role in classes:
            _CLASSES.pop((name, role))

    return take_back
