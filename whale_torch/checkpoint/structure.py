"""Whether an index makes sense: what a right checksum does not tell of a text that someone wrote or changed by hand."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from whale_torch.checkpoint.boxes import Box, overlap
from whale_torch.checkpoint.values import KINDS
from whale_torch.errors import CheckpointError

__all__ = ["check_structure", "check_values", "is_group"]

_FILE = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)
_MOST = 1 << 63  # elements that an address can tell apart
_Extent = tuple[int, int, str]  # of a file: from, to, of which tensor


class _Wrong(Exception):
    """What is wrong with one entry."""


def check_structure(data: Any, path: object, chunk_bytes: int) -> None:
    """Raises CheckpointError, naming the index and the entry, for what no save writes.

    data: of an index, as JSON gives it. chunk_bytes: of a piece under one checksum.
    """
    entry = "the index"
    try:
        _check_head(data, chunk_bytes)
        extents: dict[str, list[_Extent]] = defaultdict(list)
        for entry, stored in data["files"].items():
            _check_file(entry, stored)
        for entry, stored in data["tensors"].items():
            for file, extent in _check_tensor(entry, stored, data["files"], chunk_bytes):
                extents[file].append(extent)
        for entry in extents:
            _check_apart(extents[entry])
        for entry, first in data["ties"].items():
            _check_tie(entry, first, data["tensors"])
        for entry, value in data["values"].items():
            _check_value(entry, value, data["tensors"])
            _check_own(entry, value)
    except _Wrong as error:
        raise CheckpointError(
            f"{path} is no index that is written here: '{entry}' {error}.", fix="load another checkpoint"
        ) from None


def check_values(values: Mapping[str, Any], ties: Mapping[str, Any], tensors: Mapping[str, Any], path: object) -> None:
    """The same for what a file of another form says of them."""
    entry = "its index"
    try:
        for entry, first in ties.items():
            _check_tie(entry, first, tensors)
        for entry, value in values.items():
            _check_value(entry, value, tensors)
            _check_own(entry, value)
    except _Wrong as error:
        raise CheckpointError(f"{path} cannot be right: '{entry}' {error}.", fix="give another checkpoint") from None


def _check_head(data: Any, chunk_bytes: int) -> None:
    _need(isinstance(data, dict), "is no object")
    for key, kind in (("tensors", dict), ("files", dict), ("ties", dict), ("values", dict), ("id", str)):
        _need(isinstance(data.get(key), kind), f"has no {key}")
    _need(_number(data.get("step")), f"has step {data.get('step')!r:.60}")
    found = data.get("chunk_bytes")
    _need(found == chunk_bytes, f"has chunks of {found!r:.60} bytes, and {chunk_bytes} are read here")


def _check_file(name: str, stored: Any) -> None:
    _need(_FILE.fullmatch(name) is not None, "is no name of a file in the checkpoint's folder")
    _need(_numbers(stored, 3), "has no sizes and checksum")
    num_bytes, header_bytes, checksum = stored
    _need(8 <= header_bytes <= num_bytes < _MOST, f"has {num_bytes} bytes, {header_bytes} of them its header")
    _need(checksum < 1 << 32, f"has checksum {checksum}")


def _check_tensor(key: str, stored: Any, files: Mapping[str, Any], chunk_bytes: int) -> Iterator[tuple[str, _Extent]]:
    """The part of a file that each piece takes."""
    _need(isinstance(stored, dict) and stored.keys() == {"dtype", "shape", "pieces"}, "is no tensor")
    dtype, shape, pieces = stored["dtype"], stored["shape"], stored["pieces"]
    known = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(known, torch.dtype):
        raise _Wrong(f"has dtype {dtype!r:.60}, which this torch does not know")
    if not (_numbers(shape) and math.prod(n or 1 for n in shape) < _MOST):
        raise _Wrong(f"has shape {shape!r:.80}")
    _need(isinstance(pieces, list), "has no pieces")
    boxes = []
    for number, piece in enumerate(pieces):
        try:
            box = _box_of(piece, shape)
            size = box.numel * known.itemsize
            yield piece["file"], _extent(key, piece, size, files, chunk_bytes)
        except _Wrong as error:
            raise _Wrong(f"has piece {number}, which {error}") from None
        boxes.append(box)
    _check_covers(boxes, shape)


def _box_of(piece: Any, shape: Sequence[int]) -> Box:
    _need(isinstance(piece, dict) and piece.keys() == {"file", "offset", "box", "checksums"}, "is none")
    box, dims = piece["box"], len(shape)
    if not (isinstance(box, list) and len(box) == 2 and _numbers(box[0], dims) and _numbers(box[1], dims)):
        raise _Wrong(f"has box {box!r:.80} of shape {list(shape)!r:.80}")
    for a, n, whole in zip(*box, shape, strict=True):
        if a + n > whole:
            raise _Wrong(f"reaches beyond shape {list(shape)!r:.80}: box {box!r:.80}")
    return Box.from_json(box)


def _extent(key: str, piece: Any, size: int, files: Mapping[str, Any], chunk_bytes: int) -> _Extent:
    file, offset, checksums = piece["file"], piece["offset"], piece["checksums"]
    if not (isinstance(file, str) and file in files):
        raise _Wrong(f"lies in {file!r:.80}, which is none of the checkpoint's files")
    num_bytes, header_bytes, _ = files[file]
    if not (_number(offset) and header_bytes <= offset <= offset + size <= num_bytes):
        raise _Wrong(
            f"lies at {offset!r:.60} with {size} bytes, and {file} has {num_bytes}, {header_bytes} of them its header"
        )
    if not (_numbers(checksums) and max(checksums, default=0) < 1 << 32):
        raise _Wrong("has checksums that are none")
    wanted = -(-size // chunk_bytes)
    if len(checksums) != wanted and (size or checksums != [0]):
        raise _Wrong(f"has {len(checksums)} checksums for {wanted} chunks")
    return offset, offset + size, key


def _check_covers(boxes: list[Box], shape: Sequence[int]) -> None:
    """That boxes make up a tensor, each element once."""
    whole, found = math.prod(shape), sum(box.numel for box in boxes)
    if whole != found:
        raise _Wrong(f"has pieces of {found} elements, and shape {list(shape)!r:.80}")
    if len(boxes) < 2:
        return
    dim = max(range(len(shape)), key=lambda d: len({box.start[d] for box in boxes}), default=None)
    if dim is None:
        return
    open_: list[Box] = []
    for box in sorted((box for box in boxes if box.numel), key=lambda box: box.start[dim]):
        open_ = [one for one in open_ if one.start[dim] + one.size[dim] > box.start[dim]]
        for one in open_:
            if overlap(one, box) is not None:
                raise _Wrong(f"has pieces that overlap: {one.to_json()!r:.80} and {box.to_json()!r:.80}")
        open_.append(box)


def _check_apart(spans: list[_Extent]) -> None:
    """That no bytes of a file belong to two pieces."""
    spans = sorted(span for span in spans if span[0] < span[1])
    for (_, end, one), (start, _, other) in itertools.pairwise(spans):
        _need(end <= start, f"has bytes of both '{one}' and '{other}'")


def _check_tie(key: str, first: Any, tensors: Mapping[str, Any]) -> None:
    _need(key not in tensors, f"is a tensor, and tied to {first!r:.80}")
    _need(isinstance(first, str) and first in tensors, f"is tied to {first!r:.80}, which is no tensor")


def _check_value(key: str, value: Any, tensors: Mapping[str, Any]) -> None:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            kind = one.get("__kind__", "dict")
            _need(isinstance(kind, str) and kind in KINDS, f"holds a value of kind {kind!r:.60}, which is not known")
            name = one.get("key")
            known = kind != "tensor" or (isinstance(name, str) and name in tensors)
            _need(known, f"holds the tensor {name!r:.80}, which the index does not have")
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _check_own(key: str, value: Any) -> None:
    """Values that a load itself reads."""
    if key == "by_rank":
        _need(isinstance(value, list) and all(isinstance(one, str) for one in value), "is no list of names")
    elif key == "feeds":
        pairs = isinstance(value, list) and all(_numbers(one, 2) and one[0] < one[1] for one in value)
        _need(pairs, "is no list of feeds")
    elif key.endswith("/groups") and key.startswith("optimizer/"):
        _need(isinstance(value, list) and all(map(is_group, value)), "has a group without parameters or options")


def is_group(one: Any) -> bool:
    """Whether it is what a save writes of a group of an optimizer."""
    if not isinstance(one, dict) or not isinstance(one.get("options"), dict) or "__kind__" in one["options"]:
        return False
    return isinstance(one.get("params"), list) and all(isinstance(name, str) for name in one["params"])


def _number(value: Any) -> bool:
    return type(value) is int and value >= 0


def _numbers(value: Any, count: int | None = None) -> bool:
    if not isinstance(value, list) or (count is not None and len(value) != count):
        return False
    for one in value:  # a generator takes twice as long, and an index is full of numbers
        if type(one) is not int or one < 0:
            return False
    return True


def _need(fact: object, otherwise: str) -> None:
    if not fact:
        raise _Wrong(otherwise)
