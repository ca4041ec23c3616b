"""Folders of torch.distributed.checkpoint (DCP): read without running what pickles name, written chunk by chunk."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from whale_torch.checkpoint.boxes import Box
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.formats.source import Composed, Entry, InFiles, InMemory, Part, Range, Source
from whale_torch.checkpoint.formats.torch_files import load_torch
from whale_torch.checkpoint.formats.unpickling import read_pickle, restricted
from whale_torch.checkpoint.values import encode
from whale_torch.errors import CheckpointError, first_line

__all__ = ["OURS", "is_dcp", "read_dcp"]

_METADATA = ".metadata"
OURS = "whale_torch"
"""What DCP has no place for: further values, and which names are one tensor."""

_MODEL_KEYS = ("model", "state_dict", "app.model")
_OPTIMIZER_KEYS = ("optimizer", "optim", "optimizers")
_CLASSES = restricted("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem", "pathlib")


def is_dcp(path: Path) -> bool:
    """Whether a folder is one of torch.distributed.checkpoint."""
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
            raise self._damaged(f"it should have {self.dtype} of shape {list(self.shape)} of '{self.name}'")
        try:
            start = _record(self.path, self.offset, self.length)
        except Exception as error:  # a broken file may raise anything
            raise self._damaged(f"{type(error).__name__}: {first_line(error)}") from error
        if start is None or not found.is_contiguous():
            return InMemory(load_torch_part(self.path, self.offset, self.length))
        start += int(found.storage_offset()) * self.dtype.itemsize
        return InFiles(self.name, self.dtype, self.shape, (Range(self.path, start, Box.whole(self.shape)),), self.files)

    def _damaged(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged: at byte {self.offset} {text}.", fix="give another checkpoint")

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
        groups: dict[str, dict[tuple[str, str], Any]] = {}
        ours = None
        for fqn, path in paths.items():
            key = _key(path, fqn, alone)
            item = self._items[fqn]
            is_tensor = hasattr(item, "__dict__") and "size" in item.__dict__
            if key is not None and (of := _option(path)) is not None:
                name = f"{key}/{of[0]}/options/{of[1]}"
                if is_tensor:
                    source.tensors[name] = self._entry(fqn, item)
                told = {"__kind__": "tensor", "key": name} if is_tensor else encode(self._value(fqn), name, {})
                groups.setdefault(key, {})[of] = told
            elif is_tensor:
                source.tensors[key or f"extra/{fqn}"] = self._entry(fqn, item)
                if key is None:
                    rest[fqn] = {"__kind__": "tensor", "key": f"extra/{fqn}"}
            elif path == (OURS, "values"):
                ours = fqn
            elif key is not None:
                source.values[key] = encode(self._value(fqn), key, {})
            else:
                rest[fqn] = encode(self._value(fqn), fqn, {})
        source.values |= {key: _groups(told) for key, told in groups.items()}
        if ours is not None:
            self._ours(source, ours)
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
        if not isinstance(dtype, torch.dtype) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError(f"'{fqn}' is {dtype} of shape {shape}")
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
    if path[0] == OURS:
        return str(path[1])
    if path[0] in _MODEL_KEYS and len(path) > 1:
        return "model/" + ".".join(map(str, path[1:]))
    if path[0] in _OPTIMIZER_KEYS and len(path) > 1:
        rest, prefix = _of_optimizer(path)
        if _option(path) is not None:
            return f"{prefix}groups"
        if rest[0] == "state" and len(rest) == 3:
            name, state = rest[1], rest[2]
        else:
            name, _, state = ".".join(map(str, rest)).removeprefix("state.").rpartition(".")
        if str(name).isdigit():
            raise CheckpointError(
                f"'{fqn}' is of an optimizer that knows its parameters by numbers.",
                fix="save what torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives: it has names",
            )
        return f"{prefix}{name}/{state}"
    return f"model/{fqn}" if alone else None


def _of_optimizer(path: tuple[Any, ...]) -> tuple[tuple[Any, ...], str]:
    """What follows in a path of an optimizer's, and our prefix: one of several is under its name."""
    if len(path) == 5 and path[2] in ("state", "param_groups"):
        return path[2:], f"optimizer/@{path[1]}/"
    return path[1:], "optimizer/"


def _option(path: tuple[Any, ...]) -> tuple[str, str] | None:
    """The number of a group, or by torch's flattening the name of a parameter, and the option that a path is of."""
    if path[0] not in _OPTIMIZER_KEYS or len(path) < 2:
        return None
    rest, _ = _of_optimizer(path)
    if rest[0] == "param_groups" and len(rest) == 3:
        return str(rest[1]), str(rest[2])
    flat = ".".join(map(str, rest))
    if not flat.startswith("param_groups."):
        return None
    name, _, option = flat.removeprefix("param_groups.").rpartition(".")
    return name, option


def _groups(told: Mapping[tuple[str, str], Any]) -> list[Any]:
    """Groups of an optimizer from options by numbers of groups, or by names of parameters."""
    found: dict[str, dict[str, Any]] = {}
    for (of, option), value in told.items():
        found.setdefault(of, {})[option] = value
    if all(of.isdigit() for of in found):
        order = sorted(found, key=int)
        names = [found[of].pop("params") for of in order]
        return [{"params": p, "options": _without(found[of])} for of, p in zip(order, names, strict=True)]
    groups: dict[str, dict[str, Any]] = {}
    for name, options in found.items():
        group = groups.setdefault(json.dumps(_without(options)), {"params": [], "options": _without(options)})
        group["params"].append(name)
    return list(groups.values())


def _without(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in ("params", "param_names")}
