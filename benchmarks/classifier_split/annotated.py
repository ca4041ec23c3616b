"""The same classifier annotated for whale_torch: three lines on the model, the loop of one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import whale_torch as wh
from benchmarks.classifier_split.model import LEARNING_RATE, Task, make_features, make_head
from benchmarks.harness import sgd_loop

__all__ = ["Annotated", "Classifier"]


class Classifier(nn.Module):
    """Features replicated, their gradients reduced in `reduce_dtype`; the last layer split over all ranks."""

    def __init__(self, classes: int, reduce_dtype: torch.dtype) -> None:
        super().__init__()
        with wh.replica(reduce_dtype=reduce_dtype):
            self.features = make_features()
        with wh.split():
            self.fc = make_head(classes)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.features(inputs))
        return logits


class Annotated:
    """One process's loop, unchanged."""

    def __init__(self, task: Task, rank: int, reduce_dtype: torch.dtype = torch.float32) -> None:
        self.task, self.rank = task, rank
        self.model = wh.parallelize(Classifier(task.classes, reduce_dtype))
        self._loop = sgd_loop(self.model, LEARNING_RATE)

    def step(self, number: int) -> Tensor:
        return self._loop(*self.task.batch(number, self.rank))

    def values(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.model.named_parameters()}
