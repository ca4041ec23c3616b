"""Python's collector of garbage waits while a save or a load makes thousands of small objects, none of them garbage."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

__all__ = ["collection_paused"]


class _Collector:
    """Of all threads: off until the last one that asked for it is through; where it was off it stays so."""

    def __init__(self) -> None:
        self._lock, self._asked, self._was_on = threading.Lock(), 0, False

    def pause(self) -> None:
        with self._lock:
            if not self._asked:
                self._was_on = gc.isenabled()
                gc.disable()
            self._asked += 1

    def go_on(self) -> None:
        with self._lock:
            self._asked -= 1
            if not self._asked and self._was_on:
                gc.enable()

    def leave(self) -> None:
        """In a forked process (a DataLoader's worker, say, that a state began), which nothing of this would end for."""
        paused, self._lock, self._asked = self._asked > 0, threading.Lock(), 0
        if paused and self._was_on:
            gc.enable()


_COLLECTOR = _Collector()
os.register_at_fork(after_in_child=_COLLECTOR.leave)


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage is collected inside."""
    _COLLECTOR.pause()
    try:
        yield
    finally:
        _COLLECTOR.go_on()
