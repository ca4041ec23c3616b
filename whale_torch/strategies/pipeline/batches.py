"""Cutting a batch into micro-batches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from whale_torch.errors import LayoutError
from whale_torch.strategies.outputs import is_array, leaves_in
from whale_torch.trace.graph import map_leaves, tensors_in
from whale_torch.trace.sample_dims import Dims, micro_batch_rows

__all__ = ["MicroBatches", "micro_batches"]

Call = tuple[tuple[Any, ...], dict[str, Any]]


class MicroBatches:
    """One call of the model, each tensor cut along its dim of samples.

    rows: of each micro-batch. inputs: its tensors, in the order of a recording's.
    """

    def __init__(self, call: Call, rows: list[int], dims: Dims):
        self.rows = rows
        self._call, self._dims = call, dims
        columns = [self._cut(x, dim) for x, dim in zip(tensors_in(call), dims, strict=True)]
        self.inputs = [[column[number] for column in columns] for number in range(len(rows))]

    def call(self, rows: int) -> Call:
        """A call of the model like that of a micro-batch of so many rows."""

        dims = iter(self._dims)

        def first(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            dim = next(dims)
            return x if dim is None else x.narrow(dim, 0, rows)

        found: Call = map_leaves(self._call, first)
        return found

    def _cut(self, x: Tensor, dim: int | None) -> list[Tensor]:
        return [x] * len(self.rows) if dim is None else list(x.split(self.rows, dim))


def micro_batches(args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, number: int, dims: Dims) -> MicroBatches:
    """At most `number` parts of nearly equal rows.

    Raises LayoutError for a batch without samples, for an input that wants a gradient, and for what cannot be cut: an
    array of numpy, a tensor inside an object.
    """
    for value in (*args, *kwargs.values()):
        _check_reachable(value)
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
    if all(dim is None for dim in dims):
        raise LayoutError(
            "a pipeline was called without a tensor that has samples: there is nothing to cut into micro-batches.",
            fix="pass the batch to the model, as a tensor with one row for each sample",
        )
    return MicroBatches((args, kwargs), micro_batch_rows(rows, number), dims)


def _check_reachable(value: Any) -> None:
    """Raises LayoutError for an argument with arrays, or with tensors that a recording does not reach."""
    if isinstance(value, Tensor):
        return
    found = [x for x in leaves_in(value) if isinstance(x, Tensor) or is_array(x)]
    if any(map(is_array, found)):
        raise LayoutError(
            f"a pipeline was called with an array of numpy's, in a {type(value).__name__}.",
            fix="pass tensors: torch.from_numpy(array)",
        )
    if len(found) != len(list(tensors_in(value))):
        raise LayoutError(
            f"a pipeline was called with a {type(value).__name__} that holds tensors, which cannot be cut into "
            "micro-batches.",
            fix="pass the tensors themselves, or tuples, lists, dicts or dataclasses of them",
        )
