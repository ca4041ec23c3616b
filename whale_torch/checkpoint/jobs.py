"""Jobs that save into one run_dir: who is at work is told by locks, which end with their process."""

from __future__ import annotations

import contextlib
import errno
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.folders import TAGS, is_temporary_pointer, point, settle, tags_of, temporary
from whale_torch.errors import CheckpointError

__all__ = ["Claim", "alone", "without_locks_go_on"]

_LOCK = "lock"
_RUN_LOCK = ".lock"
_WAIT_SECONDS = 60.0  # the lock of a run_dir is held for a few operations
_TEMPORARY = re.compile(r"(step-\d{8,})\.tmp-[0-9a-f]{16}")
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_mine: set[Path] = set()  # of this process: some network file systems let a process take its own locks again


@contextlib.contextmanager
def alone(files: Files, run_dir: Path) -> Iterator[None]:
    """No other job is in here for this run_dir; on a file system without locks it may be.

    Raises CheckpointError where another one does not come to its end.
    """
    fd = None
    end = time.monotonic() + _WAIT_SECONDS
    with without_locks_go_on():
        while (fd := files.lock(run_dir / _RUN_LOCK)) is None:
            if time.monotonic() > end:
                raise CheckpointError(
                    f"another job has held {run_dir / _RUN_LOCK} for {_WAIT_SECONDS:.0f} s.",
                    fix="end it, or give each job a run_dir of its own",
                )
            time.sleep(0.01)
    try:
        yield
    finally:
        if fd is not None:
            files.unlock(fd)


class Claim:
    """The folder that this job writes a checkpoint in, told from those of jobs that have died by a lock in it."""

    def __init__(self, files: Files, final: Path, identity: str):
        """Makes the folder, and removes those of dead jobs.

        Raises CheckpointError where the checkpoint exists, or another job is writing it.
        """
        self._files, self._final, self._identity = files, final, identity
        self.folder = temporary(final, identity)
        self._fd: int | None = None
        self._complete = False
        with contextlib.ExitStack() as locked:
            with alone(files, final.parent):
                _refuse_existing(files, final)
                dead = _clear(files, final, locked)
                try:
                    files.make_folder(self.folder)
                    _mine.add(self.folder.absolute())
                    with without_locks_go_on():
                        self._fd = files.lock(self.folder / _LOCK)
                except BaseException:
                    self.drop()
                    raise
            for folder in dead:
                with contextlib.suppress(OSError):  # the next save tries again
                    files.remove_folder(folder)

    def commit(self, pointers: Sequence[str]) -> None:
        """The folder becomes the checkpoint, and the pointers name it, all by one rename.

        Raises CheckpointError where another job was faster.
        """
        run_dir = self._final.parent
        with alone(self._files, run_dir):
            _refuse_existing(self._files, self._final)
            if self._fd is not None:
                self._files.remove(self.folder / _LOCK)
            self._files.sync_folder(self.folder)
            for pointer in pointers:
                point(self._files, run_dir, pointer, self._final.name, self._identity)
            self._files.rename(self.folder, self._final)
            self._complete = True
            self._files.sync_folder(run_dir)

    def drop(self) -> None:
        """Ends the claim; a folder that has not become a checkpoint is removed, if that can be."""
        if not self._complete:
            with contextlib.suppress(OSError):  # the next save tries again
                self._files.remove_folder(self.folder)
        _mine.discard(self.folder.absolute())
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                self._files.unlock(fd)


def _refuse_existing(files: Files, final: Path) -> None:
    if files.exists(final):
        raise CheckpointError(
            f"{final} exists.",
            fix="another step or run_dir, or remove that folder first: nothing committed is overwritten",
        )


def _clear(files: Files, final: Path, locked: contextlib.ExitStack) -> list[Path]:
    """The folders of dead jobs, locked, to be removed; what they left of pointers is. Call it alone.

    Raises CheckpointError for a living job that writes this checkpoint.
    """
    dead = []
    names = files.names(final.parent)
    tags = [f"{TAGS}/{name}" for name in files.names(final.parent / TAGS)] if TAGS in names else []
    for tag in tags_of(files, final.parent):
        settle(files, final.parent, f"{TAGS}/{tag}")
    for name in [*names, *tags]:
        found = _TEMPORARY.fullmatch(name)
        if is_temporary_pointer(name):
            with contextlib.suppress(OSError):
                files.remove(final.parent / name)
        elif found is not None:
            alive = _alive(files, final.parent / name, locked)
            if alive and found[1] == final.name:
                raise CheckpointError(
                    f"another job is saving {final}.",
                    fix="give each job a run_dir of its own, or other steps; "
                    "of a model that is not parallelized one process saves",
                )
            if alive is False:
                dead.append(final.parent / name)
    return dead


def _alive(files: Files, folder: Path, locked: contextlib.ExitStack) -> bool | None:
    """Whether a job writes there, None where that cannot be told; a dead one's lock is taken."""
    if folder.absolute() in _mine:
        return True
    try:
        fd = files.lock(folder / _LOCK, create=False)
    except FileNotFoundError:  # it died before, or while it became a checkpoint
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        return None
    if fd is not None:
        locked.callback(files.unlock, fd)
    return fd is None


@contextlib.contextmanager
def without_locks_go_on() -> Iterator[None]:
    """Leaves a lock out where the file system has none."""
    try:
        yield
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
