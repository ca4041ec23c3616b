"""Convolutions by output channels, input channels or groups, and BatchNorm by channels."""

from __future__ import annotations

from torch import nn

from whale_torch.planning.layout import Shard, balanced
from whale_torch.planning.rules.registry import Cut, RuleContext, check_parameters, register_rule

__all__ = ["register_convolution_rules"]


def _plan_convolution(module: nn.Module, name: str, context: RuleContext) -> list[Cut]:
    assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    check_parameters(module, name, {"weight", "bias"}, context.site)
    shape, rule = tuple(module.weight.shape), type(module).__name__
    role = "groups" if module.groups > 1 else context.role(module).name
    if role == "rows":
        widths = balanced(module.in_channels, context.size)
        return [Cut(name, rule, role, widths, (("weight", Shard(1, widths, shape)),), 0, module.out_channels)]
    widths = balanced(module.groups if role == "groups" else module.out_channels, context.size)
    unit = module.out_channels // module.groups if role == "groups" else 1
    shards = [("weight", Shard(0, widths, shape, unit=unit))]
    if module.bias is not None:
        shards.append(("bias", Shard(0, widths, shape[:1], unit=unit)))
    return [Cut(name, rule, role, widths, tuple(shards), 0 if role == "groups" else module.in_channels, 0)]


def _plan_batch_norm(module: nn.Module, name: str, context: RuleContext) -> list[Cut]:
    """Parameters and running statistics stay whole: they are small, and a split's state is then one process's."""
    assert isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
    widths = balanced(module.num_features, context.size)
    return [Cut(name, type(module).__name__, "channels", widths, ())]


def register_convolution_rules() -> None:
    """Rules of nn.Conv1d, 2d, 3d and nn.BatchNorm1d, 2d, 3d."""
    for convolution in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        register_rule(convolution, _plan_convolution)
    for norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        register_rule(norm, _plan_batch_norm)
