"""What split modules refuse at run time, on every rank and with both numbers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import whale_torch as wh
from tests.parity.compare import own
from tests.world import outcomes, world


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with own():
            self.attention = nn.MultiheadAttention(8, 4, batch_first=True)

    def forward(self, query: Any, key: Any, value: Any, attn_mask: Any = None, nest: bool = False) -> Any:
        if nest:
            query = key = value = torch.nested.nested_tensor([query[0], query[1, :2]])
        return self.attention(query, key, value, attn_mask=attn_mask)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with own():
            self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Any) -> Any:
        return self.conv(x)


def attend(rank: int, lengths: tuple[int, int] = (5, 5), masks: str = "") -> Any:
    x = torch.randn(2, lengths[rank], 8)
    mask = None
    if masks == "other values":
        mask = torch.full((5, 5), float(rank))
    if masks == "other order":  # as many entries masked, elsewhere
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        mask = mask.t().contiguous() if rank else mask
    if masks == "other dimensions":
        mask = torch.zeros((5, 5) if rank else (8, 5, 5))
    if masks == "other shape":
        mask = torch.zeros(6, 5, 5)
    return wh.parallelize(Attention())(x, x, x, attn_mask=mask)


def unbatched(rank: int) -> Any:
    x = torch.randn(5, 8)
    return wh.parallelize(Attention())(x, x, x)


def nested(rank: int) -> Any:
    x = torch.randn(2, 5, 8)
    return wh.parallelize(Attention()).eval()(x, x, x, nest=True)


def unlike(rank: int) -> Any:
    return wh.parallelize(Attention())(torch.randn(2, 5, 8), torch.randn(3, 5, 8), torch.randn(3, 5, 8))


def image_without_batch(rank: int) -> Any:
    return wh.parallelize(Convolution())(torch.randn(3, 8, 8))


def images(rank: int) -> Any:
    return wh.parallelize(Convolution())(torch.randn(2, 3, 8 + rank, 8))


CASES: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (attend, {"lengths": (5, 7)}, r"lengths \(5, 5\) and \(7, 7\)"),
    (attend, {"masks": "other values"}, "different attention masks"),
    (attend, {"masks": "other order"}, "different attention masks"),
    (attend, {"masks": "other dimensions"}, "dimensions 3 and 2"),
    (attend, {"masks": "other shape"}, r"\(6, 5, 5\), but 2 samples and 4 heads want \(8, 5, 5\)"),
    (unbatched, {}, "got a 2-dimensional query"),
    (nested, {}, "got a nested query"),
    (unlike, {}, r"query \(2, 5, 8\), key \(3, 5, 8\)"),
    (image_without_batch, {}, "split Conv2d 'conv' got 3 dimensions"),
    (images, {}, r"rank 0: torch.float32 of shape \(3, 8, 8\), rank 1: torch.float32 of shape \(3, 9, 8\)"),
]


def refuse(rank: int, n: int) -> list[str]:
    """The message of every case."""
    texts = []
    for run, options, _ in CASES:
        with pytest.raises(wh.LayoutError) as raised:
            run(rank, **options)
        texts.append(str(raised.value))
    return texts


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_ranks_refuse_together() -> None:
    for texts in world(2, refuse, timeout=180):
        for text, (_, _, expected) in zip(texts, CASES, strict=True):
            assert re.search(expected, text), text
            assert "fix:" in text


def meet_elsewhere(rank: int, n: int) -> None:
    model: Any = wh.parallelize(Attention(), timeout=20)
    x = torch.randn(2, 5, 8)
    if rank:
        model.attention._region.agree("something else", 1)
    else:
        model(x, x, x)


def test_ranks_in_different_operations() -> None:
    for outcome in outcomes(2, meet_elsewhere, timeout=180):
        assert isinstance(outcome.error, wh.CommError)
        assert "samples of a split attention" in str(outcome.error) and "something else" in str(outcome.error)


def evaluate_a_copy(rank: int, n: int) -> None:
    """A deep copy of split modules runs like the original, under the original's class names."""
    from tests.parity.test_split_convolution import Classifier
    from tests.parity.test_split_transformer import Encoder

    for cls in (Classifier, Encoder):
        model: Any = wh.parallelize(cls(own)).eval()
        copied = copy.deepcopy(model)
        inputs = cls.batch(4)
        with torch.no_grad():
            expected, found = model(*inputs), copied(*inputs)
        assert torch.equal(expected, found)
        assert "Split" not in repr(model)
        assert "Synced" not in repr(model)
        assert isinstance(next(m for m in copied.modules() if isinstance(m, nn.Linear)), nn.Linear)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_copies_of_split_modules() -> None:
    world(2, evaluate_a_copy, timeout=180)
