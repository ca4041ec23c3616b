"""Opening: whatever holds weights, told apart by its name and by what is in it."""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from whale_torch.checkpoint.boxes import Box
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.folders import read_index
from whale_torch.checkpoint.formats.dcp import is_dcp, read_dcp
from whale_torch.checkpoint.formats.deepspeed import is_deepspeed, read_deepspeed
from whale_torch.checkpoint.formats.megatron import is_megatron, read_megatron
from whale_torch.checkpoint.formats.safetensors import SAFETENSORS, SAFETENSORS_INDEX, is_safetensors, read_safetensors
from whale_torch.checkpoint.formats.source import Entry, InFiles, Range, Source
from whale_torch.checkpoint.formats.torch_files import is_torch_folder, read_torch_file, read_torch_folder
from whale_torch.checkpoint.index import INDEX, Index
from whale_torch.checkpoint.inventory import Held
from whale_torch.checkpoint.reader import Reader, Wanted
from whale_torch.checkpoint.retention import reading
from whale_torch.checkpoint.structure import check_values
from whale_torch.errors import CheckpointError, first_line

__all__ = ["is_run_dir", "open_source"]


def open_source(path: str | os.PathLike[str], files: Files | None = None) -> Source:
    """A checkpoint of wh.save (a run_dir or one step), a file or folder of safetensors, a Hugging Face folder, a file
    of torch.save, or a folder of DCP, Megatron-LM or DeepSpeed. Tensors are read when they are asked for.

    Raises CheckpointError for what is none of these, is damaged, or would run code when it is read.
    """
    path, files = Path(path), Files() if files is None else files
    try:
        source = _opened(path, files)
        for key in source.tensors:
            if key.startswith("model/") and re.split(r"[./]", key)[-1] == "_extra_state":
                source.values.setdefault(key, {"__kind__": "tensor", "key": key})
        check_values(source.values, source.ties, source.tensors, path)
        return source
    except CheckpointError as error:
        if str(path) in error.what:
            raise
        raise CheckpointError(f"{path} cannot be read: {error.what}", fix=error.fix) from error
    except Exception as error:  # a broken file may raise anything
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {first_line(error)}.",
            fix="write it again, or give another path",
        ) from error


def is_run_dir(path: Path) -> bool:
    """Whether there are checkpoints of wh.save in a folder."""
    return any(path.glob(f"step-*/{INDEX}"))


def _opened(path: Path, files: Files) -> Source:
    if is_safetensors(path):
        return _safetensors(path, [path], files)
    if not path.is_dir():
        return read_torch_file(path)
    for found, read in _FOLDERS:
        if found(path):
            return read(path, files)
    raise CheckpointError(
        f"{path} holds no weights that can be read here.",
        fix="a folder of wh.save, safetensors, Hugging Face, torch.save, DCP, Megatron-LM or DeepSpeed",
    )


def _safetensors(path: Path, paths: Sequence[Path], files: Files) -> Source:
    tensors, ties = read_safetensors(paths, files)
    named = {f"model/{name}": entry for name, entry in tensors.items()}
    return Source(path, named, {f"model/{name}": f"model/{first}" for name, first in ties.items()})


def _own(path: Path, files: Files) -> Source:
    """A checkpoint of wh.save, which no job removes while the source is in use."""
    with contextlib.ExitStack() as at_end:
        folder = at_end.enter_context(reading(files, path, step=None, tag=None))
        index = read_index(folder, files)
        tensors: dict[str, Entry] = {}
        for key, one in index.tensors.items():
            ranges = [Range(folder / piece.file, piece.offset, piece.box) for piece in one.pieces]
            tensors[key] = InFiles(key, one.torch_dtype, one.shape, ranges, files)
        check = _check(folder, index, files)
        source = Source(folder, tensors, index.ties, index.values, index.step, check)
        weakref.finalize(source, at_end.pop_all().close)
        return source


def _check(folder: Path, index: Index, files: Files) -> Callable[[Mapping[str, Sequence[Box]]], None]:
    def check(boxes: Mapping[str, Sequence[Box]]) -> None:
        wanted = []
        for key, of_key in boxes.items():
            stored = index.tensors[key]
            held = Held(key, stored.torch_dtype, stored.shape, None, tuple((box, box) for box in of_key))
            wanted.append(Wanted(key, stored, held))
        Reader(files, folder, index).check(wanted)

    return check


def _has(name: str) -> Callable[[Path], bool]:
    return lambda path: (path / name).is_file()


_FOLDERS: list[tuple[Callable[[Path], bool], Callable[[Path, Files], Source]]] = [
    (lambda path: (path / INDEX).is_file() or is_run_dir(path), _own),
    (is_megatron, read_megatron),
    (is_dcp, read_dcp),
    (_has(SAFETENSORS_INDEX), lambda path, files: _safetensors(path, [path / SAFETENSORS_INDEX], files)),
    (_has(SAFETENSORS), lambda path, files: _safetensors(path, [path / SAFETENSORS], files)),
    (
        lambda path: any(path.glob("*.safetensors")),
        lambda path, files: _safetensors(path, sorted(path.glob("*.safetensors")), files),
    ),
    (is_deepspeed, read_deepspeed),
    (is_torch_folder, lambda path, files: read_torch_folder(path)),
]
