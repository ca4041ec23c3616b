"""Which checkpoints of a run_dir go when a new one is there, and which stay: tagged ones, and those that are read."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.folders import TAGS, find, is_temporary_pointer, named_by, steps_of, temporary  # fmt: skip
from whale_torch.checkpoint.index import INDEX
from whale_torch.checkpoint.jobs import alone, without_locks_go_on
from whale_torch.errors import CheckpointError

__all__ = ["check_keep_last", "prune", "reading"]

_TRIES = 100


def check_keep_last(keep_last: int | None) -> None:
    """Raises CheckpointError for less than one."""
    if keep_last is not None and keep_last < 1:
        raise CheckpointError(f"keep_last is {keep_last}.", fix="1 or more: the new checkpoint is one of them")


def prune(files: Files, final: Path, keep_last: int) -> None:
    """Removes checkpoints of earlier steps than that of `final`, but the last keep_last - 1, tagged ones, and those
    that a job reads.

    Each goes by one rename first, so that none is ever there in part.
    """
    gone = []
    with alone(files, final.parent):
        steps = steps_of(final.parent, files)
        earlier = steps[: steps.index(final)]
        tagged = _tagged(files, final.parent)
        for folder in earlier[: max(0, len(earlier) - (keep_last - 1))]:
            if folder.name not in tagged:
                gone.append(_taken(files, folder))
    for away in gone:
        if away is not None:
            files.remove_folder(away)


def _tagged(files: Files, run_dir: Path) -> set[str]:
    """Names of the checkpoints that tags name."""
    found = set()
    for tag in files.names(run_dir / TAGS) if files.exists(run_dir / TAGS) else []:
        if not is_temporary_pointer(tag):
            named = [name for name, _ in named_by(files, run_dir / TAGS / tag)]
            found |= {next((name for name in named if files.exists(run_dir / name / INDEX)), "")}
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
def reading(files: Files, path: Path, *, step: int | None, tag: str | None) -> Iterator[Path]:
    """The folder of a checkpoint (folders.find), which no job removes meanwhile where the file system has locks."""
    for _ in range(_TRIES):
        folder = find(path, files, step=step, tag=tag)
        fd = None
        with contextlib.suppress(FileNotFoundError), without_locks_go_on():
            fd = files.lock(folder / INDEX, shared=True)
            if fd is None:  # it is about to be removed
                time.sleep(0.01)
                continue
        if files.exists(folder / INDEX):  # a job may have been faster
            break
        if fd is not None:
            files.unlock(fd)
    else:
        raise CheckpointError(f"{path}: checkpoints are removed as fast as they are found.", fix="load it again")
    try:
        yield folder
    finally:
        if fd is not None:
            files.unlock(fd)
