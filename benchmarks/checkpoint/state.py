"""What is saved: a split chain of feed-forwards with Adam's state; the same memory as torch's own kind of shards."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import whale_torch as wh

__all__ = ["Chain", "as_dtensors", "training"]

WIDTH = 1024


class _FeedForward(nn.Module):
    """WIDTH columns a rank of one matrix, WIDTH rows of the other: 8.4 MB, and twice that of Adam's state."""

    def __init__(self, num_ranks: int):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH * num_ranks, bias=False)
        self.down = nn.Linear(WIDTH * num_ranks, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Chain(nn.Module):
    def __init__(self, num_blocks: int, num_ranks: int):
        super().__init__()
        with wh.split():
            self.blocks = nn.Sequential(*(_FeedForward(num_ranks) for _ in range(num_blocks)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def training(num_blocks: int) -> tuple[nn.Module, torch.optim.Adam]:
    """A model of 25 MB a block and rank with Adam's state, which one step has made."""
    model = wh.parallelize(Chain(num_blocks, dist.get_world_size()), seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    return model, optimizer


def as_dtensors(model: nn.Module, optimizer: torch.optim.Adam) -> dict[str, Tensor]:
    """The memory of both, as torch.distributed.checkpoint takes shards of all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        dim = 0 if ".up." in name else 1
        local = {
            "": p.detach(),
            ".exp_avg": optimizer.state[p]["exp_avg"],
            ".exp_avg_sq": optimizer.state[p]["exp_avg_sq"],
        }
        for key, value in local.items():
            found[name + key] = DTensor.from_local(value.as_subclass(Tensor), mesh, [Shard(dim)], run_check=False)
    return found
