"""Whether a checkpoint is as it was written: every byte of it, on all cores, without a model."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.folders import LATEST, TAGS, find, named_by, none_at, read_index, steps_of, tags_of
from whale_torch.checkpoint.index import INDEX, Chunk, Index, chunks_of
from whale_torch.checkpoint.payload import check_file, checksum
from whale_torch.checkpoint.retention import held
from whale_torch.errors import CheckpointError, first_line
from whale_torch.mesh import surroundings

__all__ = ["Verified", "verify"]

_CHUNKS_OF_A_TASK = 16
_MOST = 10  # damaged chunks of a file that are named


@dataclass
class Verified:
    """folders: the checkpoints that were read, by `threads`; whole: those without damage. num_bytes: of their chunks.
    damages: all that is wrong."""

    folders: list[Path] = field(default_factory=list)
    whole: list[Path] = field(default_factory=list)
    num_bytes: int = 0
    damages: list[str] = field(default_factory=list)
    threads: int = 1


def verify(path: str | os.PathLike[str], *, files: Files | None = None, cores: int | None = None) -> Verified:
    """Checks a step's folder, or all those of a run_dir, its pointer to the latest and its tags.

    cores: threads that read, by default one for each core of this process.
    Raises CheckpointError where there is no checkpoint.
    """
    files, path, found = Files() if files is None else files, Path(path), Verified()
    folders = [path] if files.exists(path / INDEX) else steps_of(path, files) if path.is_dir() else []
    if not folders:
        raise none_at(path, files)
    found.threads = cores or surroundings().cores
    with ThreadPoolExecutor(found.threads) as threads:
        for folder in folders:
            with held(files, folder) as there:
                if not there and (files.exists(folder / INDEX) or not files.exists(folder)):  # a job removes it
                    continue
                found.folders.append(folder)
                before = len(found.damages)
                with _noting(found):
                    _verify(folder, read_index(folder, files), files, threads, found)
                if len(found.damages) == before:
                    found.whole.append(folder)
    if folders != [path]:
        _verify_pointers(path, files, found)
    found.damages = list(dict.fromkeys(found.damages))
    return found


def _verify_pointers(run_dir: Path, files: Files, found: Verified) -> None:
    if files.exists(run_dir / LATEST):
        with _noting(found):
            find(run_dir, files)
    for tag in tags_of(files, run_dir):
        with _noting(found):
            named = named_by(files, run_dir / TAGS / tag)
            if any(files.exists(run_dir / name) for name, _ in named):  # else the checkpoint never came
                find(run_dir, files, tag=tag)


def _verify(folder: Path, index: Index, files: Files, threads: ThreadPoolExecutor, found: Verified) -> None:
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    for key, stored in index.tensors.items():
        for piece in stored.pieces:
            chunks[piece.file] += chunks_of(key, piece, stored.torch_dtype.itemsize)
    for name, stored_file in index.files.items():
        path = folder / name
        with _noting(found), files.open(path) as fd:
            with _noting(found):
                check_file(files, fd, path, index)
            if files.size(fd) != stored_file.num_bytes:
                continue
            of_file = sorted(chunks[name], key=lambda chunk: chunk.offset)
            tasks = [of_file[i : i + _CHUNKS_OF_A_TASK] for i in range(0, len(of_file), _CHUNKS_OF_A_TASK)]
            damages = list(itertools.chain(*threads.map(functools.partial(_check, files, fd, path), tasks)))
            found.damages += damages[:_MOST]
            if len(damages) > _MOST:
                found.damages.append(f"{path}: {len(damages) - _MOST} more chunks are not what was written.")
            found.num_bytes += sum(chunk.size for chunk in of_file)


def _check(files: Files, fd: int, path: Path, chunks: list[Chunk]) -> list[str]:
    buffer = memoryview(bytearray(max(chunk.size for chunk in chunks)))
    damages = []
    for chunk in chunks:
        part = buffer[: chunk.size]
        where = f"chunk {chunk.number} of '{chunk.key}' (bytes {chunk.offset} to {chunk.offset + chunk.size})"
        try:
            read = files.read(fd, part, chunk.offset)
        except OSError as error:
            damages.append(f"{path}: {where} cannot be read: {first_line(error)}.")
            continue
        if read != chunk.size or checksum(part) != chunk.checksum:
            damages.append(f"{path}: {where} is not what was written.")
    return damages


@contextlib.contextmanager
def _noting(found: Verified) -> Iterator[None]:
    """What is wrong is noted, and the rest is looked at as well."""
    try:
        yield
    except CheckpointError as error:
        found.damages.append(error.what)
    except FileNotFoundError as error:
        found.damages.append(f"{error.filename} is missing.")
    except OSError as error:
        found.damages.append(f"{type(error).__name__}: {first_line(error)}.")
