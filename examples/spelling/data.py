"""Misspelt words and what was meant: as many classes as English has words."""

from __future__ import annotations

import random
import zlib

import torch
from english_words import get_english_words_set
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["LENGTH", "LETTERS", "SEEN_IN_THE_WILD", "Misspellings", "encode", "vocabulary"]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LENGTH = 24  # letters a word is cut to or filled up to

# What people write, and what they mean. Never trained on.
SEEN_IN_THE_WILD = {
    "accomodate": "accommodate",
    "begining": "beginning",
    "definately": "definitely",
    "embarass": "embarrass",
    "enviroment": "environment",
    "goverment": "government",
    "neccessary": "necessary",
    "occurence": "occurrence",
    "recieve": "receive",
    "tommorow": "tomorrow",
}


def vocabulary(size: int | None) -> list[str]:
    """The words of three letters or more in Webster's Second, sorted: all, or always the same choice of `size`."""
    listed = get_english_words_set(["web2"], lower=True)
    words = {word for word in listed if len(word) > 2 and set(word) <= set(LETTERS)}
    if size is None:
        return sorted(words)
    meant = set(SEEN_IN_THE_WILD.values())
    if not len(meant) <= size <= len(words):
        raise ValueError(
            f"the list has {len(words)} words and the demo needs {len(meant)} of them, so {size} will not do"
        )
    return sorted(meant | set(random.Random(0).sample(sorted(words - meant), size - len(meant))))


def encode(word: str) -> Tensor:
    """The letters as numbers from 1 to 26, then zeros. Shape: [LENGTH]."""
    filled = word[:LENGTH].ljust(LENGTH, "`").encode()  # the backquote comes just before "a"
    return torch.frombuffer(bytearray(filled), dtype=torch.uint8).long() - ord("`")


class Misspellings(Dataset[tuple[Tensor, int]]):
    """`num_samples` misspellings by one or two random edits; sample i is always the same one.

    held_out: draw from the tenth of all misspellings that is for evaluation only; otherwise from the other nine.
    """

    def __init__(self, words: list[str], num_samples: int, *, seed: int, held_out: bool = False):
        self.words, self.known = words, set(words)
        self.num_samples, self.seed, self.held_out = num_samples, seed, held_out

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        wrong, target = self.pair(index)
        return encode(wrong), target

    def pair(self, index: int) -> tuple[str, int]:
        """The misspelling and the number of the word that is meant."""
        rng = random.Random(self.seed * 1_000_003 + index)
        target = index % len(self.words) if not self.held_out else rng.randrange(len(self.words))
        while True:
            wrong = edit(self.words[target], rng)
            if rng.random() < 0.25:
                wrong = edit(wrong, rng)
            if wrong and wrong not in self.known and is_held_out(wrong) == self.held_out:
                return wrong, target


def edit(word: str, rng: random.Random) -> str:
    """One slip of the pen: two letters swapped, one left out, one too many, or one wrong."""
    at = rng.randrange(max(1, len(word)))
    before, after = word[:at], word[at + 1 :]
    slip = rng.randrange(4)
    if slip == 0:
        return before + word[at + 1 : at + 2] + word[at : at + 1] + word[at + 2 :]
    if slip == 1:
        return before + after
    if slip == 2:
        return before + rng.choice(LETTERS) + word[at:]
    return before + rng.choice(LETTERS) + after


def is_held_out(wrong: str) -> bool:
    return wrong in SEEN_IN_THE_WILD or zlib.crc32(wrong.encode()) % 10 == 0
