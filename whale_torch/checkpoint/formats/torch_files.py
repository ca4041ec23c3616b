"""Files of torch.save: read without running code, mapped where they can be; written chunk by chunk."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale_torch.checkpoint.boxes import Box, blocks
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.formats.source import Entry, InMemory, Source
from whale_torch.checkpoint.formats.trees import plain
from whale_torch.checkpoint.index import CHUNK_BYTES
from whale_torch.checkpoint.payload import bytes_of
from whale_torch.checkpoint.values import encode
from whale_torch.errors import CheckpointError, first_line

__all__ = [
    "EXTRA", "MODEL", "OPTIMIZER", "is_torch_folder", "load_torch", "read_torch_file", "read_torch_folder",
    "rest_of", "state_dict_of", "write_torch",
]  # fmt: skip

MODEL, OPTIMIZER, EXTRA = "model.pt", "optimizer.pt", "extra.pt"
_OURS = "whale_torch"
_BIN, _BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict")


def load_torch(path: Path, *, load: Callable[..., Any] = torch.load) -> Any:
    """What a file holds, its tensors mapped. Raises CheckpointError for what is none, or would run code."""
    options = {"map_location": "cpu", "weights_only": True}
    try:
        if zipfile.is_zipfile(path):
            _check_stored(path)
            return load(path, mmap=True, **options)
        return load(path, **options)
    except pickle.UnpicklingError as error:
        text = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), None)
        if text is None:
            raise CheckpointError(
                f"{path} cannot be read as a file of torch.save: it is no pickle of tensors and plain data.",
                fix="write it again, or give another path",
            ) from error
        raise CheckpointError(
            f"{path} holds more than tensors and plain data; reading it could run code: {text}",
            fix="write it again as a state dict of tensors, where you trust it",
        ) from error
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not there.", fix="give the path of a file or folder with weights") from error
    except Exception as error:  # a broken file may raise anything
        raise CheckpointError(
            f"{path} cannot be read as a file of torch.save: {type(error).__name__}: {first_line(error)}.",
            fix="write it again, or give another path",
        ) from error


def _check_stored(path: Path) -> None:
    """Raises CheckpointError for records that would be larger than the file: torch.save compresses nothing."""
    with zipfile.ZipFile(path) as archive:
        if any(one.compress_type != zipfile.ZIP_STORED for one in archive.infolist()):
            raise CheckpointError(
                f"{path} is compressed, and torch.save's files are not.", fix="do not trust it, or write it again"
            )


def state_dict_of(data: Any, path: Path) -> Mapping[str, Any]:
    """The state dict of a model: what the file holds, or what it holds under "model", "state_dict" and the like."""
    if isinstance(data, Mapping) and not any(isinstance(one, Tensor) for one in data.values()):
        data = next((data[key] for key in _MODEL_KEYS if isinstance(data.get(key), Mapping)), data)
    if not isinstance(data, Mapping):
        raise CheckpointError(
            f"the file given as weights holds a {type(data).__name__}, not a state dict.",
            fix="write it with torch.save(model.state_dict(), path)",
        )
    return data


def read_torch_file(path: Path) -> Source:
    """A state dict, or one of a model and one of an optimizer under the usual keys."""
    data = load_torch(path)
    source = Source(path, {})
    _add_model(source, state_dict_of(data, path), path)
    if isinstance(data, Mapping):
        optimizer = next((data[key] for key in _OPTIMIZER_KEYS if isinstance(data.get(key), Mapping)), None)
        if optimizer is not None:
            _add_optimizer(source, optimizer, path)
        source.step = data["step"] if isinstance(data.get("step"), int) else None
    return source


def is_torch_folder(path: Path) -> bool:
    """Whether a folder holds files of torch.save under names that are known here."""
    return any((path / name).is_file() for name in (MODEL, _BIN, _BIN_INDEX))


def read_torch_folder(path: Path) -> Source:
    """Files as `wh.checkpoint.convert` writes them, or as Hugging Face did before safetensors."""
    source = Source(path, {})
    if (path / MODEL).is_file():
        _add_model(source, state_dict_of(load_torch(path / MODEL), path / MODEL), path / MODEL)
        if (path / OPTIMIZER).is_file():
            _add_optimizers(source, load_torch(path / OPTIMIZER), path / OPTIMIZER)
        if (path / EXTRA).is_file():
            _add_extra(source, load_torch(path / EXTRA), path / EXTRA)
        return source
    files = [path / _BIN]
    if (path / _BIN_INDEX).is_file():
        try:
            names = dict.fromkeys(json.loads((path / _BIN_INDEX).read_text())["weight_map"].values())
            files = [path / Path(name).name for name in names]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path / _BIN_INDEX} cannot be read as an index of files: {error}.") from error
    for file in files:
        _add_model(source, state_dict_of(load_torch(file), file), file)
    return source


def _add_model(source: Source, state: Mapping[str, Any], path: Path) -> None:
    first: dict[Any, str] = {}
    for name, value in state.items():
        key = f"model/{name}"
        if not isinstance(value, Tensor):
            _add_values(source, key, value)
            continue
        if value.layout is not torch.strided or value.is_meta:
            kind = "on the meta device" if value.is_meta else str(value.layout)
            raise CheckpointError(f"'{name}' of {path} is {kind}.", fix="save it with its values, and dense")
        where = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype)
        if value.numel() and first.setdefault(where, key) != key:
            source.ties[key] = first[where]
        else:
            source.tensors[key] = InMemory(value)


def _add_values(source: Source, key: str, value: Any) -> None:
    tensors: dict[str, Tensor] = {}
    source.values[key] = encode(value, key, tensors)
    source.tensors |= {name: InMemory(one) for name, one in tensors.items()}


def rest_of(source: Source, states: Mapping[str, Any]) -> dict[str, Any]:
    """What beside model and optimizer a folder has: as a user reads it, and under "whale_torch" as it is read here."""
    told = {"values": source.values, "ties": source.ties}
    tensors = {key: one for key, one in source.tensors.items() if not key.startswith(("model/", "optimizer/"))}
    extra = plain(source.values.get("extra", {}), source.tensors)
    ours = {"index": json.dumps(told), "tensors": tensors}
    return {"step": source.step, "extra": extra, "states": states, _OURS: ours}


def _add_extra(source: Source, data: Mapping[str, Any], path: Path) -> None:
    try:
        source.step = data.get("step")
        if _OURS not in data:
            _add_values(source, "extra", data.get("extra", {}))
            for name, state in data.get("states", {}).items():
                _add_values(source, f"states/{name}", state)
            return
        told = json.loads(data[_OURS]["index"])
        source.tensors |= {str(key): InMemory(one) for key, one in data[_OURS]["tensors"].items()}
        source.values |= told["values"]
        source.ties |= told["ties"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no {EXTRA} of a conversion: {type(error).__name__}: {first_line(error)}.",
            fix="convert again, or remove it",
        ) from error


def _add_optimizers(source: Source, state: Any, path: Path) -> None:
    """One, or several by their names."""
    if isinstance(state, Mapping) and "param_groups" not in state and all(isinstance(k, str) for k in state):
        for name, one in state.items():
            _add_optimizer(source, one, path, f"optimizer/@{name}/")
    else:
        _add_optimizer(source, state, path)


def _add_optimizer(source: Source, state: Any, path: Path, prefix: str = "optimizer/") -> None:
    """An optimizer's state_dict, by the names of its parameters."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not isinstance(groups, list) or not isinstance(state.get("state"), Mapping):
        raise CheckpointError(f"the optimizer in {path} has no state and param_groups.", fix="its state_dict()")
    names = _names(source, groups, state["state"], path)
    told = []
    for group in groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        told.append({"params": [names[number] for number in group["params"]], "options": options})
    for number, values in state["state"].items():
        for name, value in values.items():
            key = f"{prefix}{names[number]}/{name}"
            if isinstance(value, Tensor):
                source.tensors[key] = InMemory(value)
            else:
                _add_values(source, key, value)
    _add_values(source, f"{prefix}groups", told)


def _names(source: Source, groups: list[Any], state: Mapping[Any, Any], path: Path) -> dict[Any, str]:
    """Names of an optimizer's parameters: as it says, else the model's tensors in order where all shapes agree."""
    numbers = [number for group in groups for number in group["params"]]
    if all("param_names" in group for group in groups):
        given = [name for group in groups for name in group["param_names"]]
        return dict(zip(numbers, given, strict=True))
    if all(isinstance(number, str) for number in numbers):
        return {number: number for number in numbers}
    tensors = {key.removeprefix("model/"): one for key, one in source.tensors.items() if key.startswith("model/")}
    found = dict(zip(sorted(numbers), tensors, strict=False))
    fits = len(numbers) == len(tensors) and all(
        value.shape == tensors[found[number]].shape
        for number, values in state.items()
        for value in values.values()
        if isinstance(value, Tensor) and value.dim()
    )
    if not fits:
        raise CheckpointError(
            f"the optimizer in {path} knows its {len(numbers)} parameters by numbers, and which of the model's "
            f"{len(tensors)} tensors they are cannot be told.",
            fix="build it as torch.optim.Adam(model.named_parameters()), which keeps names, and save it again",
        )
    return found


def write_torch(files: Files, path: Path, tree: Any) -> None:
    """Writes what torch.save would of nested dicts and lists with entries for tensors, without holding a tensor.

    An entry that is there twice is one tensor in the file.
    """
    made: dict[int, tuple[Entry, Tensor]] = {}
    shown = _shown(tree, made)
    with torch.serialization.skip_data():
        torch.save(shown, path)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        records = _records(path)
        for number, (entry, _) in enumerate(made.values()):
            record = records[number]
            if record.size != entry.num_bytes:
                raise AssertionError(f"record {number} of {path} has {record.size} bytes, not {entry.num_bytes}")
            offset, crc = record.data, 0
            for box in blocks(Box.whole(entry.shape), max(1, CHUNK_BYTES // entry.dtype.itemsize)):
                if box.numel:
                    data = bytes_of(entry.read(box))
                    files.write(fd, data, offset)
                    offset, crc = offset + len(data), zlib.crc32(data, crc)
            for place in record.checksums:
                files.write(fd, memoryview(crc.to_bytes(4, "little")), place)
        files.sync(fd)
    finally:
        os.close(fd)


def _shown(tree: Any, made: dict[int, tuple[Entry, Tensor]]) -> Any:
    """The same with tensors for entries, in memory that nobody touches."""
    if isinstance(tree, Entry):
        if id(tree) not in made:
            made[id(tree)] = (tree, torch.empty(tree.shape, dtype=tree.dtype, device="cpu"))
        return made[id(tree)][1]
    if isinstance(tree, Mapping):
        shown = type(tree)() if isinstance(tree, dict) else {}
        shown.update((key, _shown(one, made)) for key, one in tree.items())
        return shown
    if isinstance(tree, list | tuple | set):
        return type(tree)(_shown(one, made) for one in tree)
    return tree


@dataclass(frozen=True)
class _Record:
    """A storage in a file: where its bytes begin, how many they are, and where their checksum stands, twice."""

    data: int
    size: int
    checksums: tuple[int, int]


def _records(path: Path) -> dict[int, _Record]:
    """The storages in a file, by the order in which they were met."""
    found = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        at = archive.start_dir
        for one in archive.infolist():
            file.seek(at + 28)  # of the directory's own entry: the lengths of its name, extra field and comment
            told = [int.from_bytes(file.read(2), "little") for _ in range(3)]
            file.seek(one.header_offset + 26)  # of the local header: those of its name and extra field
            local = [int.from_bytes(file.read(2), "little") for _ in range(2)]
            parts = one.filename.split("/")
            if len(parts) == 3 and parts[1] == "data" and parts[2].isdigit():
                start = one.header_offset + 30 + sum(local)
                found[int(parts[2])] = _Record(start, one.file_size, (one.header_offset + 14, at + 16))
            at += 46 + sum(told)
    return found
