"""Every legal nesting of replica and split: n ranks equal one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tests.parity.nesting import (
    BAR,
    MUTATIONS,
    Case,
    Part,
    Scopes,
    compare,
    difference,
    nested,
    own,
    random_case,
    replica,
    train,
    train_all,
)
from tests.world import world

R = replica()


def rows_of(num_feeds: int) -> tuple[int, ...]:
    """Uneven, with an empty feed where there are three or more."""
    return {1: (5,), 2: (4, 1), 3: (3, 0, 2), 4: (3, 1, 0, 5)}.get(num_feeds) or tuple(
        (3 * i + 1) % 5 for i in range(num_feeds)
    )


def case(n: int, feed_size: int, parts: list[tuple[str, Scopes]], heads: list[Scopes], **options: object) -> Case:
    made = tuple(Part(kind, 10, scopes) for kind, scopes in parts)
    classes = (11, 6)
    return Case(n, made, tuple(zip(classes, heads, strict=False)), rows_of(n // feed_size), **options)  # type: ignore[arg-type]


NESTINGS: dict[str, Case] = {}
for n in (1, 2, 3, 4, 8):
    NESTINGS |= {
        f"replica only, {n}": case(n, 1, [("ffn", R), ("linear", ())], [R]),
        f"classifier, {n}": case(n, 1, [("ffn", R)], [own()]),
        f"two heads, {n}": case(n, 1, [("linear", R)], [own(), own()]),
        f"gated pair and softmax, {n}": case(n, 1, [("glu", own()), ("softmax", own())], [own()]),
        f"everything split, {n}": case(n, 1, [("twice", own()), ("ffn", own())], [own()], default=own()),
        f"all ranks one replica, {n}": case(n, n, [("ffn", nested(n)), ("glu", nested(n))], [nested(n)]),
        f"own rows inside a replica, {n}": case(n, 1, [("ffn", nested(rows="own"))], [nested(n, rows="own")]),
    }
for n in (4, 8):
    NESTINGS |= {
        f"nested pairs, {n}": case(n, 2, [("ffn", nested(2)), ("twice", nested(2))], [nested(2)]),
        f"shared rows said outright, {n}": case(n, 2, [("ffn", own(2, rows="shared"))], [own(2, rows="shared")]),
        f"own rows said outright, {n}": case(n, 1, [("ffn", own(2, rows="own"))], [own(2, rows="own")]),
        f"two own sizes, {n}": case(n, 1, [("ffn", own(2)), ("softmax", own(2))], [own(n)]),
        f"two shared sizes, {n}": case(n, 4, [("ffn", nested(2)), ("glu", nested(4))], [nested(4)]),
        f"mixed rows, {n}": case(n, 2, [("ffn", nested(2)), ("twice", nested(2))], [own(n)]),
        f"mixed rows, softmax, {n}": case(n, 2, [("softmax", nested(2)), ("softmax", own(n))], [own(n), nested(2)]),
        f"row cuts, {n}": case(
            n, 2, [("glu", nested(2, cut="rows")), ("ffn", own(n, cut="rows"))], [own(n, cut="rows")]
        ),
    }
NESTINGS |= {
    "2 and 8 on 8": case(8, 1, [("ffn", own(2)), ("glu", own(8))], [own(8)]),
    "4 and 8 on 8, pairs fed alike": case(8, 2, [("ffn", nested(2)), ("glu", own(4))], [own(8)]),
    "all of them": case(
        8,
        2,
        [("linear", R), ("glu", nested(2)), ("ffn", own(4)), ("twice", nested(8, rows="own")), ("linear", ())],
        [own(8), own(2, rows="shared")],
    ),
}

FORMS = (
    "classifier, 3",
    "nested pairs, 4",
    "mixed rows, 4",
    "two own sizes, 4",
    "all ranks one replica, 3",
    "everything split, 4",
)
VARIATIONS = {
    "loss inside": {"loss": "inside"},
    "loss on plain rows": {"loss": "gathered"},
    "labels ignored, inside": {"loss": "inside", "ignored": 0.5},
    "labels ignored, outside": {"ignored": 0.5},
    "accumulation": {"accumulate": 2},
    "accumulation, no_sync": {"accumulate": 3, "no_sync": True},
    "tied": {"tied": True, "vocabulary": 11},
    "tied, tokens": {"tied": True, "vocabulary": 11, "length": 3, "loss": "inside", "ignored": 0.3},
    "tokens": {"length": 3},
    "ids": {"vocabulary": 7},
    "frozen features": {"frozen": r"(inputs|parts)\..*"},
    "frozen head": {"frozen": r"heads\..*"},
    "empty shards": {"seed": 3},
}


def varied(form: str, variation: str) -> Case:
    found = replace(NESTINGS[form], **VARIATIONS[variation])
    if variation == "empty shards":
        found = replace(found, parts=tuple(replace(p, width=2) for p in found.parts), heads=((2, found.heads[0][1]),))
    return found


# A fault and the cases in which it must be seen.
CAUGHT_BY = {
    "enter not times |R|": ["classifier, 3", "two own sizes, 4", "mixed rows, 4"],
    "leave not divided by |R|": ["everything split, 4", "two own sizes, 4", "row cuts, 4"],
    "columns to rows not divided by |R|": ["gated pair and softmax, 4", "mixed rows, softmax, 4"],
    "rows to columns not times |R|": ["gated pair and softmax, 4", "row cuts, 4"],
    "reducer sums": ["classifier, 3", "nested pairs, 4", "replica only, 2"],
    "rows have no weight": ["replica only, 3", "nested pairs, 4", "two own sizes, 8"],
    "own count of labels": ["nested pairs, 4", "two shared sizes, 8"],
    "own seed": ["classifier, 3", "mixed rows, 4"],
    "twins are not summed": ["nested pairs, 4", "mixed rows, 4", "all ranks one replica, 3"],
}
FAULTS = [(mutation, name) for mutation, names in CAUGHT_BY.items() for name in names]


def faulty(mutation: str, name: str) -> Case:
    changes = {"own count of labels": {"ignored": 0.5}, "rows have no weight": {"loss": "gathered"}}
    return replace(NESTINGS[name], **changes.get(mutation, {}))


@cache
def trained(kind: str, n: int, kept: frozenset[tuple[str, ...]]) -> dict[object, list[dict[str, object] | str]]:
    """What each rank of a world of n returned for the kept cases of a kind: one world for all of them."""
    cases: dict[object, tuple[Case, str | None, int]] = {}
    if kind == "nesting":
        cases |= {name: (NESTINGS[name], None, 3) for (name,) in kept if NESTINGS[name].world == n}
    if kind == "variation":
        cases |= {(f, v): (varied(f, v), None, 1) for f, v in kept if NESTINGS[f].world == n}
    if kind == "fault":
        cases |= {(m, name): (faulty(m, name), m, 1) for m, name in kept if NESTINGS[name].world == n}
    by_rank = world(n, train_all, list(cases.values()), timeout=300)
    return {key: [found[i] for found in by_rank] for i, key in enumerate(cases)}


@pytest.mark.matrix(keep=13)
@pytest.mark.parametrize("name", NESTINGS)
def test_every_nesting_trains_as_one_process_does(name: str, kept: frozenset[tuple[str, ...]]) -> None:
    case = NESTINGS[name]
    found = compare(case, trained("nesting", case.world, kept)[name])
    assert all(error <= BAR for error in found.values()), (found, case)


@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.matrix(keep=8)
def test_with_every_variation(form: str, variation: str, kept: frozenset[tuple[str, ...]]) -> None:
    case = varied(form, variation)
    found = compare(case, trained("variation", case.world, kept)[form, variation], 1)
    assert all(error <= BAR for error in found.values()), (found, case)


@pytest.mark.matrix(keep=6)
@pytest.mark.parametrize(("mutation", "name"), FAULTS)
def test_the_comparison_finds_faults(mutation: str, name: str, kept: frozenset[tuple[str, ...]]) -> None:
    case = faulty(mutation, name)
    found = compare(case, trained("fault", case.world, kept)[mutation, name], 1)
    assert not found["grad"] <= 100 * BAR, found


def test_every_fault_is_tried() -> None:
    assert set(CAUGHT_BY) == set(MUTATIONS)


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("first", range(0, 120, 20))
@pytest.mark.parametrize("n", [2, 3, 4, 6, 8])
def test_networks_drawn_by_chance(n: int, first: int) -> None:
    """Twenty models in one world, one after the other: also a test of several parallelized models in one process."""
    drawn = [random_case(n, seed) for seed in range(first, first + 20)]
    by_rank = world(n, train_all, [(case, None, 1) for case in drawn], timeout=240)
    for i, case in enumerate(drawn):
        found = compare(case, [results[i] for results in by_rank], 1)
        assert all(error <= BAR for error in found.values()), (found, case)


def _left_over(rank: int, n: int) -> dict[str, object]:
    """A gradient from before wh.parallelize stays what it was, and the next one adds to it."""
    case = NESTINGS["mixed rows, 4"]
    return train(rank, n, replace(case, before=True), None, 1)


def test_gradients_left_from_before_are_kept() -> None:
    case = replace(NESTINGS["mixed rows, 4"], before=True)
    found = difference(case, world(4, _left_over), train(0, 0, case, None, 1))
    assert all(error <= BAR for error in found.values()), found
