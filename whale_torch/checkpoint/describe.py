"""What a checkpoint holds, read from its index alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from whale_torch.checkpoint.boxes import Box
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.folders import find, read_index

__all__ = ["describe", "slice_text"]


def describe(path: str | os.PathLike[str], *, files: Files | None = None) -> dict[str, Any]:
    """Plain data of a step's folder, or of the latest of a run_dir: tensors and where their boxes lie, ties, files and
    all that is no tensor. Raises CheckpointError where there is none, or its index is damaged."""
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
    }


def slice_text(start: list[int], size: list[int]) -> str:
    """A box as Python would write it."""
    return "[" + ", ".join(f"{first}:{first + length}" for first, length in zip(start, size, strict=True)) + "]"
