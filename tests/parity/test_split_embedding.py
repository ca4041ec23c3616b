"""Embeddings in a split: by features, by words where tied to a head, and what follows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.compare import Case, Model, check, check_all, uneven
from tests.world import world
from whale_torch.strategies.split_embedding import VocabularyEmbedding

WORDS = 11
LENGTH = 5


class Ids(Model):
    """What the models of this file share: sequences of ids and the next word as the target."""

    dims = (0, 0)
    output_dim = 0

    @staticmethod
    def batch(rows: int) -> tuple[Tensor, ...]:
        g = torch.Generator().manual_seed(2)
        return torch.randint(0, WORDS, (rows, LENGTH), generator=g), torch.randint(
            0, WORDS, (rows, LENGTH), generator=g
        )

    @staticmethod
    def objective(out: Any, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out.reshape(-1, out.shape[-1]), targets.reshape(-1))


class Tied(Ids):
    """Embedding and head share a weight: by words where the head is cut by columns, by features where by rows."""

    def __init__(self, scope: Any, width: int = 6, padding: int | None = None, cut: str | None = None):
        super().__init__()
        with scope(**({"cut": cut} if cut else {})):
            self.embedding = nn.Embedding(WORDS, width, padding_idx=padding)
            self.head = nn.Linear(width, WORDS, bias=False)
        self.middle = nn.Linear(width, width)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(ids))))


class Positions(Ids):
    """Words (B, T) and positions (1, T), added while both are cut, then a norm and a head outside."""

    def __init__(self, scope: Any, padding: int | None = None, width: int = 6):
        super().__init__()
        with scope():
            self.words = nn.Embedding(WORDS, width, padding_idx=padding)
            self.positions = nn.Embedding(LENGTH, width)
            self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1]).unsqueeze(0)
        return self.head(self.norm(self.words(ids) + self.positions(place)))


class Chain(Ids):
    """An embedding whose columns a row-cut layer takes as they lie."""

    def __init__(self, scope: Any):
        super().__init__()
        with scope():
            self.words = nn.Embedding(WORDS, 10)
            self.out = nn.Linear(10, 4)
        self.head = nn.Linear(4, WORDS)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.head(self.out(self.words(ids)))


CASES: list[Case] = [
    (Tied, {"padding": 3}),  # by words
    (Tied, {"width": 16}),  # by features: the head is narrower than its input, so it is cut by rows
    (Tied, {"width": 6, "cut": "rows"}),
    (Positions, {"padding": 0}),
    (Positions, {"width": 3}),  # on 4 ranks one has no features
]


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize(
    ("mode", "n"), [("own", 2), ("own", 3), ("own", 4), ("shared", 2), ("shared", 4), ("pairs", 4)]
)
def test_embeddings_equal_one_process(mode: str, n: int) -> None:
    check_all(CASES, n, mode, uneven)


def test_a_layer_by_rows_takes_an_embedding_as_it_lies() -> None:
    for run in check(Chain, 4, "own", uneven):
        assert run.gathered == []


def outside(rank: int, n: int, tied: bool) -> str:
    import whale_torch as wh
    from tests.parity.compare import own

    model: Any = wh.parallelize(Tied(own) if tied else Positions(own))
    with pytest.raises(IndexError) as raised:
        model(torch.full((2, LENGTH), WORDS), None)
    return str(raised.value)


@pytest.mark.parametrize("tied", [True, False])
def test_an_id_out_of_range_raises_on_every_rank(tied: bool) -> None:
    for text in world(2, outside, tied, timeout=180):
        assert "out of range" in text


def train_the_padding() -> None:
    VocabularyEmbedding.padding_idx = property(lambda self: None)  # type: ignore[assignment]


def test_the_comparison_sees_a_trained_padding() -> None:
    with pytest.raises(AssertionError, match="is off"):
        check(Tied, 2, mutate=train_the_padding, padding=3)
