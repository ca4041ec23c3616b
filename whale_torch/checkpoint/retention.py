"""Which checkpoints of a run_dir go when a new one is there, and which stay: tagged ones, and those that are read."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.folders import TAGS, find, named_by, read_index, steps_of, tags_of, temporary
from whale_torch.checkpoint.index import INDEX
from whale_torch.checkpoint.jobs import alone, without_locks_go_on
from whale_torch.errors import CheckpointError

__all__ = ["check_keep_last", "held", "prune", "reading"]

_TRIES, _PAUSE_S = 100, 0.01


def check_keep_last(keep_last: int | None) -> None:
    """Raises CheckpointError for what is no number of checkpoints, or less than one."""
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise CheckpointError(f"keep_last is {keep_last!r}.", fix="1 or more: the new checkpoint is one of them")


def prune(files: Files, final: Path, keep_last: int) -> None:
    """Removes checkpoints of earlier steps than that of `final`, but the last keep_last - 1, tagged ones, and those
    that a job reads.

    Each goes by one rename first, so that none is ever there in part.
    """
    run_dir, gone = final.parent, []
    with alone(files, run_dir):
        steps = steps_of(run_dir, files)
        earlier = [folder for folder in steps[: steps.index(final)] if files.exists(folder / INDEX)]
        tagged = _tagged(files, run_dir)
        for folder in earlier[: max(0, len(earlier) - (keep_last - 1))]:
            if folder.name not in tagged:
                gone.append(_taken(files, folder))
        if any(gone):
            files.sync_folder(run_dir)  # or a power cut might leave a checkpoint's name to what is half removed
    for away in gone:
        if away is not None:
            with contextlib.suppress(FileNotFoundError):  # the next save of another job removes it too
                files.remove_folder(away)


def _tagged(files: Files, run_dir: Path) -> set[str]:
    """Names of the checkpoints that tags name."""
    found = set()
    for tag in tags_of(files, run_dir):
        named = [name for name, _ in named_by(files, run_dir / TAGS / tag)]
        found |= {next((name for name in named if files.exists(run_dir / name)), "")}
    return found


def _taken(files: Files, folder: Path) -> Path | None:
    """Where a checkpoint lies now that it is none any more; None where it is being read."""
    fd = None
    with without_locks_go_on():
        fd = files.lock(folder / INDEX, create=False)
        if fd is None:
            return None
    try:
        away = temporary(folder, secrets.token_hex(8))
        files.rename(folder, away)
        return away
    finally:
        if fd is not None:
            files.unlock(fd)


@contextlib.contextmanager
def held(files: Files, folder: Path) -> Iterator[bool]:
    """Whether a checkpoint is there; no job removes it meanwhile, where the file system has locks."""
    fd, free = None, True
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), without_locks_go_on():
        fd = files.lock(folder / INDEX, shared=True)
        free = fd is not None  # else it is about to be removed
    try:
        yield free and files.exists(folder / INDEX)  # a job may have been faster
    finally:
        if fd is not None:
            files.unlock(fd)


@contextlib.contextmanager
def reading(files: Files, path: Path, *, step: int | None, tag: str | None) -> Iterator[Path]:
    """The folder of a checkpoint (folders.find), held."""
    for _ in range(_TRIES):
        folder = _found(files, path, step, tag)
        if folder is not None:
            with held(files, folder) as there:
                if there:
                    yield folder
                    return
                if files.exists(folder) and not files.exists(folder / INDEX):
                    read_index(folder, files)  # raises that it is missing
        time.sleep(_PAUSE_S)
    raise CheckpointError(f"{path}: checkpoints are removed as fast as they are found.", fix="load it again")


def _found(files: Files, path: Path, step: int | None, tag: str | None) -> Path | None:
    """None where the checkpoint went while it was looked for."""
    try:
        return find(path, files, step=step, tag=tag)
    except CheckpointError as error:
        cause = error.__cause__
        if isinstance(cause, FileNotFoundError) and not files.exists(Path(cause.filename).parent):
            return None
        raise
