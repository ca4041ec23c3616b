"""The table's variants: data parallelism flat, by torch, by whale; the split classifier by hand and by whale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import whale_torch as wh
from benchmarks.handwritten import FlatWire, HierarchicalWire, SplitStep, share_buffers
from benchmarks.harness import sgd_loop
from benchmarks.slides_table.sizes import GPUS_PER_NODE, Scale

__all__ = ["FAST", "VARIANTS", "Variant", "batch_of", "make"]

VARIANTS = {
    "flat": "flat data parallelism, fp32",
    "ddp": "torch DDP",
    "whale_dp": "whale data parallelism, fp32",
    "whale_dp_half": "whale data parallelism, half wire",
    "whale": "whale split, fp32",
    "whale_half": "whale split, half wire",
    "hand_flat_half": "hand-written split, half wire, flat",
    "hand_half": "hand-written split, half wire, two-level",
}
FAST = ("whale", "whale_half", "hand_flat_half", "hand_half")
_LEARNING_RATE = 0.1


class Variant(Protocol):
    def step(self, inputs: Tensor, labels: Tensor) -> Tensor: ...

    def features(self) -> Tensor: ...


def batch_of(scale: Scale, rows: int, rank: int, number: int) -> tuple[Tensor, Tensor]:
    """Features (rows, width) before the modelled layers, and labels (rows,)."""
    generator = torch.Generator().manual_seed(number * 1000 + rank)
    return torch.randn(rows, scale.width, generator=generator), torch.randint(
        0, scale.classes, (rows,), generator=generator
    )


def _parts(scale: Scale) -> tuple[nn.Sequential, nn.Linear]:
    torch.manual_seed(0)
    return scale.features(), scale.head()


def _flattened(features: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in features.parameters()])


class _Model(nn.Module):
    def __init__(self, features: nn.Module, fc: nn.Module) -> None:
        super().__init__()
        self.features, self.fc = features, fc

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.features(inputs))
        return logits


class _Loop:
    """One process's loop around a module that takes care of gradients by itself."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._step = sgd_loop(module, _LEARNING_RATE)

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self._step(inputs, labels)

    def features(self) -> Tensor:
        model = self.module.module if isinstance(self.module, DistributedDataParallel) else self.module
        return _flattened(model.features)


class _Flat(_Loop):
    """One ring all-reduce of all gradients after backward: nothing overlapped, nothing to pack."""

    def __init__(self, scale: Scale) -> None:
        super().__init__(_Model(*_parts(scale)))
        (self.buffer,) = share_buffers(list(self.module.parameters()), 1 << 60)
        self.optimizer = torch.optim.SGD(self.module.parameters(), _LEARNING_RATE)

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.buffer.zero_()
        loss = F.cross_entropy(self.module(inputs), labels)
        loss.backward()
        dist.all_reduce(self.buffer)
        self.buffer.div_(dist.get_world_size())
        self.optimizer.step()
        return loss.detach()


def _ddp(scale: Scale) -> _Loop:
    model = _Model(*_parts(scale))
    return _Loop(DistributedDataParallel(model, bucket_cap_mb=scale.bucket_bytes / 2**20, gradient_as_bucket_view=True))


class _Classifier(nn.Module):
    """The annotated model: features replicated, the classifier split."""

    def __init__(self, scale: Scale, reduce_dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        with wh.replica(reduce_dtype=reduce_dtype, bucket_bytes=scale.bucket_bytes):
            self.features = scale.features()
        with wh.split():
            self.fc = scale.head()

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.features(inputs))
        return logits


def _whale_data_parallel(scale: Scale, reduce_dtype: torch.dtype) -> _Loop:
    with wh.replica(reduce_dtype=reduce_dtype, bucket_bytes=scale.bucket_bytes):
        model = _Model(*_parts(scale))
    return _Loop(wh.parallelize(model))


class _ByHand:
    def __init__(self, scale: Scale, wire: FlatWire | HierarchicalWire) -> None:
        self.module, head = _parts(scale)
        rank, world = dist.get_rank(), dist.get_world_size()
        bucket = scale.bucket_bytes
        self.split = SplitStep(self.module, head, rank, world, wire, lr=_LEARNING_RATE, bucket_bytes=bucket)

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.split.step(inputs, labels)

    def features(self) -> Tensor:
        return _flattened(self.module)


def make(name: str, scale: Scale, half: torch.dtype) -> Variant:
    """Builds a variant on this rank; `half` is the half-precision wire's dtype."""
    builders: dict[str, Callable[[], Variant]] = {
        "flat": lambda: _Flat(scale),
        "ddp": lambda: _ddp(scale),
        "whale_dp": lambda: _whale_data_parallel(scale, torch.float32),
        "whale_dp_half": lambda: _whale_data_parallel(scale, half),
        "whale": lambda: _Loop(wh.parallelize(_Classifier(scale, torch.float32))),
        "whale_half": lambda: _Loop(wh.parallelize(_Classifier(scale, half))),
        "hand_flat_half": lambda: _ByHand(scale, FlatWire(half)),
        "hand_half": lambda: _ByHand(scale, HierarchicalWire(GPUS_PER_NODE, half)),
    }
    return builders[name]()
