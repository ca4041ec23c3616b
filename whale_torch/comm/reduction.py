"""How one flat buffer of gradients is averaged over the ranks with a copy: in one or two levels, in any precision."""

from __future__ import annotations

import math
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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
from whale_torch.exits import failed
from whale_torch.mesh import Group, TwoLevels

__all__ = ["Packed", "Reduction", "Staging"]

_FP16_TOP = 32768.0
_RING_RANKS = 16
"""Up to here half precision is summed where it passes by, the faster way; above, each rank sums its part in float32."""


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


_STOP_S = 5.0
_Queue = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
T = TypeVar("T")


def _work(todo: _Queue) -> None:
    while (item := todo.get()) is not None:
        future, work = item
        try:
            future.set_result(work())
        except BaseException as error:  # whatever it is, the thread that waits raises it
            future.set_exception(error)
        del item, future, work  # else the thread would keep what asked for its last work, until the next


def _stop(todo: _Queue, thread: threading.Thread) -> None:
    """Ends the thread, and waits for its end: one that wakes while the interpreter goes aborts the process.

    After an error it may sit in a collective that nobody answers: then the process ends without it (exits.py).
    """
    todo.put(None)
    if not failed() and thread is not threading.current_thread():
        thread.join(_STOP_S)


class _Worker:
    """One thread that runs work of several phases in the order it came; it never keeps a failed process alive.

    On a GPU its work runs on a stream of its own, beside the backward pass.
    """

    def __init__(self) -> None:
        self._todo: _Queue = queue.SimpleQueue()
        self._stream: torch.cuda.Stream | None = None
        thread = threading.Thread(target=_work, args=(self._todo,), name="whale-reduce", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _stop, self._todo, thread)

    def run(self, work: Callable[[], T], device: torch.device) -> Callable[[], T]:
        """Begins; the returned function waits for the result, on a GPU with the stream on which it is called."""
        future: Future[T] = Future()
        if device.type != "cuda":
            self._todo.put((future, work))
            return future.result
        stream = self._stream = self._stream or torch.cuda.Stream(device)
        ready, done = torch.cuda.current_stream(device).record_event(), torch.cuda.Event()

        def on_stream() -> T:
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                result = work()
                done.record(stream)
            return result

        def finish() -> T:
            result = future.result()
            torch.cuda.current_stream(device).wait_event(done)
            return result

        self._todo.put((future, on_stream))
        return finish


class _Later(Generic[T]):
    """Work that is begun when somebody says so, or when its result is waited for."""

    def __init__(self, run: Callable[[], Callable[[], T]]):
        self._run = run
        self._wait: Callable[[], T] | None = None

    def begin(self) -> Callable[[], T]:
        self._wait = self._wait or self._run()
        return self._wait


class Reduction:
    """Averages flat buffers over `copies`.

    dtype: of what travels. levels: reduce inside nodes first; only what goes between nodes travels in half precision.
    A ring rounds half precision at every rank: the error (norm over norm) of 16 is 6e-3 in bfloat16, 7e-4 in float16.
    Above, sums are made in float32 and rounded twice, whatever the number of ranks. float16 is scaled by the largest
    gradient of all ranks, so that nothing overflows and small ones survive.
    """

    def __init__(self, copies: Group, dtype: torch.dtype, *, levels: TwoLevels | None = None):
        self.copies, self.dtype, self.levels = copies, dtype, levels
        self.groups = [copies] if levels is None else [copies, levels.inside, levels.between]
        self._half = dtype in (torch.float16, torch.bfloat16)
        outer = copies if levels is None else levels.between
        self._summed_wide = self._half and outer.size > _RING_RANKS
        # work of several phases runs on one thread in order, of two levels on one for each; one phase needs none
        self._inside = _Worker() if levels is not None else None
        self._worker = _Worker() if levels is not None or self._summed_wide or dtype is torch.float16 else None
        self._last: _Later[float] | None = None

    def staging(self, num_elements: int, device: torch.device) -> Staging:
        """Buffers for up to num_elements values and flags."""
        return Staging(self._padded(num_elements), torch.float32 if self.levels and self._half else self.dtype, device)

    def _padded(self, num_elements: int) -> int:
        """So many that every rank of a level owns an equal part."""
        parts = self.levels.inside.size if self.levels else 1
        if self._summed_wide:
            parts *= self.levels.between.size if self.levels else self.copies.size
        return -(-num_elements // parts) * parts

    def start(self, buffer: torch.Tensor, packed: Packed) -> Callable[[], float]:
        """Packs into the buffer and begins to reduce it.

        The returned function waits and gives the factor that turns the buffer into the mean.
        """
        flat = buffer.narrow(0, 0, self._padded(packed.num_elements + packed.flags.numel()))
        if self._worker is not None and self._inside is not None and self.levels is not None:
            return self._start_two_levels(flat, packed, self.levels, self._inside, self._worker)
        if self._worker is not None:
            return self._worker.run(lambda: self._phases(flat, packed), flat.device)
        _pack(flat, packed, 1.0)
        wait = all_reduce_async(flat, self.copies, name="gradient all-reduce")

        def finish() -> float:
            wait()
            return 1.0 / self.copies.size

        return finish

    def close(self) -> None:
        """Ends the threads, if there are any."""
        for worker in (self._inside, self._worker):
            if worker is not None:
                worker.close()

    def _start_two_levels(
        self, flat: torch.Tensor, packed: Packed, levels: TwoLevels, inside: _Worker, between: _Worker
    ) -> Callable[[], float]:
        """Neighbouring buckets overlap: while one is between the nodes, the next is summed inside them.

        Inside, the last phase of a bucket begins after the first one of the next, or when it is waited for: in one
        order on all ranks.
        """
        device = flat.device
        part = inside.run(lambda: self._sum_inside(flat, packed, levels), device)
        summed = between.run(lambda: self._sum_between(part(), packed, levels), device)
        before, mine = self._last, _Later(lambda: inside.run(lambda: self._spread(flat, *summed(), levels), device))
        self._last = mine
        if before is not None:
            before.begin()

        def finish() -> float:
            factor = mine.begin()()
            if self._last is mine:
                self._last = None
            return factor / self.copies.size

        return finish

    @torch.no_grad()
    def _phases(self, flat: torch.Tensor, packed: Packed) -> float:
        scale = self._shared_scale(packed.grads, flat.device, self.copies.size) if flat.dtype is torch.float16 else 1.0
        _pack(flat, packed, scale)
        if self._summed_wide:
            flat.copy_(_sum_wide(flat, self.copies))
        else:
            all_reduce(flat, self.copies, name="gradient all-reduce")
        return 1.0 / (scale * self.copies.size)

    @torch.no_grad()
    def _sum_inside(self, flat: torch.Tensor, packed: Packed, levels: TwoLevels) -> torch.Tensor:
        """This rank's part of the node's sum."""
        _pack(flat, packed, 1.0)
        return reduce_scatter_equal(flat, levels.inside, name="gradient reduce-scatter")

    @torch.no_grad()
    def _sum_between(self, part: torch.Tensor, packed: Packed, levels: TwoLevels) -> tuple[torch.Tensor, float]:
        """The part summed over the nodes, times a scale; and one over the scale."""
        _used_here(part)
        scale = 1.0
        if self._half:
            if self.dtype is torch.float16:
                # not the flags behind them
                values = part[: max(0, packed.num_elements - levels.inside.index * part.numel())]
                scale = self._shared_scale([values] if values.numel() else [], part.device, levels.between.size)
                values *= scale
            part = part.to(self.dtype)
        if self._summed_wide:
            part = _sum_wide(part, levels.between)
        else:
            all_reduce(part, levels.between, name="gradient all-reduce between nodes")
        return part, 1.0 / scale

    @torch.no_grad()
    def _spread(self, flat: torch.Tensor, part: torch.Tensor, factor: float, levels: TwoLevels) -> float:
        """Leaves all parts in flat."""
        _used_here(part)
        flat.copy_(gather_equal(part, levels.inside, name="gradient all-gather").view(-1))
        return factor

    def _shared_scale(self, grads: list[torch.Tensor], device: torch.device, num_terms: int) -> float:
        """A power of two that keeps the sum of num_terms largest values inside fp16; equal on all ranks."""
        top = ops.bucket_amax(grads).reshape(1) if grads else torch.zeros(1, device=device)
        top = all_reduce(top, self.copies, op=dist.ReduceOp.MAX, name="largest gradient")
        largest = float(top)
        if not 0.0 < largest < float("inf"):
            return 1.0
        return 2.0 ** min(100, max(-100, math.floor(math.log2(_FP16_TOP / num_terms) - math.log2(largest))))


def _used_here(x: torch.Tensor) -> None:
    """Memory of another stream, which must not be given away before this one is through with it."""
    if x.is_cuda:
        x.record_stream(torch.cuda.current_stream(x.device))


def _sum_wide(flat: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over the group, rounded once: parts travel, are added in float32, and travel back."""
    share = [flat.numel() // group.size] * group.size
    parts = all_to_all_rows(flat, share, share, group, name="gradient all-to-all").view(group.size, -1)
    total = parts.sum(0, dtype=torch.float32).to(flat.dtype)
    return gather_equal(total, group, name="gradient all-gather").view(-1)


def _pack(flat: torch.Tensor, packed: Packed, scale: float) -> None:
    if scale == 1.0:
        ops.bucket_pack([*packed.grads, packed.flags], [*packed.offsets, packed.num_elements], flat, 1.0)
        return
    ops.bucket_pack(packed.grads, packed.offsets, flat, scale)
    ops.bucket_pack([packed.flags], [packed.num_elements], flat, 1.0)
