"""nn.MultiheadAttention by heads: projections in by columns, the projection out by rows."""

from __future__ import annotations

from torch import nn

from whale_torch.errors import PlanError
from whale_torch.planning.layout import Shard, balanced
from whale_torch.planning.rules.registry import Cut, RuleContext, register_rule

__all__ = ["register_attention_rules"]

_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def _plan_attention(module: nn.Module, name: str, context: RuleContext) -> list[Cut]:
    assert isinstance(module, nn.MultiheadAttention)
    _check(module, name, context)
    heads, dim, features = module.num_heads, module.head_dim, module.embed_dim
    widths = balanced(heads, context.size)
    shards = []
    for key in ("in_proj_weight", "in_proj_bias"):
        packed = module._parameters.get(key)
        if packed is not None:
            shards.append((key, Shard(0, widths, tuple(packed.shape), blocks=3, unit=dim)))
    for key in _SEPARATE:
        weight = module._parameters.get(key)
        if weight is not None:
            shards.append((key, Shard(0, widths, tuple(weight.shape), unit=dim)))
    shards.append(("out_proj.weight", Shard(1, widths, (features, features), unit=dim)))
    return [Cut(name, "MultiheadAttention", "heads", widths, tuple(shards), features, features)]


def _check(module: nn.MultiheadAttention, name: str, context: RuleContext) -> None:
    """Raises PlanError for options that add keys which belong to no sample, and for changed projections."""
    option = "add_bias_kv" if module.bias_k is not None else "add_zero_attn" if module.add_zero_attn else None
    if option is not None:
        raise PlanError(
            f"MultiheadAttention '{name}' with {option}=True cannot be split.",
            where=context.site,
            fix=f"build it without {option}, or move it out of the split scope",
        )
    known = {"in_proj_weight", "in_proj_bias", *_SEPARATE}
    found = {key for key, p in module._parameters.items() if p is not None}
    if not found <= known or "weight" not in module.out_proj._parameters:
        raise PlanError(
            f"MultiheadAttention '{name}' has parameters {sorted(found)} and, in out_proj, "
            f"{sorted(module.out_proj._parameters)}; its split rule knows {sorted(known)}.",
            where=context.site,
            fix="remove what changed its parameters (weight_norm, pruning), or move it out of the split scope",
        )


def register_attention_rules() -> None:
    """The rule of nn.MultiheadAttention."""
    register_rule(nn.MultiheadAttention, _plan_attention)
