"""Experts by name: replaces feed-forwards of a model that nobody edits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from whale_torch.annotation import annotate_module, annotations_of
from whale_torch.capture import call_site
from whale_torch.errors import PlanError
from whale_torch.moe.dense import spread_feed_forward
from whale_torch.moe.upcycling import upcycle
from whale_torch.names import matching
from whale_torch.strategies.runtime import is_parallelized

__all__ = ["convert"]

Conversion = Callable[[nn.Module], nn.Module] | Mapping[str, Any]
"""What becomes of a module: a function from it to its replacement, or the options of `upcycle`."""


def convert(model: nn.Module, patterns: Mapping[str, Conversion]) -> nn.Module:
    """Replaces modules of a model by name, in place, and returns the model.

    patterns: regular expressions that match names of `model.named_modules()` in full, each with a function from a
        module to its replacement, or with a dict of options of `moe.upcycle`: {r".*\\.mlp": {"num_experts": 8}}. A
        layer as BERT's, whose feed-forward lies in two members, is matched as a whole by the latter.
    A module under several names is replaced under all of them; all that is not matched stays the same objects. A
    replacement has the scopes of what it replaces. Make optimizers afterwards.

    Raises: PlanError, with the model as it was (as far as functions of yours leave it alone), for a pattern that is not
    a regular expression or matches nothing (with close names), modules matched twice or inside one another, a module
    with hooks or parametrizations, which would be lost, a parallelized model, and what upcycle refuses.
    """
    site = call_site()
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"convert(): the first argument is {type(model).__name__}, not an nn.Module.",
            where=site,
            fix="moe.convert(model, {name_regex: conversion})",
        )
    odd = (
        patterns
        if not isinstance(patterns, Mapping)
        else next((c for c in patterns.values() if not (callable(c) or isinstance(c, Mapping))), None)
    )
    if odd is not None:
        raise PlanError(
            f"convert(): {odd!r} says of no module what becomes of it.",
            where=site,
            fix='{name_regex: function}, or {name_regex: {"num_experts": 8}}',
        )
    if is_parallelized(model):
        raise PlanError("convert(): this model is parallelized already.", where=site, fix="convert it before")
    names = dict(model.named_modules(remove_duplicate=False))
    matched: dict[nn.Module, tuple[str, str]] = {}
    for pattern in patterns:
        for name in matching(pattern, names, call="convert", site=site, kind=PlanError):
            known = matched.setdefault(names[name], (name, pattern))
            if known[1] != pattern:
                raise _refused(f"'{name}' is matched by {known[1]!r} and by {pattern!r}", site, "one pattern a module")
    if not patterns:
        raise PlanError("convert(): no pattern was given.", where=site, fix="give {name_regex: conversion}.")
    for pattern, conversion in patterns.items():
        _check_not_shared(pattern, conversion, sum(known == pattern for _, known in matched.values()), site)
    new: dict[nn.Module, nn.Module] = {}
    for module, (name, pattern) in matched.items():
        _check_alone(module, name, matched, site)
        new |= _converted(module, name, patterns[pattern], site)
    for module, made in new.items():
        if made is not module:
            annotate_module(made, annotations_of(module))
    for name, module in names.items():
        if module in new:
            parent, _, key = name.rpartition(".")
            setattr(names[parent], key, new[module])
    return model


def _converted(module: nn.Module, name: str, conversion: Conversion, site: str) -> dict[nn.Module, nn.Module]:
    """What replaces a module, or members of it."""
    spread = spread_feed_forward(module) if isinstance(conversion, Mapping) else None
    if spread is not None:
        member, last, dense = spread
        _check_module(module.get_submodule(member), f"{name}.{member}", site)
        _check_module(module.get_submodule(last), f"{name}.{last}", site)
        layer = _made(dense.train(module.training), name, conversion, site)
        return {module.get_submodule(member): layer, module.get_submodule(last): nn.Identity()}
    _check_module(module, name, site)
    return {module: _made(module, name, conversion, site)}


def _made(module: nn.Module, name: str, conversion: Conversion, site: str) -> nn.Module:
    try:
        made = upcycle(module, **conversion) if isinstance(conversion, Mapping) else conversion(module)
    except PlanError as error:
        raise PlanError(f"convert(): '{name}': {error.what}", where=site, fix=error.fix) from error
    if not isinstance(made, nn.Module):
        raise _refused(
            f"the conversion of '{name}' gives {type(made).__name__}", site, "a function that returns an nn.Module"
        )
    return made


def _check_not_shared(pattern: str, conversion: Conversion, number: int, site: str) -> None:
    """Raises PlanError for a module among options that several layers would have in common."""
    options = conversion if isinstance(conversion, Mapping) else {}
    shared = next((key for key, value in options.items() if isinstance(value, nn.Module)), None)
    if shared is not None and number > 1:
        raise _refused(
            f"{number} layers that {pattern!r} matches would share one {shared}",
            site,
            f"a function that builds each its own: lambda dense: moe.upcycle(dense, {shared}=...)",
        )


def _check_alone(module: nn.Module, name: str, matched: Mapping[nn.Module, tuple[str, str]], site: str) -> None:
    if not name:
        raise _refused("a pattern matches the model itself", site, "call the conversion: model = moe.upcycle(model)")
    inner = next((key for key, member in module.named_modules() if key and member in matched), None)
    if inner is not None:
        raise _refused(f"'{name}' and '{name}.{inner}' inside it are both matched", site, "a pattern for one of them")


def _check_module(module: nn.Module, name: str, site: str) -> None:
    """Raises PlanError where a replacement would lose something."""
    for key, member in module.named_modules():
        inner = f"{name}.{key}" if key else name
        if key and annotations_of(member):
            raise _refused(
                f"'{inner}' has {annotations_of(member)[-1]}, and goes with '{name}'", site, "scopes after convert()"
            )
        if is_parametrized(member):
            raise _refused(f"'{inner}' has parametrized parameters", site, "remove_parametrizations before")
        if any(member.__dict__.get(hooks) for hooks in _HOOKS):
            raise _refused(f"'{inner}' has hooks, which its replacement would not have", site, "hooks after convert()")


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def _refused(what: str, site: str, fix: str) -> PlanError:
    return PlanError(f"convert(): {what}.", where=site, fix=fix)
