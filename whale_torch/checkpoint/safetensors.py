"""Weights in the safetensors format, read where they are needed: a file is mapped, and a tensor is a view of it.

The format: 8 bytes with the length of a JSON header, the header (name -> dtype, shape, place in the data), the data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale_torch.errors import CheckpointError

__all__ = ["SafeTensors", "is_safetensors"]

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_INDEX = ".index.json"


def is_safetensors(path: str | os.PathLike[str]) -> bool:
    """Whether a path names a file of the format, or the index of several."""
    return os.fspath(path).endswith((".safetensors", f".safetensors{_INDEX}"))


class SafeTensors(Mapping[str, Tensor]):
    """The tensors of a file, or of all files that an index names; each comes from disk as it is read.

    Raises CheckpointError for a file that is not of the format.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._found: dict[str, tuple[Tensor, dict[str, Any]]] = {}
        for file in _files(Path(path)):
            self._open(file)

    def __getitem__(self, name: str) -> Tensor:
        data, entry = self._found[name]
        start, end = entry["data_offsets"]
        raw, dtype = data[start:end], _DTYPES[entry["dtype"]]
        if raw.storage_offset() % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(entry["shape"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def _open(self, path: Path) -> None:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= size - 8:
                raise _damaged(path, f"its header would be {length} bytes long, the file is {size}")
            try:
                header = json.loads(file.read(length))
                entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
                for name, entry in entries.items():
                    _check(path, name, entry, size - 8 - length)
            except (ValueError, AttributeError, KeyError, TypeError) as error:
                raise _damaged(path, f"its header cannot be read: {error}") from error
        data = torch.from_file(os.fspath(path), shared=False, size=size, dtype=torch.uint8)[8 + length :]
        self._found |= {name: (data, entry) for name, entry in entries.items()}


def _files(path: Path) -> list[Path]:
    if not path.name.endswith(_INDEX):
        return [path]
    names = json.loads(path.read_text())["weight_map"].values()
    return [path.parent / name for name in dict.fromkeys(names)]


def _check(path: Path, name: str, entry: dict[str, Any], size: int) -> None:
    """Raises CheckpointError where a tensor does not lie in the file as its header says."""
    start, end = entry["data_offsets"]
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise _damaged(path, f"'{name}' has the dtype {entry['dtype']}, which torch does not have")
    if not 0 <= start <= end <= size or end - start != math.prod(entry["shape"]) * dtype.itemsize:
        raise _damaged(path, f"'{name}' of shape {tuple(entry['shape'])} would lie at bytes {start} to {end} of {size}")


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read as safetensors: {why}.", fix="write it again")
