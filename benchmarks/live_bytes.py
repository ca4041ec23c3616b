"""Counts the bytes of tensors that are alive while something runs: of all that operations of torch made in it."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["SHARED", "LiveBytes"]

SHARED = ("/dev/shm", "/memfd")
"""How the names of files begin which are memory."""
_SMALL = 1 << 12


class LiveBytes(TorchDispatchMode):
    """now, most: bytes alive now, and at most so far; largest: bytes of the largest tensor made.

    Mapped files do not count. shared: whether memory that processes share counts.
    """

    def __init__(self, *, shared: bool = True) -> None:
        super().__init__()
        self.largest, self._shared = 0, shared
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if type(x) in (Tensor, nn.Parameter) and not x.is_meta:
                self._note(x.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        size = 0 if _is_mapped(storage, self._shared) else storage.nbytes()
        self._seen.add(key)
        self.largest = max(self.largest, size)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def _is_mapped(storage: torch.UntypedStorage, shared_counts: bool) -> bool:
    """Whether a storage of some size is part of a file on disk: the kernel holds as much of it as it has room for."""
    if storage.nbytes() < _SMALL:
        return False
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *path = line.split()
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= storage.data_ptr() < last:
            return inode != "0" and not (shared_counts and path[0].startswith(SHARED))
    return False
