"""Replicated features, an MLP pair cut over the ranks, a classifier cut over the ranks: collectives written by hand.

All ranks are fed the same rows. f and g are the two conjugate bridges: f copies forward and sums backward, g sums
forward and copies backward (Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ByHand"]


def _sum(x: Tensor, world: int) -> Tensor:
    if world > 1:
        x = x.contiguous()
        dist.all_reduce(x)
    return x


class _F(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: int) -> Tensor:
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad.clone(), ctx.world), None


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: int) -> Tensor:
        return _sum(x.clone(), world)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _exchange(numbers: Tensor, world: int, *, wait: bool = True) -> tuple[Tensor, dist.Work | None]:
    """Every rank's few numbers, [world, count]."""
    out = numbers.new_empty(world, len(numbers))
    work = dist.all_to_all_single(out, numbers.expand(world, -1).contiguous(), async_op=not wait)
    return out, work


class _CrossEntropy(torch.autograd.Function):
    """The mean cross entropy from this rank's columns of the logits: one all-gather of three numbers a row.

    told: numbers that the ranks exchange first; then they exchange the gradient of the loss too, and take its mean.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, world: int, told: Tensor | None) -> Tensor:
        ctx.exchanges = world if told is not None and world > 1 else 0
        if told is not None and world > 1:
            _exchange(told, world)
        rows, classes = logits.shape
        inside = (labels >= first) & (labels < first + classes)
        places = (labels - first).clamp(0, classes - 1)[:, None]
        target, maximum = logits.gather(1, places)[:, 0] * inside, logits.amax(1)
        exponentials = (logits - maximum[:, None]).exp_()
        own = torch.stack([maximum, exponentials.sum(1), target])
        if world > 1:
            parts = own.new_empty(world, *own.shape)
            dist.all_gather(list(parts.unbind(0)), own)
        else:
            parts = own[None]
        top = parts[:, 0].amax(0)
        total = (parts[:, 1] * (parts[:, 0] - top).exp()).sum(0)
        ctx.save_for_backward(exponentials, (maximum - top).exp() / (total * rows), inside, places)
        return (top + total.log() - parts[:, 2].sum(0)).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.exchanges:
            grad = _exchange(grad.reshape(1), ctx.exchanges)[0].mean()
        exponentials, factor, inside, places = ctx.saved_tensors
        logits_grad = exponentials.mul_((factor * grad)[:, None])
        logits_grad.scatter_add_(1, places, (inside * (-grad / len(inside)))[:, None])
        return logits_grad, None, None, None, None


class ByHand:
    """Cuts the given full modules for this rank; `step` is one SGD step and returns the loss.

    checked: with the exchanges that a library makes on top, which tells ranks that do not agree: of what each was fed
    (under way while the model runs), of what each does before the loss, and of the gradient that flows into the loss.
    """

    def __init__(
        self,
        features: nn.Module,
        up: nn.Linear,
        down: nn.Linear,
        fc: nn.Linear,
        rank: int,
        world: int,
        lr: float,
        *,
        checked: bool = False,
    ) -> None:
        def part(value: Tensor, dim: int) -> nn.Parameter:
            return nn.Parameter(value.detach().tensor_split(world, dim)[rank].clone())

        self.world, self.features, self.checked = world, features, checked
        self.first = sum(len(piece) for piece in fc.weight.tensor_split(world)[:rank])
        self.up, self.up_bias = part(up.weight, 0), part(up.bias, 0)
        self.down, self.down_bias = part(down.weight, 1), nn.Parameter(down.bias.detach().clone())
        self.fc, self.fc_bias = part(fc.weight, 0), part(fc.bias, 0)
        self.whole = [*features.parameters(), self.down_bias]
        cut = [self.up, self.up_bias, self.down, self.fc, self.fc_bias]
        self.optimizer = torch.optim.SGD([*self.whole, *cut], lr)

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        work, told = None, None
        if self.checked and self.world > 1:
            _, work = _exchange(torch.tensor([len(inputs), 0, 0, 0, 0, 0]), self.world, wait=False)
            told = torch.zeros(24, dtype=torch.int64)
        x = self.features(inputs)
        hidden = F.gelu(F.linear(_F.apply(x, self.world), self.up, self.up_bias))
        x = x + _G.apply(F.linear(hidden, self.down), self.world) + self.down_bias
        logits = F.linear(_F.apply(x, self.world), self.fc, self.fc_bias)
        loss: Tensor = _CrossEntropy.apply(logits, labels, self.first, self.world, told)
        if work is not None:
            work.wait()
        loss.backward()
        if self.world > 1:
            self._average()
        self.optimizer.step()
        return loss.detach()

    def _average(self) -> None:
        """The gradients of what every rank holds, averaged in one bucket."""
        grads = [parameter.grad for parameter in self.whole if parameter.grad is not None]
        bucket = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(bucket)
        bucket.div_(self.world)
        for grad, piece in zip(grads, bucket.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(piece.view_as(grad))
