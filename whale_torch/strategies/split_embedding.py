"""Embeddings split by features, or by words where they are tied to a head that is cut by columns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale_torch.comm.rows import gather_plain, leave_rows
from whale_torch.strategies.split_rules import SplitModule, register_class

__all__ = ["ColumnEmbedding", "GatheredEmbedding", "VocabularyEmbedding"]


class _IdsOfAll(SplitModule):
    def _ids(self, input: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Ids of all feeds of the region, and how many each has."""
        region, flat = self._region, input.reshape(-1)
        counts = region.agree("ids of a split embedding", flat.shape[0]) if region.rows.size > 1 else (flat.shape[0],)
        return gather_plain(flat, counts, region, "ids of a split embedding"), counts


class ColumnEmbedding(_IdsOfAll, nn.Embedding):
    """An embedding of which each rank holds some features of every word: only ids travel in; gives Columns."""

    def forward(self, input: Tensor) -> Tensor:
        ids, counts = self._ids(input)
        return self._columns(F.embedding(ids, self.weight, self.padding_idx), counts, tuple(input.shape))


class GatheredEmbedding(ColumnEmbedding):
    """A ColumnEmbedding that gives complete own rows: where whatever reads it reads all features."""

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        return out.rows()  # type: ignore[attr-defined, no-any-return]


class VocabularyEmbedding(_IdsOfAll, nn.Embedding):
    """An embedding of which each rank holds some words, as a tied head cut by columns does; gives complete own rows."""

    def forward(self, input: Tensor) -> Tensor:
        ids, counts = self._ids(input)
        self._check(ids)
        here = ids - self._first
        inside = ((here >= 0) & (here < self._width)).unsqueeze(1)
        if self._width == 0:
            part = self.weight.new_zeros(ids.shape[0], self.embedding_dim) + self.weight.sum()
        else:
            frozen = -1 if self.padding_idx is None else self.padding_idx - self._first
            padding = frozen if 0 <= frozen < self._width else None
            found = F.embedding(here.clamp(0, self._width - 1), self.weight, padding)
            part = torch.where(inside, found, found.new_zeros(()))
        if part.device.type != "cpu":
            part = _nan_for_no_word(part, ids, self.num_embeddings)
        return leave_rows(part, counts, tuple(input.shape), self._region)

    def _check(self, ids: Tensor) -> None:
        """Raises IndexError on the CPU for an id that no rank holds, as one process does; elsewhere its row is NaN."""
        if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings:
            raise IndexError(
                f"index out of range in self: ids {int(ids.min())}..{int(ids.max())}, {self.num_embeddings} words"
            )


def _nan_for_no_word(part: Tensor, ids: Tensor, num_words: int) -> Tensor:
    """[N, D] with NaN in the rows of ids that are no word: reading them back to raise would wait for the device."""
    return part.masked_fill(((ids < 0) | (ids >= num_words)).unsqueeze(1), torch.nan)


register_class("Embedding", "columns", ColumnEmbedding)
register_class("Embedding", "gathered", GatheredEmbedding)
register_class("Embedding", "vocabulary", VocabularyEmbedding)
