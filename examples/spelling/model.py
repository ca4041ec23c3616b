"""A character CNN, the same on every rank, and a classifier over all words, cut over the ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from examples.spelling.data import LETTERS

__all__ = ["Features", "SpellingCorrector"]


class Features(nn.Module):
    """A misspelt word as a point on a sphere: which groups of two to four letters occur in it.

    Shapes: letters [B, L] of 0..26 -> [B, dim]; B words, L letters.
    """

    def __init__(self, dim: int = 128, channels: int = 96, letter_dim: int = 32):
        super().__init__()
        self.letters = nn.Embedding(1 + len(LETTERS), letter_dim, padding_idx=0)
        self.groups = nn.ModuleList(nn.Conv1d(letter_dim, channels, width, padding=width // 2) for width in (2, 3, 4))
        self.out = nn.Linear(3 * channels, dim)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.letters(letters).transpose(1, 2)
        found = [group(x).amax(dim=2).relu() for group in self.groups]
        return 16 * F.normalize(self.out(torch.cat(found, dim=1)), dim=1)


class SpellingCorrector(nn.Module):
    def __init__(self, num_classes: int, dim: int = 128):
        super().__init__()
        with wh.replica():
            self.features = Features(dim)
        with wh.split():
            self.head = nn.Linear(dim, num_classes)

    def forward(self, letters: Tensor) -> Tensor:
        return self.head(self.features(letters))
