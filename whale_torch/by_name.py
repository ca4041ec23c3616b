"""Annotations by name: the scopes for a model that nobody edits."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from typing import cast

from torch import nn

from whale_torch.annotation import (
    Annotation,
    annotate_module,
    annotations_of,
    check_nesting,
    check_open,
    inherited_annotations,
    merge,
)
from whale_torch.capture import Scope, call_site, open_scopes
from whale_torch.errors import AnnotationError
from whale_torch.names import matching

__all__ = ["annotate"]


def annotate(
    model: nn.Module,
    patterns: Mapping[str, Scope | tuple[Scope, ...]],
    inside: Scope | tuple[Scope, ...] | None = None,
) -> nn.Module:
    """Annotates modules of a model by name, and returns the model: for one you cannot edit.

    patterns: regular expressions that match names of `model.named_modules()` in full, each with a scope or a tuple of
        scopes, outer to inner. Each pattern is one entry of its scopes, so the order of the dict is that of the stages.
        A container takes its members along. A module matched twice nests, the earlier pattern outermost where that
        is legal, else the other way round.
    inside: scopes around all that is matched, as one entry.

    Raises: AnnotationError for a pattern that is not a regular expression or matches nothing (with close names), for
    scopes that do not nest, naming the patterns, and on a parallelized model. The model is then unchanged.
    """
    site = call_site()
    if not isinstance(model, nn.Module):
        raise AnnotationError(
            f"annotate(): the first argument is {type(model).__name__}, not an nn.Module.",
            where=site,
            fix="wh.annotate(model, {name_regex: scope}).",
        )
    names = dict(model.named_modules(remove_duplicate=False))
    around = tuple(scope.entry() for scope in _as_scopes("inside", inside, site)) if inside is not None else ()
    found: dict[str, tuple[Annotation, ...]] = {}
    matched: dict[nn.Module, list[str]] = {}
    for pattern, value in patterns.items():
        found[pattern] = tuple(scope.entry() for scope in _as_scopes(f"pattern {pattern!r}", value, site))
        hits = matching(pattern, names, call="annotate", site=site, kind=AnnotationError)
        for module in dict.fromkeys(names[name] for name in hits):
            matched.setdefault(module, []).append(pattern)
    if not found:
        raise AnnotationError("annotate(): no pattern was given.", where=site, fix="give {name_regex: scope}.")

    opened = open_scopes()
    stack = [opening.annotation for opening in opened]
    own: dict[nn.Module, tuple[Annotation, ...]] = {}
    for name, module in names.items():
        if module in matched and module not in own:
            order = _nested(name, (*stack, *around), matched[module], found, annotations_of(module))
            own[module] = order
    for name, result in inherited_annotations(model, own).items():
        _check_patterns(result, name, [pattern for pattern, new in found.items() if set(new) & set(result)])
    called = {module: name for name, module in reversed(names.items())}
    for module, result in own.items():
        check_open(module, result, called[module])
    for module, result in own.items():
        annotate_module(module, result)
    for opening in opened:
        opening.captured = True
    return model


def _as_scopes(what: str, value: object, site: str) -> tuple[Scope, ...]:
    scopes = value if isinstance(value, tuple) else (value,)
    for scope in scopes:
        if not isinstance(scope, Scope):
            told = f"the function {scope.__name__}" if inspect.isfunction(scope) else repr(scope)
            raise AnnotationError(
                f"annotate(): {what} has {told}, which is not a scope.",
                where=site,
                fix="give a scope such as wh.split(), with parentheses, or a tuple of scopes, outer to inner.",
            )
    return cast("tuple[Scope, ...]", scopes)


def _nested(
    name: str,
    around: tuple[Annotation, ...],
    patterns: list[str],
    found: Mapping[str, tuple[Annotation, ...]],
    existing: tuple[Annotation, ...],
) -> tuple[Annotation, ...]:
    """Orders what several patterns put on one module: each as far inside as it is legal, in the order of the dict."""

    def assembled(order: list[str]) -> tuple[Annotation, ...]:
        return merge(around, itertools.chain.from_iterable(found[pattern] for pattern in order), existing)

    def legal(order: list[str]) -> bool:
        try:
            check_nesting(assembled(order), name)
        except AnnotationError:
            return False
        return True

    order: list[str] = []
    for pattern in patterns:
        places = ([*order[:place], pattern, *order[place:]] for place in range(len(order), -1, -1))
        placed = next((candidate for candidate in places if legal(candidate)), None)
        if placed is None:
            clash = next((p for p in order if not legal([p, pattern]) and not legal([pattern, p])), None)
            pair = [pattern] if not order else [clash, pattern] if clash else [*order, pattern]
            _check_patterns(assembled([*order, pattern]), name, pair)
        else:
            order = placed
    return assembled(order)


def _check_patterns(annotations: tuple[Annotation, ...], name: str, patterns: list[str]) -> None:
    try:
        check_nesting(annotations, name)
    except AnnotationError as error:
        raise AnnotationError(
            f"annotate(): {error.what} Patterns: {' and '.join(map(repr, patterns))}.",
            where=error.where,
            fix=error.fix,
        ) from None
