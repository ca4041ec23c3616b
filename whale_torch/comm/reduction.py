"""How one flat buffer of gradients is averaged over the ranks with a copy: flat or in two levels, in full or half precision."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.distributed as dist

from whale_torch import ops
from whale_torch.comm.collectives import (
    all_reduce,
    all_reduce_async,
    all_to_all_rows,
    gather_equal,
    reduce_scatter_equal,
)
from whale_torch.mesh import Group

__all__ = ["Packed", "Reduction", "Staging", "TwoLevels"]

_FP16_TOP = 32768.0
_RING_RANKS = 3
"""Up to here half precision is summed where it passes by; above, each rank sums its part in float32."""


@dataclass(frozen=True)
class TwoLevels:
    """The ranks of one node, and the ranks at the same place on all nodes."""

    inside: Group
    between: Group


@dataclass(frozen=True, slots=True)
class Packed:
    """What goes into one buffer: gradients at their offsets and, from `num_elements` on, the flags."""

    grads: list[torch.Tensor]
    offsets: list[int]
    num_elements: int
    flags: torch.Tensor


class Staging:
    """Buffers of one size, made when first needed and used again; `allocated` of them exist."""

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device):
        self._num_elements, self._dtype, self._device = num_elements, dtype, device
        self._free: list[torch.Tensor] = []
        self.allocated = 0

    def take(self) -> torch.Tensor:
        if self._free:
            return self._free.pop()
        self.allocated += 1
        return torch.zeros(self._num_elements, dtype=self._dtype, device=self._device)

    def give_back(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)


class _Worker:
    """One thread that runs work of several phases in the order it came; it never keeps a failed process alive."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[float], Callable[[], float]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name="whale-reduce", daemon=True).start()

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            try:
                future.set_result(work())
            except BaseException as error:  # whatever it is, the thread that waits raises it
                future.set_exception(error)

    def run(self, work: Callable[[], float]) -> Callable[[], float]:
        future: Future[float] = Future()
        self._queue.put((future, work))
        return future.result

    def close(self) -> None:
        self._queue.put(None)


class Reduction:
    """Averages flat buffers over `copies`.

    wire: dtype on the wire, None for the gradients' own. levels: reduce inside nodes first. fp16 is scaled by the
    largest gradient of all ranks, so that no sum overflows and small gradients survive.
    """

    def __init__(self, copies: Group, *, wire: torch.dtype | None = None, levels: TwoLevels | None = None):
        self.copies, self.wire, self.levels = copies, wire, levels
        half = wire in (torch.float16, torch.bfloat16)
        self._summed_wide = half and levels is None and copies.size > _RING_RANKS
        # work of several phases runs on one thread in order; one phase needs none
        self._worker = _Worker() if levels is not None or self._summed_wide or wire is torch.float16 else None

    def staging(self, num_elements: int, like: torch.Tensor) -> Staging:
        """Buffers for up to num_elements values and flags, in the wire's dtype."""
        dtype = self.wire or (like.real.dtype if like.is_complex() else like.dtype)
        return Staging(self._padded(num_elements), dtype, like.device)

    def _padded(self, num_elements: int) -> int:
        """So many that every rank of a level owns an equal part."""
        parts = self.levels.inside.size if self.levels else self.copies.size if self._summed_wide else 1
        return -(-num_elements // parts) * parts

    def start(self, buffer: torch.Tensor, packed: Packed) -> Callable[[], float]:
        """Packs into the buffer and begins to reduce it.

        The returned function waits and gives the factor that turns the buffer into the mean.
        """
        flat = buffer.narrow(0, 0, self._padded(packed.num_elements + packed.flags.numel()))
        if self._worker is not None:
            return self._worker.run(lambda: self._phases(flat, packed))
        _pack(flat, packed, 1.0)
        wait = all_reduce_async(flat, self.copies, name="gradient all-reduce")

        def finish() -> float:
            wait()
            return 1.0 / self.copies.size

        return finish

    def close(self) -> None:
        """Ends the thread, if there is one."""
        if self._worker is not None:
            self._worker.close()

    @torch.no_grad()
    def _phases(self, flat: torch.Tensor, packed: Packed) -> float:
        scale = self._shared_scale(packed.grads, flat.device) if flat.dtype is torch.float16 else 1.0
        _pack(flat, packed, scale)
        if self.levels is not None:
            part = reduce_scatter_equal(flat, self.levels.inside, name="gradient reduce-scatter")
            all_reduce(part, self.levels.between, name="gradient all-reduce between nodes")
            flat.copy_(gather_equal(part, self.levels.inside, name="gradient all-gather").view(-1))
        elif self._summed_wide:
            self._sum_wide(flat)
        else:
            all_reduce(flat, self.copies, name="gradient all-reduce")
        return 1.0 / (scale * self.copies.size)

    def _sum_wide(self, flat: torch.Tensor) -> None:
        """Two roundings whatever the number of ranks: the parts travel, are added in float32, and travel back."""
        size = self.copies.size
        share = [flat.numel() // size] * size
        parts = all_to_all_rows(flat, share, share, self.copies, name="gradient all-to-all").view(size, -1)
        total = parts.sum(0, dtype=torch.float32).to(flat.dtype)
        flat.copy_(gather_equal(total, self.copies, name="gradient all-gather").view(-1))

    def _shared_scale(self, grads: list[torch.Tensor], device: torch.device) -> float:
        """A power of two that keeps the sum of all ranks' largest values inside fp16; equal on all ranks."""
        top = ops.bucket_amax(grads).reshape(1) if grads else torch.zeros(1, device=device)
        top = all_reduce(top, self.copies, op=dist.ReduceOp.MAX, name="largest gradient")
        largest = float(top)
        if not 0.0 < largest < float("inf"):
            return 1.0
        exponent = torch.tensor(_FP16_TOP / self.copies.size, dtype=torch.float64).log2() - torch.tensor(largest, dtype=torch.float64).log2()
        return float(2.0 ** exponent.floor().clamp(-100, 100))


def _pack(flat: torch.Tensor, packed: Packed, scale: float) -> None:
    if packed.grads:
        ops.bucket_pack(packed.grads, packed.offsets, flat, scale)
    flat[packed.num_elements : packed.num_elements + packed.flags.numel()] = packed.flags
