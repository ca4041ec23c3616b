"""transformers' models as pipelines, unmodified and with their own losses, beside one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.split_case import gradients_of
from tests.world import world
from whale_torch.strategies.pipeline import places, run

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

BAR = 2e-5
WORDS, LENGTH = 100, 12
ROWS = [5, 4]  # of each replica: over three micro-batches 2, 2, 1 and 2, 1, 1

Batch = dict[str, Tensor]


def _text(rows: int) -> Batch:
    """Padded sequences; half of the words have no label, nor has any word of the first sequence."""
    ids = torch.randint(1, WORDS - 10, (rows, LENGTH))
    mask = (torch.arange(LENGTH) < torch.randint(4, LENGTH + 1, (rows, 1))).long()
    ids = ids.where(mask.bool(), 0)
    labels = ids.where((mask == 1) & (torch.rand(rows, LENGTH) < 0.5), -100)
    labels[-1, 1] = ids[-1, 1]
    labels[0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _two_sentences(rows: int) -> Batch:
    kinds = (torch.arange(LENGTH) > 5).long().expand(rows, -1)
    return _text(rows) | {"next_sentence_label": torch.randint(2, (rows,)), "token_type_ids": kinds}


def _translation(rows: int) -> Batch:
    return _text(rows) | {"labels": _text(rows)["labels"][:, :7].contiguous()}


def _images(rows: int) -> Batch:
    return {"pixel_values": torch.randn(rows, 3, 32, 32), "labels": torch.randint(2, (rows,))}


@dataclass(frozen=True)
class _Case:
    """A model by its class, the sizes of its configuration, and its stages by patterns."""

    model: str
    config: dict[str, Any]
    stages: tuple[str, ...]
    batch: Callable[[int], Batch] = _text

    def build(self, **options: Any) -> Any:
        cls = getattr(transformers, self.model)
        torch.manual_seed(0)
        return cls(cls.config_class(**self.config, **options)).train()


def _encoder(inside: str, head: str) -> tuple[str, ...]:
    layer = rf"{inside}\.encoder\.layer\."
    return rf"{inside}\.embeddings|{layer}0", f"{layer}1", f"{layer}2|{head}"


_SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": WORDS}
_BERT = _SIZES | {"intermediate_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ROTARY = _SIZES | {"intermediate_size": 64, "num_key_value_heads": 2}
_DECODER = (r"model\.embed_tokens|model\.layers\.0", r"model\.layers\.1", r"model\.layers\.2|model\.norm|lm_head")
_CASES = {
    "bert": _Case("BertForMaskedLM", _BERT, _encoder("bert", "cls")),
    "bert pre-training": _Case("BertForPreTraining", _BERT, _encoder("bert", r"cls|bert\.pooler"), _two_sentences),
    "roberta": _Case("RobertaForMaskedLM", _BERT, _encoder("roberta", "lm_head")),
    "distilbert": _Case(
        "DistilBertForMaskedLM",
        {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64, "vocab_size": WORDS, "dropout": 0.0}
        | {"attention_dropout": 0.0},
        (
            r"distilbert\.embeddings|distilbert\.transformer\.layer\.0",
            r"distilbert\.transformer\.layer\.1",
            r"distilbert\.transformer\.layer\.2|vocab_.*",
        ),
    ),
    "gpt2": _Case(
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": WORDS, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        | {"attn_pdrop": 0.0},
        (
            r"transformer\.wte|transformer\.wpe|transformer\.h\.0",
            r"transformer\.h\.1",
            r"transformer\.h\.2|transformer\.ln_f|lm_head",
        ),
    ),
    "llama": _Case("LlamaForCausalLM", _ROTARY, _DECODER),
    "qwen2": _Case("Qwen2ForCausalLM", _ROTARY | {"tie_word_embeddings": True}, _DECODER),
    "opt": _Case(
        "OPTForCausalLM",
        _SIZES
        | {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
        | {"dropout": 0.0, "attention_dropout": 0.0},
        (
            r"model\.decoder\.embed_.*|model\.decoder\.layers\.0",
            r"model\.decoder\.layers\.1",
            r"model\.decoder\.layers\.2|model\.decoder\.final_layer_norm|lm_head",
        ),
    ),
    "t5": _Case(
        "T5ForConditionalGeneration",
        {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64, "vocab_size": WORDS}
        | {"decoder_start_token_id": 0, "dropout_rate": 0.0},
        (
            r"shared|encoder\.block\.\d",
            r"encoder\.final_layer_norm|decoder\.block\.0",
            r"decoder\.block\.1|decoder\.final_layer_norm|lm_head",
        ),
        _translation,
    ),
    "vit": _Case(
        "ViTForImageClassification",
        {key: value for key, value in _BERT.items() if key != "vocab_size"} | {"image_size": 32, "patch_size": 8},
        (
            r"vit\.embeddings|vit\.(encoder\.)?layers?\.0",
            r"vit\.(encoder\.)?layers?\.1",
            r"vit\.(encoder\.)?layers?\.2|vit\.layernorm|classifier",
        ),
        _images,
    ),
}


class _Both:
    """A pipelined model and its one-process twin, fed the same global batches."""

    def __init__(
        self,
        name: str,
        prepare: Callable[[Any], None] = lambda model: None,
        schedule: Literal["zero_bubble"] | None = None,
        **options: Any,
    ):
        self.case = _CASES[name]
        self.model = self.case.build(**options)
        prepare(self.model)
        self.alone = copy.deepcopy(self.model)
        scopes = {pattern: wh.stage() for pattern in self.case.stages}
        wh.annotate(self.model, scopes, inside=(wh.replica(), wh.pipeline(num_micro_batches=3, schedule=schedule)))
        wh.parallelize(self.model, timeout=60)
        self.index, count = wh.data_rank(self.model)
        self.rows = sum(ROWS[:count])
        self.here = slice(sum(ROWS[: self.index]), sum(ROWS[: self.index + 1]))
        torch.manual_seed(1)

    def batch(self) -> tuple[Batch, Batch]:
        """What this rank is fed, and the batch of one process."""
        whole = self.case.batch(self.rows)
        return {key: value[self.here] for key, value in whole.items()}, whole

    def gradients(self) -> float:
        return relative_error(gradients_of(self.model), gradients_of(self.alone))

    def trained(self, steps: int) -> list[float]:
        """Errors of the loss and of gradients in some steps, and of all values after them."""
        errors = []
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.model, self.alone)]
        for _ in range(steps):
            mine, whole = self.batch()
            losses = [m(**given).loss for m, given in ((self.model, mine), (self.alone, whole))]
            for optimizer, loss in zip(optimizers, losses, strict=True):
                optimizer.zero_grad()
                loss.backward()
            errors += [float((losses[0] - losses[1]).detach().abs()), self.gradients()]
            for optimizer in optimizers:
                optimizer.step()
        return [*errors, relative_error(wh.full_state_dict(self.model), self.alone.state_dict())]

    def evaluated(self) -> tuple[float, list[float]]:
        """The largest error of what evaluation gives, with and without labels, and some of it."""
        mine, _ = self.batch()
        error, found = 0.0, []
        self.model.eval()
        self.alone.eval()
        for given in ({key: mine[key] for key in mine if "label" not in key or self.case.batch is _translation}, mine):
            with torch.no_grad():
                ours, theirs = (
                    {key: value for key, value in m(**given).items() if isinstance(value, Tensor)}
                    for m in (self.model, self.alone)
                )
            assert any("logits" in key for key in ours)
            error = max(error, relative_error(ours, {key: theirs[key] for key in ours}))
            found += [value.double().abs().sum().item() for value in ours.values()]
        return error, found


def _compared(rank: int, n: int, name: str) -> tuple[list[float], int, float, list[float]]:
    both = _Both(name)
    return both.trained(2), both.index, *both.evaluated()


@pytest.mark.parametrize("name", _CASES)
@pytest.mark.parametrize("n", [1, 3, 6])
@pytest.mark.matrix(keep=1)
def test_a_model_of_transformers_is_one_process(name: str, n: int) -> None:
    """Two SGD steps on uneven batches, and evaluation, in which the ranks of a pipeline get bit-equal outputs."""
    outputs: dict[int, list[float]] = {}
    for training, index, evaluation, found in world(n, _compared, name, timeout=300):
        assert max(training) < BAR
        assert evaluation < BAR
        assert outputs.setdefault(index, found) == found


def _autocast(rank: int, n: int) -> float:
    both = _Both("bert")
    mine, whole = both.batch()
    labels = (whole["labels"] != -100).sum()
    with torch.autocast("cpu", torch.bfloat16):
        both.model(**mine).loss.backward()
        for rows in torch.arange(both.rows).tensor_split(3):  # bfloat16 rounds what is added up
            part = {key: value[rows] for key, value in whole.items()}
            (both.alone(**part).loss * ((part["labels"] != -100).sum() / labels)).backward()
    return both.gradients()


def test_autocast() -> None:
    assert max(world(3, _autocast, timeout=300)) < 5e-3


def _in_parts(rank: int, n: int, name: str) -> list[float]:
    return _Both(name, schedule="zero_bubble").trained(2)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
@pytest.mark.parametrize("n", [3, 6])
@pytest.mark.matrix(keep=0)
def test_backwards_in_two_parts(name: str, n: int) -> None:
    for errors in world(n, _in_parts, name, timeout=300):
        assert max(errors) < BAR


def _recomputed(rank: int, n: int, schedule: Literal["zero_bubble"] | None) -> tuple[list[float], int]:
    """Errors of a step, and how often an attention ran on this rank."""

    def recompute(model: Any) -> None:
        newer = getattr(model, "activation_checkpointing_enable", None)  # the name in newer versions
        (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})

    both = _Both("llama", prepare=recompute, schedule=schedule)
    ran: list[int] = []
    both.model.model.layers[rank].self_attn.register_forward_hook(lambda *_: ran.append(1))
    return both.trained(1), len(ran)


@pytest.mark.parametrize("schedule", [None, "zero_bubble"])
@pytest.mark.matrix(keep=0)
def test_layers_that_recompute(schedule: Literal["zero_bubble"] | None) -> None:
    for errors, ran in world(3, _recomputed, schedule, timeout=300):
        assert max(errors) < BAR
        assert ran == 6  # 3 micro-batches, each once more in backward


def _tied_once(rank: int, n: int) -> float:
    """As if the last stage's part of tied embeddings were a copy of the first's."""
    for reader in (places, run):
        reader.terms_of_means = lambda reducers: None
    return max(_Both("bert").trained(1))


@pytest.mark.matrix(keep=0)
def test_the_comparison_sees_tied_gradients_that_are_averaged() -> None:
    assert min(world(3, _tied_once, timeout=300)) > 0.1


def _generated(rank: int, n: int, name: str) -> str:
    """Greedy words and beams without a cache are those of one process; what is said of a cache."""
    both = _Both(name)
    both.model.eval()
    both.alone.eval()
    prompt = torch.randint(1, WORDS - 10, (2, 5))
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for beams in (1, 2):
        expected = both.alone.generate(prompt, num_beams=beams, **options)
        found = both.model.generate(prompt, num_beams=beams, use_cache=False, **options)
        assert torch.equal(found, expected)
    with pytest.raises(wh.TraceError) as refused:
        both.model.generate(prompt, **options)
    return str(refused.value)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.matrix(keep=0)
def test_words_are_generated_without_a_cache(name: str) -> None:
    for refused in world(3, _generated, name, timeout=300):
        assert "Cache that holds tensors is handed from module to module" in refused
        assert "(of a Hugging Face model: use_cache=False)" in refused


def _encoded(rank: int, n: int) -> str:
    both = _Both("t5")
    both.model(**both.batch()[0]).loss.backward()
    both.model.eval()
    with pytest.raises(wh.WhaleError) as refused:
        both.model.generate(torch.randint(1, WORDS - 10, (2, 5)), max_new_tokens=4, use_cache=False)
    return str(refused.value)


def test_an_encoder_alone_is_refused() -> None:
    """generate() of an encoder-decoder calls the encoder past the model, on ranks that do not hold it."""
    for refused in world(3, _encoded, timeout=300):
        assert "of a pipelined model was called on a rank that does not hold its parameters" in refused
        assert "of a Hugging Face encoder-decoder, generate() calls the encoder alone" in refused
