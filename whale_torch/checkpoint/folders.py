"""Where checkpoints lie: a run's folder, its steps, and the pointer to the latest."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.index import INDEX, Index
from whale_torch.errors import CheckpointError

__all__ = ["LATEST", "find", "folder_of", "point", "read_index", "temporary"]

LATEST = "latest"
_STEP = re.compile(r"step-\d{8,}")


def folder_of(step: int) -> str:
    """The name of a step's folder. Raises CheckpointError for a step below 0."""
    if step < 0:
        raise CheckpointError(f"step is {step}.", fix="0 or more")
    return f"step-{step:08d}"


def temporary(final: Path, identity: str) -> Path:
    """Where a checkpoint is written until it is complete."""
    return final.with_name(f"{final.name}.tmp-{identity}")


def point(files: Files, path: Path, name: str) -> None:
    """Makes a pointer name a checkpoint, or leaves it as it was."""
    new = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    with files.create(new) as fd:
        files.write(fd, memoryview(name.encode()), 0)
    files.replace(new, path)
    files.sync_folder(path.parent)


def find(path: Path, files: Files) -> Path:
    """A step's folder: the path itself, or the latest of a run_dir. Raises CheckpointError where there is none."""
    if (path / INDEX).exists():
        return path
    steps = sorted(one for one in path.glob("step-*") if _STEP.fullmatch(one.name)) if path.is_dir() else []
    if not steps:
        raise CheckpointError(f"{path} has no checkpoint.", fix="give a run_dir of wh.save, or one of its step folders")
    pointer = path / LATEST
    named = path / pointer.read_text().strip() if pointer.exists() else steps[-1]
    return named if (named / INDEX).exists() else steps[-1]


def read_index(folder: Path, files: Files) -> Index:
    """Raises CheckpointError for what is no checkpoint."""
    path = folder / INDEX
    with files.open(path) as fd:
        data = bytearray(files.size(fd))
        files.read(fd, memoryview(data), 0)
    return Index.from_json(data.decode(), path)
