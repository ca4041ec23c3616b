"""The index of a checkpoint: which tensors it has, and where each piece of them lies, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from whale_torch.checkpoint.boxes import Box
from whale_torch.checkpoint.structure import check_structure
from whale_torch.errors import CheckpointError

__all__ = [
    "CHUNK_BYTES", "FORMAT", "INDEX", "Chunk", "Index", "Piece", "StoredFile", "StoredTensor", "chunks_of",
    "dtype_name",
]  # fmt: skip

FORMAT = "whale_torch checkpoint 1"
INDEX = "index.json"
CHUNK_BYTES = 4 << 20
"""Bytes of a piece under one checksum."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor in a file: `offset` from its beginning, with a checksum for each chunk of its bytes."""

    file: str
    offset: int
    box: Box
    checksums: tuple[int, ...]

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Piece:
        return Piece(data["file"], data["offset"], Box.from_json(data["box"]), tuple(data["checksums"]))

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.file, "offset": self.offset, "box": self.box.to_json(), "checksums": list(self.checksums)
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a file that have a checksum: the `number`-th ones of a tensor's piece."""

    file: str
    offset: int
    size: int
    key: str
    number: int
    checksum: int


def chunks_of(key: str, piece: Piece, itemsize: int) -> Iterator[Chunk]:
    """The chunks of a piece of the tensor under a key, in order. itemsize: bytes of an element."""
    total = piece.box.numel * itemsize
    for number, expected in enumerate(piece.checksums):
        start = number * CHUNK_BYTES
        yield Chunk(piece.file, piece.offset + start, min(CHUNK_BYTES, total - start), key, number, expected)


@dataclass(slots=True)
class StoredTensor:
    """A tensor of a checkpoint: dtype by torch's name, shape of the whole, and the pieces that make it up."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Raises CheckpointError for one that this torch does not know."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise CheckpointError(f"a tensor has dtype '{self.dtype}', which this torch does not know.")
        return found


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file's bytes in all, those of its header, and the header's checksum; the header names the checkpoint."""

    num_bytes: int
    header_bytes: int
    checksum: int

    def to_json(self) -> list[int]:
        return [self.num_bytes, self.header_bytes, self.checksum]


@dataclass(slots=True)
class Index:
    """id: of this checkpoint, which its files name too. ties: further names of tensors. values: what is no tensor."""

    id: str
    step: int
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)

    def to_json(self) -> str:
        tensors = {
            key: {"dtype": one.dtype, "shape": one.shape, "pieces": [piece.to_json() for piece in one.pieces]}
            for key, one in self.tensors.items()
        }
        data = {"format": FORMAT, "chunk_bytes": CHUNK_BYTES, "id": self.id, "step": self.step, "tensors": tensors}
        files = {name: one.to_json() for name, one in self.files.items()}
        data |= {"ties": self.ties, "values": self.values, "files": files}
        return json.dumps(data, separators=(",", ":"))

    @staticmethod
    def from_json(text: str, path: object) -> Index:
        """Raises CheckpointError for what is no index."""
        try:
            data = json.loads(text)
            if data.get("format") != FORMAT:
                raise CheckpointError(
                    f"{path} is of format {data.get('format')!r}, and {FORMAT!r} is read here.",
                    fix="read it with the version that wrote it",
                )
            check_structure(data, path, CHUNK_BYTES)
            tensors = {
                key: StoredTensor(one["dtype"], tuple(one["shape"]), [Piece.from_json(p) for p in one["pieces"]])
                for key, one in data["tensors"].items()
            }
            files = {name: StoredFile(*one) for name, one in data["files"].items()}
            return Index(data["id"], data["step"], tensors, data["ties"], data["values"], files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{path} cannot be read as an index: {type(error).__name__}: {error!s:.200}."
            ) from error


def dtype_name(dtype: torch.dtype) -> str:
    """As an index writes it: "float32"."""
    return str(dtype).removeprefix("torch.")
