"""Tensors that are read when they are used: copied into memory, they are read there, and nothing else is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from whale_torch.checkpoint.boxes import Box, blocks
from whale_torch.checkpoint.formats.source import Entry, inside
from whale_torch.checkpoint.index import CHUNK_BYTES
from whale_torch.comm.cut_tensor import CutTensor
from whale_torch.comm.registry import ParameterPlace

__all__ = ["Unread", "UnreadPart"]

Boxes = Sequence[tuple[Box, Box]]


class Unread(Tensor):
    """A tensor of a source, or boxes of one laid out as a part: `copy_` reads it into another, in place, chunk by chunk
    where the other is no plain memory of its dtype. narrow, split and iteration read nothing; all else reads all of it.
    """

    _entry: Entry
    _boxes: Boxes  # of the entry, and where each lies here

    @staticmethod
    def of(entry: Entry) -> Unread:
        """All of an entry."""
        whole = Box.whole(entry.shape)
        return Unread.laid_out(entry, ((whole, whole),), entry.shape)

    @staticmethod
    def laid_out(entry: Entry, boxes: Boxes, shape: Sequence[int]) -> Unread:
        """Boxes of an entry as a tensor of another shape; boxes: of the entry, and where each lies in that."""
        made: Unread = torch.empty(tuple(shape), dtype=entry.dtype, device="meta").as_subclass(Unread)
        made._entry, made._boxes, made._shape = entry, tuple(boxes), tuple(shape)
        return made

    _shape: tuple[int, ...]

    @property
    def entry(self) -> Entry:
        return self._entry

    def read(self) -> Tensor:
        """All of it, in memory."""
        found = torch.empty(self._shape, dtype=self._entry.dtype, device="cpu")
        self.read_into(found)
        return found

    @torch.no_grad()
    def read_into(self, goal: Tensor) -> None:
        """Reads it into a tensor of its shape, of any dtype and device."""
        goal = goal.detach().as_subclass(Tensor)
        if goal.is_meta:
            return
        plain = goal.device.type == "cpu" and goal.dtype == self._entry.dtype
        most = max(1, CHUNK_BYTES // self._entry.dtype.itemsize)
        for box, local in self._boxes:
            if not box.numel:
                continue
            view = inside(goal, local).view(box.size)
            if plain and view.is_contiguous():
                self._entry.fill(box, view)
                continue
            for chunk in blocks(box, most):
                here = Box(tuple(c - b for c, b in zip(chunk.start, box.start, strict=True)), chunk.size)
                inside(view, here).copy_(self._entry.read(chunk))
        torch.autograd.graph.increment_version(goal)

    def _narrow(self, dim: int, start: int, length: int) -> Unread:
        ((box, _),) = self._boxes
        dim = dim % len(self._shape)
        at = dim + len(box.size) - len(self._shape)  # dims in front have been selected from
        begin, size = list(box.start), list(box.size)
        begin[at], size[at] = begin[at] + start, length
        shape = (*self._shape[:dim], length, *self._shape[dim + 1 :])
        return Unread.laid_out(self._entry, ((Box(tuple(begin), tuple(size)), Box.whole(shape)),), shape)

    def _rows(self) -> list[Unread]:
        rows = [self._narrow(0, row, 1) for row in range(self._shape[0])]
        shape = self._shape[1:]
        return [Unread.laid_out(row._entry, ((row._boxes[0][0], Box.whole(shape)),), shape) for row in rows]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is Tensor.copy_ and isinstance(args[1], Unread) and isinstance(first, Tensor):
            args[1].read_into(first)
            return first
        if isinstance(first, Unread):
            if func in _KNOWN:
                return _KNOWN[func](first)
            if func is Tensor.size:
                shape = torch.Size(first._shape)
                return shape[args[1]] if len(args) > 1 else shape
            if func is Tensor.narrow:
                return first._narrow(*args[1:], **kwargs)
            if func is Tensor.split and isinstance(args[1], int) and (*args[2:], *kwargs.values()) in ((), (0,)):
                rows, step = first._shape[0], args[1]
                return tuple(first._narrow(0, at, min(step, rows - at)) for at in range(0, rows, step))
            if func is Tensor.__iter__:
                return iter(first._rows())
        return func(*(_read(one) for one in args), **{key: _read(one) for key, one in kwargs.items()})


class UnreadPart(CutTensor):
    """This rank's part of a cut parameter, in a source; `part` is unread."""

    _unread: Unread

    @staticmethod
    def at(entry: Entry, boxes: Boxes, shape: Sequence[int], place: ParameterPlace) -> UnreadPart:
        made: UnreadPart = torch.empty(tuple(shape), dtype=entry.dtype, device="meta").as_subclass(UnreadPart)
        made._place, made._unread = place, Unread.laid_out(entry, boxes, shape)
        return made

    def part(self) -> Tensor:
        return self._unread


def _read(value: Any) -> Any:
    if isinstance(value, Unread):
        return value.read()
    if isinstance(value, tuple | list):
        return type(value)(_read(one) for one in value)
    return value


def _numel(one: Unread) -> int:
    return Box.whole(one._shape).numel


_FIELDS: dict[Any, Callable[[Unread], Any]] = {
    Tensor.shape: lambda one: torch.Size(one._shape),
    Tensor.dtype: lambda one: one._entry.dtype,
    Tensor.layout: lambda one: torch.strided,
    Tensor.device: lambda one: torch.device("meta"),
    Tensor.is_meta: lambda one: False,
    Tensor.requires_grad: lambda one: False,
    Tensor.ndim: lambda one: len(one._shape),
    Tensor.nbytes: lambda one: _numel(one) * one._entry.dtype.itemsize,
}
_KNOWN: dict[Any, Callable[[Unread], Any]] = {field.__get__: answer for field, answer in _FIELDS.items()} | {
    Tensor.dim: lambda one: len(one._shape),
    Tensor.numel: _numel,
    Tensor.element_size: lambda one: one._entry.dtype.itemsize,
    Tensor.is_contiguous: lambda one: False,
    Tensor.detach: lambda one: one,
    Tensor.resolve_conj: lambda one: one,
    Tensor.resolve_neg: lambda one: one,
    Tensor.cpu: Unread.read,
    Tensor.__len__: lambda one: one._shape[0],
}
