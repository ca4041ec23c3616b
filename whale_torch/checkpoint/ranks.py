"""What the ranks that save or load one model tell each other: plain data, and whether one of them failed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from whale_torch.comm.collectives import all_gather_rows, gather_equal
from whale_torch.errors import CheckpointError, first_line
from whale_torch.mesh import Group, Mesh
from whale_torch.strategies.runtime import KEY

__all__ = ["Ranks", "mesh_of"]

T = TypeVar("T")
_HEAD_BYTES = 1024  # of a message go with its length, as most have no more


class Ranks:
    """The ranks of a model; one process alone without a mesh. channel: of their messages, one for each thread."""

    def __init__(self, mesh: Mesh | None, channel: str = "checkpoint"):
        self._group: Group | None = None if mesh is None or mesh.world == 1 else mesh.everyone(channel=channel)
        self.index = 0 if self._group is None else self._group.index
        self.size = 1 if self._group is None else self._group.size

    def gather(self, data: Any) -> list[Any]:
        """What every rank tells, as JSON, in rank order."""
        if self._group is None:
            return [json.loads(json.dumps(data))]
        mine = torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8)
        head = torch.zeros(_HEAD_BYTES, dtype=torch.uint8, device="cpu")
        head[:8] = torch.tensor([len(mine)], device="cpu").view(torch.uint8)
        first = min(len(mine), _HEAD_BYTES - 8)
        head[8 : 8 + first] = mine[:first]
        name = "what ranks save or load"
        heads = gather_equal(head, self._group, name=name)
        sizes = heads[:, :8].contiguous().view(torch.int64).flatten().tolist()
        texts = [bytes(head[8 : 8 + size].numpy()) for head, size in zip(heads, sizes, strict=True)]
        more = [size - len(text) for size, text in zip(sizes, texts, strict=True)]
        if any(more):
            rest = all_gather_rows(mine[first:], more, self._group, name=name).split(more)
            texts = [text + bytes(data.numpy()) for text, data in zip(texts, rest, strict=True)]
        return [json.loads(text) for text in texts]

    def agree(self, what: str, asked: Mapping[str, Any]) -> None:
        """Raises CheckpointError, alike on all ranks, where they ask for different things."""
        single = {name: value.item() if getattr(value, "shape", None) == () else value for name, value in asked.items()}
        told = self.gather({name: repr(value) for name, value in single.items()})  # on whatever device a step is
        for name, first in told[0].items():
            for rank, other in enumerate(told):
                if other.get(name) != first:
                    raise CheckpointError(
                        f"{what}: {name} is {first} on rank 0 and {other.get(name)} on rank {rank}.",
                        fix="give the same on every rank",
                    )

    def together(self, what: str, run: Callable[[], Any]) -> list[Any]:
        """What `run` gives on every rank, plain data.

        Raises CheckpointError on all ranks alike where one of them failed; its own error is the cause there.
        """
        return self._outcomes(what, *_tried(run))

    def run(self, what: str, run: Callable[[], T]) -> T:
        """What `run` gives here; raises as `together`."""
        result, failed = _tried(run)
        self._outcomes(what, None, failed)
        return result  # type: ignore[return-value]

    def first(self, what: str, run: Callable[[], T]) -> T:
        """What `run` gives on the first rank, which alone runs it, plain data; raises as `together`."""
        found: T = self.together(what, run if self.index == 0 else lambda: None)[0]
        return found

    def _outcomes(self, what: str, result: Any, failed: Exception | None) -> list[Any]:
        told = self.gather([None if failed is None else self._told(failed), result])
        errors = [(rank, error) for rank, (error, _) in enumerate(told) if error is not None]
        if not errors:
            return [found for _, found in told]
        rank, (text, fix) = errors[0]
        others = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        place = "" if self.size == 1 else f" on rank {rank}{others}"
        raise CheckpointError(f"{what} failed{place}: {text}", fix=fix) from failed

    @staticmethod
    def _told(error: Exception) -> list[str | None]:
        if isinstance(error, CheckpointError):
            return [error.what, error.fix]
        return [f"{type(error).__name__}: {first_line(error)}", None]


def _tried(run: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return run(), None
    except Exception as error:
        return None, error


def mesh_of(model: nn.Module | None) -> Mesh | None:
    """The mesh of a parallelized model, None for another."""
    runtime: Any = None if model is None else model.__dict__.get(KEY)
    return getattr(runtime, "mesh", None)
