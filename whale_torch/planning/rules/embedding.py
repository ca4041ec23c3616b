"""Embeddings: by features, or by words where the weight is tied to a head that is cut by columns."""

from __future__ import annotations

from torch import nn

from whale_torch.errors import PlanError
from whale_torch.planning.layout import Shard, balanced
from whale_torch.planning.rules.registry import Cut, RuleContext, check_parameters, register_rule

__all__ = ["register_embedding_rules"]


def _plan_embedding(module: nn.Module, name: str, context: RuleContext) -> list[Cut]:
    assert isinstance(module, nn.Embedding)
    check_parameters(module, name, {"weight"}, context.site)
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise PlanError(
                f"Embedding '{name}' with {option}={getattr(module, option)} cannot be split.",
                where=context.site,
                fix=f"build it without {option}, or move it out of the split scope",
            )
    shape = (module.num_embeddings, module.embedding_dim)
    tied = id(module.weight) in context.column_weights
    role, dim = ("vocabulary", 0) if tied else (context.role(module).name, 1)
    widths = balanced(shape[dim], context.size)
    leaves = module.embedding_dim if tied else 0
    return [Cut(name, "Embedding", role, widths, (("weight", Shard(dim, widths, shape)),), 1, leaves)]


def register_embedding_rules() -> None:
    """The rule of nn.Embedding."""
    register_rule(nn.Embedding, _plan_embedding)
