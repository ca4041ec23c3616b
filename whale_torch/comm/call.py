"""One forward of the whole model: the rows of every feed, exchanged while it runs, and the weights that follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from whale_torch.comm.collectives import gather_equal_async
from whale_torch.comm.region import Region
from whale_torch.errors import LayoutError
from whale_torch.mesh import Group

__all__ = ["Call", "deliver"]


class Call:
    """Row counts of one forward.

    rows: samples this rank was fed. digest: a hash of its inputs, compared between the ranks of one feed.
    arm: called when a backward reaches the model's output.
    The 16 bytes travel while the model runs and are waited for where a weight is first needed.
    """

    def __init__(self, world: Group, feed_size: int, rows: int, digest: int, arm: Callable[[], None]):
        self.arm = arm
        self.world, self.feed_size, self.num_feeds, self.rows = world, feed_size, world.size // feed_size, rows
        self._counts: list[int] | None = None
        header = torch.tensor([rows, digest], dtype=torch.int64)
        self._gathered, self._wait = gather_equal_async(header, world, name="row counts of the batch")
        if feed_size > 1:
            self.counts()

    def counts(self) -> list[int]:
        """Rows of each feed. Raises LayoutError where the ranks of one feed were given different batches."""
        if self._counts is None:
            self._wait()
            table = self._gathered.tolist()
            for feed in range(self.num_feeds):
                ranks = range(feed * self.feed_size, (feed + 1) * self.feed_size)
                if any(table[rank] != table[ranks[0]] for rank in ranks):
                    raise LayoutError(
                        f"ranks {list(ranks)} are one replica but were fed different batches (rows {[table[r][0] for r in ranks]}, "
                        f"input hashes {[table[r][1] & 0xFFFF for r in ranks]}).",
                        fix="feed all ranks of a replica the same batch: wh.sampler(model, dataset) or wh.batch_sampler(...) do",
                        ranks=ranks,
                    )
            self._counts = [table[feed * self.feed_size][0] for feed in range(self.num_feeds)]
        return self._counts

    @property
    def feed(self) -> int:
        return self.world.rank // self.feed_size

    def weight(self) -> float:
        """Share of this feed's rows times the number of feeds: 1 where all are equal."""
        counts = self.counts()
        total = sum(counts)
        return self.num_feeds * counts[self.feed] / total if total else 0.0

    def share(self, region: Region) -> float:
        """Mean weight of the region's feeds."""
        counts = self.counts()
        total = sum(counts)
        mine = sum(counts[rank // self.feed_size] for rank in region.rows.ranks)
        return self.num_feeds * mine / (region.rows.size * total) if total else 0.0


class _Deliver(torch.autograd.Function):
    """Identity on an output of the model; backward arms the gradient reducers and weighs by the feed's rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Call, weigh: bool) -> torch.Tensor:
        ctx.call, ctx.weigh = call, weigh
        return x.view_as(x) if x.dim() else x.clone()  # loss /= 4 may not write into a view made here

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.call.arm()
        weight = ctx.call.weight() if ctx.weigh else 1.0
        return (grad if weight == 1.0 else grad * weight), None, None


def deliver(x: torch.Tensor, call: Call, *, weigh: bool = True) -> torch.Tensor:
    """Passes a differentiable output of the model to the user; uneven rows enter the gradient here and only here."""
    if not x.requires_grad:
        return x
    out: torch.Tensor = _Deliver.apply(x, call, weigh)
    return out
