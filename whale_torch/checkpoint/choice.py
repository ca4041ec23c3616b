"""Which names of a model are loaded, from which names of a checkpoint, and how what does not fit is told."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from whale_torch.checkpoint.slices import Slice, split_slice
from whale_torch.errors import CheckpointError
from whale_torch.names import outward

__all__ = ["MOST", "Choice", "listed"]

MOST = 5
"""Names that an error lists."""


@dataclass
class Choice:
    """only: regular expressions of the names that are loaded, None for all. assign: from such a pattern to the name it
    is loaded from, where \\1 stands for its first group and a slice may follow. A pattern matches names as a
    whole; one that matches a module takes along what is in it.
    """

    only: Sequence[str] | None = None
    assign: Mapping[str, str] = field(default_factory=dict)
    missing_ok: bool = False
    unexpected_ok: bool = False
    dtype: Literal["same", "cast"] = "same"

    def __post_init__(self) -> None:
        self.only = (self.only,) if isinstance(self.only, str) else self.only
        for name, given, kind in (("only", self.only, Sequence), ("assign", self.assign, Mapping)):
            if given is not None and not isinstance(given, kind):
                raise CheckpointError(f"{name} is {given!r:.80}.", fix="only: patterns; assign: {pattern: name}")
        if self.dtype not in ("same", "cast"):
            raise CheckpointError(f"dtype is {self.dtype!r}.", fix='"same", or "cast" to the dtypes of the model')
        for pattern in (*(self.only or ()), *self.assign):
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise CheckpointError(
                    f"{pattern!r} is not a regular expression: {error}.", fix="a dot of a name is '\\.'"
                ) from error

    def takes(self, name: str) -> bool:
        return self.only is None or any(_matched(pattern, name) for pattern in self.only)

    def source(self, name: str) -> tuple[str, Slice | None] | None:
        """The name it is assigned from and the part of that, None where it is assigned from none."""
        for pattern, source in self.assign.items():
            found = _matched(pattern, name)
            if found:
                try:
                    outer, part = split_slice(found.expand(source))
                    return outer + name[found.end() :], part
                except (re.error, IndexError) as error:
                    raise CheckpointError(
                        f"assign: {source!r} does not follow from {pattern!r}: {error}.", fix="groups are \\1, \\2, ..."
                    ) from error
        return None

    def check(self, names: Iterable[str]) -> None:
        """Raises CheckpointError for a pattern that matches none of a model's names, with close ones."""
        names = list(names)
        for pattern in (*(self.only or ()), *self.assign):
            if not any(_matched(pattern, name) for name in names):
                plain = pattern.replace("\\", "")
                close = difflib.get_close_matches(plain, [o for name in names for o in outward(name)], n=3)
                hint = f" Close names: {', '.join(map(repr, dict.fromkeys(close)))}." if close else ""
                raise CheckpointError(
                    f"pattern {pattern!r} matches nothing of the model.{hint}",
                    fix="patterns match whole names of the model's parameters, buffers, modules (no 'model/' before)",
                )


def _matched(pattern: str, name: str) -> re.Match[str] | None:
    """What a pattern matches of a name: all of it, or a module that it is in."""
    for outer in outward(name):
        if outer and (found := re.compile(pattern).fullmatch(name, 0, len(outer))):
            return found
    return None


def listed(what: str, names: Iterable[str], others: Iterable[str]) -> str:
    """Some names and how many more there are, each with a close one of the other side; "" for none."""
    names, others = sorted(names), list(others)
    shown = []
    for name in names[:MOST]:
        close = difflib.get_close_matches(name, others, n=1)
        shown.append(f"'{name}'" + (f" (close: '{close[0]}')" if close else ""))
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return f"{what} {', '.join(shown)}{more}" if names else ""
