"""The pure half of each split rule: which parameters of a module are cut, how, and what moves for each row.

A rule belongs to one exact module type. strategies/split_rules.py holds the other half, the class that runs the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from whale_torch.errors import PlanError
from whale_torch.planning.layout import Shard, balanced

__all__ = ["Cut", "RuleContext", "SplitRule", "linear_roles", "register_rule", "replicated", "rule_of"]


@dataclass(frozen=True, slots=True)
class Cut:
    """What one split module becomes.

    module: its name. rule: the registered rule. role: how it is cut ("columns", "rows", ...). widths: units of each rank.
    shards: parameter name relative to the module -> its shard.
    elements_in, elements_out: elements that enter and leave all ranks' work for each row, forward; backward moves the same.
    """

    module: str
    rule: str
    role: str
    widths: tuple[int, ...]
    shards: tuple[tuple[str, Shard], ...]
    elements_in: int = 0
    elements_out: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "module": self.module, "rule": self.rule, "role": self.role, "widths": list(self.widths),
            "shards": {name: shard.to_json() for name, shard in self.shards},
            "elements_in": self.elements_in, "elements_out": self.elements_out,
        }  # fmt: skip

    @staticmethod
    def from_json(data: dict[str, Any]) -> Cut:
        shards = tuple((name, Shard.from_json(shard)) for name, shard in data["shards"].items())
        return Cut(data["module"], data["rule"], data["role"], tuple(data["widths"]), shards, data["elements_in"], data["elements_out"])


@dataclass(frozen=True)
class RuleContext:
    """What a rule may look at besides its module.

    size: ranks of the split. site: the scope's place, for errors. roles: Linear module -> "columns" or "rows", from its
    neighbours. column_weights: ids of the weights of column-cut linears, for tied embeddings.
    """

    size: int
    site: str
    roles: dict[nn.Module, str] = field(default_factory=dict)
    column_weights: frozenset[int] = frozenset()


PlanFunction = Callable[[nn.Module, str, RuleContext], "list[Cut]"]


@dataclass(frozen=True)
class SplitRule:
    """A rule: `plan` gives the cuts of a module and of members it takes over; whole: members are not looked at again."""

    name: str
    plan: PlanFunction
    whole: bool = True


_RULES: dict[type[nn.Module], SplitRule] = {}
_REPLICATED: set[type[nn.Module]] = {nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.PReLU}


def register_rule(module_type: type[nn.Module], rule: SplitRule) -> None:
    """Gives modules of exactly this type a split rule; the later registration wins."""
    _RULES[module_type] = rule


def replicated(module_type: type[nn.Module]) -> None:
    """Lets modules of exactly this type stay whole inside a split: every rank runs them on its own rows."""
    _REPLICATED.add(module_type)


def rule_of(module: nn.Module, name: str, site: str) -> SplitRule | None:
    """The rule of a module, None where it stays whole.

    Raises PlanError for a module with matrices of its own and no rule.
    """
    rule = _RULES.get(type(module))
    if rule is not None:
        return rule
    own = [(key, tuple(p.shape)) for key, p in module._parameters.items() if p is not None]
    if type(module) in _REPLICATED or all(len(shape) <= 1 for _, shape in own):
        return None
    raise PlanError(
        f"no split rule for {type(module).__name__} '{name}' with parameters {dict(own)}.",
        where=site,
        fix=f"register one: whale_torch.strategies.register_split_rule({type(module).__name__}, ...), keep it whole with "
        f"whale_torch.planning.rules.replicated({type(module).__name__}), or move it out of the split scope",
    )


_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.Softplus,
    nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.Softsign, nn.LogSigmoid, nn.Dropout, nn.Identity,
)  # fmt: skip


def linear_roles(children: Iterable[nn.Module], forced: str | None = None) -> dict[nn.Module, str]:
    """"columns" or "rows" for the linear layers among neighbours, in order of registration.

    A linear that takes exactly what earlier column layers of its neighbourhood give (a pair, or a gated pair) is cut by
    rows, so that nothing is gathered between. Alone, the side that moves fewer bytes: rows where the output is
    narrower than the input. A wrong guess costs a gather, never a wrong result.
    """
    linears: list[nn.Linear] = []
    roles: dict[nn.Module, str] = {}
    alone: set[nn.Linear] = set()
    for child in children:
        if type(child) is nn.Linear:
            if linears and linears[0].out_features == child.in_features:
                roles[child] = "rows"
                alone.difference_update(linears)
                linears = []
            else:
                beside = linears and (linears[0].in_features, linears[0].out_features) == (child.in_features, child.out_features)
                linears = [*linears, child] if beside else [child]
                roles[child] = "columns"
                alone.add(child)
        elif not isinstance(child, _ELEMENTWISE) and any(True for _ in child.parameters()):
            linears = []
    for linear in alone:
        if linear.out_features < linear.in_features:
            roles[linear] = "rows"
    return dict.fromkeys(roles, forced) if forced else roles


def _plan_linear(module: nn.Module, name: str, context: RuleContext) -> list[Cut]:
    assert isinstance(module, nn.Linear)
    role = context.roles.get(module, "columns")
    shape = (module.out_features, module.in_features)
    dim = 0 if role == "columns" else 1
    widths = balanced(shape[dim], context.size)
    shards = [("weight", Shard(dim, widths, shape))]
    if role == "columns" and module.bias is not None:
        shards.append(("bias", Shard(0, widths, shape[:1])))
    elements = (module.in_features, 0) if role == "columns" else (0, module.out_features)
    return [Cut(name, "Linear", role, widths, tuple(shards), *elements)]


def _plan_embedding(module: nn.Module, name: str, context: RuleContext) -> list[Cut]:
    assert isinstance(module, nn.Embedding)
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise PlanError(
                f"Embedding '{name}' with {option}={getattr(module, option)} cannot be split.", where=context.site,
                fix=f"build it without {option}, or move it out of the split scope",
            )  # fmt: skip
    shape = (module.num_embeddings, module.embedding_dim)
    tied = id(module.weight) in context.column_weights
    role, dim = ("vocabulary", 0) if tied else ("columns", 1)
    widths = balanced(shape[dim], context.size)
    return [Cut(name, "Embedding", role, widths, (("weight", Shard(dim, widths, shape)),), 1, module.embedding_dim if tied else 0)]


register_rule(nn.Linear, SplitRule("Linear", _plan_linear))
register_rule(nn.Embedding, SplitRule("Embedding", _plan_embedding))
