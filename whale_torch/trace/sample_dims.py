"""Which of a model's inputs have samples, and along which dim: one decision, on the whole batch, for all cutting."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from whale_torch.errors import LayoutError
from whale_torch.trace.graph import tensors_in

__all__ = ["BatchDim", "Dims", "Inputs", "SampleDims", "micro_batch_rows"]

BatchDim = int | tuple[tuple[str, int | None], ...]
Dims = tuple[int | None, ...]
"""Of the tensors of a call, in order, the dim along which each has samples; None for those that have none."""


def micro_batch_rows(rows: int, number: int) -> list[int]:
    """Samples of each micro-batch: at most `number` nearly equal parts, of one sample at least."""
    number = min(number, rows)
    return [rows // number + (part < rows % number) for part in range(number)]


class Inputs:
    """What a model's forward takes, by name; all that `*rest` takes is called rest."""

    def __init__(self, model: nn.Module):
        parameters = inspect.signature(model.forward).parameters.values()
        self._positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """The arguments of a call, in order."""
        number = len(self._positional)
        found = list(zip(self._positional, args, strict=False))
        if args[number:]:
            found.append((self._rest or f"argument {number}", args[number:]))
        return [*found, *kwargs.items()]

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with the name of its input, in order."""
        for name, value in self.named(args, kwargs):
            for x in tensors_in(value):
                yield name, x


class SampleDims:
    """Says so of every call of one model.

    batch_dim: a dim, along which every tensor as long as the batch has samples; or (input name, dim or None) pairs,
    that hold for all tensors of an input.
    """

    def __init__(self, model: nn.Module, batch_dim: BatchDim, *, where: str = ""):
        self._dim = batch_dim if isinstance(batch_dim, int) else 0
        self._named: Mapping[str, int | None] | None = None if isinstance(batch_dim, int) else dict(batch_dim)
        self._inputs = Inputs(model)
        self._where = where

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int) -> Dims:
        """The dims of a call with so many samples.

        Raises LayoutError for a tensor of an input that no name covers, and for one that is not as long as its name
        says.
        """
        if self._named is None:
            found = tensors_in((args, dict(kwargs)))
            return tuple(self._dim if x.dim() > self._dim and x.shape[self._dim] == rows else None for x in found)
        return tuple(self._named_dim(name, x, rows) for name, x in self._inputs.tensors(args, kwargs))

    def count(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Samples of the first tensor that has them; 1 where there is none."""
        for name, x in self._inputs.tensors(args, kwargs):
            dim = self._dim if self._named is None else self._named.get(name)
            if dim is not None and x.dim() > dim:
                return x.shape[dim]
        return 1

    def _named_dim(self, name: str, x: Tensor, rows: int) -> int | None:
        assert self._named is not None
        if name not in self._named:
            raise LayoutError(
                f"the input '{name}', of shape {tuple(x.shape)}, is not among those that batch_dim names "
                f"({', '.join(self._named)}), so whether it is cut into micro-batches is not said.",
                where=self._where,
                fix=f'add it, with the dim that counts samples, or None for one without: batch_dim={{"{name}": None}}',
            )
        dim = self._named[name]
        if dim is not None and (x.dim() <= dim or x.shape[dim] != rows):
            raise LayoutError(
                f"the input '{name}', of shape {tuple(x.shape)}, has not {rows} samples along dim {dim}, as batch_dim "
                "says.",
                where=self._where,
                fix="give the dim that counts samples, or None; in a list, every tensor has a row for each sample",
            )
        return dim
