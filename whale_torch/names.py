"""Dotted names of modules and what they hold; "" is the model itself."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator

from whale_torch.errors import WhaleError

__all__ = ["containers", "joined", "matching", "outward"]


def joined(module: str, key: str) -> str:
    """The name of what a module holds under a key."""
    return f"{module}.{key}" if module else key


def containers(name: str) -> Iterator[str]:
    """Names of what contains a module, from the inside out."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def outward(name: str) -> Iterator[str]:
    """A module's own name, then those of what contains it."""
    yield name
    yield from containers(name)


def matching(pattern: str, names: Iterable[str], *, call: str, site: str, kind: type[WhaleError]) -> list[str]:
    """The names that a regular expression matches as a whole.

    Raises the kind of error, for `call` at `site`, for a pattern that is none and for one that matches nothing.
    """
    try:
        regex = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise kind(
            f"{call}(): pattern {pattern!r} is not a regular expression: {error}.",
            where=site,
            fix="write the names of model.named_modules() as a Python regular expression; a dot is '\\.'.",
        ) from error
    names = list(names)
    found = [name for name in names if regex.fullmatch(name)]
    if not found:
        known = [name for name in names if name]
        close = difflib.get_close_matches(pattern.replace("\\", ""), known, n=3)
        hint = f"Close names: {', '.join(map(repr, close))}." if close else f"The model has {len(known)} names."
        raise kind(
            f"{call}(): pattern {pattern!r} matches no module. {hint}",
            where=site,
            fix=f"patterns match whole names of model.named_modules(), such as {', '.join(map(repr, known[:3]))}.",
        )
    return found
