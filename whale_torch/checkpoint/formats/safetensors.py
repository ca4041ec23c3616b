"""Files in the safetensors format: their headers are read, their tensors stay there; and how such files are written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whale_torch.checkpoint.boxes import Box, blocks
from whale_torch.checkpoint.dtypes import CODES, DTYPES
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.formats.source import Entry, InFiles, Range
from whale_torch.checkpoint.index import CHUNK_BYTES
from whale_torch.checkpoint.payload import bytes_of
from whale_torch.errors import CheckpointError

__all__ = ["SAFETENSORS", "SAFETENSORS_INDEX", "is_safetensors", "read_safetensors", "write_safetensors"]

SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = f"{SAFETENSORS}.index.json"
_INDEX = ".index.json"
_TIES = "whale_torch.ties"  # metadata: further names of tensors, as JSON
_MOST_HEADER = 100 << 20  # bytes, as the format's own reader has it


def is_safetensors(path: str | os.PathLike[str]) -> bool:
    """Whether a path names a file of the format, or the index of several."""
    return os.fspath(path).endswith((".safetensors", f".safetensors{_INDEX}"))


def read_safetensors(paths: Sequence[Path], files: Files) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors of files, or of all files that an index among them names, and further names for some.

    Raises CheckpointError for a file, or an index, that is not of the format, not there, or not of its full length.
    """
    found: dict[str, Entry] = {}
    ties: dict[str, str] = {}
    for path in [file for given in paths for file in _files(given)]:
        try:
            entries, metadata = _header(path, files)
            further = _ties(metadata.get(_TIES, "{}"), entries)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            text = error.what.rstrip(".") if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(
                f"{path} cannot be read as safetensors: {text}.", fix="write it again, or give another path"
            ) from error
        twice = next((name for name in entries if name in found), None)
        if twice is not None:
            raise CheckpointError(f"'{twice}' is in {path} and in another file.", fix="give the files of one model")
        found |= entries
        ties |= further
    return found, ties


def _files(path: Path) -> list[Path]:
    if not path.name.endswith(_INDEX):
        return [path]
    try:
        names = list(dict.fromkeys(json.loads(path.read_text())["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("a file's name leads to another folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as an index of safetensors files: {type(error).__name__}: {error}.",
            fix='write {"weight_map": {name of a tensor: name of its file}}, or give one file\'s path',
        ) from error
    return [path.parent / name for name in names]


def _header(path: Path, files: Files) -> tuple[dict[str, Entry], Mapping[str, str]]:
    with files.open(path) as fd:
        total = files.size(fd)
        length = int.from_bytes(_bytes(files, fd, 8, 0), "little")
        if length > min(total - 8, _MOST_HEADER):
            raise ValueError(f"its header would have {length} bytes, and the file has {total}")
        header = json.loads(_bytes(files, fd, length, 8))
    metadata = header.pop("__metadata__", {})
    found: dict[str, Entry] = {}
    for name, one in header.items():
        shape = tuple(int(n) for n in one["shape"])
        first, last = one["data_offsets"]
        if one["dtype"] not in DTYPES:
            raise ValueError(f"'{name}' has dtype '{one['dtype']}', which this torch does not know")
        dtype = DTYPES[one["dtype"]]
        if min((*shape, first)) < 0 or last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"'{name}' of shape {list(shape)} would have bytes {first} to {last}")
        if 8 + length + last > total:
            raise ValueError(f"'{name}' reaches to byte {8 + length + last}, and the file has {total}")
        found[name] = InFiles(name, dtype, shape, (Range(path, 8 + length + first, Box.whole(shape)),), files)
    return found, metadata


def _ties(text: str, entries: Mapping[str, Entry]) -> dict[str, str]:
    found = json.loads(text)
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise ValueError("its metadata have no map of ties")
    return {name: first for name, first in found.items() if name not in entries}


def _bytes(files: Files, fd: int, size: int, offset: int) -> bytes:
    data = bytearray(size)
    if files.read(fd, memoryview(data), offset) != size:
        raise ValueError(f"it ends within its first {offset + size} bytes")
    return bytes(data)


def _shards(tensors: Mapping[str, Entry], most: int) -> list[dict[str, Entry]]:
    """Tensors in files of at most so many bytes each, where no tensor is larger, in their order."""
    found: list[dict[str, Entry]] = [{}]
    size = 0
    for name, entry in tensors.items():
        if found[-1] and size + entry.num_bytes > most:
            found.append({})
            size = 0
        found[-1][name] = entry
        size += entry.num_bytes
    return found


def write_safetensors(
    files: Files, folder: Path, name: str, tensors: Mapping[str, Entry], ties: Mapping[str, str], most: int
) -> list[str]:
    """Writes tensors chunk by chunk: one file, or as many as it takes and an index; gives the names of all.

    name: of the one file. ties: further names, which go into the metadata. most: bytes of a file's tensors.
    """
    parts = _shards(tensors, most)
    metadata = {"format": "pt"} | ({_TIES: json.dumps(dict(ties))} if ties else {})
    if len(parts) == 1:
        _write(files, folder / name, parts[0], metadata)
        return [name]
    stem = name.removesuffix(".safetensors")
    names = [f"{stem}-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    for number, (file, part) in enumerate(zip(names, parts, strict=True)):
        _write(files, folder / file, part, metadata if number == 0 else {"format": "pt"})
    index: dict[str, Any] = {"metadata": {"total_size": sum(one.num_bytes for one in tensors.values())}}
    index["weight_map"] = {key: file for file, part in zip(names, parts, strict=True) for key in part}
    with files.create(folder / f"{name}{_INDEX}") as fd:
        files.write(fd, memoryview(json.dumps(index, indent=2).encode()), 0)
    return [*names, f"{name}{_INDEX}"]


def _write(files: Files, path: Path, tensors: Mapping[str, Entry], metadata: Mapping[str, str]) -> None:
    # the format wants tensors without gaps; the largest types first keep each aligned to its own size
    ordered = dict(sorted(tensors.items(), key=lambda one: -one[1].dtype.itemsize))
    header = _header_of(ordered, metadata)
    with files.create(path) as fd:
        files.write(fd, memoryview(header), 0)
        offset = len(header)
        for data in _data(ordered.values()):
            files.write(fd, data, offset)
            offset += len(data)


def _header_of(tensors: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, one in tensors.items():
        if one.dtype not in CODES:
            raise CheckpointError(f"'{name}' is {one.dtype}, which safetensors do not know.", fix="convert to torch")
        entries[name] = {
            "dtype": CODES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [offset, offset + one.num_bytes],
        }
        offset += one.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _data(entries: Iterable[Entry]) -> Iterable[memoryview]:
    for one in entries:
        for box in blocks(Box.whole(one.shape), max(1, CHUNK_BYTES // one.dtype.itemsize)):
            if box.numel:
                yield bytes_of(one.read(box))
