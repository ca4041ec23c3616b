"""Split rules, the pure half: what each module type becomes when it is split."""

from __future__ import annotations

from whale_torch.planning.rules.attention import register_attention_rules
from whale_torch.planning.rules.convolution import register_convolution_rules
from whale_torch.planning.rules.embedding import register_embedding_rules
from whale_torch.planning.rules.huggingface import model_plan, register_huggingface_rules
from whale_torch.planning.rules.linear import register_linear_rules
from whale_torch.planning.rules.registry import (
    Cut,
    PlanFunction,
    Role,
    RuleContext,
    SplitRule,
    find_rule,
    register_rule,
    replicated,
    unregister_rule,
)
from whale_torch.planning.rules.roles import neighbour_roles

__all__ = [
    "Cut",
    "PlanFunction",
    "Role",
    "RuleContext",
    "SplitRule",
    "find_rule",
    "model_plan",
    "neighbour_roles",
    "register_rule",
    "replicated",
    "unregister_rule",
]

register_linear_rules()
register_embedding_rules()
register_attention_rules()
register_convolution_rules()
register_huggingface_rules()
