"""What a checkpoint holds, read from its index alone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from whale_torch.checkpoint.boxes import Box
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.folders import find, read_index, steps_of, tags_of
from whale_torch.errors import CheckpointError

__all__ = ["bytes_text", "describe", "slice_text"]

_UNITS = ("B", "kB", "MB", "GB", "TB")


def describe(path: str | os.PathLike[str], *, files: Files | None = None) -> dict[str, Any]:
    """Plain data of a step's folder, or of the latest of a run_dir: tensors and where their boxes lie, ties, files and
    all that is no tensor; of a run_dir also its steps and tags.
    Raises CheckpointError where there is none, or its index is damaged."""
    files = Files() if files is None else files
    folder = find(Path(path), files)
    index = read_index(folder, files)
    tensors = {
        key: {
            "dtype": stored.dtype,
            "shape": list(stored.shape),
            "bytes": stored.torch_dtype.itemsize * Box.whole(stored.shape).numel,
            "pieces": [
                {
                    "file": piece.file,
                    "offset": piece.offset,
                    "start": list(piece.box.start),
                    "size": list(piece.box.size),
                }
                for piece in stored.pieces
            ],
        }
        for key, stored in sorted(index.tensors.items())
    }
    return {
        "path": str(folder),
        "step": index.step,
        "id": index.id,
        "bytes": sum(one.num_bytes for one in index.files.values()),
        "files": {name: one.num_bytes for name, one in sorted(index.files.items())},
        "tensors": tensors,
        "ties": dict(sorted(index.ties.items())),
        "values": index.values,
        **({} if folder == Path(path) else _of_run(Path(path), files)),
    }


def _of_run(run_dir: Path, files: Files) -> dict[str, Any]:
    tags = {}
    for tag in sorted(tags_of(files, run_dir)):
        with contextlib.suppress(CheckpointError):  # verify and load tell
            tags[tag] = _step(find(run_dir, files, tag=tag))
    return {"steps": [_step(one) for one in steps_of(run_dir, files)], "tags": tags}


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def bytes_text(number: int) -> str:
    size, unit = float(number), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{number} B"


def slice_text(start: list[int], size: list[int]) -> str:
    """A box as Python would write it."""
    return "[" + ", ".join(f"{first}:{first + length}" for first, length in zip(start, size, strict=True)) + "]"
