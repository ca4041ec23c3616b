"""Peers: DDP, DDP with its half-precision hook, DDP + DTensor + loss_parallel, collectives written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.classifier_split.model import LEARNING_RATE, Task, make_features, make_head, make_whole
from benchmarks.handwritten import Exchange, SplitStep
from benchmarks.harness import sgd_loop

__all__ = ["DTensorSplit", "DataParallel", "Handwritten"]


class DataParallel:
    """Plain DDP: every rank holds all classes, all gradients are all-reduced."""

    def __init__(self, task: Task, rank: int, *, half: bool = False) -> None:
        self.task, self.rank = task, rank
        self.module = DistributedDataParallel(make_whole(task.classes))
        if half:
            hook: Callable[..., Any] = fp16_compress_hook
            self.module.register_comm_hook(None, hook)
        self._loop = sgd_loop(self.module, LEARNING_RATE)

    def step(self, number: int) -> Tensor:
        return self._loop(*self.task.batch(number, self.rank))

    def values(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.module.module.named_parameters()}


class _ScaleGradient(torch.autograd.Function):
    """DDP divides by the world what the split part has already averaged over it: without this factor the features
    would train with gradients that are too small by the size of the world."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class DTensorSplit:
    """DDP for the features, a column-wise DTensor for the classifier, loss_parallel for the loss."""

    def __init__(self, task: Task, rank: int) -> None:
        self.task, self.rank = task, rank
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.features, self.head = DistributedDataParallel(make_features()), make_head(task.classes)
        parallelize_module(self.head, self.mesh, ColwiseParallel(input_layouts=Shard(0), use_local_output=False))
        self.optimizer = torch.optim.SGD([*self.features.parameters(), *self.head.parameters()], LEARNING_RATE)

    def step(self, number: int) -> Tensor:
        inputs, labels = self.task.batch(number, self.rank)
        self.optimizer.zero_grad()
        all_labels = DTensor.from_local(labels, self.mesh, [Shard(0)]).redistribute(placements=[Replicate()])
        features = _ScaleGradient.apply(self.features(inputs), self.task.world)
        with loss_parallel():
            loss = F.cross_entropy(self.head(features), all_labels)
            loss.backward()
        self.optimizer.step()
        return loss.detach().to_local()

    def values(self) -> dict[str, Tensor]:
        named = {f"features.{name}": value.detach() for name, value in self.features.module.named_parameters()}
        return named | {f"fc.{name}": value.detach().to_local() for name, value in self.head.named_parameters()}


class Handwritten:
    """The features' gradients leave in two buckets; see `benchmarks.handwritten` for the step."""

    def __init__(self, task: Task, rank: int, wire: Exchange) -> None:
        self.task, self.rank, self.features = task, rank, make_features()
        head = make_head(task.classes)
        self.split = SplitStep(self.features, head, rank, task.world, wire, lr=LEARNING_RATE, bucket_bytes=6 << 20)

    def step(self, number: int) -> Tensor:
        return self.split.step(*self.task.batch(number, self.rank))

    def values(self) -> dict[str, Tensor]:
        named = {f"features.{name}": value.detach() for name, value in self.features.named_parameters()}
        return named | {"fc.weight": self.split.weight.detach(), "fc.bias": self.split.bias.detach()}
