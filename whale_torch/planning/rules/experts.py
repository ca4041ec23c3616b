"""Mixture-of-experts layers: each rank has a part of the experts, whole ones; gate and shared expert stay whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from whale_torch.planning.layout import Shard, balanced
from whale_torch.planning.rules.registry import Cut, RuleContext, register_rule_by_name
from whale_torch.planning.taskgraph import EXPERTS

__all__ = ["plan_routed_experts", "register_expert_rules"]


def _plan_experts(module: nn.Module, name: str, context: RuleContext) -> list[Cut]:
    layer: Any = module
    return _plan(layer, name, context, "MoELayer", layer.experts.named_parameters(prefix="experts"))


def plan_routed_experts(module: nn.Module, name: str, context: RuleContext) -> list[Cut]:
    """The rule of experts that others choose (moe.RoutedExperts): all their own parameters are [num_experts, ...]."""
    return _plan(module, name, context, "RoutedExperts", module.named_parameters(recurse=False))


def _plan(
    layer: Any, name: str, context: RuleContext, rule: str, parameters: Iterable[tuple[str, nn.Parameter]]
) -> list[Cut]:
    widths = balanced(layer.num_experts, context.size)
    shards = tuple((key, Shard(0, widths, tuple(parameter.shape))) for key, parameter in parameters)
    moved = layer.top_k * layer.dim
    return [Cut(name, rule, "experts", widths, shards, moved, moved)]


def register_expert_rules() -> None:
    """The rule of whale_torch.moe.MoELayer."""
    register_rule_by_name(EXPERTS, _plan_experts)
