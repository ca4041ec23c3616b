"""Linear layers, by output or by input features; transformers' Conv1D, which holds its weight the other way round."""

from __future__ import annotations

from torch import nn

from whale_torch.planning.layout import Shard, balanced
from whale_torch.planning.rules.registry import (
    Cut,
    RuleContext,
    check_parameters,
    register_rule,
    register_rule_by_name,
)
from whale_torch.planning.rules.roles import features_of

__all__ = ["register_linear_rules"]


def _cut(module: nn.Module, name: str, context: RuleContext, rule: str, column_dim: int) -> list[Cut]:
    """column_dim: the weight's dimension of output features."""
    check_parameters(module, name, {"weight", "bias"}, context.site)
    sizes = features_of(module)
    assert sizes is not None
    taken, given = sizes
    role = context.role(module)
    shape = (taken, given) if column_dim else (given, taken)
    if role.name == "columns":
        widths = balanced(given, context.size)
        shards = [("weight", Shard(column_dim, widths, shape))]
        if module._parameters.get("bias") is not None:
            shards.append(("bias", Shard(0, widths, (given,))))
        return [Cut(name, rule, "columns", widths, tuple(shards), taken, 0)]
    widths = tuple(width * role.unit for width in balanced(taken // role.unit, context.size))
    moved = 0 if role.paired else -(-taken // context.size)
    return [Cut(name, rule, "rows", widths, (("weight", Shard(1 - column_dim, widths, shape)),), moved, given)]


def _plan_linear(module: nn.Module, name: str, context: RuleContext) -> list[Cut]:
    return _cut(module, name, context, "Linear", 0)


def _plan_conv1d_of_transformers(module: nn.Module, name: str, context: RuleContext) -> list[Cut]:
    return _cut(module, name, context, "Conv1D", 1)


def register_linear_rules() -> None:
    """Rules of nn.Linear and of transformers' Conv1D."""
    register_rule(nn.Linear, _plan_linear)
    register_rule_by_name("transformers.pytorch_utils.Conv1D", _plan_conv1d_of_transformers)
