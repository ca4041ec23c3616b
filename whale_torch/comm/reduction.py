"""How one flat buffer of gradients is averaged over the ranks that hold a copy: flat or in two levels, in full or half precision."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from whale_torch import ops
from whale_torch.comm.collectives import all_reduce, all_reduce_async, gather_equal, reduce_scatter_equal
from whale_torch.mesh import Group

__all__ = ["Pending", "Reduction", "TwoLevels"]

_FP16_TOP = 32768.0


@dataclass(frozen=True)
class TwoLevels:
    """The ranks of one node, and the ranks at the same place on all nodes."""

    inside: Group
    between: Group


@dataclass
class Pending:
    """A reduction under way; wait() returns the factor that turns the buffer into the mean."""

    wait: Callable[[], float]


class Reduction:
    """Averages flat buffers over `copies`.

    wire: dtype on the wire, None for the gradients' own. levels: reduce inside nodes first. fp16 is scaled by the
    buffer's largest value over all ranks, so that no sum overflows.
    """

    def __init__(self, copies: Group, *, wire: torch.dtype | None = None, levels: TwoLevels | None = None):
        self.copies, self.wire, self.levels = copies, wire, levels
        self._free: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}
        # work of several phases runs on one thread in order; one phase needs none
        several = levels is not None or wire is torch.float16
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="whale-reduce") if several else None

    def buffer(self, num_elements: int, like: torch.Tensor) -> torch.Tensor:
        """A flat buffer of the wire's dtype, padded so that every rank of a level owns an equal part."""
        pad = self.levels.inside.size if self.levels else 1
        num_elements = -(-num_elements // pad) * pad
        key = (num_elements, self.wire or like.dtype, like.device)
        free = self._free.get(key)
        return free.pop() if free else torch.zeros(key[0], dtype=key[1], device=key[2])

    def give_back(self, flat: torch.Tensor) -> None:
        """Keeps a buffer for the next bucket of its size."""
        self._free.setdefault((flat.numel(), flat.dtype, flat.device), []).append(flat)

    def start(self, grads: list[torch.Tensor], offsets: list[int], flat: torch.Tensor, num_elements: int, flags: torch.Tensor) -> Pending:
        """Packs the gradients and the flags behind them into `flat` and begins its reduction."""
        if self._thread is None:
            self._pack(grads, offsets, flat, num_elements, flags, 1.0)
            wait = all_reduce_async(flat, self.copies, name="gradient all-reduce")

            def finish() -> float:
                wait()
                return 1.0 / self.copies.size

            return Pending(finish)
        future: Future[float] = self._thread.submit(self._phases, grads, offsets, flat, num_elements, flags)
        return Pending(future.result)

    def _pack(self, grads: list[torch.Tensor], offsets: list[int], flat: torch.Tensor, num_elements: int, flags: torch.Tensor, scale: float) -> None:
        if grads:
            ops.bucket_pack(grads, offsets, flat, scale)
        flat[num_elements : num_elements + flags.numel()] = flags.to(flat.device, flat.dtype)

    @torch.no_grad()
    def _phases(self, grads: list[torch.Tensor], offsets: list[int], flat: torch.Tensor, num_elements: int, flags: torch.Tensor) -> float:
        scale = 1.0
        if flat.dtype is torch.float16:
            scale = self._shared_scale(grads, flat.device)
        self._pack(grads, offsets, flat, num_elements, flags, scale)
        if self.levels is None:
            all_reduce(flat, self.copies, name="gradient all-reduce")
        else:
            part = reduce_scatter_equal(flat, self.levels.inside, name="gradient reduce-scatter")
            all_reduce(part, self.levels.between, name="gradient all-reduce between nodes")
            flat.copy_(gather_equal(part, self.levels.inside, name="gradient all-gather").view(-1))
        return 1.0 / (scale * self.copies.size)

    def _shared_scale(self, grads: list[torch.Tensor], device: torch.device) -> float:
        """A power of two that keeps the sum of all ranks' largest values inside fp16; equal on all ranks."""
        top = ops.bucket_amax(grads).reshape(1) if grads else torch.zeros(1, device=device)
        top = all_reduce(top, self.copies, op=dist.ReduceOp.MAX, name="largest gradient")
        largest = float(top)
        if not 0.0 < largest < float("inf"):
            return 1.0
        return float(2.0 ** torch.tensor(_FP16_TOP / (largest * self.copies.size)).log2().floor().clamp(-60, 60))
