"""Folders of torch.distributed.checkpoint (DCP): read without running what pickles name, written chunk by chunk."""

from __future__ import annotations

import io
import json
import os
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from whale_torch.checkpoint.boxes import Box
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.formats.source import Composed, Entry, InFiles, InMemory, Part, Range, Source, chunks_of
from whale_torch.checkpoint.formats.torch_files import load_torch
from whale_torch.checkpoint.formats.unpickling import read_pickle, restricted
from whale_torch.checkpoint.values import decode, encode
from whale_torch.errors import CheckpointError

__all__ = ["is_dcp", "read_dcp", "write_dcp"]

_METADATA = ".metadata"
_OURS = "whale_torch"  # what DCP has no place for: further values, and which names are one tensor
_MODEL_KEYS = ("model", "state_dict", "app.model")
_OPTIMIZER_KEYS = ("optimizer", "optim", "optimizers")
_CHUNK_BYTES = 64 << 20  # of a tensor, in one record of a file
_CLASSES = restricted("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem", "pathlib")


def is_dcp(path: Path) -> bool:
    return (path / _METADATA).is_file()


@dataclass
class _Stored(Entry):
    """A tensor, or a box of one, that torch.save wrote into the middle of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    offset: int
    length: int
    files: Files = field(default_factory=Files)

    @cached_property
    def _place(self) -> Entry:
        with torch.serialization.skip_data():
            found = load_torch_part(self.path, self.offset, self.length)
        if not isinstance(found, Tensor) or found.dtype != self.dtype or tuple(found.shape) != self.shape:
            raise CheckpointError(
                f"{self.path} is damaged: at byte {self.offset} it should have {self.dtype} of shape "
                f"{list(self.shape)} of '{self.name}'.",
                fix="give another checkpoint",
            )
        start = _record(self.path, self.offset, self.length)
        if start is None or not found.is_contiguous():
            return InMemory(load_torch_part(self.path, self.offset, self.length))
        start += int(found.storage_offset()) * self.dtype.itemsize
        return InFiles(self.name, self.dtype, self.shape, (Range(self.path, start, Box.whole(self.shape)),), self.files)

    def fill(self, box: Box, into: Tensor) -> None:
        self._place.fill(box, into)


class _Window(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, path: Path, offset: int, length: int):
        self._file, self._offset, self._length, self._at = path.open("rb"), offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(view)
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def load_torch_part(path: Path, offset: int, length: int) -> Any:
    """What torch.save wrote into the middle of a file."""
    with _Window(path, offset, length) as window:
        return load_torch(
            path, load=lambda _, **options: torch.load(cast("IO[bytes]", window), **{**options, "mmap": False})
        )


def _record(path: Path, offset: int, length: int) -> int | None:
    """Where, in the whole file, the one storage lies that torch.save wrote there."""
    with _Window(path, offset, length) as window, zipfile.ZipFile(window) as archive:
        found = [one for one in archive.infolist() if one.filename.split("/")[1:] == ["data", "0"]]
        if len(found) != 1:
            return None
        window.seek(found[0].header_offset + 26)
        lengths = window.read(4) or b"\0\0\0\0"
        name, extra = int.from_bytes(lengths[:2], "little"), int.from_bytes(lengths[2:], "little")
        return offset + found[0].header_offset + 30 + name + extra


def read_dcp(path: Path, files: Files) -> Source:
    """Model, optimizer by names, and what else wh.checkpoint.convert put there."""
    metadata = read_pickle((path / _METADATA).read_bytes(), str(path / _METADATA), _CLASSES)
    reading = _Reading(path, files, metadata)
    try:
        return reading.source()
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{path / _METADATA} cannot be read as DCP's: {type(error).__name__}: {error}.",
            fix="give another checkpoint",
        ) from error


class _Reading:
    def __init__(self, path: Path, files: Files, metadata: Any):
        self._path, self._files = path, files
        self._items: dict[str, Any] = metadata.state_dict_metadata
        self._names: Mapping[str, Any] = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        self._stored: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
        for index, info in metadata.storage_data.items():
            self._stored.setdefault(index.fqn, []).append((tuple(index.__dict__.get("offset") or ()), info))

    def source(self) -> Source:
        source = Source(self._path, {})
        paths = {fqn: tuple(self._names.get(fqn, _split(fqn))) for fqn in self._items}
        alone = not any(path[0] in _MODEL_KEYS for path in paths.values())
        rest: dict[str, Any] = {}
        groups: dict[tuple[Any, ...], Any] = {}
        for fqn, path in paths.items():
            key = _key(path, fqn, alone)
            item = self._items[fqn]
            if hasattr(item, "__dict__") and "size" in item.__dict__:
                source.tensors[key or f"extra/{fqn}"] = self._entry(fqn, item)
                if key is None:
                    rest[fqn] = {"__kind__": "tensor", "key": f"extra/{fqn}"}
            elif path == (_OURS, "values"):
                self._ours(source, fqn)
            elif key == "optimizer/groups":
                groups[path[2:]] = self._value(fqn)
            elif key is not None:
                source.values[key] = encode(self._value(fqn), key, {})
            else:
                rest[fqn] = encode(self._value(fqn), fqn, {})
        if groups:
            source.values["optimizer/groups"] = encode(_groups(groups), "optimizer/groups", {})
        for key, first in source.ties.items():
            if first in source.tensors:
                source.tensors.pop(key, None)
        if rest and "extra" not in source.values:
            source.values["extra"] = rest
        return source

    def _ours(self, source: Source, fqn: str) -> None:
        told = json.loads(self._value(fqn))
        source.values |= told["values"]
        source.ties |= told["ties"]
        source.step = told["step"]

    def _entry(self, fqn: str, item: Any) -> Entry:
        shape, dtype = tuple(item.size), item.properties.arguments[0]
        sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in item.chunks}
        parts = []
        for offset, info in self._stored.get(fqn, []):
            box = Box(offset or (0,) * len(shape), sizes[offset or (0,) * len(shape)])
            if box.numel:
                entry = _Stored(fqn, dtype, box.size, self._file(fqn, info), info.offset, info.length, self._files)
                parts.append(Part(box, entry, (0,) * len(shape)))
        if sum(part.box.numel for part in parts) != Box.whole(shape).numel:
            raise CheckpointError(
                f"{self._path} has not all of '{fqn}': {sum(part.box.numel for part in parts)} of "
                f"{Box.whole(shape).numel} elements.",
                fix="give another checkpoint",
            )
        return Composed(dtype, shape, parts)

    def _value(self, fqn: str) -> Any:
        ((_, info),) = self._stored[fqn]
        return load_torch_part(self._file(fqn, info), info.offset, info.length)

    def _file(self, fqn: str, info: Any) -> Path:
        if info.__dict__.get("transform_descriptors"):
            raise CheckpointError(
                f"'{fqn}' of {self._path} is stored by {info.transform_descriptors}, which is not read here.",
                fix="write the checkpoint without extensions",
            )
        if Path(info.relative_path).name != info.relative_path:
            raise CheckpointError(
                f"{self._path} names a file outside of it: {info.relative_path!r}.", fix="do not trust it"
            )
        path: Path = self._path / info.relative_path
        size = path.stat().st_size if path.is_file() else -1
        if info.offset < 0 or info.length < 0 or info.offset + info.length > size:
            text = (
                "is missing" if size < 0 else f"is too short: '{fqn}' reaches to byte {info.offset + info.length} of it"
            )
            raise CheckpointError(f"{path} {text}.", fix="give another checkpoint")
        return path


def _split(fqn: str) -> tuple[str, ...]:
    """The path of a name that DCP was given flat."""
    first, _, rest = fqn.partition(".")
    return (first, rest) if rest and first in (*_MODEL_KEYS, *_OPTIMIZER_KEYS) else (fqn,)


def _key(path: tuple[Any, ...], fqn: str, alone: bool) -> str | None:
    """Our key of what DCP has under a path; None for what is neither the model's nor the optimizer's."""
    if path[0] == _OURS:
        return str(path[1])
    if path[0] in _MODEL_KEYS and len(path) > 1:
        return "model/" + ".".join(map(str, path[1:]))
    if path[0] in _OPTIMIZER_KEYS and len(path) > 1:
        rest = path[1:]
        if rest[0] == "param_groups":
            return "optimizer/groups"
        if rest[0] == "state" and len(rest) == 3:
            name, state = rest[1], rest[2]
        else:
            name, _, state = ".".join(map(str, rest)).removeprefix("state.").rpartition(".")
        if str(name).isdigit():
            raise CheckpointError(
                f"'{fqn}' is of an optimizer that knows its parameters by numbers.",
                fix="save what torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives: it has names",
            )
        return f"optimizer/{name}/{state}"
    return f"model/{fqn}" if alone else None


def _groups(told: Mapping[tuple[Any, ...], Any]) -> list[Any]:
    """Groups of an optimizer from what DCP has under (number, option), or torch's flattening under (name.option)."""
    found: dict[Any, dict[str, Any]] = {}
    for path, value in told.items():
        if len(path) != 2 or not str(path[0]).isdigit():
            raise CheckpointError(f"param_groups has {path}, which is not understood.", fix="leave options unflattened")
        found.setdefault(int(path[0]), {})[path[1]] = value
    return [
        {"params": group["params"], "options": {k: v for k, v in group.items() if k not in ("params", "param_names")}}
        for _, group in sorted(found.items())
    ]


def write_dcp(files: Files, folder: Path, source: Source) -> None:
    """Writes model, optimizer and the rest; of a tie both names, of one record."""
    from torch.distributed.checkpoint.state_dict_saver import save  # slow to import, and seldom needed

    entries = {_path(key): entry for key, entry in source.tensors.items()}
    told = {key: value for key, value in source.values.items() if not _is_plain(key)}
    ours = {"values": told, "ties": source.ties, "step": source.step}
    values: dict[tuple[str | int, ...], Any] = {(_OURS, "values"): json.dumps(ours)}
    for key, value in source.values.items():
        if key == "optimizer/groups":
            for number, group in enumerate(decode(value, {})):
                for name, one in {**group["options"], "params": group["params"]}.items():
                    values["optimizer", "param_groups", number, name] = one
        elif _is_plain(key):
            values[_path(key)] = decode(value, {name: source.tensors[name].read() for name in _tensors_in(value)})
    ties = {_fqn(_path(key)): _fqn(_path(first)) for key, first in source.ties.items()}
    planner = _planner(entries, values, {_fqn(_path(key)): _path(key) for key in source.ties})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that it saves in one process is meant
        save({}, storage_writer=_writer(folder, ties), planner=planner, no_dist=True)


def _path(key: str) -> tuple[str, ...]:
    """Where DCP has what we have under a key: as torch's get_state_dict nests it."""
    first, _, rest = key.partition("/")
    if first == "model":
        return ("model", rest)
    if first == "optimizer":
        return ("optimizer", "state", *rest.rsplit("/", 1))
    return (_OURS, key)


def _fqn(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path))


def _is_plain(key: str) -> bool:
    return key.startswith(("model/", "optimizer/"))


def _tensors_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if value.get("__kind__") == "tensor":
            yield value["key"]
        for one in value.values():
            yield from _tensors_in(one)
    elif isinstance(value, list):
        for one in value:
            yield from _tensors_in(one)


def _planner(
    entries: Mapping[tuple[str, ...], Entry],
    values: Mapping[tuple[str | int, ...], Any],
    ties: Mapping[str, tuple[str, ...]],
) -> Any:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import (
        BytesIOWriteData,
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    class Planner(DefaultSavePlanner):
        """Plans records of one chunk each, which are read when they are written."""

        def __init__(self) -> None:
            super().__init__()
            self.told: dict[str, io.BytesIO] = {}
            self.boxes: dict[tuple[str, tuple[int, ...]], tuple[Entry, Box]] = {}

        def create_local_plan(self) -> SavePlan:
            items = []
            for path, value in values.items():
                buffer = io.BytesIO()
                torch.save(value, buffer)
                self.told[_fqn(path)] = buffer
                data = BytesIOWriteData(buffer.getbuffer().nbytes)
                items.append(WriteItem(MetadataIndex(_fqn(path)), WriteItemType.BYTE_IO, bytes_io_data=data))
            for path, entry in entries.items():
                most = max(1, _CHUNK_BYTES // entry.dtype.itemsize)
                for box in chunks_of(Box.whole(entry.shape), most):
                    index = MetadataIndex(_fqn(path), torch.Size(box.start))
                    self.boxes[_fqn(path), tuple(box.start)] = (entry, box)
                    chunk = ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size))
                    properties = TensorProperties(dtype=entry.dtype)
                    data_of = TensorWriteData(chunk, properties, torch.Size(entry.shape))
                    items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data_of))
            names = {_fqn(path): path for path in (*entries, *values)} | dict(ties)
            self.plan = SavePlan(items, planner_data=names)
            return self.plan

        def resolve_data(self, write_item: WriteItem) -> Any:
            if write_item.type == WriteItemType.BYTE_IO:
                return self.told[write_item.index.fqn]
            entry, box = self.boxes[write_item.index.fqn, tuple(write_item.index.offset or ())]
            return entry.read(box)

    return Planner()


def _writer(folder: Path, ties: Mapping[str, str]) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    class Writer(FileSystemWriter):
        """Notes a tie's further names as other names of the same records."""

        def finish(self, metadata: Any, results: Any) -> None:
            of_ties = []
            for name, first in ties.items():
                metadata.state_dict_metadata[name] = metadata.state_dict_metadata[first]
                of_ties += [
                    replace(one, index=replace(one.index, fqn=name))
                    for of_rank in results
                    for one in of_rank
                    if one.index.fqn == first
                ]
            super().finish(metadata, [*results, of_ties])

    # a file for each record: of one file the writer would hold all tensors
    return Writer(folder, single_file_per_rank=False, thread_count=1, overwrite=False)
