"""How many labels each loss inside the model has on every rank: one exchange at the end of a forward.

Every rank takes part, whatever losses it called: a rank may leave out a loss that it has no labels for.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from whale_torch.comm.collectives import gather_equal
from whale_torch.errors import LossError
from whale_torch.mesh import Group

__all__ = ["LossCounts"]

_LEAST = 4
_LINE_BITS = 20
_NAME = "counts of labels"


class LossCounts:
    """The losses that one forward called on this rank, and on the others once `settle` was called.

    A loss is known by its line in the user's code, by the lines that led there, and by how often these came before. The
    first message has room for as many losses as any rank called in an earlier forward, and for 4 at least; where some
    rank has more, a second one follows at the start of backward. On the CPU counts travel with the lines, elsewhere
    from device to device, so that nobody waits for the device.
    """

    def __init__(self, copies: Group, device: torch.device, before: LossCounts | None):
        """before: those of the model's last forward."""
        self._copies, self._device, self._before = copies, device, before
        self._lines: list[int] = []
        self._counts: list[Tensor] = []
        self._room = _LEAST
        self._of_all: Callable[[], Tensor] | None = None
        self._on_device: Tensor | None = None
        self._places: list[list[tuple[int, int]]] = []
        self._table: Tensor | None = None
        self._most: int | None = None

    def add(self, count: Tensor, lines: Sequence[tuple[str, int]]) -> int:
        """Notes a loss called in the first of these lines, (file, line) each, and that by way of the others.

        Returns its number.
        """
        self._counts.append(count.detach().to(self._device, torch.float64).reshape(()))
        self._lines.append(_line_code(lines))
        return len(self._lines) - 1

    @property
    def started(self) -> bool:
        """Whether the exchange has begun, and no loss comes any more."""
        return self._of_all is not None

    def start(self, send: Callable[[Sequence[int]], Callable[[], Tensor]]) -> None:
        """Starts the exchange, on every rank.

        send: sends a rank's numbers; the call that it returns gives those of all ranks, one row each.
        """
        if self._before is not None:
            self._room, self._before = self._before._room_needed(), None
        room = self._room
        numbers = [len(self._lines), *_padded(self._lines[:room], room)]
        if self._apart:
            self._on_device = gather_equal(self._vector(0, room), self._copies, name=_NAME)
        elif self._lines and self._device.type == "cpu":
            numbers += struct.unpack(f"{room}q", struct.pack(f"{room}d", *self._vector(0, room).tolist()))
        else:
            numbers += [0] * room
        self._of_all = send(numbers)

    def settle(self) -> None:
        """Knows the losses of all ranks.

        Raises LossError, with the same text on every rank, where two ranks each called a loss that the other did not.
        """
        if self._most is not None:
            return
        assert self._of_all is not None
        numbers = self._of_all()
        rows, room = numbers.tolist(), self._room
        most = max(row[0] for row in rows)
        if most:
            counts = self._on_device
            if counts is None:
                counts = numbers[:, room + 1 :].contiguous().view(torch.float64)
            lines = [row[1 : room + 1] for row in rows]
            if most > room:
                rest = torch.tensor(_padded(self._lines[room:], most - room), dtype=torch.int64, device="cpu")
                more = gather_equal(rest, self._copies, name=_NAME).tolist()
                lines = [first + then for first, then in zip(lines, more, strict=True)]
                counts = torch.cat([counts, gather_equal(self._vector(room, most - room), self._copies, name=_NAME)], 1)
            lines = [line[: row[0]] for line, row in zip(lines, rows, strict=True)]
            _check_lines(lines)
            self._places, self._table = _same_loss(lines, self._copies.index), counts
        self._most = most

    def mean(self, number: int) -> Tensor:
        """The mean over all ranks of their counts for a loss of this rank, float64."""
        self.settle()
        assert self._table is not None
        ranks, places = zip(*self._places[number], strict=True)
        return self._table[list(ranks), list(places)].sum() / self._copies.size

    @property
    def _apart(self) -> bool:
        """Whether counts travel in a message of their own."""
        return self._device.type not in ("cpu", "meta")

    def _room_needed(self) -> int:
        """Room that every loss called in this forward had, on any rank; a number on which all ranks agree."""
        if self._of_all is None:  # that forward raised
            return self._room
        most = self._most if self._most is not None else int(self._of_all()[:, 0].max())
        return max(self._room, most)

    def _vector(self, first: int, length: int) -> Tensor:
        """Counts of the losses from `first` on, with zeros behind."""
        counts = self._counts[first : first + length]
        zeros = torch.zeros(length - len(counts), dtype=torch.float64, device=self._device)
        return torch.cat([torch.stack(counts), zeros]) if counts else zeros


def _padded(values: list[int], length: int) -> list[int]:
    return values + [0] * (length - len(values))


def _line_code(lines: Sequence[tuple[str, int]]) -> int:
    """A number of lines in files, the same where the files lie elsewhere; its end is the first line's."""
    told = [(Path(path).name, line) for path, line in lines]
    first = lines[0][1] if lines else 0
    return zlib.crc32(repr(told).encode()) << _LINE_BITS | first & ((1 << _LINE_BITS) - 1)


def _check_lines(lines: list[list[int]]) -> None:
    """Raises LossError unless every rank called some, in order, of the losses of the rank that called most."""
    longest = max(lines, key=len)
    for rank, mine in enumerate(lines):
        rest = iter(longest)
        if not all(line in rest for line in mine):
            most = lines.index(longest)
            told = [[line & ((1 << _LINE_BITS) - 1) for line in found] for found in (longest, mine)]
            callers = ", called from other lines" if set(told[1]) <= set(told[0]) else ""
            raise LossError(
                f"the ranks called different losses inside the model: rank {most} in the lines {told[0]}, "
                f"rank {rank} in the lines {told[1]}{callers}. Which of them are one loss over all ranks cannot be "
                "told.",
                fix="call the same losses in the same order on every rank, with all labels ignored where a rank has "
                "none; a rank may leave some out, if another one calls them all",
                ranks=(most, rank),
            )


def _same_loss(lines: list[list[int]], index: int) -> list[list[tuple[int, int]]]:
    """For each loss of one rank, where it stands in the lists of those ranks that called it: (rank, place)."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank, called in enumerate(lines):
        before: Counter[int] = Counter()
        for place, line in enumerate(called):
            found.setdefault((line, before[line]), []).append((rank, place))
            before[line] += 1
    before = Counter()
    mine = []
    for line in lines[index]:
        mine.append(found[line, before[line]])
        before[line] += 1
    return mine
