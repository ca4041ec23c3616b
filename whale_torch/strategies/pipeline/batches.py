"""Cutting a batch into micro-batches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from whale_torch.errors import LayoutError
from whale_torch.strategies.outputs import is_array, leaves_in, map_tensors
from whale_torch.trace.graph import tensors_in

__all__ = ["MicroBatches", "micro_batches"]

Call = tuple[tuple[Any, ...], dict[str, Any]]


class MicroBatches:
    """One call of the model, cut along `dim` of every tensor that has as many entries there as the batch.

    rows: of each micro-batch. inputs: its tensors, in the order of a recording's. which: of these those that are cut.
    """

    def __init__(self, call: Call, rows: list[int], dim: int):
        self.rows = rows
        self._call, self._dim, self._all = call, dim, sum(rows)
        self.which = [self._has_rows(x) for x in tensors_in(call)]
        columns = [self._cut(x) for x in tensors_in(call)]
        self.inputs = [[column[number] for column in columns] for number in range(len(rows))]

    def call(self, rows: int) -> Call:
        """A call of the model like that of a micro-batch of so many rows."""

        def first(x: Tensor) -> Tensor:
            return x.narrow(self._dim, 0, rows) if self._has_rows(x) else x

        found: Call = map_tensors(self._call, first)
        return found

    def _has_rows(self, x: Tensor) -> bool:
        return x.dim() > self._dim and x.shape[self._dim] == self._all

    def _cut(self, x: Tensor) -> list[Tensor]:
        return list(x.split(self.rows, self._dim)) if self._has_rows(x) else [x] * len(self.rows)


def micro_batches(args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, number: int, dim: int) -> MicroBatches:
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
    number = min(number, rows)
    cut = MicroBatches((args, kwargs), [rows // number + (part < rows % number) for part in range(number)], dim)
    if not any(cut.which):
        raise LayoutError(
            f"a pipeline was called without a tensor that has samples along dim {dim}: there is nothing to cut into "
            "micro-batches.",
            fix="pass the batch to the model, as a tensor with one row for each sample",
        )
    return cut


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
