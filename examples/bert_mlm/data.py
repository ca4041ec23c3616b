"""Text that is on every machine: Python's own library. And words of it to guess."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["LENGTH", "Guesses", "documents", "sequences", "train_tokenizer"]

LENGTH = 64  # tokens of a sequence
SPECIAL = ["[PAD]", "[UNK]", "[MASK]"]
NOT_TEXT = {"encodings", "idlelib", "lib2to3", "site-packages", "test", "tests", "__pycache__"}
NO_LABEL = -100  # what transformers' losses leave out


def documents(folder: Path | None = None) -> Iterator[str]:
    """The sources of Python's library, documentation strings and all: one text a file, always in the same order."""
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    for path in sorted(folder.rglob("*.py")):
        if not NOT_TEXT.intersection(path.relative_to(folder).parts):
            yield path.read_text(encoding="utf-8", errors="ignore")


def train_tokenizer(texts: list[str], num_tokens: int) -> str:
    """A WordPiece tokenizer with at most `num_tokens` tokens, as JSON."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=num_tokens, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


def sequences(tokenizer: Tokenizer, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Token numbers [sequences, LENGTH] of all texts one after the other: to train on, and a fiftieth to measure on."""
    numbers = [number for encoding in tokenizer.encode_batch(texts) for number in encoding.ids]
    rows = torch.tensor(numbers[: len(numbers) // LENGTH * LENGTH]).view(-1, LENGTH)
    held_out = torch.arange(len(rows)) % 50 == 0
    return rows[~held_out], rows[held_out]


class Guesses(Dataset[dict[str, Tensor]]):
    """`num_samples` sequences in which some tokens are to be guessed, 15 % as in BERT; sample i is always the same.

    Of these eight in ten are masked, one is replaced by any other and one is left as it is.
    """

    def __init__(self, rows: Tensor, num_samples: int, num_tokens: int, *, seed: int):
        self.rows, self.num_samples, self.num_tokens, self.seed = rows, num_samples, num_tokens, seed

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """input_ids and labels, [LENGTH] both."""
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        ids = self.rows[index % len(self.rows)]
        chosen, how = torch.rand(LENGTH, generator=draw) < 0.15, torch.rand(LENGTH, generator=draw)
        anything = torch.randint(len(SPECIAL), self.num_tokens, (LENGTH,), generator=draw)
        shown = torch.where(how < 0.8, SPECIAL.index("[MASK]"), torch.where(how < 0.9, anything, ids))
        return {"input_ids": torch.where(chosen, shown, ids), "labels": torch.where(chosen, ids, NO_LABEL)}
