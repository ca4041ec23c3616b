"""Every error whale_torch raises on purpose: what went wrong, where it was asked for, and the fix."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "AnnotationError",
    "CheckpointError",
    "CommError",
    "LayoutError",
    "LossError",
    "PlanError",
    "TraceError",
    "WhaleError",
    "first_line",
]


class WhaleError(Exception):
    """Base of all errors of this package.

    what: the fact, with both numbers and the module's name.
    where: the scope's or call's "file:line", or None.
    fix: what to change, or None.
    ranks: the ranks concerned; empty when it is all of them.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None, ranks: Iterable[int] = ()):
        self.what, self.where, self.fix, self.ranks = what, where, fix, tuple(ranks)
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where:  {self.where}")
        if self.fix:
            lines.append(f"  fix:    {self.fix}")
        if self.ranks:
            lines.append(f"  ranks:  {', '.join(map(str, self.ranks))}")
        return "\n".join(lines)

    def inside(self, call: str, fix: str) -> WhaleError:
        """The same error as the user's call that met it tells it, with the fix for that call."""
        return type(self)(f"{call}: {self.what}", where=self.where, fix=fix, ranks=self.ranks)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.where, self.fix, self.ranks)


def _rebuild(
    kind: type[WhaleError], what: str, where: str | None, fix: str | None, ranks: tuple[int, ...]
) -> WhaleError:
    return kind(what, where=where, fix=fix, ranks=ranks)


class AnnotationError(WhaleError, ValueError):
    """A scope was opened, nested or matched in a way that has no meaning."""


class PlanError(WhaleError, ValueError):
    """The annotations cannot be placed on this cluster."""


class LayoutError(WhaleError, ValueError):
    """A tensor does not have the rows, columns or sizes that its place in the plan asks for."""


class TraceError(WhaleError, RuntimeError):
    """The code between pipeline stages cannot be traced."""


class LossError(WhaleError, RuntimeError):
    """A loss or a gradient cannot be made exact as written."""


class CommError(WhaleError, RuntimeError):
    """Ranks disagree, or one did not arrive."""


class CheckpointError(WhaleError, RuntimeError):
    """Saved or loaded state does not fit the model or is damaged."""


def first_line(error: BaseException) -> str:
    """What an error of other code says, short enough to be told inside another one."""
    return next(iter(str(error).strip().splitlines()), "no message")
