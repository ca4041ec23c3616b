"""Cutting a batch into micro-batches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from whale_torch.errors import LayoutError
from whale_torch.strategies.outputs import map_tensors, tensors_in

__all__ = ["MicroBatches", "micro_batches"]

Call = tuple[tuple[Any, ...], dict[str, Any]]


class MicroBatches:
    """The calls of the micro-batches that one call of the model is cut into, and the rows of each."""

    def __init__(self, calls: list[Call], rows: list[int]):
        self.calls, self.rows = calls, rows

    def __len__(self) -> int:
        return len(self.calls)


def micro_batches(args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, number: int, dim: int) -> MicroBatches:
    """At most `number` parts of nearly equal rows, along `dim` of every tensor that has as many there as the batch.

    Raises LayoutError for a batch without samples, and for an input that wants a gradient.
    """
    for x in tensors_in((args, kwargs)):
        if x.requires_grad:
            raise LayoutError(
                f"an input of a pipeline, of shape {tuple(x.shape)}, wants a gradient.",
                fix="pass it detached, or make it inside the first stage",
            )
    if rows == 0:
        raise LayoutError(
            "a pipeline was called with a batch of 0 samples.", fix="feed every pipeline one sample at least"
        )
    number = min(number, rows)
    sizes = [rows // number + (part < rows % number) for part in range(number)]
    starts = [sum(sizes[:part]) for part in range(number)]

    def cut(start: int, size: int) -> Call:
        def one(x: Tensor) -> Tensor:
            return x.narrow(dim, start, size) if x.dim() > dim and x.shape[dim] == rows else x

        found: Call = map_tensors((args, kwargs), one)
        return found

    return MicroBatches([cut(start, size) for start, size in zip(starts, sizes, strict=True)], sizes)
