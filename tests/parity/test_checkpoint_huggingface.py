"""Models of transformers: saved under one plan, opened by from_pretrained, and built on meta under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import whale_torch as wh
from tests.world import world
from whale_torch.checkpoint.convert import convert
from whale_torch.checkpoint.files import Files
from whale_torch.comm.registry import place_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

WORDS, WIDTH = 300, 256
_SIZES = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[tuple[str, str], ...]]] = {
    "gpt2": (
        "GPT2",
        {**_SIZES, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0},
        (
            (r"transformer\.wte|transformer\.wpe", r"transformer\.h\.0"),
            (r"transformer\.ln_f|lm_head", r"transformer\.h\.1"),
        ),
    ),
    "llama": (
        "Llama",
        {**_SIZES, "intermediate_size": 320, "num_key_value_heads": 2, "tie_word_embeddings": True},
        ((r"model\.embed_tokens", r"model\.layers\.0"), (r"model\.norm|lm_head", r"model\.layers\.1")),
    ),
}
NEXT = {"split": ("pipeline", 2), "pipeline": ("both", 4), "both": ("split", 2)}


def build(kind: str) -> Any:
    name, options, _ = MODELS[kind]
    torch.manual_seed(0)
    head = "LMHeadModel" if kind == "gpt2" else "ForCausalLM"
    return getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**options))


def planned(kind: str, plan: str, *, meta: bool) -> Any:
    with torch.device("meta" if meta else "cpu"):
        if plan == "split":
            with wh.split():
                return build(kind)
        model = build(kind)
    scopes: dict[str, Any] = {}
    for ends, layer in MODELS[kind][2]:
        scopes[f"{ends}|{layer}"] = wh.stage()
        if plan == "both":
            scopes[layer] = wh.split()
    wh.annotate(model, scopes, inside=(wh.replica(), wh.pipeline(num_micro_batches=2)))
    return model


def ids() -> Tensor:
    return torch.arange(24).view(4, 6) * 7 % WORDS


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=ids(), use_cache=False).logits
    return found


def saved(rank: int, n: int, kind: str, plan: str, path: str) -> None:
    wh.save(path, step=1, model=wh.parallelize(planned(kind, plan, meta=False)))


def built(
    rank: int, n: int, kind: str, plan: str, path: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, int, int]:
    """State, buffers that are not in it, logits, bytes that were read, and bytes of what this rank holds."""
    read, total = Files.read, [0]

    def count(self: Files, fd: int, into: memoryview, offset: int) -> int:
        total[0] += len(into)
        return read(self, fd, into, offset)

    Files.read = count
    model = planned(kind, plan, meta=True)
    wh.parallelize(
        model, weights=path, init_fn=model._init_weights, sample_inputs={"input_ids": ids(), "use_cache": False}
    )
    reading = total[0]
    held = 0
    for p in model.parameters():
        place = place_of(p)
        held += p.numel() * p.element_size() if place is None or place.held else 0
    state = wh.full_state_dict(model)
    buffers = {k: v.clone() for k, v in model.named_buffers() if k not in state and not v.is_meta}
    found = logits(model)
    return state, buffers, found, reading, held


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("plan", "n"), [("split", 2), ("pipeline", 2), ("both", 4)])
@pytest.mark.matrix(keep=1)
def test_there_and_back(kind: str, plan: str, n: int, tmp_path: Path) -> None:
    alone = build(kind)
    alone.config.save_pretrained(tmp_path / "config")
    world(n, saved, kind, plan, str(tmp_path / "run"), timeout=120)
    done = convert(tmp_path / "run", tmp_path / "hf", "hf", config=tmp_path / "config", shard_bytes=2_000_000)
    assert done.left_out == ["rng"]
    again, told = type(alone).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(told.values()), told
    assert again.lm_head.weight is again.get_input_embeddings().weight
    assert torch.equal(logits(again), logits(alone))
    other, ranks = NEXT[plan]
    expected = alone.state_dict()
    unsaved = {key: value for key, value in alone.named_buffers() if key not in expected}
    for state, buffers, found, read, held in world(ranks, built, kind, other, str(tmp_path / "hf"), timeout=120):
        assert state.keys() == expected.keys()
        assert all(torch.equal(value, expected[key]) for key, value in state.items())
        assert all(torch.equal(value, unsaved[key]) for key, value in buffers.items())
        assert kind == "gpt2" or buffers
        torch.testing.assert_close(found, logits(alone), atol=1e-4, rtol=1e-4)
        assert read < 1.05 * held + 40_000, f"{read} bytes for {held}"


def stepped(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.train()(input_ids=ids(), labels=ids(), use_cache=False).loss.backward()
    optimizer.step()


def still(kind: str) -> None:
    """No dropout: what is compared is one process."""
    if kind == "gpt2":
        MODELS[kind][1].update(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def trained(rank: int, n: int, kind: str) -> dict[str, Tensor]:
    still(kind)
    model = planned(kind, "both", meta=False)
    wh.parallelize(model, sample_inputs={"input_ids": ids(), "labels": ids(), "use_cache": False})
    stepped(model)
    return wh.full_state_dict(model)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.matrix(keep=0)
def test_split_blocks_in_stages_have_the_gradients_of_one_process(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, kind, (MODELS[kind][0], dict(MODELS[kind][1]), MODELS[kind][2]))
    still(kind)
    alone = build(kind)
    before = {key: value.clone() for key, value in alone.state_dict().items()}
    stepped(alone)
    for found in world(4, trained, kind, timeout=120):
        for key, value in alone.state_dict().items():
            step = float((value - before[key]).abs().max())
            assert step > 0 and float((found[key] - value).abs().max()) < 1e-4 * step + 1e-6, key
