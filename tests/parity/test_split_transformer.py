"""torch's transformer layers in a split equal one process, in training and past the eval fast paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity.compare import Case, Model, check, check_all, uneven
from tests.parity.test_split_attention import PLACEMENTS

WIDTH, LENGTH, SOURCE, HEADS = 16, 5, 4, 4


class Encoder(Model):
    """An nn.TransformerEncoder or single layers; which of them are split is an option."""

    rows = 8
    dims = (0, 0)

    def __init__(
        self,
        scope: Any,
        container: bool = True,
        split: tuple[int, ...] | None = None,
        padding: bool = True,
        mask: bool = False,
        heads: int = HEADS,
        norm: bool = True,
        batch_first: bool = True,
        left: bool = False,
        **options: Any,
    ):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, heads, 22, dropout=0.0, batch_first=batch_first, **options)
        last = nn.LayerNorm(WIDTH) if norm else None
        if split is None:
            with scope():
                self.encoder = nn.TransformerEncoder(layer, 2, last, enable_nested_tensor=container)
        else:
            self.encoder = nn.TransformerEncoder(layer, 2, last, enable_nested_tensor=container)
            for i in split:
                with scope():
                    self.encoder.layers[i] = nn.TransformerEncoderLayer(
                        WIDTH, heads, 22, dropout=0.0, batch_first=batch_first, **options
                    )
        self.first = nn.Linear(WIDTH, WIDTH)
        self.padding, self.mask, self.batch_first, self.left = padding, mask, batch_first, left
        for parameter in self.parameters():  # norms' biases too: what stands at padding is seen
            if parameter.dim() == 1:
                nn.init.normal_(parameter, std=0.1)

    @staticmethod
    def batch(rows: int) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(6)
        return torch.randn(rows, LENGTH, WIDTH, generator=g), torch.randint(2, LENGTH + 1, (rows,), generator=g)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.first(x)
        padding = torch.arange(LENGTH) >= lengths.unsqueeze(1) if self.padding else None
        padding = padding.flip(1) if padding is not None and self.left else padding
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) if self.mask else None
        h = h if self.batch_first else h.transpose(0, 1)
        h = self.encoder(h, mask=mask, src_key_padding_mask=padding)
        return h if self.batch_first else h.transpose(0, 1)


class Seq2Seq(Model):
    """nn.Transformer: encoder, decoder with a causal mask, memory padding."""

    rows = 8
    dims = (0, 0, 0)

    def __init__(self, scope: Any, batch_first: bool = True, **options: Any):
        super().__init__()
        with scope():
            self.transformer = nn.Transformer(WIDTH, HEADS, 1, 2, 22, dropout=0.0, batch_first=batch_first, **options)
        self.batch_first = batch_first

    @staticmethod
    def batch(rows: int) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(7)
        return (
            torch.randn(rows, SOURCE, WIDTH, generator=g),
            torch.randn(rows, LENGTH, WIDTH, generator=g),
            torch.randint(2, SOURCE + 1, (rows,), generator=g),
        )

    def forward(self, source: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
        padding = torch.zeros(lengths.shape[0], SOURCE).masked_fill(
            torch.arange(SOURCE) >= lengths.unsqueeze(1), -torch.inf
        )
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        lift = (lambda t: t) if self.batch_first else (lambda t: t.transpose(0, 1))
        out = self.transformer(
            lift(source),
            lift(target),
            tgt_mask=mask,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return lift(out)


class Decoder(Model):
    """One nn.TransformerDecoderLayer of L targets over S memories, whose features are replicated."""

    rows = 9
    dims = (0, 0, 0, 0)

    def __init__(self, scope: Any, batch_first: bool = True, masked: bool = True, **options: Any):
        super().__init__()
        self.memory = nn.Linear(3, WIDTH)
        self.target = nn.Embedding(7, WIDTH)
        with scope():
            self.layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 22, dropout=0.0, batch_first=batch_first, **options)
        self.batch_first, self.masked = batch_first, masked
        for parameter in self.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, std=0.1)

    @staticmethod
    def batch(rows: int) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(8)
        return (
            torch.randn(rows, SOURCE, 3, generator=g),
            torch.randint(7, (rows, LENGTH), generator=g),
            torch.randint(2, SOURCE + 1, (rows,), generator=g),
            torch.randint(2, LENGTH + 1, (rows,), generator=g),
        )

    def forward(self, source: Tensor, words: Tensor, of_source: Tensor, of_words: Tensor) -> Tensor:
        memory, target = self.memory(source).tanh(), self.target(words)
        options: dict[str, Any] = {}
        if self.masked:
            options["tgt_mask"] = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
            options["memory_mask"] = torch.ones(LENGTH, SOURCE, dtype=torch.bool).triu(2)
            options["tgt_key_padding_mask"] = torch.arange(LENGTH) >= of_words.unsqueeze(1)
            options["memory_key_padding_mask"] = torch.arange(SOURCE) >= of_source.unsqueeze(1)
        if self.batch_first:
            return self.layer(target, memory, **options)
        return self.layer(target.transpose(0, 1), memory.transpose(0, 1), **options).transpose(0, 1)


CASES: list[Case] = [
    (Encoder, {}),  # nested tensors in eval mode
    (Encoder, {"norm": False}),
    (Encoder, {"left": True}),
    (Encoder, {"container": False, "norm_first": True, "activation": "gelu", "padding": False}),
    (Encoder, {"container": False, "batch_first": False, "bias": False, "mask": True}),
    (Encoder, {"split": (1,)}),  # the first layer, replicated, would hand on a nested tensor
    (Encoder, {"split": (0,), "mask": True}),
    (Encoder, {"heads": 2, "mask": True, "padding": False}),
    (Seq2Seq, {}),
    (Seq2Seq, {"batch_first": False, "norm_first": True, "activation": "gelu"}),
    (Decoder, {}),
    (Decoder, {"masked": False, "batch_first": False, "bias": False}),
    (Decoder, {"norm_first": True, "activation": "gelu"}),
]


@pytest.mark.matrix(keep=2)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("mode", "n"), PLACEMENTS)
def test_transformers_equal_one_process(mode: str, n: int) -> None:
    check_all(CASES, n, mode, uneven)


def detach_the_memory() -> None:
    from whale_torch.strategies.split_attention import HeadAttention

    whole = HeadAttention.forward

    def forward(self: HeadAttention, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if key.shape[1] != query.shape[1]:  # cross-attention: what it gives back to the memory is lost
            key, value = key.detach(), value.detach()
        return whole(self, query, key, value, *args, **kwargs)

    HeadAttention.forward = forward  # type: ignore[method-assign]


def test_the_comparison_sees_a_memory_without_gradient() -> None:
    with pytest.raises(AssertionError, match="memory"):
        check(Decoder, 2, mutate=detach_the_memory)


def leave_fast_paths_on() -> None:
    from whale_torch.strategies import split

    split.switch_off_fast_paths = lambda model: None  # type: ignore[assignment]


class FastPath(Encoder):
    """The mutation acts before parallelize."""

    def __init__(self, scope: Any):
        leave_fast_paths_on()
        super().__init__(scope, container=False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_comparison_sees_a_fast_path() -> None:
    with pytest.raises(RuntimeError, match="expected `qkv_weight` first dim to be 3x embed_dim"):
        check(FastPath, 2)
