"""What a schedule is made of: actions, the results they wait for, and one row of actions a rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

from whale_torch.errors import PlanError

__all__ = ["KIND_NAMES", "Action", "Edges", "Kind", "Result", "Rows", "Schedule", "Table", "read_rows"]

Kind = Literal["F", "B", "I", "W"]

KIND_NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "input part", "W": "weight part"}

_TEXT = re.compile(r"([FBIW])([0-9]{1,9})\.([0-9]{1,9})")


class Result(NamedTuple):
    """What an action makes for others: the activation after a stage, or the gradient of what went into it."""

    kind: Literal["activation", "gradient"]
    stage: int
    micro_batch: int


class Action(NamedTuple):
    """One step of a rank.

    kind: F forward, B whole backward, or a backward in two: I its input part, W its weight part, which can wait.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """As tables have it: F0.3 is the forward of micro-batch 3 on stage 0."""
        return f"{self.kind}{self.stage}.{self.micro_batch}"

    @property
    def result(self) -> Result | None:
        """What others may wait for; a weight part makes nothing of the kind."""
        if self.kind == "W":
            return None
        return Result("activation" if self.kind == "F" else "gradient", self.stage, self.micro_batch)

    @property
    def holds(self) -> int:
        """1 where the activations of a micro-batch begin to be kept, -1 where they end, else 0."""
        return {"F": 1, "B": -1, "I": 0, "W": -1}[self.kind]

    @staticmethod
    def parse(text: str) -> Action | None:
        """The action that `text` names, or None."""
        found = _TEXT.fullmatch(text)
        return Action(cast(Kind, found[1]), int(found[2]), int(found[3])) if found else None


Table = tuple[tuple[Action, ...], ...]
"""Rows of actions, one a rank."""

Rows = Sequence[str | Sequence[str | tuple[str, int, int]]]
"""Rows as a person writes them."""


@dataclass(frozen=True, slots=True)
class Edges:
    """Which stage's activation goes into which stages; the gradient takes the same way back.

    producers, consumers: of each stage, ascending.
    """

    producers: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(num_stages: int, pairs: Iterable[tuple[int, int]] | None = None) -> Edges:
        """From (producer, consumer) pairs, skips allowed; None is the chain of neighbours.

        Raises: PlanError for a pair that does not go forward between two of the stages.
        """
        chosen = sorted(set(pairs)) if pairs is not None else [(s, s + 1) for s in range(num_stages - 1)]
        for producer, consumer in chosen:
            if not 0 <= producer < consumer < num_stages:
                raise PlanError(
                    f"an edge from stage {producer} to stage {consumer}: there are {num_stages} stages, and an edge "
                    "goes to a later one.",
                    fix="give (producer, consumer) pairs with the smaller number first",
                )
        return Edges(
            tuple(tuple(p for p, c in chosen if c == stage) for stage in range(num_stages)),
            tuple(tuple(c for p, c in chosen if p == stage) for stage in range(num_stages)),
        )

    def needs(self, action: Action) -> list[Result]:
        """What must exist before the action runs."""
        kind, stage, micro_batch = action
        if kind == "F":
            return [Result("activation", producer, micro_batch) for producer in self.producers[stage]]
        if kind == "W":
            return [Result("gradient", stage, micro_batch)]
        back = [Result("gradient", consumer, micro_batch) for consumer in self.consumers[stage]]
        return [Result("activation", stage, micro_batch), *back]


@dataclass(frozen=True, repr=False)
class Schedule:
    """Which rank runs what, in which order; when follows from the costs (simulate).

    table: one row a rank. A stage is on one rank, which may have several.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    num_ranks: int
    table: Table

    def __hash__(self) -> int:  # without the table, which may be long: annotations are hashed often
        return hash((self.name, self.num_stages, self.num_micro_batches, self.num_ranks))

    def __repr__(self) -> str:
        return f"Schedule({self})"

    def __str__(self) -> str:
        return (
            f"{self.name}: {_count(self.num_stages, 'stage')} on {_count(self.num_ranks, 'rank')}, "
            f"{_count(self.num_micro_batches, 'micro-batch', 'micro-batches')}"
        )

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """All actions, rank by rank."""
        return tuple(action for row in self.table for action in row)

    @cached_property
    def _rank_of(self) -> dict[int, int]:
        return {action.stage: rank for rank, row in enumerate(self.table) for action in row}

    def rank_of(self, stage: int) -> int:
        """The rank that runs a stage."""
        return self._rank_of[stage]

    @cached_property
    def is_forward_only(self) -> bool:
        return all(action.kind == "F" for action in self.actions)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward comes in two parts."""
        return any(action.kind == "I" for action in self.actions)

    def held(self, rank: int) -> Iterator[int]:
        """After each action of a rank, how many micro-batches it keeps activations of, counted once a stage."""
        held = 0
        for action in self.table[rank]:
            held += 0 if self.is_forward_only else action.holds
            yield held

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The most micro-batches that each rank keeps activations of at once, counted once a stage."""
        return tuple(max(self.held(rank), default=0) for rank in range(self.num_ranks))

    def forward_only(self) -> Schedule:
        """The forwards in their order: what evaluation runs."""
        return replace(self, table=tuple(tuple(a for a in row if a.kind == "F") for row in self.table))

    def forwards_first(self) -> Schedule:
        """All forwards of a rank in their order, then all backwards in theirs, each whole: for a loss outside."""
        rows = []
        for row in self.table:
            backwards = [Action("B", a.stage, a.micro_batch) for a in row if a.kind in ("B", "I")]
            rows.append((*(a for a in row if a.kind == "F"), *backwards))
        return replace(self, table=tuple(rows))

    def first(self, num_micro_batches: int) -> Schedule:
        """The same without later micro-batches: what is left keeps its order, which needs nothing of theirs."""
        if num_micro_batches >= self.num_micro_batches:
            return self
        rows = tuple(tuple(a for a in row if a.micro_batch < num_micro_batches) for row in self.table)
        return replace(self, num_micro_batches=num_micro_batches, table=rows)

    @property
    def rows(self) -> tuple[str, ...]:
        """The table as a person writes it: "F0.0 F0.1 B0.0 B0.1", one a rank."""
        return tuple(" ".join(map(str, row)) for row in self.table)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: a row is one string, "F0.0 F0.1 B0.0 B0.1"."""
        return {
            "name": self.name,
            "num_stages": self.num_stages,
            "num_micro_batches": self.num_micro_batches,
            "num_ranks": self.num_ranks,
            "table": list(self.rows),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Schedule:
        """A schedule from what to_dict gave; `validate` checks what it says.

        Raises: PlanError for a row that cannot be read.
        """
        return Schedule(
            data["name"], data["num_stages"], data["num_micro_batches"], data["num_ranks"], read_rows(data["table"])
        )


def read_rows(rows: Rows, *, where: str | None = None) -> Table:
    """Rows of "F0.3" or ("F", 0, 3), or rows that are one string with spaces.

    Raises: PlanError for an entry that is no action; it says the row and the place, both from 0.
    """
    table = []
    for rank, row in enumerate(rows):
        entries = row.split() if isinstance(row, str) else row
        if not isinstance(entries, Sequence):
            raise PlanError(f"rank {rank}: {row!r} is no row of actions.", where=where, fix='write "F0.0 B0.0 ..."')
        table.append(tuple(_read(entry, rank, position, where) for position, entry in enumerate(entries)))
    return tuple(table)


def _read(entry: object, rank: int, position: int, where: str | None) -> Action:
    text = "{}{}.{}".format(*entry) if isinstance(entry, (tuple, list)) and len(entry) == 3 else entry
    action = Action.parse(text) if isinstance(text, str) else None
    if action is None:
        raise PlanError(
            f"rank {rank}, position {position}: {entry!r} is no action of a schedule.",
            where=where,
            fix='write "F0.3" or ("F", 0, 3): F forward, B backward, I and W its input and weight part; stage; '
            "micro-batch",
            ranks=[rank],
        )
    return action


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
