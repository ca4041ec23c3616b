"""A 24-layer encoder of 84 MB that predicts tokens, its batches, and its one-process run."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import sgd_loop

__all__ = ["LEARNING_RATE", "Encoder", "batch_of", "gradient_error", "make_encoder", "one_process", "token_loss"]

LEARNING_RATE = 0.1
_WIDTH, _LAYERS, _WORDS, _LENGTH = 256, 24, 4096, 32


class Encoder(nn.Module):
    """Tokens (rows, length) -> logits (rows, length, words)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(_WORDS, _WIDTH), nn.Embedding(_LENGTH, _WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True, activation="gelu")
            for _ in range(_LAYERS)
        )
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def make_encoder() -> Encoder:
    """The same values at every call."""
    torch.manual_seed(0)
    return Encoder()


def batch_of(rows: int, number: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets (rows, length) of one rank at one step."""
    generator = torch.Generator().manual_seed(number * 1000 + rank)
    tokens, targets = torch.randint(0, _WORDS, (2, rows, _LENGTH), generator=generator)
    return tokens, targets


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def one_process(rows: int, world: int, steps: int, path: Path) -> list[float]:
    """Trains on the global batches in one process; writes the first step's gradients to `path`, returns the losses."""
    torch.set_num_threads(max(torch.get_num_threads(), 2))
    model, losses = make_encoder(), []
    step = sgd_loop(model, LEARNING_RATE, token_loss)
    for number in range(steps):
        parts = zip(*(batch_of(rows, number, rank) for rank in range(world)), strict=True)
        losses.append(step(*map(torch.cat, parts)).item())
        if number == 0:
            torch.save({name: parameter.grad for name, parameter in model.named_parameters()}, path)
    return losses


def gradient_error(model: nn.Module, path: Path) -> tuple[float, float]:
    """(of all gradients together, of the worst parameter): the norm of the difference to one process over its norm."""
    reference = torch.load(path, mmap=True)
    pairs = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        difference, size = (parameter.grad - reference[name]).norm(), reference[name].norm()
        pairs.append((difference.item(), size.item()))
    largest = max(size for _, size in pairs)
    squares = [sum(x * x for x in column) for column in zip(*pairs, strict=True)]
    worst = max(difference / max(size, 0.01 * largest) for difference, size in pairs)
    return (squares[0] / squares[1]) ** 0.5, worst
