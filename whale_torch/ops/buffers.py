"""Memory of large CPU tensors that is used again: fresh memory costs a page fault for every 4 KB of it.

A buffer is free again when no tensor, view or graph holds it, so a layer that runs several times before its backward
(micro-batches, layers of one size, a checkpoint's second forward) has as many as it needs and no more.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections import OrderedDict, deque

import torch
from torch import Tensor, nn

__all__ = ["BufferPool", "empty"]

_LEAST_BYTES = 1 << 17  # what is smaller is left to torch, whose allocator keeps it warm
_SPARE = 1.25  # memory held over the most that was ever in use at a time


class BufferPool:
    """Memory that tensors borrow.

    in_use, idle: bytes that tensors hold, and bytes kept for those to come.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: OrderedDict[int, list[mmap.mmap]] = OrderedDict()  # by size, that which was used last at the end
        self._returned: deque[mmap.mmap] = deque()
        self._lent: dict[int, weakref.ref[memoryview]] = {}
        self.in_use = self.idle = self._most = 0

    def empty(self, num_bytes: int) -> Tensor:
        """[num_bytes] of uint8, undefined. Raises OSError where the system has no such memory."""
        memory = self._take(_rounded(num_bytes))
        lease = memoryview(memory)
        key = id(lease)
        # Called wherever the last tensor dies, in any thread, and perhaps while this one holds the lock.
        self._lent[key] = weakref.ref(lease, lambda _, m=memory: self._end(key, m))  # type: ignore[misc]
        return torch.frombuffer(lease, dtype=torch.uint8, count=num_bytes)

    def _take(self, size: int) -> mmap.mmap:
        with self._lock:
            self._take_back()
            in_use = self.in_use + size
            most = max(self._most, in_use)
            if free := self._free.get(size):
                memory = free.pop()
                self.idle -= size
            else:
                self._drop(int(most * _SPARE) - in_use)
                memory = self._fresh(size)
            self.in_use, self._most = in_use, most
        return memory

    def _fresh(self, size: int) -> mmap.mmap:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            return mmap.mmap(-1, size, flags=flags)
        except OSError:
            self._drop(0)
            return mmap.mmap(-1, size, flags=flags)

    def _end(self, key: int, memory: mmap.mmap) -> None:
        del self._lent[key]
        self._returned.append(memory)

    def _take_back(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            size = len(memory)
            self._free.setdefault(size, []).append(memory)
            self._free.move_to_end(size)
            self.in_use -= size
            self.idle += size

    def _drop(self, most: int) -> None:
        """Gives memory that nobody used for long to the system, until at most so many bytes are idle."""
        for size in list(self._free):
            kept = self._free[size]
            while kept and self.idle > most:
                kept.pop()
                self.idle -= size
            if not kept:
                del self._free[size]


def _rounded(num_bytes: int) -> int:
    """To an eighth of a power of two, so that sizes which differ a little share their buffers."""
    step = max(1 << (num_bytes - 1).bit_length() - 4, mmap.PAGESIZE)
    return -(-num_bytes // step) * step


_POOL = BufferPool()


def empty(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of another's device, and dtype by default, undefined; large ones of the CPU lie in memory used again.

    It cannot be resized, and is for what a layer needs inside.
    """
    dtype = like.dtype if dtype is None else dtype
    num_bytes = math.prod(shape) * dtype.itemsize
    plain = type(like) in (Tensor, nn.Parameter) and like.device.type == "cpu"
    if not plain or num_bytes < _LEAST_BYTES or torch.compiler.is_compiling():
        return like.new_empty(shape, dtype=dtype)
    try:
        lent = _POOL.empty(num_bytes)
    except OSError:
        return like.new_empty(shape, dtype=dtype)  # or torch's own words of what is missing
    return lent.view(dtype).view(shape).data  # no view to autograd, which refuses to change one in place
