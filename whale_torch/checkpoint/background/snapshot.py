"""Values as they were when a save began: read where they lie while training goes on, copied before a step changes them.

An optimizer's step is the only time at which parameters and its state change, so most of a save needs no copy at all: a
forward and a backward have passed before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor

from whale_torch.checkpoint.boxes import Box
from whale_torch.checkpoint.payload import Item, blocks_of
from whale_torch.errors import CheckpointError

__all__ = ["Snapshot"]

_SAMPLED = 16  # values of a block that are compared, about: a change by way of `.data` moves no version


class _Part:
    """A block of an item. state: live where it lies in the training's memory, busy while it is copied or read there."""

    __slots__ = ("_sample", "_version", "num_bytes", "state", "values")

    def __init__(self, values: Tensor):
        self.values, self.num_bytes = values, values.numel() * values.element_size()
        self.state: Literal["live", "busy", "copied", "changed", "done"] = "live"
        self._version, self._sample = _version(values), _sample(values)

    def copied(self) -> Tensor:
        copy = torch.empty(self.values.shape, dtype=self.values.dtype, device="cpu")
        return copy.copy_(self.values)

    def is_unchanged(self) -> bool:
        return _version(self.values) == self._version and torch.equal(_sample(self.values), self._sample)


def _version(values: Tensor) -> int:
    return 0 if values.is_inference() else values._version


def _sample(values: Tensor) -> Tensor:
    """Some values of a block as bytes."""
    most = max(2, round(_SAMPLED ** (1 / max(1, values.dim()))))
    some = values[tuple(slice(None, None, max(1, size // most)) for size in values.shape)]
    return some.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


class Snapshot:
    """The values of items, for one thread that reads them in order and another that trains.

    waits: whether an item changes in an optimizer's step alone; others are copied at once.
    staging_bytes: of copies at a time; `keep` waits for what is beyond to be read.
    """

    def __init__(self, items: Sequence[Item], *, waits: Callable[[Item], bool], staging_bytes: int):
        self._turn = threading.Condition()
        self._room, self._open = staging_bytes, 0
        self._parts: dict[tuple[str, Box], list[_Part]] = {}
        self._stream = _stream_behind(items)
        for item in items:
            parts = self._parts[item.key, item.box] = [_Part(block) for block in blocks_of(item)]
            if not waits(item):
                self._copy(parts, even_if_full=True)
        self._open = sum(part.state == "live" for part in self._all())

    def keep(self) -> None:
        """Returns once training may change anything: all is read or copied. Called by the thread that trains."""
        self._copy(self._all()[::-1])  # the reader is in front
        with self._turn:
            self._turn.wait_for(lambda: self._open <= 0)

    def blocks(self, item: Item) -> Iterator[Tensor]:
        """The values of an item, as payload.blocks_of has them; a block is read once the next one is asked for.

        Raises CheckpointError where something else than an optimizer has changed them.
        """
        for part in self._parts[item.key, item.box]:
            with self._turn:
                self._turn.wait_for(lambda part=part: part.state != "busy")  # type: ignore[misc]
                live = part.state == "live"
                if live:
                    part.state = "busy"
            with self._stream():
                values = part.values.cpu()
            yield values
            with self._stream():
                changed = not part.is_unchanged() if live else part.state == "changed"
            self._end(part, was_live=live)
            if changed:
                raise CheckpointError(
                    f"'{item.key}' was changed while it was saved in the background, by something else than the step "
                    "of an optimizer.",
                    fix="wh.save(..., wait=True), or .wait() for what wh.save(..., wait=False) gives before it changes",
                )

    def abandon(self) -> None:
        """Nobody reads any more: nothing waits, and copies are let go."""
        with self._turn:
            self._parts, self._open = {}, 0
            self._turn.notify_all()

    def _all(self) -> list[_Part]:
        return [part for parts in self._parts.values() for part in parts]

    def _copy(self, parts: Sequence[_Part], *, even_if_full: bool = False) -> None:
        for part in parts:
            with self._turn:
                if part.state != "live" or (part.num_bytes > self._room and not even_if_full):
                    continue
                part.state = "busy"
                self._room -= part.num_bytes
            copied = None
            try:
                copied = part.copied()
            finally:
                with self._turn:
                    if copied is None:  # no memory: it can still be read where it lies
                        part.state = "live"
                        self._room += part.num_bytes
                    else:
                        part.state = "copied" if part.is_unchanged() else "changed"
                        part.values = copied
                        self._open -= 1
                    self._turn.notify_all()

    def _end(self, part: _Part, *, was_live: bool) -> None:
        with self._turn:
            part.state = "done"
            part.values = part.values.new_empty(0)
            if was_live:
                self._open -= 1
            else:
                self._room += part.num_bytes
            self._turn.notify_all()


def _stream_behind(items: Sequence[Item]) -> Callable[[], AbstractContextManager[object]]:
    """A stream of its own for the reader, behind all that was started so far; nothing on the CPU."""
    device = next((item.values.device for item in items if item.values.device.type == "cuda"), None)
    if device is None:
        return nullcontext
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return lambda: torch.cuda.stream(stream)
