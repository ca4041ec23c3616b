"""A catalogue of mistakes: each a few lines a user might write, and what has to be said about them."""

from __future__ import annotations

import inspect
import re
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import whale_torch as wh

__all__ = ["MISTAKES", "Mistake", "Said", "commit", "mistake"]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    section, title: where docs/errors.md has it. commit: makes the mistake on a rank. ranks: how many make it together.
    error: the type raised. says: a regular expression of the message, with its numbers. site: the message names the
    user's line. alone: it leaves its ranks out of step. same: all ranks say the same.
    """

    section: str
    title: str
    commit: Callable[[int, int], object]
    ranks: int
    error: type[BaseException]
    says: str
    site: bool
    alone: bool
    same: bool

    @property
    def cause(self) -> str:
        return inspect.cleandoc(self.commit.__doc__ or "")

    @property
    def code(self) -> str:
        """The function's body without its docstring."""
        lines, _ = inspect.getsourcelines(self.commit)
        return re.sub(r"  # (type: ignore|fmt).*", "", textwrap.dedent("".join(lines[self._first :]))).strip()

    @property
    def _first(self) -> int:
        """Number of source lines before the first that the page shows."""
        lines, _ = inspect.getsourcelines(self.commit)
        return next(i for i, line in enumerate(lines) if line.rstrip().endswith('"""')) + 1

    def shown(self, text: str) -> str:
        """Lines of this suite as those of the code that the page shows (train.py) or does not show (model.py)."""
        lines, start = inspect.getsourcelines(self.commit)

        def line(found: re.Match[str]) -> str:
            number = int(found[1]) - start - self._first + 1
            return f"train.py:{number}" if 0 < number <= len(lines) - self._first else "model.py:3"

        text = text.replace(f"{ROOT}/", "")  # first: a clone may lie among temporary files
        text = re.sub(rf"{tempfile.gettempdir()}/\w+/", "", text)
        text = re.sub(r"(RuntimeError|DistBackendError): .*", "(the words of gloo)", text)
        text = re.sub(r"(?<=as safetensors: ).*", "(the words of safetensors)", text)
        text = re.sub(r"(?<=in the lines \[)\d+", lambda found: str(int(found[0]) - start - self._first + 1), text)
        text = re.sub(r"tests/errors/mistakes\.py:(\d+)", line, text)
        return re.sub(
            r"\d+\.\d{4,}", lambda found: f"{float(found[0]):.2g}", text
        )  # the rest differs between processors


@dataclass(frozen=True)
class Said:
    """What one rank got to read."""

    kind: str
    kinds: tuple[str, ...]
    text: str
    where: str | None = None
    fix: str | None = None


MISTAKES: dict[str, Mistake] = {}


def mistake(
    section: str,
    title: str,
    error: type[BaseException],
    says: str,
    *,
    ranks: int = 1,
    site: bool = False,
    alone: bool = False,
    same: bool = True,
) -> Callable[[Callable[[int, int], object]], Callable[[int, int], object]]:
    def register(function: Callable[[int, int], object]) -> Callable[[int, int], object]:
        name = function.__name__
        assert name not in MISTAKES, name
        MISTAKES[name] = Mistake(section, title, function, ranks, error, says, site, alone, same)
        return function

    return register


def commit(rank: int, n: int, names: list[str]) -> list[Said]:
    """Makes several mistakes in one world, one after the other."""
    from tests.errors import mistakes  # noqa: F401  (fills the catalogue in a fresh rank)

    return [_said(MISTAKES[name], rank, n) for name in names]


def _said(found: Mistake, rank: int, n: int) -> Said:
    try:
        found.commit(rank, n)
    except Exception as error:  # every kind is compared with what the catalogue expects
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        if isinstance(error, wh.WhaleError):
            return Said(kinds[0], kinds, found.shown(str(error)), error.where, error.fix)
        return Said(kinds[0], kinds, found.shown(str(error)))
    return Said("nothing", (), "nothing was raised")
