"""A MoELayer whose experts lie on several ranks: tokens travel to them and back."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from whale_torch import ops
from whale_torch.comm.all2all import AllToAll
from whale_torch.comm.slices import join, parts_of, take
from whale_torch.mesh import Mesh
from whale_torch.moe.dispatch import combine, permute
from whale_torch.moe.layer import MoELayer
from whale_torch.planning.plan import Plan
from whale_torch.strategies.split_rules import SplitModule, register_class

__all__ = ["SplitMoELayer", "attach_experts"]


_FEW_SOURCES = 4
"""Up to here a product for every source and expert is cheaper than sorting rows by expert."""


class SplitMoELayer(SplitModule, MoELayer):
    """Its experts are this rank's; every rank of the region brings tokens of its own.

    Ranks that are fed the same rows take a slice of the tokens each. Gradients of experts are sums over the tokens of
    all ranks of the region, so what flows back to them is divided by the number of those, as a mean over the ranks
    that hold the same experts completes the mean over all.
    """

    _added: ClassVar[tuple[str, ...]] = (*SplitModule._added, "_rows")
    _rows: AllToAll

    def forward(self, x: Tensor, mask: Tensor | None = None, *, token_ids: Tensor | None = None) -> Tensor:
        twins = self._region.twins
        if twins.size == 1:
            return super().forward(x, mask, token_ids=token_ids)
        self._check(x, mask)
        flat = x.reshape(-1, self.dim)
        tokens = len(flat)
        first, count = sum(parts_of(tokens, twins.size)[: twins.index]), parts_of(tokens, twins.size)[twins.index]
        (mine,) = take([flat], [0], tokens, twins)
        part = slice(first, first + count)
        seen, ids = (None if of is None else of.reshape(-1)[part] for of in (mask, token_ids))
        (out,) = join([super().forward(mine, seen, token_ids=ids)], [0], tokens, twins)
        return out.view(x.shape)

    def _through_experts(self, x: Tensor, positions: Tensor, kept: Tensor, weights: Tensor) -> Tensor:
        size, widths = self._region.columns.size, self._cut.widths
        counts = torch.zeros(size, max(widths), dtype=torch.int64)
        for rank, part in enumerate(kept.cpu().split(list(widths))):
            counts[rank, : len(part)] = part
        splits = self._rows.splits(counts)
        lengths = splits.counts[:, self._index, : self._width].contiguous()  # [source, expert]
        sent, wire = permute(x, positions, int(kept.sum()), back=size), self.wire_dtype
        rows = self._rows(sent, splits, wire_dtype=wire)
        y = self._rows(self._on_rows(rows, lengths), splits.transposed, wire_dtype=wire)
        return combine(y, positions, weights, back=1 / size)

    def _on_rows(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """Experts on rows that lie source by source, and expert by expert for each: lengths [source, expert]."""
        if self.experts.takes_blocks and len(lengths) <= _FEW_SOURCES:
            ends = lengths.flatten().cumsum(0).view(lengths.shape).tolist()
            counts = lengths.tolist()
            blocks = [
                (e, end[e] - count[e], end[e])
                for e in range(self._width)
                for end, count in zip(ends, counts, strict=True)
            ]
            return self.experts.on_blocks(rows, blocks)
        here = lengths.to(rows.device)
        y = self.experts(ops.moe_chunk_sort(rows, here), lengths.sum(0).tolist())
        return ops.moe_chunk_sort(y, here, inverse=True)


def attach_experts(model: nn.Module, plan: Plan, mesh: Mesh) -> bool:
    """Gives MoE layers the groups that they need, and says whether there are any.

    Called on all ranks, after parameters were cut.
    """
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    exchanges: dict[tuple[str, bool], AllToAll] = {}
    for layer in layers:
        ranks = mesh.group("ranks of a layer of experts", plan.device("replica").copies, channel="loads of experts")
        layer.__dict__["_ranks"] = ranks
        if isinstance(layer, SplitMoELayer):
            device = plan.device(plan.taskgraph_of(layer._cut.module).device)
            key = device.name, layer.node_memory
            if key not in exchanges:
                name = f"{device.name} experts"
                exchanges[key] = AllToAll(mesh, name, device.columns, channel="experts", shared=layer.node_memory)
            layer.__dict__["_rows"] = exchanges[key]
    return bool(layers)


register_class("MoELayer", "experts", SplitMoELayer)
