"""Features replicated, classifier split: the step with its collectives written by hand, right and as fast as we can.

One step on each of W ranks (N rows in all, D features, C/W classes on a rank):

    features(x) -> all-gather (N, D) -> logits (N, C/W) -> all-gather 3 numbers a row -> loss
    d logits -> d features, partial (N, D) -> sent to the rows' ranks and summed (N/W, D) -> backward of the features
    -> sum of their gradients over ranks, started from hooks, *while* the classifier's weight gradient is computed

The loss is the mean over all N rows, so what flows back into a rank's features is the true gradient already and their
parameter gradients are *summed* over ranks. (With DDP around the features they would be divided by W once more.)
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["Exchange", "FlatWire", "HierarchicalWire", "NoWire", "SplitStep", "share_buffers"]


class Exchange(Protocol):
    """The bridges and the sum that the step needs."""

    def gather(self, x: Tensor) -> Callable[[], Tensor]:
        """Begins to collect x (rows, ...) of all ranks; the call returned waits and gives (world * rows, ...)."""

    def sum_rows(self, x: Tensor) -> Tensor:
        """Partial sums (world * rows, ...) -> this rank's rows, summed over ranks."""

    def start_sum(self, x: Tensor) -> None:
        """Begins to sum x over ranks, in place."""

    def finish_sums(self) -> None:
        """Waits for the sums that were begun."""


def _gather(x: Tensor, group: dist.ProcessGroup | None = None) -> Callable[[], Tensor]:
    world = dist.get_world_size(group)
    out = x.new_empty(world * x.shape[0], *x.shape[1:])
    work = dist.all_gather(list(out.chunk(world)), x.contiguous(), group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return out

    return wait


def _scatter_sum(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Reduce-scatter over dim 0 as an all-to-all and a local sum: on gloo several times faster than its own."""
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out.view(dist.get_world_size(group), -1, *x.shape[1:]).sum(0)


class FlatWire:
    """Collectives over all ranks at once. dtype: what gradients are cast to while they travel; None: as they are."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self._running: list[tuple[dist.Work, Tensor, Tensor]] = []

    def gather(self, x: Tensor) -> Callable[[], Tensor]:
        return _gather(x)

    def sum_rows(self, x: Tensor) -> Tensor:
        return _scatter_sum(x)

    def start_sum(self, x: Tensor) -> None:
        buffer = x if self.dtype is None else x.to(self.dtype)
        self._running.append((dist.all_reduce(buffer, async_op=True), buffer, x))

    def finish_sums(self) -> None:
        for work, buffer, x in self._running:
            work.wait()
            if buffer is not x:
                x.copy_(buffer)
        self._running.clear()


class HierarchicalWire:
    """Each exchange in two parts, inside a node and between nodes: fewer messages, fewer bytes on the links.

    Between nodes the ranks with the same number in their nodes talk, so all ranks of a node share its link's work.
    """

    def __init__(self, ranks_per_node: int, dtype: torch.dtype | None = None) -> None:
        rank, world, local = dist.get_rank(), dist.get_world_size(), ranks_per_node
        nodes, self.local, self.dtype = world // local, local, dtype
        self.inside = [dist.new_group(list(range(n * local, (n + 1) * local))) for n in range(nodes)][rank // local]
        self.between = [dist.new_group(list(range(i, world, local))) for i in range(local)][rank % local]
        self._jobs: queue.Queue[Tensor] = queue.Queue()
        self._done: queue.Queue[BaseException | None] = queue.Queue()
        self._begun = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def gather(self, x: Tensor) -> Callable[[], Tensor]:
        between = _gather(x, self.between)
        return lambda: _gather(between(), self.inside)()

    def sum_rows(self, x: Tensor) -> Tensor:
        return _scatter_sum(_scatter_sum(x, self.inside), self.between)

    def start_sum(self, x: Tensor) -> None:
        self._begun += 1
        self._jobs.put(x)

    def finish_sums(self) -> None:
        while self._begun:
            error = self._done.get()
            self._begun -= 1
            if error is not None:
                raise error

    def _serve(self) -> None:
        while True:
            x = self._jobs.get()
            try:
                self._sum(x)
                self._done.put(None)
            except RuntimeError as error:
                self._done.put(error)

    def _sum(self, x: Tensor) -> None:
        padded = x.new_zeros(-(-x.numel() // self.local) * self.local, dtype=self.dtype)
        padded[: x.numel()] = x
        part = _scatter_sum(padded, self.inside)
        dist.all_reduce(part, group=self.between)
        x.copy_(_gather(part, self.inside)()[: x.numel()])


class NoWire:
    """Nothing is exchanged: the same compute on the same sizes, to measure its floor."""

    def __init__(self, world: int) -> None:
        self.world = world

    def gather(self, x: Tensor) -> Callable[[], Tensor]:
        return lambda: x.repeat(self.world, *[1] * (x.dim() - 1))

    def sum_rows(self, x: Tensor) -> Tensor:
        return x.view(self.world, -1, *x.shape[1:]).sum(0)

    def start_sum(self, x: Tensor) -> None:
        pass

    def finish_sums(self) -> None:
        pass


def share_buffers(
    parameters: Sequence[nn.Parameter], bucket_bytes: int, full: Callable[[Tensor], None] | None = None
) -> list[Tensor]:
    """Makes gradients views into buffers of about `bucket_bytes`, in the order in which backward fills them.

    full: called with each buffer once all its gradients are there. Returns the buffers.
    """
    buckets: list[list[nn.Parameter]] = [[]]
    for parameter in reversed(parameters):
        if buckets[-1] and sum(p.nbytes for p in buckets[-1]) + parameter.nbytes > bucket_bytes:
            buckets.append([])
        buckets[-1].append(parameter)
    return [_share(bucket, full) for bucket in buckets]


def _share(bucket: list[nn.Parameter], full: Callable[[Tensor], None] | None) -> Tensor:
    sizes = [parameter.numel() for parameter in bucket]
    buffer, waiting = torch.zeros(sum(sizes)), set(bucket)

    def arrived(parameter: nn.Parameter) -> None:
        waiting.discard(parameter)
        if not waiting and full is not None:
            waiting.update(bucket)
            full(buffer)

    for parameter, part in zip(bucket, buffer.split(sizes), strict=True):
        parameter.grad = part.view_as(parameter)
        if full is not None:
            parameter.register_post_accumulate_grad_hook(arrived)
    return buffer


class SplitStep:
    """Trains `features` (replicated) and `head` (its classes cut over all ranks) with plain SGD.

    rank, world: this rank's part of the classes. bucket_bytes: of the gradients that leave
    together.
    """

    def __init__(
        self,
        features: nn.Module,
        head: nn.Linear,
        rank: int,
        world: int,
        wire: Exchange,
        *,
        lr: float,
        bucket_bytes: int,
    ) -> None:
        self.features, self.wire = features, wire
        weights, biases = head.weight.detach().tensor_split(world), head.bias.detach().tensor_split(world)
        self.first = sum(len(part) for part in weights[:rank])
        self.weight, self.bias = nn.Parameter(weights[rank].clone()), nn.Parameter(biases[rank].clone())
        self._buffers = share_buffers(list(features.parameters()), bucket_bytes, wire.start_sum)
        self.optimizer = torch.optim.SGD([*features.parameters(), self.weight, self.bias], lr)

    @torch.no_grad()
    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """One step on this rank's rows; returns the mean loss over all rows."""
        gathered_labels = self.wire.gather(labels)
        for buffer in self._buffers:
            buffer.zero_()
        with torch.enable_grad():
            own = self.features(inputs)
        rows = self.wire.gather(own.detach())()
        logits = torch.addmm(self.bias, rows, self.weight.t())
        loss, grad = self._loss(logits, gathered_labels())
        own.backward(self.wire.sum_rows(grad @ self.weight))
        self.weight.grad, self.bias.grad = grad.t() @ rows, grad.sum(0)
        self.wire.finish_sums()
        self.optimizer.step()
        return loss

    def _loss(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The mean cross entropy over all rows, and its gradient for this rank's logits (in their memory)."""
        rows, classes = logits.shape
        inside = (labels >= self.first) & (labels < self.first + classes)
        places = (labels - self.first).clamp_(0, classes - 1)[:, None]
        target = logits.gather(1, places)[:, 0] * inside
        maximum = logits.amax(1)
        exponentials = logits.sub_(maximum[:, None]).exp_()
        statistics = self.wire.gather(torch.stack([maximum, exponentials.sum(1), target]))().view(-1, 3, rows)
        top = statistics[:, 0].amax(0)
        total = (statistics[:, 1] * (statistics[:, 0] - top).exp()).sum(0)
        loss = (top + total.log() - statistics[:, 2].sum(0)).mean()
        grad = exponentials.mul_(((maximum - top).exp() / (total * rows))[:, None])
        grad.scatter_add_(1, places, (-1.0 / rows * inside)[:, None])
        return loss, grad
