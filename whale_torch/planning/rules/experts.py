"""Mixture-of-experts layers: each rank has a part of the experts, whole ones; gate and shared expert stay whole."""

from __future__ import annotations

from typing import Any

from torch import nn

from whale_torch.planning.layout import Shard, balanced
from whale_torch.planning.rules.registry import Cut, RuleContext, register_rule_by_name
from whale_torch.planning.taskgraph import EXPERTS

__all__ = ["register_expert_rules"]


def _plan_experts(module: nn.Module, name: str, context: RuleContext) -> list[Cut]:
    layer: Any = module
    widths = balanced(layer.num_experts, context.size)
    shards = [
        (f"experts.{key}", Shard(0, widths, tuple(parameter.shape)))
        for key, parameter in layer.experts.named_parameters()
    ]
    moved = layer.top_k * layer.dim
    return [Cut(name, "MoELayer", "experts", widths, tuple(shards), moved, moved)]


def register_expert_rules() -> None:
    """The rule of whale_torch.moe.MoELayer."""
    register_rule_by_name(EXPERTS, _plan_experts)
