"""Mixture-of-experts layers: each rank has a part of the experts, whole ones; gate and shared expert stay whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from whale_torch.errors import PlanError
from whale_torch.planning.layout import Shard, balanced
from whale_torch.planning.rules.registry import Cut, RuleContext, register_rule_by_name
from whale_torch.planning.taskgraph import EXPERTS

__all__ = ["plan_routed_experts", "register_expert_rules"]


def _plan_experts(module: nn.Module, name: str, context: RuleContext) -> list[Cut]:
    layer: Any = module
    parameters = layer.experts.named_parameters(prefix="experts")
    return _plan(layer, name, context, "MoELayer", parameters, layer.experts.slices)


def plan_routed_experts(module: nn.Module, name: str, context: RuleContext) -> list[Cut]:
    """The rule of experts that others choose (moe.RoutedExperts): all their own parameters are [num_experts, ...]."""
    return _plan(module, name, context, "RoutedExperts", module.named_parameters(recurse=False))


def _plan(
    layer: Any,
    name: str,
    context: RuleContext,
    rule: str,
    parameters: Iterable[tuple[str, nn.Parameter]],
    slices: int = 1,
) -> list[Cut]:
    parameters = list(parameters)
    number = layer.num_experts * slices
    _check_stacked(layer, name, number, parameters, context.site)
    widths = balanced(number, context.size)
    shards = tuple((key, Shard(0, widths, tuple(parameter.shape))) for key, parameter in parameters)
    moved = layer.top_k * slices * layer.dim
    return [Cut(name, rule, "experts", widths, shards, moved, moved)]


def _check_stacked(layer: Any, name: str, number: int, parameters: list[tuple[str, nn.Parameter]], site: str) -> None:
    """Raises PlanError for what cannot be cut by experts, or slices of them."""
    of = f"'{name}'" if name else "the layer"
    odd = next(((key, p) for key, p in parameters if p.dim() < 1 or p.shape[0] != number), None)
    if odd is not None:
        raise PlanError(
            f"{of} has {number} experts, and its parameter '{odd[0]}' has shape {list(odd[1].shape)}.",
            where=site,
            fix=f"parameters of Experts are [{number}, ...], those of all experts in one",
        )
    whole = next((key for key, b in layer.experts.named_buffers() if b.dim() and b.shape[0] == number > 1), None)
    if whole is not None:
        raise PlanError(
            f"{of} has {number} experts, and its buffer 'experts.{whole}' is of all of them on every rank.",
            where=site,
            fix="a parameter with requires_grad=False, which is cut as the others are",
        )


def register_expert_rules() -> None:
    """The rule of whale_torch.moe.MoELayer."""
    register_rule_by_name(EXPERTS, _plan_experts)
