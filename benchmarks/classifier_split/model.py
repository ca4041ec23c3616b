"""The task: features of 2.2 M parameters and width 200, a linear classifier, random rows; and its one-process run."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.harness import sgd_loop

__all__ = ["LEARNING_RATE", "WIDTH", "Task", "make_features", "make_head", "make_whole", "one_process", "update_error"]

WIDTH = 200
LEARNING_RATE = 0.1


@dataclass(frozen=True, slots=True)
class Task:
    """Sizes: rows are a rank's, `world` is the number of ranks."""

    classes: int
    rows: int
    world: int

    def batch(self, number: int, rank: int) -> tuple[Tensor, Tensor]:
        """Inputs (rows, 256) and labels (rows,) of one rank at one step."""
        generator = torch.Generator().manual_seed(1000 + number * self.world + rank)
        inputs = torch.randn(self.rows, 256, generator=generator)
        return inputs, torch.randint(0, self.classes, (self.rows,), generator=generator)


def make_features() -> nn.Sequential:
    """256 inputs -> 200 features, 2.2 M parameters, the same values at every call."""
    torch.manual_seed(0)
    sizes = (256, 1024, 1024, 740, WIDTH)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_head(classes: int) -> nn.Linear:
    """200 features -> logits, the same values at every call."""
    torch.manual_seed(1)
    return nn.Linear(WIDTH, classes)


def make_whole(classes: int) -> nn.Sequential:
    """Features and head as one module, with the names of the annotated one."""
    return nn.Sequential(OrderedDict(features=make_features(), fc=make_head(classes)))


def one_process(task: Task, steps: int, path: Path) -> list[float]:
    """Trains on the global batches in one process; writes values before and after to `path` and returns the losses."""
    torch.set_num_threads(max(torch.get_num_threads(), 2))
    module, losses = make_whole(task.classes), []
    start, step = _values(module), sgd_loop(module, LEARNING_RATE)
    for number in range(steps):
        batches = [task.batch(number, rank) for rank in range(task.world)]
        inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        losses.append(step(inputs, labels).item())
    torch.save({"start": start, "end": _values(module)}, path)
    return losses


def _values(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def update_error(values: Mapping[str, Tensor], path: Path, rank: int) -> float:
    """How far training moved parameters differently from one process, as a ratio of norms, the worst parameter's.

    values: this rank's parameters by name; a cut parameter is recognised by its first dim and holds the rank-th part.
    A loss alone would not show gradients that are wrong by a factor: over a few steps it hardly depends on them.
    """
    reference, worst = torch.load(path, mmap=True), 0.0
    for name, value in values.items():
        start, end = reference["start"][name], reference["end"][name]
        if value.shape != end.shape:
            rows = value.shape[0]
            start, end = start[rank * rows : (rank + 1) * rows], end[rank * rows : (rank + 1) * rows]
        worst = max(worst, ((value - end).norm() / (end - start).norm()).item())
    return worst
