"""The gradient reducer: packed buckets, reduced while backward still runs, the plain mean over the ranks with a copy.

Order is static (reverse order of registration, cut by bytes), so that every rank reduces the same buckets in the same
order; one "used" flag a parameter rides in its bucket, so that ranks may use different parameters and a parameter that
nobody used keeps grad None. docs/design.md 5.7.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from whale_torch import ops
from whale_torch.comm.reduction import Pending, Reduction

__all__ = ["Reducer"]


@dataclass
class Bucket:
    """Parameters reduced in one message: their places in the flat buffer and who has arrived."""

    parameters: list[torch.nn.Parameter]
    offsets: list[int] = field(default_factory=list)
    num_elements: int = 0
    missing: int = 0

    def __post_init__(self) -> None:
        for parameter in self.parameters:
            self.offsets.append(self.num_elements)
            self.num_elements += parameter.numel()


class Reducer:
    """Reduces the gradients of parameters that one set of ranks holds copies of.

    parameters: in order of registration, all of one dtype. reduction: how one flat buffer is averaged.
    bucket_bytes: size of a message. max_in_flight: messages under way at once; staging memory is their product.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], reduction: Reduction, *, bucket_bytes: int, max_in_flight: int):
        self.reduction, self.max_in_flight = reduction, max_in_flight
        self.sync, self.armed = True, False
        self._buckets = _fill(parameters, bucket_bytes)
        self._home = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._written: set[torch.nn.Parameter] = set()
        self._arrived: set[torch.nn.Parameter] = set()
        self._next = 0
        self._in_flight: deque[tuple[Bucket, torch.Tensor, Pending]] = deque()
        self._handles = [parameter.register_post_accumulate_grad_hook(self._ready) for parameter in self._home]

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def arm(self) -> None:
        """Begins one backward: called when it reaches the model's output, also where no parameter gets a gradient."""
        if self.sync and not self.armed:
            self.armed, self._next = True, 0
            self._arrived.clear()
            for bucket in self._buckets:
                bucket.missing = len(bucket.parameters)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def abandon(self) -> None:
        """Ends a backward that an error cut short, so that the next one begins clean."""
        if self.armed:
            while self._in_flight:
                _, flat, pending = self._in_flight.popleft()
                pending.wait()
                self.reduction.give_back(flat)
            self.armed = False
            self._written.clear()

    def _ready(self, parameter: torch.nn.Parameter) -> None:
        self._written.add(parameter)
        if not self.sync:
            return
        self.arm()
        if parameter in self._arrived:
            return
        self._arrived.add(parameter)
        self._home[parameter].missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._launch(self._buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        self._next += 1
        if len(self._in_flight) >= self.max_in_flight:
            self._land()
        count = len(bucket.parameters)
        flags = torch.tensor([float(p in self._written) for p in bucket.parameters])
        have = [(p.grad, o) for p, o in zip(bucket.parameters, bucket.offsets, strict=True) if p.grad is not None]
        grads = [grad for grad, _ in have if grad is not None]
        flat = self.reduction.buffer(bucket.num_elements + count, bucket.parameters[0])
        if len(grads) < count:
            flat.zero_()
        pending = self.reduction.start(grads, [offset for _, offset in have], flat, bucket.num_elements, flags)
        self._in_flight.append((bucket, flat, pending))

    def _land(self) -> None:
        bucket, flat, pending = self._in_flight.popleft()
        scale = pending.wait()
        used = flat[bucket.num_elements : bucket.num_elements + len(bucket.parameters)].tolist()
        grads, offsets = [], []
        for parameter, offset, flag in zip(bucket.parameters, bucket.offsets, used, strict=True):
            if flag:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                grads.append(parameter.grad)
                offsets.append(offset)
        if grads:
            ops.bucket_unpack(flat, offsets, grads, scale)
        self.reduction.give_back(flat)

    def _finish(self) -> None:
        while self._next < len(self._buckets):
            self._launch(self._buckets[self._next])
        while self._in_flight:
            self._land()
        self.armed = False
        self._written.clear()


def _fill(parameters: list[torch.nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    buckets, current, size = [], [], 0
    for parameter in reversed(parameters):
        current.append(parameter)
        size += parameter.numel() * parameter.element_size()
        if size >= bucket_bytes:
            buckets.append(Bucket(current))
            current, size = [], 0
    return [*buckets, Bucket(current)] if current else buckets
