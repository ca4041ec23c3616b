"""Pictures of two handwritten digits, each with a caption: "a three left of a seven"."""

from __future__ import annotations

import random

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["CAPTION", "NO_LABEL", "SIDE", "WORDS", "Digits", "Scenes", "read", "told", "words_of"]

SIDE = 16  # of a picture
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
RELATIONS = ("left of", "above")  # the left, or upper, digit comes first: of one picture there is one caption
WORDS = ("<pad>", "<start>", "<end>", "a", "an", "of", "left", "above", *DIGITS)
CAPTION = 8  # words at most, with <start> and <end>
NO_LABEL = -100
_NUMBER = {word: number for number, word in enumerate(WORDS)}

Digits = tuple[Tensor, Tensor]
"""Handwritten digits [N, 8, 8] from 0 to 1, and which they are [N]."""


def read() -> tuple[Digits, Digits]:
    """scikit-learn's digits, and every tenth of them apart, never trained on."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32) / 16
    labels = torch.tensor(found.target, dtype=torch.int64)
    held_out = torch.arange(len(labels)) % 10 == 0
    return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])


def words_of(caption: str) -> Tensor:
    """Numbers of the words, from <start> to <end>, padded: [CAPTION]."""
    numbers = [_NUMBER[word] for word in ("<start>", *caption.split(), "<end>")]
    return torch.tensor(numbers + [0] * (CAPTION - len(numbers)))


def told(numbers: list[int]) -> str:
    """The caption behind <start>, as far as its <end>."""
    words = [WORDS[number] for number in numbers[1:]]
    return " ".join(words[: words.index("<end>")] if "<end>" in words else words)


class Scenes(Dataset[tuple[Tensor, Tensor]]):
    """Pictures [SIDE, SIDE] and captions [CAPTION], each a function of its number and the seed."""

    def __init__(self, digits: Digits, number: int, seed: int):
        self.digits, self.number, self.seed = digits, number, seed

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        rng = random.Random(self.seed * 1_000_003 + index)
        images, labels = self.digits
        first, second = rng.randrange(len(labels)), rng.randrange(len(labels))
        relation = rng.choice(RELATIONS)
        offset = rng.randrange(SIDE - 8)
        picture = torch.zeros(SIDE, SIDE)
        for digit, end, across in zip((first, second), (0, SIDE - 8), (offset, offset + rng.randrange(2)), strict=True):
            top, left = (across, end) if relation == "left of" else (end, across)
            picture[top : top + 8, left : left + 8] = images[digit]
        return picture, words_of(f"{_named(labels[first])} {relation} {_named(labels[second])}")


def _named(label: Tensor) -> str:
    return f"a {DIGITS[label]}" if int(label) != 8 else "an eight"
