"""Handwritten digits: a small network that every rank has, and a classifier that is split."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import whale_torch as wh

__all__ = ["Reader", "digits"]


def digits() -> TensorDataset:
    """scikit-learn's 1797 pictures [64] from 0 to 1, and which digit each shows."""
    found = load_digits()
    return TensorDataset(torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target))


class Reader(nn.Module):
    """Shapes: pictures [B, 64] -> [B, 10]."""

    def __init__(self, width: int = 128):
        super().__init__()
        with wh.replica():
            self.features = nn.Sequential(
                nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
            )
        with wh.split():
            self.head = nn.Linear(width, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.features(pictures))
