"""The split classifier with its collectives written by hand, gradients right, and as fast as we know how to make it.

One step, on each of W ranks (N rows in all, D features, C/W classes here):

    features(x) -> all-gather (N, D) -> logits (N, C/W) -> all-gather 3 numbers a row -> loss
    d logits -> d features, partial (N, D) -> all-to-all, sum over ranks (N/W, D) -> backward of the features
    -> all-reduce of their gradients, started from hooks, *while* the classifier's weight gradient is computed

The loss is the mean over all N rows, so what flows back into a rank's features is the true gradient already and their
parameter gradients are *summed* over ranks. (With DDP around the features they would be divided by W once more.)
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.classifier_split.model import LEARNING_RATE, Task, make_features, make_head

__all__ = ["Exchange", "Handwritten", "NoWire", "Wire"]


class Exchange(Protocol):
    """The three bridges and the all-reduce that the step needs."""

    def gather(self, x: Tensor) -> Tensor: ...

    def sum_rows(self, x: Tensor) -> Tensor: ...

    def start_sum(self, x: Tensor) -> None: ...

    def finish_sums(self) -> None: ...


class Wire:
    """Collectives over all ranks. dtype: what gradients are cast to for their all-reduce, as bfloat16; None: as they are.

    Small exchanges are all-to-alls where that is gloo's fastest collective.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.world, self.dtype = dist.get_world_size(), dtype
        self._running: list[tuple[dist.Work, Tensor, Tensor]] = []

    def gather(self, x: Tensor) -> Tensor:
        """(rows, ...) -> (world * rows, ...), in the order of ranks."""
        out = x.new_empty(self.world * x.shape[0], *x.shape[1:])
        dist.all_gather(list(out.chunk(self.world)), x)
        return out

    def sum_rows(self, x: Tensor) -> Tensor:
        """Partial sums (world * rows, ...) -> this rank's rows, summed."""
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out.view(self.world, -1, *x.shape[1:]).sum(0)

    def start_sum(self, x: Tensor) -> None:
        """Begins the sum over ranks of x, in place."""
        buffer = x if self.dtype is None else x.to(self.dtype)
        self._running.append((dist.all_reduce(buffer, async_op=True), buffer, x))

    def finish_sums(self) -> None:
        """Waits for the sums that were begun."""
        for work, buffer, x in self._running:
            work.wait()
            if buffer is not x:
                x.copy_(buffer)
        self._running.clear()


class NoWire:
    """Nothing is exchanged: the same compute on the same sizes, to measure its floor."""

    def __init__(self, world: int) -> None:
        self.world = world

    def gather(self, x: Tensor) -> Tensor:
        return x.repeat(self.world, *[1] * (x.dim() - 1))

    def sum_rows(self, x: Tensor) -> Tensor:
        return x.view(self.world, -1, *x.shape[1:]).sum(0)

    def start_sum(self, x: Tensor) -> None:
        pass

    def finish_sums(self) -> None:
        pass


class Handwritten:
    """The step above, with the optimizer of one process."""

    def __init__(self, task: Task, rank: int, wire: Exchange) -> None:
        self.task, self.rank, self.wire = task, rank, wire
        if task.classes % task.world:
            raise ValueError(f"the hand-written step needs equal shards: {task.classes} classes on {task.world} ranks")
        self.features, head = make_features(), make_head(task.classes)
        self.first = rank * (task.classes // task.world)
        self.weight = nn.Parameter(head.weight.detach().chunk(task.world)[rank].clone())
        self.bias = nn.Parameter(head.bias.detach().chunk(task.world)[rank].clone())
        self._share_buffers()
        self.optimizer = torch.optim.SGD([*self.features.parameters(), self.weight, self.bias], LEARNING_RATE)

    def _share_buffers(self) -> None:
        """Makes gradients views into two buffers, in the order in which backward fills them; a full one leaves."""
        parameters = list(self.features.parameters())[::-1]
        for bucket in (parameters[:4], parameters[4:]):
            buffer = torch.zeros(sum(parameter.numel() for parameter in bucket))
            for parameter, part in zip(bucket, buffer.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = part.view_as(parameter)
            waiting = set(bucket)

            def arrived(
                parameter: nn.Parameter,
                waiting: set[nn.Parameter] = waiting,
                bucket: list[nn.Parameter] = bucket,
                buffer: Tensor = buffer,
            ) -> None:
                waiting.discard(parameter)
                if not waiting:
                    waiting.update(bucket)
                    self.wire.start_sum(buffer)

            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(arrived)

    @torch.no_grad()
    def step(self, number: int) -> Tensor:
        inputs, labels = self.task.batch(number, self.rank)
        for parameter in self.features.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        with torch.enable_grad():
            own = self.features(inputs)
        rows, labels = self.wire.gather(own.detach()), self.wire.gather(labels)
        logits = torch.addmm(self.bias, rows, self.weight.t())
        loss, grad = self._loss(logits, labels)
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
        statistics = self.wire.gather(torch.stack([maximum, exponentials.sum(1), target])).view(-1, 3, rows)
        top = statistics[:, 0].amax(0)
        total = (statistics[:, 1] * (statistics[:, 0] - top).exp()).sum(0)
        loss = (top + total.log() - statistics[:, 2].sum(0)).mean()
        grad = exponentials.mul_(((maximum - top).exp() / (total * rows))[:, None])
        grad.scatter_add_(1, places, (-1.0 / rows * inside)[:, None])
        return loss, grad

    def values(self) -> dict[str, Tensor]:
        named = {f"features.{name}": value.detach() for name, value in self.features.named_parameters()}
        return named | {"fc.weight": self.weight.detach(), "fc.bias": self.bias.detach()}
