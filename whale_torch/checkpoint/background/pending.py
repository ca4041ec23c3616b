"""A save in the background: its handle, its thread, and what waits for it: a step, the next save, the process's end."""

from __future__ import annotations

import atexit
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from torch.optim.optimizer import register_optimizer_step_pre_hook

from whale_torch.checkpoint.background.snapshot import Snapshot
from whale_torch.errors import CheckpointError
from whale_torch.exits import fail, failed

__all__ = ["IfBusy", "Pending", "before_save", "finish", "start"]

IfBusy = Literal["wait", "raise"]


class Pending:
    """A checkpoint that is being written in the background. path: the folder that it will be."""

    def __init__(self, path: Path, run: Callable[[], object], snapshot: Snapshot):
        self.path = path
        self._run: Callable[[], object] | None = run
        self._snapshot = snapshot
        self._error: Exception | None = None
        self._is_told = False
        self._ended = threading.Event()  # a thread whose `join` was interrupted counts as ended (Python 3.11)
        # A daemon: after an error elsewhere the process ends at once, and `_finish_at_exit` waits in all other cases.
        self._thread = threading.Thread(target=self._work, name=f"saving {path}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self.done() else "being written"
        return f"Pending({self.path}, {state})"

    def done(self) -> bool:
        """Whether it has come to its end on this rank, complete or failed."""
        return self._ended.is_set()

    def wait(self) -> Path:
        """The folder, once the checkpoint is complete. Raises CheckpointError or CommError where it failed."""
        self.end()
        if self._error is not None:
            self._is_told = True
            raise self._error
        return self.path

    def end(self) -> None:
        """Waits for it to come to its end, complete or failed."""
        self._ended.wait()
        self._thread.join()

    def keep(self) -> None:
        """Returns once training may change what is saved."""
        self._snapshot.keep()

    def untold(self) -> Exception | None:
        """The error that it ended with, once; None where `wait` has raised it. Waits for the end."""
        self.end()
        error, self._is_told = None if self._is_told else self._error, True
        return error

    def _work(self) -> None:
        assert self._run is not None
        try:
            self._run()
        except Exception as error:
            self._error = error
        finally:
            self._run = None  # what it holds of the model is let go
            self._snapshot.abandon()
            self._ended.set()

    def left(self) -> None:
        """In a forked process, which has no such thread: nothing waits there, and nobody is told that it is done."""
        if self._run is not None:
            self._run, self._is_told = None, True
            self._error = CheckpointError(f"{self.path} is written by another process.", fix="wait() there")
            self._ended = threading.Event()  # the other one's lock may be held by the thread
            self._ended.set()


class _Latest:
    """The save that this process began last in the background."""

    def __init__(self) -> None:
        self.pending: Pending | None = None

    def leave(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.left()


_latest = _Latest()
os.register_at_fork(after_in_child=_latest.leave)


def start(path: Path, run: Callable[[], object], snapshot: Snapshot) -> Pending:
    """Runs `run`, which reads the snapshot, in the background."""
    _watch()
    atexit.unregister(_finish_at_exit)
    atexit.register(_finish_at_exit)  # later than what leaves the groups (mesh.py), so it runs before
    _latest.pending = Pending(path, run, snapshot)
    return _latest.pending


def before_save(if_busy: IfBusy) -> None:
    """Waits for the save in the background, if there is one.

    Raises CheckpointError where it failed and nobody has been told, and where it is to be raised that it goes on.
    """
    if if_busy not in get_args(IfBusy):
        raise CheckpointError(f"if_busy is {if_busy!r}.", fix='"wait" or "raise"')
    pending = _latest.pending
    if pending is None:
        return
    if if_busy == "raise" and not pending.done():
        raise CheckpointError(
            f"{pending.path} is still being written.", fix='if_busy="wait", or .wait() for what the last wh.save gave'
        )
    error, _latest.pending = pending.untold(), None
    if error is not None:
        raise CheckpointError(f"the save before failed in the background: {error}") from error


def finish() -> None:
    """Waits for the save in the background, whatever becomes of it: before what it reads is changed by a load."""
    if _latest.pending is not None:
        _latest.pending.end()


def _keep(*_: Any) -> None:
    if _latest.pending is not None:
        _latest.pending.keep()


def _finish_at_exit() -> None:
    if _latest.pending is not None and not failed():
        error = _latest.pending.untold()
        if error is not None:
            fail(error)


@functools.cache
def _watch() -> None:
    """From the first save in the background on, for every optimizer of the process.

    The hook stays, since nothing may be taken from torch's list while a step goes through it.
    """
    register_optimizer_step_pre_hook(_keep)
