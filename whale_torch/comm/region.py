"""A region: the ranks that run one split together, and whose rows they run it on (docs/design.md 8)."""

from __future__ import annotations

import weakref
import zlib
from typing import TYPE_CHECKING, Any

import torch

from whale_torch.comm.collectives import gather_equal
from whale_torch.errors import CommError, LayoutError
from whale_torch.mesh import Group

if TYPE_CHECKING:
    from whale_torch.comm.call import Call

__all__ = ["Region"]

_COUNT_BITS = 40
_HEADER_NUMBERS = 8
_REMEMBERED = 3
_names: dict[int, str] = {}


class Region:
    """The groups of one split and what its modules share at run time.

    columns: the S ranks that hold the S shards. rows: those of them with distinct feeds, at this rank's place.
    twins: those of them fed the same rows. copies: the ranks that hold the same shard.
    label: how messages name it. strict: an implicit gather is an error.
    """

    def __init__(self, label: str, columns: Group, rows: Group, twins: Group, copies: Group, *, strict: bool = False):
        self.label, self.columns, self.rows, self.twins, self.copies, self.strict = label, columns, rows, twins, copies, strict
        self.row_positions = tuple(columns.ranks.index(rank) for rank in rows.ranks)
        self.call: Call | None = None
        self.gathered: dict[tuple[str, str], list[float]] = {}
        self._entered: dict[str, list[tuple[Any, ...]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        """A copied model has its own memory of what it gathered, on the same ranks."""
        return Region(self.label, self.columns, self.rows, self.twins, self.copies, strict=self.strict)

    def positions_of_twin(self, index: int) -> tuple[int, ...]:
        """Places in `columns` of the ranks that the `index`-th twin exchanges rows with."""
        shift = index - self.twins.index
        return tuple(p + shift for p in self.row_positions)

    def agree(self, operation: str, count: int) -> tuple[int, ...]:
        """Row counts of the region's feeds; raises where ranks meet in different operations.

        Raises CommError naming both operations, on every rank, before any other data moves.
        """
        return tuple(row[0] for row in self.meet(operation, (count,)))

    def meet(self, operation: str, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The numbers of every feed of the region: at most 8, equally many on each rank, the first below 2^40.

        A header of one size, whatever is asked, tells in which operation each rank is: number of the operation in this group, and its name's hash.
        Raises CommError naming both operations, on every rank, before any other data moves.
        """
        group = self.columns
        if group.size == 1:
            return [numbers]
        group.sequence += 1
        code = zlib.crc32(operation.encode()) & 0x7FFF
        _names[code] = operation
        number = group.sequence & 0xFF
        rest = (*numbers[1:], *([0] * (_HEADER_NUMBERS - len(numbers))))
        header = torch.tensor([(code << 8 | number) << _COUNT_BITS | numbers[0], *rest])
        table = gather_equal(header, group, name=operation).tolist()
        tags = [row[0] >> _COUNT_BITS for row in table]
        if any(tag != tags[0] for tag in tags):
            self._disagree(tags)
        rows = [(row[0] & ((1 << _COUNT_BITS) - 1), *row[1 : len(numbers)]) for row in table]
        return [rows[p] for p in self.row_positions]

    def check_equal(self, value: tuple[int, ...], what: str, fix: str) -> None:
        """Compares a small tuple over the region's ranks. Raises LayoutError naming both values, on every rank."""
        code = torch.tensor([zlib.crc32(repr(value).encode()), *value[:4], *([-1] * (4 - len(value[:4])))])
        found = gather_equal(code, self.columns, name=what).tolist()
        for rank, other in zip(self.columns.ranks, found, strict=True):
            if other[0] != found[0][0]:
                mine, theirs = ([n for n in row[1:] if n >= 0] for row in (found[0], other))
                raise LayoutError(
                    f"{self.label}: {what} is {mine} on rank {self.columns.ranks[0]} and {theirs} on rank {rank}.",
                    fix=fix, ranks=(self.columns.ranks[0], rank),
                )  # fmt: skip

    def _disagree(self, tags: list[int]) -> None:
        at = {rank: f"'{_names.get(tag >> 8, 'an operation unknown here')}' (number {tag & 0xFF})" for rank, tag in zip(self.columns.ranks, tags, strict=True)}
        text = ", ".join(f"rank {rank}: {place}" for rank, place in at.items())
        raise CommError(
            f"the ranks of {self.label} are in different operations: {text}.",
            fix="run every operation on a split's output on all ranks of its group, or take z.rows() on every rank first",
            ranks=self.columns.ranks,
        )

    def remember(self, x: torch.Tensor, what: str, value: Any) -> None:
        """Keeps one form of x as long as x lives unchanged, so that a second reader finds it: of few tensors a form."""
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
