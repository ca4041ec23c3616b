"""Models that bring a plan of their own, as transformers' do: `config.base_model_tp_plan` and `_tp_plan`, duck-typed.

Patterns such as "layers.*.self_attn.q_proj" name layers that are cut by output ("colwise") or input ("rowwise")
features. Outside attention they are roles like any other. An attention module whose projections are named is cut by
heads as a whole: it runs its own forward on this rank's heads of all rows, so nothing of its code has to be known here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from whale_torch.errors import PlanError
from whale_torch.planning.layout import Shard, balanced
from whale_torch.planning.rules.registry import (
    Cut,
    PlanFunction,
    Role,
    RuleContext,
    check_parameters,
    find_rule,
    register_rule_by_name,
)

__all__ = ["ATTENTION", "PACKED_ATTENTION", "model_plan", "own_plans", "register_huggingface_rules"]

ATTENTION = "attention by its model's plan"
"""Rule of an attention module whose q, k, v and output projections are linear layers."""

PACKED_ATTENTION = "GPT2Attention"
"""Rule of GPT-2's attention, which holds q, k and v in one transposed matrix."""

_COLUMNS = ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise")
_ROWS = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise")
_EMBEDDING = ("embedding_rowwise", "embedding_colwise")

OwnPlan = tuple[nn.Module, list[tuple[re.Pattern[str], str]]]


def model_plan(
    plans: Sequence[OwnPlan], inside: Callable[[nn.Module], bool]
) -> tuple[dict[nn.Module, Role], dict[nn.Module, PlanFunction]]:
    """Roles and attention containers that a model's own plans give to the modules that are `inside`."""
    roles: dict[nn.Module, Role] = {}
    attention: dict[nn.Module, dict[str, str]] = {}
    for owner, patterns in plans:
        for name, module in owner.named_modules():
            style = next((s for regex, s in patterns if regex.fullmatch(name)), None)
            if style is None or not inside(module):
                continue
            if isinstance(module, nn.Embedding) or style in _EMBEDDING:
                roles.setdefault(module, Role("gathered"))
                continue
            parent_name, _, key = name.rpartition(".")
            parent = owner.get_submodule(parent_name)
            if isinstance(getattr(parent, "head_dim", None), int) and inside(parent):
                attention.setdefault(parent, {})[key] = style
            elif style in _COLUMNS or style in _ROWS:
                roles.setdefault(module, Role("columns" if style in _COLUMNS else "rows"))
    cut = {module: styles for module, styles in attention.items() if set(styles.values()) & {*_COLUMNS, *_ROWS}}
    containers: dict[nn.Module, PlanFunction] = {
        module: partial(_plan_attention, styles=styles)
        for module, styles in cut.items()
        if f"{type(module).__module__}.{type(module).__qualname__}" not in _PACKED
    }
    return roles, containers


def own_plans(model: nn.Module) -> list[OwnPlan]:
    """(module, patterns) of every member with a plan, outermost first; patterns are relative to the member."""
    plans = []
    for module in model.modules():
        own = getattr(module, "_tp_plan", None)
        base = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        found: dict[str, str] = {**(base if isinstance(base, dict) else {}), **(own if isinstance(own, dict) else {})}
        if found:
            plans.append((module, [(re.compile(re.escape(p).replace(r"\*", r"[^.]+")), s) for p, s in found.items()]))
    return plans


def _register_a_rule(name: str) -> str:
    return f"register a rule for '{name}' (register_split_rule), or move it out of the split scope"


def _key_value_heads(module: nn.Module, name: str, context: RuleContext) -> int:
    """How many heads of keys and values there are. Raises PlanError where the ranks cannot share them evenly."""
    config: Any = getattr(module, "config", None)
    queries = getattr(config, "num_attention_heads", None)
    if not isinstance(queries, int):
        raise PlanError(
            f"attention '{name}' ({type(module).__name__}) does not say in its config how many heads it has.",
            where=context.site,
            fix=_register_a_rule(name),
        )
    keys: int = getattr(config, "num_key_value_heads", None) or queries
    if keys % context.size:
        raise PlanError(
            f"attention '{name}' has {keys} key/value heads, which {context.size} ranks cannot share evenly.",
            where=context.site,
            fix=f"wh.split(size=...) with a size that divides {keys}, or move it out of the split scope",
        )
    return keys


def _plan_attention(module: nn.Module, name: str, context: RuleContext, styles: dict[str, str]) -> list[Cut]:
    keys = _key_value_heads(module, name, context)
    widths = balanced(keys, context.size)
    shards: list[tuple[str, Shard]] = []
    for key, style in styles.items():
        member = module.get_submodule(key)
        if style.startswith("replicate"):
            continue
        if type(member) is not nn.Linear or style not in ("colwise", "rowwise", "rowwise_split_input"):
            raise _unknown_style(name, key, member, style, context)
        check_parameters(member, f"{name}.{key}", {"weight", "bias"}, context.site)
        given, taken = member.weight.shape
        columns = style == "colwise"
        if (given if columns else taken) % keys:
            raise PlanError(
                f"'{name}.{key}' has {given if columns else taken} features; {keys} key/value heads do not divide it.",
                where=context.site,
                fix="move it out of the split scope",
            )
        unit = (given if columns else taken) // keys
        shards.append((f"{key}.weight", Shard(0 if columns else 1, widths, (given, taken), unit=unit)))
        if columns and member.bias is not None:
            shards.append((f"{key}.bias", Shard(0, widths, (given,), unit=unit)))
    if list(styles.values()).count("rowwise") + list(styles.values()).count("rowwise_split_input") != 1:
        raise PlanError(
            f"attention '{name}' ({type(module).__name__}) has {styles}; one projection by rows is wanted.",
            where=context.site,
            fix=_register_a_rule(name),
        )
    return [_whole_cut(module, name, context, ATTENTION, widths, shards)]


def _unknown_style(name: str, key: str, member: nn.Module, style: str, context: RuleContext) -> PlanError:
    return PlanError(
        f"'{name}.{key}' ({type(member).__name__}) is planned as '{style}' by its model, which wh.split does not know "
        "inside attention.",
        where=context.site,
        fix=_register_a_rule(name),
    )


def _whole_cut(
    module: nn.Module,
    name: str,
    context: RuleContext,
    rule: str,
    widths: tuple[int, ...],
    shards: list[tuple[str, Shard]],
) -> Cut:
    """The cut of a container; the members that stay whole must be ones that may."""
    inner = {key.rpartition(".")[0] for key, _ in shards}
    own = {key: tuple(p.shape) for key, p in module._parameters.items() if p is not None}
    if own:
        raise PlanError(
            f"attention '{name}' ({type(module).__name__}) has parameters of its own that no plan cuts: {own}.",
            where=context.site,
            fix=_register_a_rule(name),
        )
    for key, member in module.named_modules():
        if key and key not in inner and find_rule(member, f"{name}.{key}", context) is not None:
            raise PlanError(
                f"attention '{name}' ({type(module).__name__}) holds '{key}' ({type(member).__name__}), which its "
                "model's plan does not name.",
                where=context.site,
                fix=_register_a_rule(name),
            )
    rows = next(shard for key, shard in shards if key.endswith("weight") and _is_rows(module, key, shard))
    width = rows.shape[1 - rows.dim]
    return Cut(name, rule, "heads", widths, tuple(shards), width, width)


def _is_rows(module: nn.Module, key: str, shard: Shard) -> bool:
    """Whether a projection is cut by its input features."""
    member = module.get_submodule(key.rpartition(".")[0])
    return shard.dim == (1 if isinstance(member, nn.Linear) else 0)


def _plan_packed_attention(module: nn.Module, name: str, context: RuleContext) -> list[Cut]:
    """GPT-2: c_attn holds q, k and v side by side (k and v where q_attn is of its own), each cut by heads."""
    attention: Any = module
    heads, dim, features = int(attention.num_heads), int(attention.head_dim), int(attention.embed_dim)
    if heads < context.size:
        raise PlanError(
            f"attention '{name}' has {heads} heads, fewer than the {context.size} ranks of the split.",
            where=context.site,
            fix=f"wh.split(size=...) with a size of at most {heads}, or move it out of the split scope",
        )
    widths = balanced(heads, context.size)
    shards = []
    for key in ("c_attn", "q_attn"):
        member = getattr(module, key, None)
        if isinstance(member, nn.Module):
            check_parameters(member, f"{name}.{key}", {"weight", "bias"}, context.site)
            shapes = {part: tuple(p.shape) for part, p in member._parameters.items() if p is not None}
            blocks = shapes["weight"][1] // features
            shards.append((f"{key}.weight", Shard(1, widths, shapes["weight"], blocks, dim)))
            shards.append((f"{key}.bias", Shard(0, widths, shapes["bias"], blocks, dim)))
    check_parameters(attention.c_proj, f"{name}.c_proj", {"weight", "bias"}, context.site)
    shards.append(("c_proj.weight", Shard(0, widths, (features, features), unit=dim)))
    return [_whole_cut(module, name, context, PACKED_ATTENTION, widths, shards)]


_PACKED = ("transformers.models.gpt2.modeling_gpt2.GPT2Attention",)


def register_huggingface_rules() -> None:
    """Rules of modules of transformers that no plan of their model describes."""
    for name in _PACKED:
        register_rule_by_name(name, _plan_packed_attention)
