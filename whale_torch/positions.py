"""How far an epoch has come, in samples of all feeds: what the loop took, however far a DataLoader has read ahead."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Generic, TypeVar

import torch

from whale_torch.errors import CheckpointError

__all__ = ["Counted", "Positioned"]

Batch = TypeVar("Batch")


class Positioned:
    """A sampler that knows its position, which is the same on every rank and good for any number of feeds.

    What its iterators hand out one by one stands for `unit` samples of all feeds.
    """

    dataset: Any
    drop_last: bool
    alike_on_all_ranks = True  # wh.save refuses a position that differs

    def _stand_at(self, epoch: int, start: int = 0) -> None:
        self.epoch = epoch
        self._start = start  # samples of this epoch that the next iterator skips
        self._position = start  # where the last iterator began
        self._handed = 0  # what it handed out
        self._taken: int | None = None  # of that, what a loop has taken, where that is counted
        self._ahead = False  # the workers of a DataLoader read it
        self._ended = False  # it has no more
        self._finished = False  # and the loop has taken all
        self._draw: _Draw | None = None

    @property
    def _unit(self) -> int:
        raise NotImplementedError

    def _begin(self) -> None:
        """An iterator is asked for; a DataLoader with workers asks twice."""
        self._position, self._handed, self._taken = self._start, 0, None
        self._ended = self._finished = False
        self._ahead = _workers_ask()
        if self._start and self._draw is None:
            self._draw = _Draw()

    def _hand(self) -> None:
        if self._draw is not None:
            self._draw.undo()
        self._start, self._draw, self._handed = 0, None, self._handed + 1

    def _end(self) -> None:
        self._start, self._ended, self._finished = 0, True, not self._read_ahead()

    def _read_ahead(self) -> bool:
        return self._ahead

    def _in_a_batch(self, loader: object) -> int:
        """How many of what is handed out make a batch of a loader."""
        raise NotImplementedError

    def _consumed(self, handed: int | None) -> int | None:
        """Samples of all feeds after which the epoch goes on, None where a DataLoader has read ahead.

        handed: how much of what the last iterator handed out counts; by default what is known.
        """
        total = len(self.dataset)
        if handed is None:
            if self._finished:
                return total
            handed = self._taken
        if handed is None:
            if self._read_ahead():
                return None
            handed = self._handed
        return min(self._position + handed * self._unit, total)

    def _is_over(self, consumed: int) -> bool:
        return len(self.dataset) - consumed < (self._unit if self.drop_last else 1)

    def _check_order(self, state: dict[str, Any], mine: dict[str, Any]) -> None:
        """Raises CheckpointError where a state counts samples of another order."""
        for key, value in mine.items():
            found = state.get(key, "wh.batch_sampler" if key == "sampler" else None)
            if found != value:
                raise CheckpointError(
                    f"the state counts samples of an order with {key} {found!r}, here it is {value!r}.",
                    fix=f"build {mine['sampler']} with the same {key}, or begin a new epoch: set_epoch(...)"
                    if key != "sampler"
                    else f"load it into {found}",
                )

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def counted(self, loader: Iterable[Batch]) -> Counted[Batch]:
        """The loader, whose batches are counted as the loop takes them: what state_dict() tells then, inside the loop
        and after it, however far workers have read ahead. The batch that the loop is at counts as trained on.

            for x, y in batches.counted(loader):
        """
        return Counted(loader, self, self._in_a_batch(loader))


class Counted(Generic[Batch]):
    """A loader that tells its sampler what a loop takes; its state is the sampler's. `counted` makes it."""

    alike_on_all_ranks = True

    def __init__(self, loader: Iterable[Batch], sampler: Positioned, width: int):
        self._loader, self._sampler, self._width = loader, sampler, width

    def __iter__(self) -> Iterator[Batch]:
        sampler = self._sampler
        draw = _Draw() if sampler._start else None
        reading = iter(self._loader)
        if draw is not None:
            draw.undo()
        for number, batch in enumerate(reading, 1):
            sampler._taken = number * self._width
            yield batch
        sampler._finished = True

    def __len__(self) -> int:
        assert isinstance(self._loader, Sized)
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)


class _Draw:
    """A DataLoader draws a seed for its workers when an epoch begins: one that goes on inside an epoch did so before,
    and what the model draws next must be what it would have drawn."""

    def __init__(self) -> None:
        self._before = torch.get_rng_state()

    def undo(self) -> None:
        """Takes the draw back if it is all that was drawn."""
        now = torch.get_rng_state()
        torch.set_rng_state(self._before)
        torch.empty((), dtype=torch.int64).random_()
        alone = torch.equal(torch.get_rng_state(), now)
        torch.set_rng_state(self._before if alone else now)


def _workers_ask() -> bool:
    """Whether a DataLoader with workers asks for an iterator: it is told from one without by its class alone."""
    frame = inspect.currentframe()
    for _ in range(5):
        frame = frame and frame.f_back
        if frame and type(frame.f_locals.get("self")).__name__ == "_MultiProcessingDataLoaderIter":
            return True
    return False
