"""Checkpoints of transformers' models: packed projections by the plain model's names, from layout to layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import whale_torch as wh
from tests.parity.checkpoint_cases import whole
from tests.world import world
from whale_torch.strategies.runtime import is_parallelized

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

BAR = 1e-5
WORDS, LENGTH, ROWS = 24, 6, 8
SIZES = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 16}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], str, tuple[str, str]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {**SIZES, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        r"transformer\.h\.[01]",
        (r"transformer\.(wte|wpe|h\.0)", r"transformer\.(h\.1|ln_f)|lm_head"),
    ),
    "bert": (
        "BertForMaskedLM",
        {**SIZES, "intermediate_size": 22, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        r"bert\.encoder\.layer\.[01]",
        (r"bert\.embeddings|bert\.encoder\.layer\.0", r"bert\.encoder\.layer\.1|cls"),
    ),
}
PACKED = {"gpt2": ("transformer.h.0.attn.c_attn.weight", [16, 48]),
          "bert": ("bert.encoder.layer.1.attention.self.query.weight", [16, 16])}  # fmt: skip
LIVES = [("split", 2), ("pipeline", 2), ("plain", 0), ("split", 4), ("replica", 2)]


def _build(kind: str, layout: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    name, config, split, stages = MODELS[kind]
    cls = getattr(transformers, name)
    torch.manual_seed(seed)
    model = cls(cls.config_class(**config)).train()
    if layout == "split":
        wh.annotate(model, {split: wh.split()})
    elif layout == "pipeline":
        inside = wh.pipeline(num_micro_batches=2)
        wh.annotate(model, {pattern: wh.stage() for pattern in stages}, inside=inside)  # type: ignore[dict-item]
    if layout != "plain":
        wh.parallelize(model, sample_inputs=_batch(0) if layout == "pipeline" else None)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def _batch(number: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(100 + number)
    ids = torch.randint(1, WORDS, (ROWS, LENGTH), generator=draw)
    return {"input_ids": ids, "labels": ids}


def _step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> float:
    index, feeds = wh.data_rank(model) if is_parallelized(model) else (0, 1)
    optimizer.zero_grad()
    loss = model(**{key: value.chunk(feeds)[index] for key, value in _batch(number).items()}).loss
    loss.backward()
    optimizer.step()
    return float(wh.reduce(loss.detach(), model=model)) if feeds > 1 else float(loss.detach())


def _live(rank: int, n: int, kind: str, layout: str, life: int, path: str) -> list[float]:
    """Loads, trains two steps, saves."""
    model, optimizer = _build(kind, layout, seed=life)
    name, shape = PACKED[kind]
    if layout == "split":
        assert model.get_parameter(name).numel() == shape[0] * shape[1] // n, "a part of it is here"
    if life:
        found = wh.load(path, model=model, optimizer=optimizer)
        expected = torch.load(found.path / "expected")
        for mine, saved in zip(whole(model, optimizer), expected, strict=True):
            assert mine.keys() == saved.keys()
            assert all(torch.equal(mine[key], value) for key, value in saved.items())
    losses = [_step(model, optimizer, 2 * life + number) for number in range(2)]
    folder = wh.save(path, step=life, model=model, optimizer=optimizer)
    state = whole(model, optimizer)
    if rank == 0:
        torch.save(state, folder / "expected")
    return losses


def _check_names(kind: str, folder: Path) -> None:
    """All are those of the plain model, with its shapes."""
    index = json.loads((folder / "index.json").read_text())
    model, optimizer = _build(kind, "plain", 0)
    _step(model, optimizer, 0)
    tied = {f"model/{key}" for key in model.state_dict()}
    assert {key for key in (*index["tensors"], *index["ties"]) if key.startswith("model/")} == tied
    of = {f"optimizer/{name}/{key}" for name, p in model.named_parameters() for key in optimizer.state[p]}
    assert {key for key in index["tensors"] if key.startswith("optimizer/")} == of
    name, shape = PACKED[kind]
    for key in (f"model/{name}", f"optimizer/{name}/exp_avg", f"optimizer/{name}/exp_avg_sq"):
        assert index["tensors"][key]["shape"] == shape == list(model.get_parameter(name).shape)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.matrix(keep=0)
def test_a_model_goes_from_layout_to_layout(kind: str, tmp_path: Path) -> None:
    model, optimizer = _build(kind, "plain", 0)
    for life, (layout, n) in enumerate(LIVES):
        expected = [_step(model, optimizer, 2 * life + number) for number in range(2)]
        if n:
            found = world(n, _live, kind, layout, life, str(tmp_path), timeout=120)
        else:
            found = [_live(0, 0, kind, layout, life, str(tmp_path))]
        for losses in found:
            assert losses == pytest.approx(expected, rel=BAR * 10), (life, layout)
        _check_names(kind, tmp_path / f"step-{life:08d}")
