"""transformers' BERT as it is, its layers dealt out to the stages of a pipeline by their names."""

from __future__ import annotations

import itertools

from transformers import BertConfig, BertForMaskedLM

import whale_torch as wh
from examples.bert_mlm.data import LENGTH

__all__ = ["pipelined_bert"]


def pipelined_bert(
    num_tokens: int, *, num_layers: int, width: int, num_stages: int, num_micro_batches: int, schedule: str | None
) -> BertForMaskedLM:
    """BERT with scopes: as many pipelines side by side as the ranks make, each of at most `num_stages` ranks."""
    config = BertConfig(
        vocab_size=num_tokens,
        hidden_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 32,
        intermediate_size=4 * width,
        max_position_embeddings=LENGTH,
        initializer_range=0.05,  # 0.02, meant for a width of a thousand, starts a small model slowly
        hidden_dropout_prob=0.0,  # no sequence is read twice
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config)
    scopes = {pattern: wh.stage() for pattern in stages(num_layers, num_stages)}
    pipeline = wh.pipeline(num_micro_batches=num_micro_batches, schedule=schedule)
    return wh.annotate(model, scopes, inside=(wh.replica(), pipeline))


def stages(num_layers: int, num_stages: int) -> list[str]:
    """A pattern of module names for each stage: its share of the layers, the first with the embeddings, the last with
    the head."""
    ends = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    names = [[rf"bert\.encoder\.layer\.{k}" for k in range(*span)] for span in itertools.pairwise(ends)]
    names[0].append(r"bert\.embeddings")
    names[-1].append("cls")
    return ["|".join(group) for group in names]
