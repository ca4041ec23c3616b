"""Weights in the safetensors format, read where they are needed: files are mapped, tensors come one by one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from whale_torch.errors import CheckpointError

__all__ = ["SafeTensors", "is_safetensors"]

_INDEX = ".index.json"


def is_safetensors(path: str | os.PathLike[str]) -> bool:
    """Whether a path names a file of the format, or the index of several."""
    return os.fspath(path).endswith((".safetensors", f".safetensors{_INDEX}"))


class SafeTensors(Mapping[str, Tensor]):
    """The tensors of a file, or of all files that an index names.

    Raises CheckpointError for a file, or an index, that is not of the format or not there.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._files: dict[str, Any] = {}
        for file in _files(Path(path)):
            try:
                opened = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{file} cannot be read as safetensors: {error}.", fix="write it again, or give another path"
                ) from error
            self._files |= dict.fromkeys(opened.keys(), opened)  # type: ignore[no-untyped-call]

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._files[name].get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _files(path: Path) -> list[Path]:
    if not path.name.endswith(_INDEX):
        return [path]
    try:
        names = list(json.loads(path.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as an index of safetensors files: {type(error).__name__}: {error}.",
            fix='write {"weight_map": {name of a tensor: name of its file}}, or give one file\'s path',
        ) from error
    return [path.parent / name for name in dict.fromkeys(names)]
