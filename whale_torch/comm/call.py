"""One forward of the whole model: the rows of every feed, exchanged while it runs, and the weights that follow."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from whale_torch.comm.collectives import Spread, spread_async
from whale_torch.comm.hooks import on_gradient
from whale_torch.comm.region import Region
from whale_torch.comm.scale import Witness
from whale_torch.errors import CommError, LayoutError, LossError
from whale_torch.mesh import Group

__all__ = ["Anchor", "Batch", "Call", "Trained", "accept", "deliver", "givers_of"]


_NAME = "row counts of the batch"


class Batch:
    """What one rank was fed.

    rows: samples. digest: a hash of the inputs. other: a size, along the same dim, of an input that has another number
    of samples than the first; 0 where there is none. stream: a hash of the random state that the model will draw from.
    """

    __slots__ = ("digest", "other", "rows", "stream")

    def __init__(self, rows: int, digest: int = 0, other: int = 0):
        self.rows, self.digest, self.other, self.stream = rows, digest, other, 0


class Trained:
    """Which parameters a rank trains, in one number: how many, and a hash of which and of their dtypes.

    dtypes: of each parameter, None where it is frozen.
    """

    __slots__ = ("code",)

    def __init__(self, dtypes: Sequence[torch.dtype | None]):
        self.code = zlib.crc32(str(dtypes).encode()) << 24 | sum(dtype is not None for dtype in dtypes)

    @staticmethod
    def count(code: int) -> int:
        return code & 0xFFFFFF


class Anchor:
    """A leaf that every output of the model hangs on, so that a backward through one is noticed, on any rank.

    reached: called in a backward() that came to the model's output; torch.autograd.grad does not reach a leaf.
    parameters: those of the model.
    """

    def __init__(self, device: torch.device, reached: Callable[[], None], parameters: Sequence[torch.nn.Parameter]):
        self.leaf = torch.zeros((), device=device, requires_grad=True)
        self.zero = torch.zeros((), device=device)
        self._reached, self._parameters = reached, parameters
        on_gradient(self.leaf, self._fire)

    def _fire(self, leaf: torch.Tensor) -> None:
        leaf.grad = None
        self._reached()

    def accumulates(self) -> bool:
        """Whether what runs now is a backward() that gives gradients to the model, and no torch.autograd.grad."""
        leaves = [self.leaf, *(parameter for parameter in self._parameters if parameter.requires_grad)]
        try:
            return any(torch._C._will_engine_execute_node(get_gradient_edge(leaf).node) for leaf in leaves)
        except RuntimeError:  # torch says so of the leaves that torch.autograd.grad was asked for
            return False


class Call:
    """Row counts of one forward.

    batch: what this rank was fed. trained: which parameters it trains. anchor: where backward arms the reducers.
    summed: the loss is a sum over samples, not a mean. witness: tells what gradients of cut ones were multiplied by.
    before_backward: what every rank does first in a backward that comes to the model's output.
    later: something else is to travel along: `send` starts the exchange, and not this. labels: over which it travels
    where it comes after; never mixed up with the row counts of a rank that left out a forward.
    The 48 bytes travel while the model runs, or its loss, and are waited for where a weight is first needed.
    """

    before_backward: Callable[[], None] | None = None

    def __init__(
        self,
        world: Group,
        feed_size: int,
        batch: Batch,
        trained: Trained,
        anchor: Anchor,
        *,
        summed: bool = False,
        witness: Witness | None = None,
        later: bool = False,
        labels: Group | None = None,
    ):
        self.anchor, self._witness = anchor, witness
        self.anchors = {anchor}  # also those of models behind the inputs
        self.world, self.feed_size, self.num_feeds, self.summed = world, feed_size, world.size // feed_size, summed
        self.is_empty = batch.rows == 0
        self._counts: list[int] | None = None
        self._table: list[list[int]] | None = None
        seen = 0 if witness is None else witness.take()
        self._header = (batch.rows, batch.digest, batch.other, trained.code, batch.stream, seen)
        self._labels = labels or world
        self._spreads: list[Spread] = []
        if not later or feed_size > 1:
            self.send()
        if feed_size > 1:
            self.counts()

    def send(self, more: Sequence[int] = ()) -> Callable[[], torch.Tensor]:
        """Sends what this rank was fed and `more` numbers; the returned call gives those of all, [world, len(more)]."""
        header, group = ((), self._labels) if self._spreads else (self._header, self.world)
        spread = spread_async((*header, *more), group, name=_NAME)
        self._spreads.append(spread)
        return lambda: spread.wait()[:, len(header) :]

    def table(self) -> list[list[int]]:
        """What every rank sent.

        Raises CommError, with the same text on every rank, where ranks train different parameters, or multiplied
        gradients of cut ones by different numbers.
        """
        if self._table is None:
            if not self._spreads:
                self.send()
            self._table = self._spreads[0].wait()[:, : len(self._header)].tolist()
            self._check_trained([row[3] for row in self._table])
            if self._witness is not None:
                self._witness.check([row[5] for row in self._table])
        return self._table

    def counts(self) -> list[int]:
        """Rows of each feed.

        Raises LayoutError, with the same text on every rank, where the ranks of one feed were given different batches
        or have different random states, and where it cannot be said which input counts the samples; and what `table`
        raises.
        """
        if self._counts is None:
            table = self.table()
            for feed in range(self.num_feeds if self.feed_size > 1 else 0):
                ranks = range(feed * self.feed_size, (feed + 1) * self.feed_size)
                if any(table[rank][:4] != table[ranks[0]][:4] for rank in ranks):
                    raise LayoutError(
                        f"ranks {list(ranks)} are one replica but were fed different batches "
                        f"(rows {[table[r][0] for r in ranks]}, input hashes {[table[r][1] & 0xFFFF for r in ranks]}).",
                        fix="feed all ranks of a replica the same batch: wh.sampler or wh.batch_sampler do",
                        ranks=ranks,
                    )
                if any(table[rank][4] != table[ranks[0]][4] for rank in ranks):
                    raise LayoutError(
                        f"ranks {list(ranks)} are one replica and were fed the same batch, but their random states "
                        f"differ (hashes {[table[r][4] & 0xFFFF for r in ranks]}): their dropout masks would.",
                        fix="draw random numbers on all ranks of a replica alike, or from a torch.Generator of your "
                        "own; torch.manual_seed(...) on all of them brings the states together again",
                        ranks=ranks,
                    )
            counts, _, others, *_ = zip(*table[:: self.feed_size], strict=True)
            uneven = len(set(counts)) > 1
            if not self.summed and ((uneven and any(others)) or len(set(others)) > 1):
                raise LayoutError(
                    f"it cannot be said which input counts the samples: the first has {list(counts)} along dim 0 on "
                    f"the {self.num_feeds} feeds, another has {list(others)}.",
                    fix='name it: wh.replica(batch_dim={"x": 0, ...}), with the dim of every input that counts them',
                )
            self._counts = list(counts)
        return self._counts

    def advance(self) -> None:
        """Called on every rank at the end of the forward: the exchange comes to its end whoever reads it."""
        for spread in self._spreads:
            spread.advance()

    def reached(self) -> None:
        """Backward comes to the model's output: what all ranks sent is looked at, in the order in which it was sent."""
        if self._witness is not None or self.before_backward is not None:
            self.counts()
        if self.before_backward is not None:
            self.before_backward()

    def accumulates(self) -> bool:
        """Whether a backward() runs that gives gradients to this model, or to one that gave it an input."""
        return any(anchor.accumulates() for anchor in self.anchors)

    def _check_trained(self, codes: list[int]) -> None:
        odd = next((rank for rank, code in enumerate(codes) if code != codes[0]), None)
        if odd is not None:
            raise CommError(
                f"ranks train different parameters, or in other dtypes: rank 0 trains {Trained.count(codes[0])}, "
                f"rank {odd} trains {Trained.count(codes[odd])}.",
                fix="change requires_grad and the dtype of parameters on all ranks alike",
                ranks=(0, odd),
            )

    @property
    def uneven(self) -> bool:
        """Whether some feed's weight is not 1."""
        counts = self.counts()
        return self.num_feeds > 1 if self.summed else len(set(counts)) > 1

    def weight(self) -> float:
        """What the gradient of this feed's loss is multiplied by: its share of the rows times the number of feeds."""
        return self.weight_of(self.world.rank)

    def weight_of(self, rank: int) -> float:
        """The same, of the feed of any rank."""
        if self.summed:
            return float(self.num_feeds)
        counts = self.counts()
        total = sum(counts)
        return self.num_feeds * counts[rank // self.feed_size] / total if total else 0.0

    def share(self, region: Region) -> float:
        """Mean weight of the region's feeds."""
        if self.summed:
            return float(self.num_feeds)
        counts = self.counts()
        total = sum(counts)
        mine = sum(counts[rank // self.feed_size] for rank in region.rows.ranks)
        return self.num_feeds * mine / (region.rows.size * total) if total else 0.0


class _Deliver(torch.autograd.Function):
    """Identity on an output of the model; backward arms the gradient reducers and weighs by the feed's rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, call: Call, weigh: bool) -> torch.Tensor:
        ctx.call, ctx.weigh = call, weigh
        return x.detach()  # not a view to autograd, so that the user may write into it

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        call.reached()
        if ctx.weigh and call.accumulates():
            if call.uneven:
                weight = call.weight()
                grad = grad * weight if weight else torch.zeros_like(grad)  # the mean of no rows is NaN
        elif ctx.weigh and torch.is_grad_enabled() and call.uneven:
            raise LossError(
                "a gradient of a gradient (create_graph=True) where feeds are weighed: "
                + ('wh.replica(loss="sum").' if call.summed else f"they have {call.counts()} rows."),
                fix="a penalty on it would miss its weight: feed every rank equally many rows and use a mean loss",
            )
        return grad, call.anchor.zero, None, None


def deliver(x: torch.Tensor, call: Call, *, weigh: bool = True) -> torch.Tensor:
    """Passes a differentiable output of the model to the user; uneven rows enter the gradient here and only here.

    What a feed without samples computes may depend on no parameter; its backward has to join the others all the same.
    """
    if not x.requires_grad and not (call.is_empty and x.is_floating_point() and torch.is_grad_enabled()):
        return x
    out: torch.Tensor = _Deliver.apply(x, call.anchor.leaf, call, weigh)  # type: ignore[no-untyped-call]
    return out


class _Accept(torch.autograd.Function):
    """Identity on an input that parallelized models gave; its gradient has the weight of the model that took it.

    The outputs that it was made of would weigh the gradient again: their weight is taken off.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, givers: Sequence[Call]) -> torch.Tensor:
        ctx.givers = givers
        return x.detach()  # as in _Deliver: a first layer may work in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        givers = [giver for giver in ctx.givers if giver.accumulates()]
        if any(giver.uneven for giver in givers):
            _check_weights(givers)
            weight = givers[0].weight()
            grad = grad / weight if weight else grad
        return grad, None


def accept(x: torch.Tensor, call: Call) -> torch.Tensor:
    """An input of the model: one that parallelized models gave is weighed once, by the model nearest to the loss."""
    givers = givers_of(x) if x.requires_grad else ()
    if not givers:
        return x
    call.anchors.update(*(giver.anchors for giver in givers))
    out: torch.Tensor = _Accept.apply(x, givers)  # type: ignore[no-untyped-call]
    return out


def givers_of(x: torch.Tensor) -> list[Call]:
    """The forwards whose weighed outputs x was made of, without those behind them."""
    found: dict[int, Call] = {}
    seen: set[Any] = set()
    waiting: list[Any] = [x.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() != "_DeliverBackward":
            waiting += [before for before, _ in node.next_functions]
        elif node.weigh:
            found[id(node.call)] = node.call
    return list(found.values())


def _check_weights(givers: Sequence[Call]) -> None:
    """Raises LossError, on every rank, where one input was made of outputs that weigh differently."""
    first, *others = ([giver.weight_of(rank) for rank in range(giver.world.size)] for giver in givers)
    odd = next((weights for weights in others if weights != first), None)
    if odd is not None:
        raise LossError(
            "an input of a model was made of outputs of several forwards, whose rows are spread differently over the "
            f"ranks: their weights are {_short(first)} and {_short(odd)}.",
            fix="give each output to the model as an input of its own",
        )


def _short(weights: Sequence[float]) -> list[float]:
    return [round(weight, 4) for weight in weights]
