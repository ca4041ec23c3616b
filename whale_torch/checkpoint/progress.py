"""A progress bar of a long save or load, with bytes per second: of the first rank's files, where somebody looks."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

from whale_torch.checkpoint.files import Files
from whale_torch.errors import CheckpointError

__all__ = ["check_progress", "shown"]

_PATIENCE_S = 1.0  # what ends sooner shows no bar
_MOST_DONE = 0.7  # nor does what is nearly done by then


def check_progress(progress: bool | None) -> None:
    """Raises CheckpointError where a bar is asked for, and rich, which draws it, is not installed."""
    if progress and importlib.util.find_spec("rich") is None:
        raise CheckpointError("progress=True needs rich, which is not installed.", fix="pip install rich")


@contextlib.contextmanager
def shown(files: Files, what: str, total_bytes: int, progress: bool | None) -> Iterator[Files]:
    """The same files, whose bytes read and written are shown. progress: None shows them on a terminal alone."""
    wanted = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None if progress is None else progress
    if not wanted:
        yield files
        return
    bar = _Bar(what, total_bytes)
    try:
        yield cast(Files, _Counted(files, bar))
    finally:
        bar.close()


class _Bar:
    """Appears once it is clear that it takes long."""

    def __init__(self, what: str, total_bytes: int):
        self._what, self._total, self._done = what, total_bytes, 0
        self._start = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def advance(self, num_bytes: int) -> None:
        self._done = min(self._done + num_bytes, self._total)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif time.monotonic() - self._start > _PATIENCE_S and self._done < _MOST_DONE * self._total:
            self._open()

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bar = Progress(*columns, console=console, transient=console.is_terminal)  # elsewhere its end is one line
        self._task = self._bar.add_task(self._what, total=self._total, completed=self._done)
        self._bar.start()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class _Counted:
    """Files that tell what is read and written."""

    def __init__(self, files: Files, bar: _Bar):
        self._files, self._bar = files, bar

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        self._files.write(fd, data, offset)
        self._bar.advance(len(data))

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        count = self._files.read(fd, into, offset)
        self._bar.advance(count)
        return count

    @contextlib.contextmanager
    def look(self, fd: int, offset: int, buffer: memoryview) -> Iterator[memoryview]:
        with self._files.look(fd, offset, buffer) as data:
            yield data
        self._bar.advance(len(buffer))
