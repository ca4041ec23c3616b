"""Bad use: every mistake ends in an error that says what, where and the fix, the same on all ranks, and none hangs."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.errors import mistakes  # noqa: F401  (fills the catalogue)
from tests.errors.catalogue import MISTAKES, ROOT, Said, commit
from tests.errors.document import document
from tests.world import world


@cache
def together(n: int) -> dict[str, list[Said]]:
    """What each rank read, by mistake: all mistakes of n ranks in one world."""
    names = [name for name, found in MISTAKES.items() if found.ranks == n and not found.alone]
    by_rank = world(n, commit, names, timeout=90)
    return {name: [said[i] for said in by_rank] for i, name in enumerate(names)}


@cache
def read(name: str) -> list[Said]:
    found = MISTAKES[name]
    if found.alone:
        return [said for (said,) in world(found.ranks, commit, [name], timeout=40)]
    return commit(0, 1, [name]) if found.ranks == 1 else together(found.ranks)[name]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name: str) -> None:
    found = MISTAKES[name]
    for said in read(name):
        assert found.error.__name__ in said.kinds, said
        assert re.search(found.says, said.text), said.text
        if said.fix is not None or "WhaleError" in said.kinds:
            assert said.fix, said.text
        if found.site:
            assert said.where and "tests/errors/mistakes.py:" in said.where, said
    if found.same:
        assert len({said.text for said in read(name)}) == 1, [said.text for said in read(name)]


def test_the_catalogue_is_not_thin() -> None:
    assert len(MISTAKES) >= 50 and all(found.cause and found.says for found in MISTAKES.values())


def test_messages_have_no_slips() -> None:
    for name in MISTAKES:
        for said in read(name):
            assert not re.search(
                r"<\w+ (object|function|at)|\b0x[0-9a-f]{6}|NoneType|\w  +\w|\.\.$", said.text, flags=re.M
            ), (name, said.text)


def test_docs_errors_is_what_the_messages_say() -> None:
    """docs/errors.md is written by `python -m tests.errors.document`."""
    said = {name: read(name)[0] for name in MISTAKES}
    path = ROOT / "docs" / "errors.md"
    assert path.read_text() == document(said), "run: python -m tests.errors.document"
