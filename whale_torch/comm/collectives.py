"""Collectives on plain tensors: uneven rows, rank order of sums, and errors that name operation and ranks.

Small messages travel by all-to-all, the only fast small collective of gloo (docs/design.md 7).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from whale_torch.comm.failure import explain
from whale_torch.mesh import Group, TwoLevels
from whale_torch.ops import buffers

__all__ = [
    "Spread",
    "all_gather_rows",
    "all_reduce",
    "all_reduce_async",
    "all_to_all_rows",
    "all_to_all_rows_async",
    "broadcast",
    "broadcast_copy",
    "gather_equal",
    "reduce_scatter_equal",
    "reduce_scatter_rows",
    "spread_async",
]

# renamed in torch 2.13; the old names warn there and the new ones are absent before
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_SMALL_BYTES = 1 << 18


Result = TypeVar("Result")


def _run(group: Group, operation: str, call: Callable[[], Result]) -> Result:
    try:
        return call()
    except RuntimeError as error:
        raise explain(group, operation, error) from error


@functools.cache
def _options(op: dist.ReduceOp.RedOpType) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op  # type: ignore[assignment]
    return options


def _start_sum(x: torch.Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> dist.Work:
    """torch.distributed.all_reduce without its checks, which cost as much as a small message."""
    assert group.process_group is not None
    return group.process_group.allreduce([x], _options(op))


def _start_all_to_all(
    out: torch.Tensor, x: torch.Tensor, group: Group, received: Sequence[int] = (), sent: Sequence[int] = ()
) -> dist.Work:
    """torch.distributed.all_to_all_single without its checks; equal parts where no numbers of rows are given."""
    assert group.process_group is not None
    return group.process_group.alltoall_base(out, x, list(received), list(sent))


def _wait(group: Group, operation: str, work: dist.Work) -> None:
    _run(group, operation, work.wait)


def all_reduce(
    x: torch.Tensor, group: Group, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, name: str = "all-reduce"
) -> torch.Tensor:
    """Reduces x in place over the group and returns it."""
    if group.size > 1:
        group.count(2 * x.numel() * x.element_size() * (group.size - 1) / group.size, name)
        _run(group, name, lambda: _start_sum(x, group, op).wait())
    return x


def all_reduce_async(x: torch.Tensor, group: Group, *, name: str = "all-reduce") -> Callable[[], None]:
    """Starts a sum of x in place; the returned function waits for it."""
    if group.size == 1:
        return lambda: None
    group.count(2 * x.numel() * x.element_size() * (group.size - 1) / group.size, name)
    work = _run(group, name, lambda: _start_sum(x, group))
    return lambda: _wait(group, name, work)


def broadcast(x: torch.Tensor, group: Group, source: int = 0, *, name: str = "broadcast") -> torch.Tensor:
    """Overwrites x with that of the group's rank at place `source`."""
    if group.size > 1:
        group.count(x.numel() * x.element_size(), name)
        _run(group, name, lambda: dist.broadcast(x, group.ranks[source], group=group.process_group))
    return x


def broadcast_copy(x: torch.Tensor, group: Group, source: int = 0, *, name: str = "broadcast") -> torch.Tensor:
    """A dense copy of the x, of any dtype, of the rank at place `source`, on every rank of the group."""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if out.numel():
        broadcast(out.view(-1).view(torch.uint8), group, source, name=name)  # as bytes: gloo knows few dtypes
    return out


def gather_equal(x: torch.Tensor, group: Group, *, name: str = "all-gather") -> torch.Tensor:
    """Every rank's x, of one shape, stacked in front: [group.size, *x.shape]."""
    if group.size == 1:
        return x.unsqueeze(0)
    if group.levels is not None:
        between = gather_equal(x, group.levels.between, name=name)
        return gather_equal(between, group.levels.inside, name=name).transpose(0, 1).flatten(0, 1)
    x = x.contiguous()
    out = x.new_empty(group.size, *x.shape)
    group.count(x.numel() * x.element_size() * (group.size - 1), name)
    if x.numel() * x.element_size() * group.size <= _SMALL_BYTES and x.device.type == "cpu":
        spread = x.expand(group.size, *x.shape).contiguous()
        _run(group, name, lambda: _start_all_to_all(out, spread, group).wait())
    else:
        _run(group, name, lambda: _all_gather(out.view(-1), x.view(-1), group=group.process_group))
    return out


class Spread:
    """A gather of a few whole numbers of every rank, under way.

    In two levels it has a second part, inside the node, which each rank has to start: `advance` does, once the first
    part is here. So no rank depends on whether another one reads.
    """

    def __init__(self, parts: torch.Tensor, wait: Callable[[], None], inside: Group | None = None, name: str = ""):
        self._parts, self._wait, self._inside, self._name = parts, wait, inside, name

    def advance(self) -> None:
        """Starts the part inside the node; does nothing in one level, or the second time."""
        if self._inside is not None:
            of_nodes, inside, self._inside = self._here(), self._inside, None
            then = _start_spread(of_nodes, inside, self._name)
            self._parts, self._wait = then._parts, then._wait

    def wait(self) -> torch.Tensor:
        """The numbers, [group.size, count], in rank order."""
        self.advance()
        return self._here()

    def _here(self) -> torch.Tensor:
        self._wait()
        self._wait = lambda: None
        return self._parts.transpose(0, 1).flatten(0, 1)


def spread_async(numbers: tuple[int, ...], group: Group, *, name: str = "all-gather") -> Spread:
    """Starts to gather a few whole numbers of every rank."""
    mine = torch.tensor([numbers], device="cpu")
    if group.levels is None:
        return _start_spread(mine, group, name)
    between = _start_spread(mine, group.levels.between, name)
    return Spread(between._parts, between._wait, group.levels.inside, name)


def _start_spread(x: torch.Tensor, group: Group, name: str) -> Spread:
    """[k, count] of every rank."""
    if group.size == 1:
        return Spread(x.unsqueeze(0), lambda: None)
    out = x.new_empty(group.size, *x.shape)
    sent = x.expand_as(out).contiguous()
    group.count(x.numel() * x.element_size() * (group.size - 1), name)
    work = _run(group, name, lambda: _start_all_to_all(out, sent, group))
    return Spread(out, lambda: _wait(group, name, work))


def all_gather_rows(x: torch.Tensor, counts: Sequence[int], group: Group, *, name: str = "all-gather") -> torch.Tensor:
    """[counts[index], ...] of every rank -> [sum(counts), ...] in rank order; counts may differ and be 0."""
    if group.size == 1:
        return x
    if min(counts) == max(counts):
        return gather_equal(x, group, name=name).flatten(0, 1)
    if group.levels is not None:
        return _all_gather_two_levels(x, counts, group.levels, name)
    x = x.contiguous()
    spread = x.unsqueeze(0).expand(group.size, *x.shape).reshape(-1, *x.shape[1:])
    return all_to_all_rows(spread, [x.shape[0]] * group.size, list(counts), group, name=name)


def _by_place(counts: Sequence[int], levels: TwoLevels) -> list[list[int]]:
    """counts of the ranks at each place of a node, node by node."""
    return [list(counts[place :: levels.inside.size]) for place in range(levels.inside.size)]


def _all_gather_two_levels(x: torch.Tensor, counts: Sequence[int], levels: TwoLevels, name: str) -> torch.Tensor:
    """Each row crosses a node's link once: between nodes first, then inside."""
    places = _by_place(counts, levels)
    mine = all_gather_rows(x, places[levels.inside.index], levels.between, name=name)
    flat = all_gather_rows(mine, [sum(place) for place in places], levels.inside, name=name)
    parts = flat.split([count for place in places for count in place])
    num_nodes = levels.between.size
    return torch.cat([parts[p * num_nodes + n] for n in range(num_nodes) for p in range(levels.inside.size)])


def _reduce_scatter_two_levels(x: torch.Tensor, counts: Sequence[int], levels: TwoLevels, name: str) -> torch.Tensor:
    """Sums inside nodes first, so that each row crosses a node's link once."""
    places = _by_place(counts, levels)
    per_node = levels.inside.size
    parts = x.split(list(counts))
    ordered = torch.cat([parts[n * per_node + p] for p in range(per_node) for n in range(levels.between.size)])
    mine = reduce_scatter_rows(ordered, [sum(place) for place in places], levels.inside, name=name)
    return reduce_scatter_rows(mine, places[levels.inside.index], levels.between, name=name)


def all_to_all_rows(
    x: torch.Tensor, sent: list[int], received: list[int], group: Group, *, name: str = "all-to-all"
) -> torch.Tensor:
    """Sends sent[i] rows to the i-th rank, receives received[i] from it: [sum(sent), ...] -> [sum(received), ...]."""
    return all_to_all_rows_async(x, sent, received, group, name=name)()


def all_to_all_rows_async(
    x: torch.Tensor,
    sent: list[int],
    received: list[int],
    group: Group,
    *,
    name: str = "all-to-all",
    out: torch.Tensor | None = None,
) -> Callable[[], torch.Tensor]:
    """Starts all_to_all_rows, into `out` where it is given; the returned function waits for the rows.

    x must not change before that.
    """
    if group.size == 1:
        return lambda: x if out is None else out.copy_(x)
    x = x.contiguous()
    out = buffers.empty(sum(received), *x.shape[1:], like=x) if out is None else out
    row_bytes = x.element_size() * (x[0].numel() if x.shape[0] else 0)
    group.count((sum(sent) - sent[group.index]) * row_bytes, name)
    work = _run(group, name, lambda: _start_all_to_all(out, x, group, received, sent))

    def arrive() -> torch.Tensor:
        _wait(group, name, work)
        return out

    return arrive


def reduce_scatter_rows(
    x: torch.Tensor, counts: Sequence[int], group: Group, *, name: str = "reduce-scatter"
) -> torch.Tensor:
    """[sum(counts), ...] of every rank -> the sum of this rank's rows, added in rank order on every rank."""
    if group.size == 1:
        return x
    if group.levels is not None:
        return _reduce_scatter_two_levels(x, counts, group.levels, name)
    mine = counts[group.index]
    parts = all_to_all_rows(x, list(counts), [mine] * group.size, group, name=name)
    return parts.view(group.size, mine, *x.shape[1:]).sum(0)


def reduce_scatter_equal(x: torch.Tensor, group: Group, *, name: str = "reduce-scatter") -> torch.Tensor:
    """The sum over the ranks of this rank's equal part of a flat x."""
    if group.size == 1:
        return x
    if x.device.type == "cpu":  # gloo's own reduce-scatter takes several times as long
        share = [x.numel() // group.size] * group.size
        return all_to_all_rows(x, share, share, group, name=name).view(group.size, -1).sum(0)
    out = x.new_empty(x.numel() // group.size)
    group.count(x.numel() * x.element_size() * (group.size - 1) / group.size, name)
    _run(group, name, lambda: _reduce_scatter(out, x, group=group.process_group))
    return out
