"""A region: the ranks that run one split together, and whose rows they run it on (docs/design.md 8)."""

from __future__ import annotations

import struct
import weakref
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from whale_torch.comm.collectives import gather_equal
from whale_torch.errors import CommError, LayoutError, PlanError
from whale_torch.mesh import Group

if TYPE_CHECKING:
    from whale_torch.comm.call import Call

__all__ = ["MOST_NUMBERS", "CompileError", "Region", "refuse_compile"]

_COUNT_BITS = 40
_TEXT_BYTES = 96
_HEADER_NUMBERS = 24
_REMEMBERED = 3

MOST_NUMBERS = 2 * (_HEADER_NUMBERS - 2)
"""Whole numbers of 32 bits that travel with what the ranks agree on."""
_LEAST, _MOST = -(1 << 31), (1 << 31) - 1


class Region:
    """The groups of one split and what its modules share at run time.

    columns: the S ranks that hold the S shards. rows: those of them with distinct feeds, at this rank's place.
    twins: those of them fed the same rows. copies: the ranks that hold the same shard.
    headers: the ranks of `columns` again, on a channel of their own: what they agree on is never mixed up with data.
    label: how messages name it. strict: an implicit gather is an error. keeps_columns: its output leaves the model as
    Columns also where nothing is trained. on_host: reading a value waits for no device. compiles: torch.compile may
    trace all modules of the region, which then say themselves where a graph ends.
    """

    def __init__(
        self,
        label: str,
        columns: Group,
        rows: Group,
        twins: Group,
        copies: Group,
        *,
        headers: Group | None = None,
        strict: bool = False,
        keeps_columns: bool = False,
        on_host: bool = True,
    ):
        self.label, self.strict, self.keeps_columns, self.on_host = label, strict, keeps_columns, on_host
        self.compiles = True
        self.columns, self.rows, self.twins, self.copies = columns, rows, twins, copies
        self.headers = headers or columns
        self.row_positions = tuple(columns.ranks.index(rank) for rank in rows.ranks)
        self.call: Call | None = None
        self.gathered: dict[tuple[str, str], list[float]] = {}
        self._entered: dict[str, list[tuple[Any, ...]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        """A copied model has its own memory of what it gathered, on the same ranks."""
        groups = (self.columns, self.rows, self.twins, self.copies)
        copied = Region(
            self.label,
            *groups,
            headers=self.headers,
            strict=self.strict,
            keeps_columns=self.keeps_columns,
            on_host=self.on_host,
        )
        copied.compiles = self.compiles
        return copied

    def positions_of_twin(self, index: int) -> tuple[int, ...]:
        """Places in `columns` of the ranks that the `index`-th twin exchanges rows with."""
        shift = index - self.twins.index
        return tuple(p + shift for p in self.row_positions)

    def check_eager(self) -> None:
        """Raises PlanError where torch.compile traces a module of the region; its guards take no logical shapes."""
        if torch.compiler.is_dynamo_compiling():
            refuse_compile(self.label)

    def agree(self, operation: str, count: int, detail: str = "", fix: str = "") -> tuple[int, ...]:
        """Row counts of the region's feeds, once its ranks are known to be in one operation with equal `detail`.

        Raises, on every rank, before any other data moves: CommError naming both operations; LayoutError naming both
        details, and `fix`.
        """
        if self.headers.size == 1:
            return (count,)
        return tuple(row[0] for row in self._agree(operation, count, detail, fix))

    def agree_with(self, operation: str, numbers: Sequence[int], detail: str) -> list[Sequence[int]]:
        """As agree, with at most MOST_NUMBERS numbers of each feed: those of all feeds, with zeros behind them.

        Of a number of more than 32 bits only the sign arrives.
        """
        if self.headers.size == 1:
            return [numbers]
        rows = self._agree(operation, len(numbers), detail, "", _in_pairs(numbers), of_feeds=True)
        return [_from_pairs(row[2:]) for row in rows]

    def _agree(
        self,
        operation: str,
        count: int,
        detail: str,
        fix: str,
        numbers: Sequence[int] = (),
        *,
        of_feeds: bool = False,
    ) -> list[tuple[int, ...]]:
        table = self._exchange(operation, (count, zlib.crc32(detail.encode()), *numbers))
        if any(row[1] != table[0][1] for row in table):
            self._different_details(operation, detail, fix)
        if of_feeds:
            self._check_twins(operation, table)
        return [table[p] for p in self.row_positions]

    def _check_twins(self, operation: str, table: list[tuple[int, ...]]) -> None:
        """Raises LayoutError, on every rank, where ranks that are fed the same rows came with different numbers."""
        for first in range(0, self.columns.size, self.twins.size):
            twins = slice(first, first + self.twins.size)
            if any(row != table[first] for row in table[twins]):
                raise LayoutError(
                    f"{operation}: ranks {list(self.columns.ranks[twins])} are one replica but came with different "
                    "numbers (labels).",
                    fix="feed all ranks of a replica the same batch: wh.sampler or wh.batch_sampler do",
                    ranks=self.columns.ranks[twins],
                )

    def meet(self, operation: str, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The numbers of every feed of the region, up to 24 of them and the first below 2^40.

        Raises CommError naming both operations, on every rank, before any other data moves.
        """
        if self.headers.size == 1:
            return [numbers]
        table = self._exchange(operation, numbers)
        return [table[p][: len(numbers)] for p in self.row_positions]

    def _exchange(self, operation: str, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Every rank's numbers: a header of one size, whatever the operation, that also tells which one it is."""
        group = self.headers
        group.sequence += 1
        tag = (zlib.crc32(operation.encode()) & 0x7FFF) << 8 | group.sequence & 0xFF
        rest = (0,) * (_HEADER_NUMBERS - len(numbers))
        header = torch.tensor([tag << _COUNT_BITS | numbers[0], *numbers[1:], *rest], device="cpu")
        table = gather_equal(header, group, name=operation).tolist()
        if any(row[0] >> _COUNT_BITS != tag for row in table):
            self._different_operations(operation)
        return [(row[0] & ((1 << _COUNT_BITS) - 1), *row[1:]) for row in table]

    def _texts(self, text: str) -> dict[int, str]:
        """Every rank's text: called on all ranks of the region, once their headers differ."""
        found = gather_equal(_to_bytes(text), self.headers, name="what the ranks disagree on")
        return {rank: _to_text(row) for rank, row in zip(self.columns.ranks, found, strict=True)}

    def _different_operations(self, operation: str) -> None:
        texts = self._texts(f"'{operation}' (number {self.headers.sequence})")
        told = ", ".join(f"rank {rank}: {text}" for rank, text in texts.items())
        raise CommError(
            f"the ranks of {self.label} are in different operations: {told}.",
            fix="run every operation on a split's output on all ranks of its group; after rows = z.rows() on every "
            "rank each has an ordinary tensor",
            ranks=self.columns.ranks,
        )

    def _different_details(self, operation: str, detail: str, fix: str) -> None:
        texts = self._texts(detail or "nothing")
        told = ", ".join(f"rank {rank}: {text}" for rank, text in texts.items())
        raise LayoutError(
            f"{operation}: the ranks of {self.label} come with different numbers: {told}.",
            fix=fix
            or "what happens to a split's output must be equal on all ranks of its group; where a number belongs to "
            "the own rows, apply it to z.rows()",
            ranks=self.columns.ranks,
        )

    def remember(self, x: torch.Tensor, what: str, value: Any) -> None:
        """Keeps one form of x as long as x lives unchanged, so that a second reader finds it: of few tensors a form."""
        if x.is_inference():  # such a tensor does not tell when it is written to
            return
        alive = [entry for entry in self._entered.get(what, ()) if entry[0]() is not None and entry[0]() is not x]
        self._entered[what] = [*alive[-_REMEMBERED + 1 :], (weakref.ref(x), x._version, torch.is_grad_enabled(), value)]

    def recall(self, x: torch.Tensor, what: str) -> Any:
        """What `remember` keeps for this very tensor, or None."""
        for entry in self._entered.get(what, ()):
            if entry[0]() is x and entry[1:3] == (x._version, torch.is_grad_enabled()):
                return entry[3]
        return None

    def forget(self) -> None:
        """Drops what it remembers; the model's exit calls it."""
        self._entered.clear()

    def note_gather(self, operation: str, site: str, num_bytes: float) -> None:
        """Counts an implicit gather for the plan's report."""
        entry = self.gathered.setdefault((operation, site), [0, 0.0])
        entry[0] += 1
        entry[1] += num_bytes


class CompileError(PlanError, AssertionError):
    """Of the errors met while tracing, torch.compile hands on few kinds as they are; assertions are one."""


def refuse_compile(label: str) -> None:
    """Called while torch.compile traces; make_root marks it as one to run then, and not to trace."""
    raise CompileError(
        f"torch.compile over a split: {label} runs on several ranks, in eager mode only.",
        fix="compile the replicated parts in place: model.features.compile()",
    )


def _in_pairs(numbers: Sequence[int]) -> tuple[int, ...]:
    """Numbers of 32 bits, two in one of 64."""
    fitting = [min(max(number, _LEAST), _MOST) for number in numbers]
    fitting += [0] * (len(fitting) % 2)
    return struct.unpack(f"{len(fitting) // 2}q", struct.pack(f"{len(fitting)}i", *fitting))


def _from_pairs(pairs: Sequence[int]) -> tuple[int, ...]:
    return struct.unpack(f"{2 * len(pairs)}i", struct.pack(f"{len(pairs)}q", *pairs))


def _to_bytes(text: str) -> torch.Tensor:
    """The end of a text, where the latest operation stands, in a fixed number of bytes."""
    return torch.tensor(list(text.encode()[-_TEXT_BYTES:].ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8, device="cpu")


def _to_text(row: torch.Tensor) -> str:
    return bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
