"""Split rules, the pure half: what each module type becomes when it is split."""

from __future__ import annotations

from whale_torch.planning.rules.attention import register_attention_rules
from whale_torch.planning.rules.convolution import register_convolution_rules
from whale_torch.planning.rules.embedding import register_embedding_rules
from whale_torch.planning.rules.experts import register_expert_rules
from whale_torch.planning.rules.huggingface import (
    ATTENTION,
    PACKED_ATTENTION,
    model_plan,
    own_plans,
    register_huggingface_rules,
)
from whale_torch.planning.rules.linear import register_linear_rules
from whale_torch.planning.rules.registry import (
    Cut,
    PlanFunction,
    Role,
    RuleContext,
    find_rule,
    register_rule,
    replicated,
    unregister_rule,
)
from whale_torch.planning.rules.roles import neighbour_roles

__all__ = [
    "ATTENTION",
    "PACKED_ATTENTION",
    "Cut",
    "PlanFunction",
    "Role",
    "RuleContext",
    "find_rule",
    "model_plan",
    "neighbour_roles",
    "own_plans",
    "register_rule",
    "replicated",
    "unregister_rule",
]

register_linear_rules()
register_embedding_rules()
register_attention_rules()
register_convolution_rules()
register_expert_rules()
register_huggingface_rules()
