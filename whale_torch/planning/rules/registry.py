"""What a split rule is: it says which parameters of a module are cut, how, and what moves for each row.

A rule belongs to one exact module type. The strategies hold its other half, the class that runs the shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from whale_torch.errors import PlanError
from whale_torch.planning.layout import Shard

__all__ = [
    "Cut",
    "PlanFunction",
    "Role",
    "RuleContext",
    "check_parameters",
    "find_rule",
    "register_rule",
    "register_rule_by_name",
    "replicated",
    "unregister_rule",
]


@dataclass(frozen=True, slots=True)
class Cut:
    """What one split module becomes.

    module: its name. rule: the registered rule. role: how it is cut ("columns", "rows", ...).
    widths: units of each rank. shards: parameter name relative to the module -> its shard.
    elements_in, elements_out: elements that enter and leave all ranks' work for each row, forward; backward moves as
    many.
    """

    module: str
    rule: str
    role: str
    widths: tuple[int, ...]
    shards: tuple[tuple[str, Shard], ...]
    elements_in: int = 0
    elements_out: int = 0

    def full_name(self, key: str) -> str:
        """The name in the model of a parameter that `shards` names."""
        return f"{self.module}.{key}" if self.module else key

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self) | {"shards": {name: asdict(shard) for name, shard in self.shards}}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Cut:
        """A cut from what `to_dict` gave."""
        shards = tuple((name, Shard.from_dict(shard)) for name, shard in data["shards"].items())
        return Cut(**{**data, "widths": tuple(data["widths"]), "shards": shards})


@dataclass(frozen=True, slots=True)
class Role:
    """How a module is cut, as its neighbours suggest.

    name: "columns" (output features), "rows" (input features), ... unit: input features of one unit of the layer
    before, where they lie side by side: the pixels of a channel that was flattened. paired: the layer before or after
    takes or gives the same columns, so nothing moves between the two.
    """

    name: str
    unit: int = 1
    paired: bool = False


@dataclass(frozen=True)
class RuleContext:
    """What a rule may look at besides its module.

    size: ranks of the split. site: the scope's place, for errors. roles: module -> its Role among its neighbours.
    column_weights: ids of the weights of column-cut linears, for tied embeddings.
    containers: modules of which the model's own plan says how they are cut as a whole -> the rule for it.
    """

    size: int
    site: str
    roles: dict[nn.Module, Role] = field(default_factory=dict)
    column_weights: frozenset[int] = frozenset()
    containers: dict[nn.Module, PlanFunction] = field(default_factory=dict)

    def role(self, module: nn.Module) -> Role:
        """The role of a module: "columns" where neighbours suggest none."""
        return self.roles.get(module) or Role("columns")


PlanFunction = Callable[[nn.Module, str, RuleContext], "list[Cut]"]
"""A rule: from a module, its name and the context to the cuts of the module and of the members it takes over."""


_RULES: dict[type[nn.Module], PlanFunction] = {}
_RULES_BY_NAME: dict[str, PlanFunction] = {}
_REPLICATED: set[type[nn.Module]] = {nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.PReLU}


def register_rule(module_type: type[nn.Module], rule: PlanFunction) -> PlanFunction | None:
    """Gives modules of exactly this type a split rule and returns the one it had; the later registration wins."""
    before = _RULES.get(module_type)
    _RULES[module_type] = rule
    return before


def unregister_rule(module_type: type[nn.Module], before: PlanFunction | None) -> None:
    """Takes a registration back: `before` is what register_rule returned."""
    del _RULES[module_type]
    if before is not None:
        _RULES[module_type] = before


def register_rule_by_name(qualified_name: str, rule: PlanFunction) -> None:
    """Gives a type of a package that need not be installed a split rule: "package.module.Class"."""
    _RULES_BY_NAME[qualified_name] = rule


def replicated(module_type: type[nn.Module]) -> None:
    """Lets modules of exactly this type stay whole inside a split: every rank runs them on its own rows."""
    _REPLICATED.add(module_type)


def find_rule(module: nn.Module, name: str, context: RuleContext) -> PlanFunction | None:
    """The rule of a module, None where it stays whole.

    Raises PlanError for a module with matrices of its own and no rule.
    """
    kind = type(module)
    rule = (
        context.containers.get(module)
        or _RULES.get(kind)
        or _RULES_BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")
    )
    if rule is not None:
        return rule
    if is_parametrized(module):
        raise PlanError(
            f"'{name}' ({kind.__name__}) has parametrized parameters {sorted(module.parametrizations)}: "  # type: ignore[arg-type]
            "what is computed from a shard is not a shard of what is computed from the whole.",
            where=context.site,
            fix="remove the parametrization (torch.nn.utils.parametrize), or move it out of the split scope",
        )
    own = {key: tuple(p.shape) for key, p in module._parameters.items() if p is not None}
    if kind in _REPLICATED or all(len(shape) <= 1 for shape in own.values()):
        return None
    base = next((t for t in kind.__mro__[1:] if t in _RULES), None)
    of = "" if base is None else f", a subclass of {base.__name__} that may compute something else"
    raise PlanError(
        f"no split rule for {kind.__name__} '{name}'{of}, with parameters {own}.",
        where=context.site,
        fix=f"register one: whale_torch.strategies.split_rules.register_split_rule({kind.__name__}, ...), keep it "
        f"whole with whale_torch.planning.rules.replicated({kind.__name__}), or move it out of the split scope",
    )


def check_parameters(module: nn.Module, name: str, expected: set[str], site: str) -> None:
    """Raises PlanError where a module of a known type has other parameters than its type: something changed it."""
    found = {key for key, p in module._parameters.items() if p is not None}
    if found <= expected and "weight" in found:
        return
    raise PlanError(
        f"{type(module).__name__} '{name}' has parameters {sorted(found)}; its split rule knows {sorted(expected)}.",
        where=site,
        fix="remove what changed its parameters (weight_norm, spectral_norm, pruning), or move it out of the split",
    )
