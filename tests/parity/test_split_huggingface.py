"""transformers' models in a split by their own plans equal one process; nobody edits them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.compare import Case, Model, check_all, even, no_scope, own, uneven
from tests.world import world
from whale_torch.strategies import split_huggingface

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

WORDS, LENGTH = 23, 6
SIZES = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 32}
ROTARY = {**SIZES, "intermediate_size": 22, "num_attention_heads": 8, "num_key_value_heads": 4, "pad_token_id": 0}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**ROTARY, "attention_bias": True}),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**ROTARY, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**ROTARY, "head_dim": 6}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**ROTARY, "sliding_window": 4}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {**SIZES, "num_attention_heads": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
}


def build(kind: str, **options: Any) -> Any:
    name, config, given = MODELS[kind]
    return getattr(transformers, name)(getattr(transformers, config)(**{**given, **options}))


class Causal(Model):
    """A causal language model; what of it is split is told by name."""

    rows = 8
    dims = (0, 0)

    def __init__(
        self,
        scope: Any,
        kind: str,
        split: str = "",
        padding: bool = True,
        loss: str = "inside",
        attentions: bool = False,
        **options: Any,
    ):
        super().__init__()
        options = {"attn_implementation": "sdpa", **options}
        if scope is no_scope or split:
            self.model = build(kind, **options)
        else:
            with scope():
                self.model = build(kind, **options)
        if scope is not no_scope and split:
            wh.annotate(self.model, {split: wh.split()} if scope is own else {split: (wh.replica(), wh.split(size=2))})
        self.padding, self.loss, self.attentions = padding, loss, attentions
        torch.manual_seed(1)
        for parameter in self.parameters():  # as built, nearly everything is too small to see
            nn.init.normal_(parameter, std=0.3)

    @staticmethod
    def batch(rows: int) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(9)
        lengths = torch.randint(2, LENGTH + 1, (rows,), generator=g)
        lengths[-1] = LENGTH  # the last rank's rows mask nothing, so it has no mask
        return torch.randint(1, WORDS, (rows, LENGTH), generator=g), lengths

    def forward(self, ids: Tensor, lengths: Tensor) -> Any:
        mask = (torch.arange(LENGTH) < lengths.unsqueeze(1)).long() if self.padding else None
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            labels=ids if self.loss == "inside" else None,
            output_attentions=self.attentions,
        )
        if not torch.is_grad_enabled():
            return out.logits
        if self.attentions:
            return out.loss + sum((w.square() * torch.arange(LENGTH)).mean() for w in out.attentions)
        return out.loss if self.loss == "inside" else out.logits.softmax(-1).square().mean()


CASES: list[Case] = [
    (Causal, {"kind": "llama"}),
    (Causal, {"kind": "llama", "padding": False, "loss": "outside", "tie_word_embeddings": True}),
    (Causal, {"kind": "llama", "split": r"model\.layers\..*", "attn_implementation": "eager", "use_cache": False}),
    (Causal, {"kind": "llama", "split": r".*\.mlp", "use_cache": False}),
    (Causal, {"kind": "qwen2"}),
    (Causal, {"kind": "qwen3", "attn_implementation": "eager", "attentions": True}),
    (Causal, {"kind": "qwen3", "tie_word_embeddings": True}),
    (Causal, {"kind": "mistral"}),
    (Causal, {"kind": "gpt2"}),
    (Causal, {"kind": "gpt2", "split": r"transformer\.h\..*", "padding": False, "use_cache": False}),
]


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize(("mode", "n"), [("own", 2), ("own", 4), ("shared", 2), ("shared", 4)])
def test_language_models_equal_one_process(mode: str, n: int) -> None:
    check_all(CASES, n, mode, even if n == 2 else uneven, timeout=300)


def test_heads_of_gpt2_that_do_not_divide() -> None:
    """4 heads on 3 ranks."""
    check_all([(Causal, {"kind": "gpt2"})], 3, "own", uneven, timeout=300)


def forget_the_share() -> None:
    """A norm of queries gets the gradient of this rank's heads, as if every rank had seen all."""
    split_huggingface.partial_parameter = lambda p, region: p  # type: ignore[assignment]


def test_the_comparison_sees_a_gradient_of_some_heads() -> None:
    with pytest.raises(AssertionError, match="q_norm"):
        check_all([(Causal, {"kind": "qwen3"})], 2, mutate=forget_the_share, timeout=300)


def generate(rank: int, n: int, rows: str) -> dict[str, Any]:
    """Greedy tokens with and without a cache, and what a cache raises where it cannot be kept."""
    import contextlib

    def make(scope: Any) -> Any:
        torch.manual_seed(3)
        with scope:
            model = build("qwen3", tie_word_embeddings=True)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.5)
        return model.eval()

    prompt = torch.randint(1, WORDS, (2, 4), generator=torch.Generator().manual_seed(5))
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = make(contextlib.nullcontext()).generate(prompt, **options)
    model = wh.parallelize(make(wh.split(rows=rows)))
    found: dict[str, Any] = {"expected": expected, "without": model.generate(prompt, use_cache=False, **options)}
    try:
        found["with"] = model.generate(prompt, **options)
    except wh.LayoutError as error:
        found["error"] = str(error)
    beams = {**options, "num_beams": 2, "use_cache": rows == "shared"}
    found["beams"] = torch.equal(
        make(contextlib.nullcontext()).generate(prompt, **beams), model.generate(prompt, **beams)
    )
    model.train()
    with pytest.raises(wh.LayoutError, match="not kept in a split where"):
        first = model(prompt)
        model(prompt[:, -1:], cache=first.cache)
    return found


def test_generation() -> None:
    """A cache of keys and values is kept where the ranks are fed the same rows, and refused elsewhere."""
    for found in world(2, generate, "shared", timeout=300):
        assert "error" not in found
        assert torch.equal(found["with"], found["expected"])
        assert torch.equal(found["without"], found["expected"])
        assert found["beams"]
    for found in world(2, generate, "own", timeout=300):
        assert torch.equal(found["without"], found["expected"])
        assert (
            "keys and values of earlier calls are not kept in a split where its ranks have own rows" in found["error"]
        )
        assert found["beams"]


def misuse(rank: int, n: int) -> list[str]:
    model: Any = wh.parallelize(wh.split(build("llama")))
    ids = torch.randint(1, WORDS, (2, LENGTH))
    texts = []
    with pytest.raises(wh.LayoutError) as raised:
        model(input_ids=ids[:, : LENGTH - rank])
    texts.append(str(raised.value))
    hidden, positions = torch.randn(2, 3, 16), (torch.ones(2, 3, 2),) * 2
    for given in (
        {"attention_mask": torch.ones(2, 3)},
        {"position_bias": torch.ones(2, 8, 3, 3)},
        {"position_ids": torch.ones(3, 2, 3)},
    ):
        with pytest.raises(wh.LayoutError) as raised:
            model.model.layers[0].self_attn(hidden, position_embeddings=positions, **given)
        texts.append(str(raised.value))
    return texts


def test_what_attention_refuses() -> None:
    for lengths, mask, unknown, positions in world(2, misuse, timeout=300):
        assert "sequences of lengths [6, 5]" in lengths
        assert "attention_mask has 2 dimensions" in mask
        assert "argument 'position_ids' has shape (3, 2, 3), and 2 samples are fed" in positions
        assert "argument 'position_bias' has shape (2, 8, 3, 3)" in unknown
