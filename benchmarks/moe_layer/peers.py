"""Layers to compare with: a dense one of equal operations, a chain of torch's own operations, fairscale's MOELayer."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

__all__ = ["Chain", "Dense", "Fairscale"]


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Dense(nn.Module):
    """top_k feed-forward layers on every token: the operations of the experts, and nothing else."""

    def __init__(self, dim: int, hidden: int, top_k: int):
        super().__init__()
        self.layer, self.top_k = FeedForward(dim, hidden), top_k

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = sum(self.layer(x) for _ in range(self.top_k))  # type: ignore[assignment]
        return out


class Chain(nn.Module):
    """Sorted dispatch by torch's operations: softmax, topk, stable argsort, index_select, all_to_all_single, experts in
    a ModuleList, index_add."""

    def __init__(self, dim: int, hidden: int, num_experts: int, top_k: int):
        super().__init__()
        self.world, self.num_experts, self.top_k = dist.get_world_size(), num_experts, top_k
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(dim, hidden) for _ in range(num_experts // self.world))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).float().softmax(-1).topk(self.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        token = order // self.top_k
        counts = torch.bincount(flat, minlength=self.num_experts)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        sent, got = (c.view(self.world, -1).sum(1).tolist() for c in (counts, received))
        rows = all_to_all_single_autograd(x.index_select(0, token), got, sent, dist.group.WORLD)
        local = torch.arange(len(self.experts)).repeat(self.world).repeat_interleave(received)
        by_expert = local.argsort(stable=True)
        parts = rows.index_select(0, by_expert).split(torch.bincount(local, minlength=len(self.experts)).tolist())
        done = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        back = torch.empty_like(by_expert)
        back[by_expert] = torch.arange(len(by_expert))
        done = all_to_all_single_autograd(done.index_select(0, back), sent, got, dist.group.WORLD)
        done = done * weights.flatten()[order].to(done.dtype).unsqueeze(1)
        return torch.zeros_like(x).index_add(0, token, done)


class Fairscale(nn.Module):
    """fairscale's top-2 layer, on tokens [a multiple of 8, dim]."""

    def __init__(self, dim: int, hidden: int, num_experts: int):
        from fairscale.nn import MOELayer, Top2Gate

        super().__init__()
        experts = nn.ModuleList(FeedForward(dim, hidden) for _ in range(num_experts // dist.get_world_size()))
        self.layer = MOELayer(Top2Gate(dim, num_experts), experts)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.view(8, -1, x.shape[-1])).view(x.shape)
        return out
