"""What a model is fed: how many samples, and a hash that tells whether two ranks were fed the same."""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from whale_torch.comm.call import Batch
from whale_torch.errors import LayoutError, PlanError
from whale_torch.strategies.outputs import is_array, leaves_in
from whale_torch.trace.sample_dims import BatchDim, Inputs

__all__ = ["BatchReader", "digest"]


class BatchReader:
    """Counts the samples in a model's arguments.

    batch_dim: a dim, read off the first tensor that has it; or (input name, dim or None) pairs, read off the inputs
    named. A list of tensors under a name counts its items, one a sample; items: whether it does, else its tensors have
    samples each. Where no input has a tensor, every feed weighs the same.
    Raises PlanError for a name that the model's forward does not take.
    """

    def __init__(self, model: nn.Module, batch_dim: BatchDim, *, items: bool = True):
        self._items = items
        self._dim = batch_dim if isinstance(batch_dim, int) else 0
        self._named = (
            None if isinstance(batch_dim, int) else tuple((name, dim) for name, dim in batch_dim if dim is not None)
        )
        self._model_name = type(model).__name__
        if not isinstance(batch_dim, int):
            self._check_names(model, [name for name, _ in batch_dim])

    def _check_names(self, model: nn.Module, names: list[str]) -> None:
        parameters = inspect.signature(model.forward).parameters
        self._inputs = Inputs(model)
        free = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        unknown = [name for name in names if name not in parameters and not free]
        if unknown or not self._named:
            raise PlanError(
                f"batch_dim={{...}} names {unknown or names}, but " + (
                    f"{self._model_name}.forward takes {list(parameters)}." if unknown else "gives none of them a dim."
                ),
                fix='name the inputs that count samples: wh.replica(batch_dim={"x": 0})',
            )  # fmt: skip

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, hashed: bool) -> Batch:
        """The batch in the arguments of one call. Raises LayoutError where the inputs named disagree."""
        rows, other = self._count_named(args, kwargs) if self._named is not None else self._count_first(args, kwargs)
        return Batch(rows, digest((args, kwargs) if kwargs else args) if hashed else 0, other)

    def _count_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
        dim = self._dim
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].dim() > dim:
            return args[0].shape[dim], 0
        sizes = [t.shape[dim] for t in _tensors((args, kwargs)) if t.ndim > dim]
        if not sizes:
            return 1, 0
        if dim:  # the user spoke of the first input; masks are often laid out otherwise
            return sizes[0], 0
        return sizes[0], next((size for size in sizes if size not in (1, sizes[0])), 0)

    def _count_named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
        found: dict[str, int] = {}
        given = dict(self._inputs.named(args, kwargs))
        for name, dim in self._named or ():
            size = _size(given.get(name), dim, items=self._items)
            if size is not None:
                found[name] = size
        if not found:
            raise LayoutError(
                f"{self._model_name} was called without a tensor for any of {[name for name, _ in self._named or ()]}, "
                "which count its samples.",
                fix="pass one of them, or name another input in batch_dim={...}",
            )
        if len(set(found.values())) > 1:
            raise LayoutError(
                f"the inputs that count samples disagree: {found}, along the dims {dict(self._named or ())}.",
                fix="check batch_dim={...} of wh.replica or wh.pipeline",
            )
        return next(iter(found.values())), 0


def _size(value: Any, dim: int | None, *, items: bool) -> int | None:
    if items and isinstance(value, list):
        return len(value)
    return next((t.shape[dim] for t in _tensors(value) if dim is not None and t.ndim > dim), None)


def _tensors(value: Any) -> Iterator[Any]:
    """Every tensor and numpy array."""
    return (leaf for leaf in leaves_in(value) if isinstance(leaf, Tensor) or is_array(leaf))


@functools.lru_cache(maxsize=64)
def _multipliers(num_words: int, device: torch.device) -> Tensor:
    """Odd random 64-bit numbers, the same on every rank."""
    generator = torch.Generator().manual_seed(0x5EED)
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (num_words,), generator=generator, device="cpu")
    return (words | 1).to(device)


_BLOCK = 1 << 15


def _words(x: Tensor) -> Iterator[Tensor]:
    """The bits of a tensor as 64-bit words, in pieces of one length but the last."""
    flat = x.detach().contiguous().view(-1)
    num_bytes = flat.numel() * flat.element_size()
    if num_bytes % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0:
        if num_bytes:
            yield from flat.view(torch.int64).split(_BLOCK)
        return
    padded = flat.new_zeros(-(-num_bytes // 8) * 8, dtype=torch.uint8)
    padded[:num_bytes] = flat.view(torch.uint8)
    yield from padded.view(torch.int64).split(_BLOCK)


@functools.lru_cache(maxsize=256)
def _form(shape: torch.Size, dtype: torch.dtype) -> int:
    return zlib.crc32(f"{tuple(shape)} {dtype}".encode())


def digest(inputs: Any) -> int:
    """A 63-bit hash of all tensors, arrays, numbers and texts in the inputs: of bits, their order, shapes and dtypes.

    0.1 ms for each MB on one CPU core; on another device it is computed there.
    """
    total = 0
    for leaf in leaves_in(inputs):
        if is_array(leaf):
            total = _mix(total, _digest_of_array(leaf))
            continue
        if not isinstance(leaf, Tensor):
            total = _mix(total, zlib.crc32(repr(leaf).encode()))
            continue
        total = _mix(total, _form(leaf.shape, leaf.dtype))
        if leaf.is_meta:  # no bits
            continue
        dense = leaf if leaf.layout is torch.strided else leaf.detach().to_dense()
        sums = [words.mul(_multipliers(words.numel(), words.device)).sum() for words in _words(dense)]
        for value in sums if len(sums) < 2 else torch.stack(sums).tolist():
            total = _mix(total, int(value))
    return total


def _digest_of_array(x: Any) -> int:
    """Of a numpy array: its bits, shape and dtype; of an array of objects what they print."""
    bits = repr(x.tolist()).encode() if x.dtype.hasobject else x.tobytes()
    return zlib.crc32(bits, zlib.crc32(f"{x.shape} {x.dtype.str}".encode()))


def _mix(total: int, value: int) -> int:
    return ((total ^ value) * 0x9E3779B97F4A7C15 + 1) & 0x7FFFFFFFFFFFFFFF
