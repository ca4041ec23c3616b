"""Other names for what a source has: of tensors, of ties, and of parameters as optimizers call them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from whale_torch.checkpoint.contents import BY_RANK
from whale_torch.checkpoint.formats.source import Source
from whale_torch.checkpoint.formats.trees import GROUPS, optimizers_in, tensors_of_values
from whale_torch.errors import CheckpointError

__all__ = ["rename_tensors"]


def rename_tensors(source: Source, rename: Mapping[str, str]) -> None:
    """Gives tensors of the model, of averages of it and of optimizers other names.

    rename: regular expressions that match whole names, and what they become. Raises CheckpointError for one that
    matches nothing, and where two tensors would have one name.
    """
    patterns = [(_compiled(pattern), to) for pattern, to in rename.items()]
    unused = {pattern.pattern for pattern, _ in patterns}

    def named(name: str) -> str:
        for pattern, to in patterns:
            found = pattern.fullmatch(name)
            if found:
                unused.discard(pattern.pattern)
                return _expanded(found, to)
        return name

    optimizers = optimizers_in(source)
    states = {key for key in (*source.values, *source.values.get(BY_RANK, ())) if key.startswith("states/")}

    def parameter(name: str) -> str:
        """As an optimizer calls it: those of further modules after their prefixes."""
        kind, outer, rest = name.split("/", 2) if name.startswith("states/") and name.count("/") > 1 else ("", "", name)
        return f"{kind}/{outer}/{named(rest)}" if kind else named(name)

    def key_of(key: str) -> str:
        prefix = next((one for one in optimizers if key.startswith(one) and "/" in key.removeprefix(one)), None)
        if prefix is not None:
            name, _, state = key.removeprefix(prefix).rpartition("/")
            return f"{prefix}{parameter(name)}/{state}"
        kind, _, rest = key.partition("/")
        if kind == "model":
            return f"model/{named(rest)}"
        outer, _, inner = rest.partition("/")
        of_module = kind == "states" and inner and f"states/{outer}" not in states
        return f"states/{outer}/{named(inner)}" if of_module and f"states/{outer}/" not in optimizers else key

    inside = tensors_of_values(source)
    new = {key: key_of(key) for key in (*source.values, *source.ties, *source.tensors) if key not in inside}
    new |= {key: new[value] + key.removeprefix(value) for key, value in inside.items() if key in source.tensors}
    if len(set(new.values())) != len(new):
        raise CheckpointError("rename gives two tensors one name.", fix="patterns that keep names apart")
    source.tensors = {new[key]: one for key, one in source.tensors.items()}
    source.ties = {new[key]: new.get(first, first) for key, first in source.ties.items()}
    source.values = {new[key]: _with_keys(value, new) for key, value in source.values.items()}
    for prefix in optimizers:
        for group in source.values[prefix + GROUPS]:
            group["params"] = [parameter(name) for name in group["params"]]
    if unused:
        raise CheckpointError(f"rename: {sorted(unused)} match no tensor.", fix="patterns match whole names")


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise CheckpointError(
            f"rename: {pattern!r} is no regular expression: {error}.", fix="a dot of a name is '\\.'"
        ) from error


def _expanded(found: re.Match[str], to: str) -> str:
    try:
        return found.expand(to)
    except (re.error, IndexError, TypeError) as error:
        raise CheckpointError(
            f"rename: {to!r} does not follow from {found.re.pattern!r}: {error}.", fix="groups are \\1, \\2, ..."
        ) from error


def _with_keys(value: Any, new: Mapping[str, str]) -> Any:
    """A value of an index whose tensors have other keys."""
    if isinstance(value, list):
        return [_with_keys(one, new) for one in value]
    if not isinstance(value, dict):
        return value
    if value.get("__kind__") == "tensor":
        return {**value, "key": new.get(value["key"], value["key"])}
    return {key: _with_keys(one, new) for key, one in value.items()}
