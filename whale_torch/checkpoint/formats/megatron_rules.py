"""How Megatron core's tensor ranks cut what Hugging Face calls otherwise, as data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RULES", "Rule"]


@dataclass(frozen=True)
class Rule:
    """How tensor ranks cut a tensor, and what it is called outside.

    pattern: of Megatron's whole name; layers and experts have global numbers. names: one for each tensor that is fused
    in it, in `fused` order. dim: along which ranks cut, None for a copy on each. fused: "qkv" for rows of query heads,
    keys and values of one group after the other; "halves" for two blocks of rows on each rank. padded: whether its rows
    are those of the vocabulary and some more.
    """

    pattern: str
    names: tuple[str, ...]
    dim: int | None = None
    fused: str = ""
    padded: bool = False


_LAYER = r"decoder\.layers\.(\d+)\."
_TO = r"model.layers.\1."
_EXPERT = rf"{_LAYER}mlp\.experts\.local_experts\.(\d+)\."
_TO_EXPERT = rf"{_TO}block_sparse_moe.experts.\2."
RULES = (
    Rule(r"embedding\.word_embeddings\.weight", ("model.embed_tokens.weight",), 0, padded=True),
    Rule(r"output_layer\.weight", ("lm_head.weight",), 0, padded=True),
    Rule(r"decoder\.final_layernorm\.(weight|bias)", (r"model.norm.\1",)),
    Rule(
        rf"{_LAYER}(?:input_layernorm\.|self_attention\.linear_qkv\.layer_norm_)(weight|bias)",
        (rf"{_TO}input_layernorm.\2",),
    ),
    Rule(
        rf"{_LAYER}(?:pre_mlp_layernorm\.|mlp\.linear_fc1\.layer_norm_)(weight|bias)",
        (rf"{_TO}post_attention_layernorm.\2",),
    ),
    Rule(
        rf"{_LAYER}self_attention\.linear_qkv\.(weight|bias)",
        tuple(rf"{_TO}self_attn.{one}_proj.\2" for one in "qkv"), 0, "qkv",
    ),
    Rule(rf"{_LAYER}self_attention\.([qk])_layernorm\.(weight|bias)", (rf"{_TO}self_attn.\2_norm.\3",)),
    Rule(rf"{_LAYER}self_attention\.linear_proj\.weight", (rf"{_TO}self_attn.o_proj.weight",), 1),
    Rule(rf"{_LAYER}self_attention\.linear_proj\.bias", (rf"{_TO}self_attn.o_proj.bias",)),
    Rule(
        rf"{_LAYER}mlp\.linear_fc1\.(weight|bias)",
        (rf"{_TO}mlp.gate_proj.\2", rf"{_TO}mlp.up_proj.\2"), 0, "halves",
    ),
    Rule(rf"{_LAYER}mlp\.linear_fc2\.weight", (rf"{_TO}mlp.down_proj.weight",), 1),
    Rule(rf"{_LAYER}mlp\.linear_fc2\.bias", (rf"{_TO}mlp.down_proj.bias",)),
    Rule(rf"{_LAYER}mlp\.router\.weight", (rf"{_TO}block_sparse_moe.gate.weight",)),
    Rule(rf"{_EXPERT}linear_fc1\.weight", (rf"{_TO_EXPERT}w1.weight", rf"{_TO_EXPERT}w3.weight"), 0, "halves"),
    Rule(rf"{_EXPERT}linear_fc2\.weight", (rf"{_TO_EXPERT}w2.weight",), 1),
)  # fmt: skip
"""Megatron core's GPT with gated feed-forwards, as Llama and Mixtral are called by Hugging Face."""
