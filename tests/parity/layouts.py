"""Small models in every layout of replica and split, and one step of them on a rank and in one process."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.metric import gradients

__all__ = ["LAYOUTS", "WIDTH", "Net", "backward", "batch", "build", "gradients", "mine", "step"]

WIDTH, CLASSES = 6, 11


class Block(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """features -> block -> head; `layout` says which of them are split, and how."""

    def __init__(self, layout: str):
        super().__init__()
        with wh.replica():
            self.features = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.LayerNorm(8))
            if layout in ("shared", "mixed"):
                with wh.split(size=2):
                    self.block = Block(8, 9)
            elif layout != "two sizes":
                self.block = Block(8, 9)
        if layout == "two sizes":
            with wh.split(size=2):
                self.block = Block(8, 9)
        if layout in ("own", "mixed", "two sizes"):
            with wh.split():
                self.head = nn.Linear(8, CLASSES)
        else:
            with wh.replica():
                self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.features(x)))


# layout -> worlds it runs on; "two sizes" and "mixed" have splits over 2 and over all ranks
LAYOUTS = {"replica": (1, 2, 3), "own": (1, 2, 3, 4), "shared": (2, 4), "mixed": (2, 4), "two sizes": (2, 4)}


def build(layout: str, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(layout)


def batch(rows: int = 11, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(CLASSES, (rows,), generator=generator)


def mine(model: nn.Module, *tensors: Tensor) -> list[Tensor]:
    """This feed's rows: uneven, the first feed has most."""
    index, count = wh.data_rank(model)
    rows = len(tensors[0])
    sizes = [rows - (count - 1) * (rows // (2 * count))] + [rows // (2 * count)] * (count - 1)
    return [t.split(sizes)[index] for t in tensors]


def backward(
    model: nn.Module, x: Tensor, y: Tensor, *, scale: Callable[[Tensor], Tensor] = lambda loss: loss
) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    scale(loss).backward()
    return loss.detach()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    backward(model, x, y)
    optimizer.step()
