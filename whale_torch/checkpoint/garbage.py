"""Python's collector of garbage waits while a save or a load makes thousands of small objects, none of them garbage."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

__all__ = ["collection_paused"]

_lock = threading.Lock()
_paused = 0
_was_enabled = False


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Of all threads, until the last one that asked for it is through; where it was off it stays so."""
    global _paused, _was_enabled
    with _lock:
        if not _paused:
            _was_enabled = gc.isenabled()
            gc.disable()
        _paused += 1
    try:
        yield
    finally:
        with _lock:
            _paused -= 1
            if not _paused and _was_enabled:
                gc.enable()
