"""How two checkpoints differ: tensor by tensor, whatever the layouts that they were saved in."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.folders import read_index
from whale_torch.checkpoint.index import StoredTensor
from whale_torch.checkpoint.inventory import held_of_place
from whale_torch.checkpoint.reader import Reader, Wanted
from whale_torch.checkpoint.retention import reading

__all__ = ["Difference", "difference"]

_SHORT_LIST = 8
_WIDE = (torch.int64, torch.uint64)
_LOW = (1 << 32) - 1


@dataclass(frozen=True)
class Difference:
    """key: of a tensor or value. what: how it differs. elements: how many do, of `total`. largest: difference of two of
    them; relative: to the largest finite value of both."""

    key: str
    what: str
    elements: int = 0
    total: int = 0
    largest: float = 0.0
    relative: float = 0.0


def difference(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> list[Difference]:
    """What differs between two checkpoints, in order of keys, nothing where they hold the same.

    one, other: step folders, or run_dirs, of which the latest is taken. Both are read and checked, a tensor at a time.
    Raises CheckpointError for what is no checkpoint or damaged.
    """
    files = Files()
    with contextlib.ExitStack() as held:
        folders = [held.enter_context(reading(files, Path(path), step=None, tag=None)) for path in (one, other)]
        return _difference(files, folders)


def _difference(files: Files, folders: list[Path]) -> list[Difference]:
    indices = [read_index(folder, files) for folder in folders]
    readers = [Reader(files, folder, index) for folder, index in zip(folders, indices, strict=True)]
    first, second = (index.tensors for index in indices)
    found = []
    for key in sorted(first.keys() | second.keys()):
        a, b = first.get(key), second.get(key)
        if a is None or b is None:
            found.append(Difference(key, f"only in {folders[a is None]}"))
        elif (a.dtype, tuple(a.shape)) != (b.dtype, tuple(b.shape)):
            found.append(Difference(key, f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"))
        else:
            values = [_read(reader, key, stored) for reader, stored in zip(readers, (a, b), strict=True)]
            found += _compare(key, *values)
    of_one, of_other = indices
    found += _plain(of_one.ties, of_other.ties, folders)
    return found + _plain(of_one.values, of_other.values, folders)


def _read(reader: Reader, key: str, stored: StoredTensor) -> Tensor:
    values = torch.empty(stored.shape, dtype=stored.torch_dtype, device="cpu")
    wanted = [Wanted(key, stored, held_of_place(key, values, None))]
    reader.check(wanted)
    reader.read(wanted)
    return values


def _compare(key: str, a: Tensor, b: Tensor) -> list[Difference]:
    raw = [value.reshape(-1).view(torch.uint8) for value in (a, b)]
    if torch.equal(*raw):
        return []
    kind = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.reshape(-1).to(kind), b.reshape(-1).to(kind)
    if a.is_floating_point() or a.is_complex():
        same = (x == y) | (x.isnan() & y.isnan())
    else:  # of whole numbers not all are float64
        same = (raw[0] == raw[1]).view(-1, a.dtype.itemsize).all(1)
    if same.all():
        return [Difference(key, "signs of zero or kinds of nan", 0, a.numel())]
    gap = _gap(a.reshape(-1)[~same], b.reshape(-1)[~same]) if a.dtype in _WIDE else (x - y)[~same].abs()
    gap = torch.where(gap.isnan(), float("inf"), gap)
    scale = max(float(value.abs().nan_to_num(0.0, 0.0, 0.0).max()) for value in (x, y))
    largest = float(gap.max())
    return [
        Difference(key, "values", int((~same).sum()), a.numel(), largest, largest / scale if scale else float("inf"))
    ]


def _gap(a: Tensor, b: Tensor) -> Tensor:
    """How far whole numbers of 64 bits are apart, their halves each by itself."""
    halves = [(value.view(torch.int64) >> 32, value.view(torch.int64) & _LOW) for value in (a, b)]
    (high, low), (other_high, other_low) = halves
    if a.dtype is torch.uint64:
        high, other_high = high & _LOW, other_high & _LOW
    return ((high - other_high) * 2.0**32 + (low - other_low)).abs()


def _plain(one: dict[str, Any], other: dict[str, Any], folders: list[Path]) -> list[Difference]:
    found = []
    for key in sorted(one.keys() | other.keys()):
        if key not in one or key not in other:
            found.append(Difference(key, f"only in {folders[key not in one]}"))
        else:
            found += _within(key, one[key], other[key], folders)
    return found


def _within(key: str, one: Any, other: Any, folders: list[Path]) -> list[Difference]:
    """What differs inside of two values: entries of dicts and of short lists each by itself."""
    if isinstance(one, dict) and isinstance(other, dict):
        a, b = ({f"{key}/{name}": value for name, value in held.items()} for held in (one, other))
        return _plain(a, b, folders)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other) <= _SHORT_LIST:
        pairs = enumerate(zip(one, other, strict=True))
        return [item for i, pair in pairs for item in _within(f"{key}/{i}", *pair, folders)]
    return [] if one == other else [Difference(key, f"{_short(one)} and {_short(other)}")]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
