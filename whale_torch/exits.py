"""How a rank ends: what it tells the ranks that wait for it, and that nothing keeps its process from ending.

Ranks write into one log in the world's store: where one gave up waiting, and why one ended. A failed collective reads
it (comm/failure.py). The sockets of a process that ends are what wakes the others; so a process with an error must end
at once, also while messages are under way that nobody will answer.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import sys
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Literal

import torch.distributed as dist

__all__ = ["Word", "fail", "failed", "leave_word", "watch_exit", "words"]

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
    """How this process ends; code: of an error that ends it."""

    def __init__(self) -> None:
        self.code = 0

    def leave(self) -> None:
        """After an error, the last thing a process does: nothing else would end it at once.

        gloo's destructors wait for messages under way, up to the time-out, and a thread that waits for one aborts the
        process when the interpreter is gone.
        """
        if self.code:
            sys.stdout.flush()
            sys.stderr.flush()
            logging.shutdown()
            os._exit(self.code)


_exit = _Exit()
atexit.register(_exit.leave)  # functions registered later, by the script or by what it starts, run before it


def failed() -> bool:
    """Whether an error ends this process."""
    return _exit.code != 0


def fail(error: BaseException) -> None:
    """An error after the program's end: it is shown, and the process ends with it all the same."""
    sys.excepthook(type(error), error, error.__traceback__)
    _exit.code = _exit.code or 1


@functools.cache
def watch_exit(rank: int) -> None:
    """Lets the ranks that wait for this one read how it ended: by which error, or that its program was over."""
    earlier = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _exit.code = 130 if issubclass(kind, KeyboardInterrupt) else 1
        text = f"{kind.__name__}: {next(iter(str(error).splitlines()), '')}"
        leave_word(Word(rank, "failed", text[:_MOST_CHARACTERS]))
        earlier(kind, error, trace)

    def end() -> None:
        if not failed():
            leave_word(Word(rank, "ended", "its program was over"))

    sys.excepthook = hook
    atexit.register(end)
