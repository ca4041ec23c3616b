"""A MoELayer whose experts lie on several ranks: tokens travel to them and back."""

from __future__ import annotations

import contextlib
from typing import ClassVar

import torch
from torch import Tensor, nn

from whale_torch import ops
from whale_torch.comm.all2all import AllToAll
from whale_torch.comm.local_random import LocalRandom
from whale_torch.comm.shared_rows import SharedRows
from whale_torch.comm.slices import join, part_of, parts_of, take
from whale_torch.comm.splits import Splits
from whale_torch.mesh import Mesh
from whale_torch.moe.alike import check_alike, form_of
from whale_torch.moe.dispatch import combine, permute
from whale_torch.moe.everyone import OnRanks
from whale_torch.moe.experts import FeedForward
from whale_torch.moe.given import check_given, rows_of_tokens
from whale_torch.moe.layer import MoELayer
from whale_torch.moe.routing import Routing
from whale_torch.moe.through_memory import through_memory
from whale_torch.planning.placement import Blocks
from whale_torch.planning.plan import Plan
from whale_torch.strategies.split_rules import SplitModule, register_class

__all__ = ["SplitMoELayer", "attach_experts"]


class _Chunk:
    """Tokens that travel together."""

    def __init__(self, x: Tensor, experts: Tensor, weights: Tensor, num_experts: int):
        self.x, self.experts, self.weights = x, experts, weights
        self.positions, _, self.kept = ops.moe_positions(experts.contiguous(), num_experts)
        self.num_rows = int(self.kept.sum())


_FEW_SOURCES = 4
_MANY_ROWS = 384
"""Up to so many sources, and from so many rows of a source for an expert on (a mean), products for each source and
expert are no slower than to sort rows by expert first."""


class SplitMoELayer(SplitModule, MoELayer):
    """Its experts are this rank's; every rank of the region brings tokens of its own.

    Ranks that are fed the same rows take a slice of the tokens each. Gradients of experts are sums over the tokens of
    all ranks of the region, so what flows back to them is divided by the number of those, as a mean over the ranks
    that hold the same experts completes the mean over all.
    """

    _added: ClassVar[tuple[str, ...]] = (*SplitModule._added, "_rows")
    _compiles: ClassVar[bool] = True
    _rows: AllToAll

    def forward(self, x: Tensor, mask: Tensor | None = None, *, token_ids: Tensor | None = None) -> Tensor:
        twins = self._region.twins
        if x.is_meta:
            self._count_bytes(x)
            return self.as_recorded(x, mask, token_ids=token_ids)
        if twins.size == 1:
            return super().forward(x, mask, token_ids=token_ids)
        x = rows_of_tokens(x)
        check_given(x, mask, token_ids, self.dim, self.gate)
        flat = [None if of is None else of.reshape(-1, *of.shape[x.dim() - 1 :]) for of in (x, mask, token_ids)]
        return self._between_graphs(self._of_slice, *flat).view(x.shape)

    def _of_slice(self, x: Tensor, mask: Tensor | None, token_ids: Tensor | None) -> Tensor:
        """Of tokens that several ranks are fed alike, [T, dim], each runs a part."""
        twins, tokens = self._region.twins, len(x)
        (mine,) = take([x], [0], tokens, twins)
        seen, ids = (None if of is None else of[part_of(tokens, twins)] for of in (mask, token_ids))
        draws = self.training and (self.gate.draws or self.experts.draws)  # of slices of different sizes
        with LocalRandom(twins.rank, x.device) if draws else contextlib.nullcontext():
            routed = super().forward(mine, seen, token_ids=ids)
        (out,) = join([routed], [0], tokens, twins)
        return out

    def _count_bytes(self, x: Tensor) -> None:
        """Of a rehearsal: every route there and back, and its gradient, if all ranks get equally many."""
        columns = self._region.columns
        dtype = self.wire_dtype or x.dtype
        moved = x.numel() * self.top_k * self.experts.slices * dtype.itemsize / self._region.twins.size
        columns.count(4 * moved * (columns.size - 1) / columns.size, "tokens")

    def _through_experts(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        size = self._region.columns.size
        parts = parts_of(len(x), self.chunks)
        chunks = [
            _Chunk(part, experts, weights, self.num_experts * self.experts.slices)
            for part, experts, weights in zip(
                x.split(parts), routing.experts.split(parts), routing.weights.split(parts), strict=True
            )
        ]
        wire = self.wire_dtype
        splits, called = self._splits([chunk.kept for chunk in chunks], form_of(x, wire))
        plain = None if called else self._feed_forwards()
        if len(chunks) == 1 and plain is not None and wire in (None, x.dtype):
            rows = self._rows.in_memory(splits[0], x.shape[1] * x.element_size())
            if rows is not None:
                positions = self._among_all(chunks[0], rows)
                return through_memory(x, positions, routing.weights, plain, rows, size), chunks[0].kept
        there = [
            self._rows.begin(permute(c.x, c.positions, c.num_rows, back=size), split, wire_dtype=wire)
            for c, split in zip(chunks, splits, strict=True)
        ]
        back = []
        for underway, split in zip(there, splits, strict=True):
            lengths = split.counts[:, self._index, : self._width].contiguous()  # [source, expert]
            y = self._on_rows(underway.finish(), lengths)
            self._check_made(y)
            back.append(self._rows.begin(y, split.transposed, wire_dtype=wire))
        found = [
            combine(underway.finish(), c.positions, c.weights, back=1 / size)
            for underway, c in zip(back, chunks, strict=True)
        ]
        kept = torch.stack([chunk.kept for chunk in chunks]).sum(0)
        return (found[0] if len(found) == 1 else torch.cat(found)), kept

    def _feed_forwards(self) -> FeedForward | None:
        return self.experts if type(self.experts) is FeedForward else None

    def _among_all(self, chunk: _Chunk, rows: SharedRows) -> Tensor:
        """Where each route's row lies among those of all ranks."""
        widths = self._cut.widths
        first = torch.cat([begins[:width] for begins, width in zip(rows.first, widths, strict=True)])
        moved = (first - (chunk.kept.cumsum(0) - chunk.kept)).to(torch.int32)
        whole = chunk.positions + moved[chunk.experts.clamp(min=0).to(torch.int64)]
        return torch.where(chunk.positions < 0, -1, whole)

    def _splits(self, kept: list[Tensor], form: int) -> tuple[list[Splits], bool]:
        """(how many rows of each chunk go to each expert, whether experts are called on any rank): one exchange.

        form: of the tokens, which has to be that of all ranks.
        """
        size, widths = self._region.columns.size, list(self._cut.widths)
        counts = torch.zeros(size, len(kept), max(widths), dtype=torch.int64)
        for number, of_chunk in enumerate(kept):
            for rank, part in enumerate(of_chunk.cpu().split(widths)):
                counts[rank, number, : len(part)] = part
        beside = counts.new_tensor([form, self.experts.called]).expand(size, 2)
        told = torch.cat([beside, counts.view(size, -1)], 1)
        whole = self._rows.splits(told)
        check_alike(whole.counts[:, 0, 0].tolist(), self._region.columns.ranks, self._rows.name)
        by_chunk = whole.counts[:, :, 2:].view(size, size, len(kept), -1)
        splits = [Splits(by_chunk[:, :, number].contiguous(), whole.index) for number in range(len(kept))]
        return splits, bool(whole.counts[:, 0, 1].any())

    def _on_rows(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """Experts on rows that lie source by source, and expert by expert for each: lengths [source, expert]."""
        if not self._width:
            return self.experts.without(rows)
        many = len(rows) >= _MANY_ROWS * lengths.numel()
        if self.experts.takes_blocks and not self.experts.called and len(lengths) <= _FEW_SOURCES and many:
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
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}
    exchanges: dict[tuple[str, bool], AllToAll] = {}
    for name, layer in layers.items():
        ranks = mesh.group("ranks of a layer of experts", _run_by(layer, name, plan), channel="loads of experts")
        layer.__dict__["_on_ranks"] = OnRanks(ranks)
        if isinstance(layer, SplitMoELayer):
            device = plan.device(plan.taskgraph_of(layer._cut.module).device)
            key = device.name, layer.node_memory
            if key not in exchanges:
                whose = f"{device.name} experts"
                exchanges[key] = AllToAll(mesh, whose, device.columns, channel="experts", shared=layer.node_memory)
            layer.__dict__["_rows"] = exchanges[key]
            layer.experts.first = sum(layer._cut.widths[: layer._index])
    return bool(layers)


def _run_by(layer: MoELayer, name: str, plan: Plan) -> Blocks:
    """The ranks that bring a layer tokens of their own; of those fed alike that do not share the work, one."""
    if isinstance(layer, SplitMoELayer):
        return plan.device(plan.taskgraph_of(layer._cut.module).device).all_rows
    whole = plan.device("replica")
    return whole.all_rows if plan.taskgraph_of(name).inner_replica is None else whole.copies


register_class("MoELayer", "experts", SplitMoELayer)
