"""How a rank ends: what it tells the ranks that wait for it, and that nothing keeps its process from ending.

Ranks write into one log in the world's store: where one gave up waiting, and why one ended. A failed collective reads
it (comm/failure.py). The sockets of a process that ends are what wakes the others; so a process with an error must end
at once, also while messages are under way that nobody will answer.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import sys
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Literal

import torch.distributed as dist

__all__ = ["Word", "failed", "leave_word", "watch_exit", "words"]

_KEY = "whale/words"
_MOST_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Word:
    """What a rank left in the log: "waited" in a collective in vain, "failed" with an error, or "ended" its program."""

    rank: int
    kind: Literal["waited", "failed", "ended"]
    text: str


def leave_word(word: Word) -> None:
    """Appends to the log; nothing where the store is gone, as it is when the process that hosts it ended."""
    try:
        store = dist.distributed_c10d._get_default_store()
        store.append(_KEY, json.dumps(asdict(word)) + "\n")  # type: ignore[attr-defined]
    except (RuntimeError, ValueError):
        return


def words() -> list[Word]:
    """All that was left in the log, in order; nothing where the store is gone."""
    try:
        store = dist.distributed_c10d._get_default_store()
        text = store.get(_KEY).decode() if store.check([_KEY]) else ""
    except (RuntimeError, ValueError):
        return []
    return [Word(**json.loads(line)) for line in text.splitlines()]


class _Exit:
    """How this process ends."""

    def __init__(self) -> None:
        self.has_failed = False


_exit = _Exit()


def failed() -> bool:
    """Whether an error ends this process."""
    return _exit.has_failed


@functools.cache
def watch_exit(rank: int) -> None:
    """Lets the ranks that wait for this one read how it ended: by which error, or that its program was over."""
    earlier = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _exit.has_failed = True
        text = f"{kind.__name__}: {next(iter(str(error).splitlines()), '')}"
        leave_word(Word(rank, "failed", text[:_MOST_CHARACTERS]))
        earlier(kind, error, trace)
        _abandon_groups()

    def end() -> None:
        if not _exit.has_failed:
            leave_word(Word(rank, "ended", "its program was over"))

    sys.excepthook = hook
    atexit.register(end)


def _abandon_groups() -> None:
    """Keeps process groups from being destroyed: gloo's destructor waits for messages under way, up to the time-out."""
    for group in list(dist.distributed_c10d._world.pg_names):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
