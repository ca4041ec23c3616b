"""nn.MultiheadAttention by heads equals one process: masks, weights and their gradient, uneven and absent heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity.compare import Model, check, check_all, even, uneven
from whale_torch.strategies import split_attention

WIDTH, LENGTH, SOURCE = 12, 5, 4


def rows_of(kind: str, samples: int, source: int) -> Tensor | None:
    """A key padding mask, None for any other kind."""
    g = torch.Generator().manual_seed(4)
    if kind in ("bool", "float"):
        mask = torch.rand(samples, source, generator=g) < 0.3
        mask[:, 0] = False
        return mask if kind == "bool" else torch.zeros(mask.shape).masked_fill_(mask, -2.0)
    return None


class Attention(Model):
    """One attention module between replicated layers; `heads` of 12 features, or self-attention with separate sizes."""

    rows = 8

    def __init__(
        self,
        scope: Any,
        heads: int = 4,
        batch_first: bool = True,
        cross: bool = False,
        padding: str = "",
        mask: str = "",
        weights: str = "",
        causal: bool = False,
        bias: bool = True,
        other: tuple[int, int] | None = None,
    ):
        super().__init__()
        key, value = other or (WIDTH, WIDTH)
        self.query, self.memory, self.memory_value = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, key),
            nn.Linear(WIDTH, value),
        )
        with scope():
            self.attention = nn.MultiheadAttention(
                WIDTH,
                heads,
                batch_first=batch_first,
                bias=bias,
                kdim=None if other is None else key,
                vdim=None if other is None else value,
            )
        self.heads, self.batch_first, self.cross = heads, batch_first, cross
        self.padding, self.mask, self.weights, self.causal = padding, mask, weights, causal
        self.bias = nn.Parameter(torch.randn(LENGTH, SOURCE if cross else LENGTH))
        if batch_first is False:
            self.output_dim = 0

    @staticmethod
    def batch(rows: int) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(3)
        return (
            torch.randn(rows, LENGTH, WIDTH, generator=g),
            torch.randn(rows, SOURCE, WIDTH, generator=g),
            torch.arange(rows),
        )

    dims = (0, 0, 0)

    @staticmethod
    def objective(out: Any, *inputs: Any) -> Tensor:
        first, weights = out if isinstance(out, tuple) else (out, None)
        loss = first.square().mean() + first.tanh().mean()
        return loss if weights is None else loss + (weights.square() * torch.arange(weights.shape[-1])).mean()

    def forward(self, x: Tensor, y: Tensor, number: Tensor) -> Any:
        q = torch.tanh(self.query(x))
        k, v = (self.memory(y), self.memory_value(y)) if self.cross else (q, q)
        source = k.shape[1]
        padding = rows_of(self.padding, 64, source)
        padding = None if padding is None else padding[number]
        mask = self.attention_mask(number, source)
        lift = (lambda t: t) if self.batch_first else (lambda t: t.transpose(0, 1))
        q = lift(q)
        k, v = (lift(k), lift(v)) if self.cross else (q, q)
        out, weights = self.attention(
            q,
            k,
            v,
            key_padding_mask=padding,
            attn_mask=mask,
            need_weights=bool(self.weights),
            average_attn_weights=self.weights != "all",
            is_causal=self.causal,
        )
        return (lift(out), weights) if self.weights else lift(out)

    def attention_mask(self, number: Tensor, source: int) -> Tensor | None:
        g = torch.Generator().manual_seed(5)
        if self.mask == "causal":
            return torch.ones(LENGTH, source, dtype=torch.bool).triu(1)
        if self.mask == "learned":
            return self.bias * 2
        if self.mask == "samples":
            every = torch.rand(64, self.heads, LENGTH, source, generator=g) < 0.3
            every[..., 0] = False
            return every[number].flatten(0, 1)
        if self.mask == "learned samples":
            every = torch.rand(64, self.heads, LENGTH, source, generator=g)
            return (every[number] * self.bias).flatten(0, 1)
        return None


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence first": {"batch_first": False, "padding": "bool"},
    "bool padding, causal": {"padding": "bool", "mask": "causal", "causal": True},
    "causal left to the kernel": {"mask": "causal", "causal": True},
    "float padding, learned mask": {"padding": "float", "mask": "learned"},
    "mask of samples": {"mask": "samples", "padding": "bool"},
    "learned mask of samples": {"mask": "learned samples", "weights": "mean"},
    "weights of all heads": {"weights": "all", "padding": "bool"},
    "mean weights, sequence first": {"weights": "mean", "batch_first": False, "mask": "causal"},
    "cross, other sizes": {"cross": True, "other": (7, 9), "padding": "bool", "weights": "mean"},
    "cross, one size": {"cross": True, "mask": "learned"},
    "no bias": {"bias": False, "weights": "all"},
    "3 heads": {"heads": 3, "weights": "all"},
    "2 heads": {"heads": 2, "padding": "bool"},
    "1 head, weights": {"heads": 1, "weights": "all", "mask": "learned samples"},
}


PLACEMENTS = [("own", 2), ("own", 3), ("own", 4), ("shared", 2), ("shared", 4), ("pairs", 4)]


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize(("mode", "n"), PLACEMENTS)
def test_attention_equals_one_process(mode: str, n: int) -> None:
    """1, 2 and 3 heads on up to 4 ranks: some ranks have none."""
    check_all([(Attention, options) for options in CASES.values()], n, mode, even if n == 2 else uneven)


def forget_the_other_heads() -> None:
    """A learned mask gets the gradient of this rank's heads only."""
    split_attention.enter_shared = lambda x, region: x  # type: ignore[assignment]


def share_one_padding() -> None:
    """Every rank masks all rows with its own padding."""
    split_attention._Masks._gather_padding = (
        lambda self, padding, remembered: split_attention._additive(  # type: ignore[method-assign]
            padding[:1].expand(sum(self.counts), -1), torch.float32
        )
    )


@pytest.mark.parametrize(("mutate", "options"), [(forget_the_other_heads, "learned"), (share_one_padding, "samples")])
def test_the_comparison_sees_a_wrong_mask(mutate: Any, options: str) -> None:
    with pytest.raises(AssertionError, match="is off"):
        check(Attention, 2, mutate=mutate, mask=options, padding="bool" if options == "samples" else "")
