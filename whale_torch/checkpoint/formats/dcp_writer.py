"""Folders of torch.distributed.checkpoint, written chunk by chunk by its own writer."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from whale_torch.checkpoint.boxes import Box, blocks
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.formats.dcp import OURS
from whale_torch.checkpoint.formats.source import Entry, Source
from whale_torch.checkpoint.formats.trees import optimizer_tree, optimizers_in, plain, tensors_of_values

__all__ = ["write_dcp"]

_CHUNK_BYTES = 32 << 20  # of a tensor, in one record of a file


def write_dcp(files: Files, folder: Path, source: Source) -> None:
    """Writes model, optimizer and the rest; of a tie both names, of one record."""
    from torch.distributed.checkpoint.state_dict_saver import save  # slow to import, and seldom needed

    ours = {"values": source.values, "ties": source.ties, "step": source.step}
    found: dict[_Path, Any] = {(OURS, "values"): json.dumps(ours)}
    inside = tensors_of_values(source)
    placed = {key for key in source.tensors if key.startswith("model/") and key not in inside}
    found |= {_path(key): source.tensors[key] for key in placed}
    for prefix in optimizers_in(source):
        if prefix.startswith("optimizer/"):
            of, keys = _optimizer(source, prefix)
            found |= of
            placed |= keys
    found |= {(OURS, key): one for key, one in source.tensors.items() if key not in placed}
    for key, value in source.values.items():
        if key.startswith("model/") and key not in source.tensors:
            found[_path(key)] = plain(value, source.tensors)
    entries = {path: one for path, one in found.items() if isinstance(one, Entry)}
    values = {path: _in_memory(one) for path, one in found.items() if path not in entries}
    ties = {_fqn(_path(key)): _fqn(_path(first)) for key, first in source.ties.items()}
    planner = _planner(entries, values, {_fqn(_path(key)): _path(key) for key in source.ties})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that it saves in one process is meant
        save({}, storage_writer=_writer(folder, ties), planner=planner, no_dist=True)


_Path = tuple[str | int, ...]


def _optimizer(source: Source, prefix: str) -> tuple[dict[_Path, Any], set[str]]:
    """An optimizer as torch's get_state_dict nests it, and the keys of the tensors in it."""
    name = prefix.removeprefix("optimizer/@").removesuffix("/")
    outer = ("optimizer",) if prefix == "optimizer/" else ("optimizer", name)
    state, groups = optimizer_tree(source, prefix)
    found: dict[_Path, Any] = {}
    for number, group in enumerate(groups):
        found |= {(*outer, "param_groups", number, option): one for option, one in group.items()}
    keys = set()
    for parameter, of in state.items():
        found |= {(*outer, "state", parameter, kind): one for kind, one in of.items()}
        keys |= {f"{prefix}{parameter}/{kind}" for kind, one in of.items() if isinstance(one, Entry)}
    return found, keys & source.tensors.keys()


def _path(key: str) -> _Path:
    """Where DCP has what we have under a key."""
    return ("model", key.removeprefix("model/")) if key.startswith("model/") else (OURS, key)


def _fqn(path: _Path) -> str:
    return ".".join(map(str, path))


def _in_memory(value: Any) -> Any:
    """Plain data with the tensors that are in it."""
    if isinstance(value, Entry):
        return value.read()
    if isinstance(value, Mapping):
        return {key: _in_memory(one) for key, one in value.items()}
    return type(value)(map(_in_memory, value)) if isinstance(value, list | tuple | set) else value


def _planner(entries: Mapping[_Path, Entry], values: Mapping[_Path, Any], ties: Mapping[str, _Path]) -> Any:
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
                for box in blocks(Box.whole(entry.shape), most):
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
