"""What a training step of a pipeline sends over which link: inside nodes and between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import nn

from whale_torch.planning.gradients import local_numel
from whale_torch.planning.layout import Shard
from whale_torch.planning.pipelines import Links
from whale_torch.planning.plan import Plan, Reduce

__all__ = ["Sent", "links_of", "send_stages"]


class Sent:
    """Bytes that each rank sends to ranks of its own node and to those of other nodes.

    nodes: node of each rank.
    """

    def __init__(self, nodes: Sequence[int]):
        self.nodes = nodes
        self.inside = [0.0] * len(nodes)
        self.between = [0.0] * len(nodes)

    def send(self, source: int, goal: int, num_bytes: float) -> None:
        if source != goal:
            kind = self.inside if self.nodes[source] == self.nodes[goal] else self.between
            kind[source] += num_bytes

    def all_reduce(self, ranks: Sequence[int], num_bytes: float) -> None:
        """In a ring, each rank sends to the next."""
        each = 2 * num_bytes * (len(ranks) - 1) / len(ranks)
        for source, goal in pairwise([*ranks, ranks[0]]):
            self.send(source, goal, each)

    def exchange(self, ranks: Sequence[int], num_bytes: float) -> None:
        """Each rank sends so much in all, to all others alike."""
        for source in ranks:
            for goal in ranks:
                self.send(source, goal, num_bytes / max(len(ranks) - 1, 1))

    def busiest_node(self) -> float:
        """Bytes that leave the node that sends most."""
        total: dict[int, float] = {}
        for node, sent in zip(self.nodes, self.between, strict=True):
            total[node] = total.get(node, 0.0) + sent
        return max(total.values())


def send_stages(plan: Plan, sent: Sent) -> None:
    """Adds what stages hand each other in a step, and the gradients that come back."""
    assert plan.pipeline is not None
    for ranks in plan.device("replica").pipelines:
        for moved in plan.pipeline.moved:
            source, goal = (ranks[plan.pipeline.place_of(stage)] for stage in (moved.source, moved.goal))
            sent.send(source, goal, moved.activation_bytes)
            sent.send(goal, source, moved.gradient_bytes)


def links_of(
    plan: Plan, model: nn.Module, shards: Mapping[str, Shard], split_bytes: Mapping[str, Sequence[float]]
) -> Links:
    """What a step of a pipeline moves over its busiest links: stages' outputs, gradients, and rows of splits.

    split_bytes: that a rank of each place sends for the splits on a VirtualDevice, by its name.
    """
    assert plan.pipeline is not None
    sent = Sent(plan.cluster.nodes)
    send_stages(plan, sent)
    users = plan.pipeline.users(model)
    places = {name: tuple(sorted({plan.pipeline.place_of(stage) for stage in users[name]})) for name in users}
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for reduce in plan.reduces:
        _send_gradients(plan, reduce, parameters, shards, places, sent)
    for name, by_place in split_bytes.items():
        for block in plan.device(name).columns:
            sent.exchange(block, by_place[_place(plan, block[0])])
    return Links(plan.pipeline.inner, sent.busiest_node(), max(sent.inside))


def _send_gradients(
    plan: Plan,
    reduce: Reduce,
    parameters: Mapping[str, nn.Parameter],
    shards: Mapping[str, Shard],
    places: Mapping[str, tuple[int, ...]],
    sent: Sent,
) -> None:
    device = plan.device(reduce.device)
    sizes: dict[tuple[int, ...], float] = {}
    for name in reduce.parameters:
        if name in parameters:
            itemsize = reduce.wire_dtype(parameters[name].dtype).itemsize
            own = local_numel(parameters[name], shards.get(name)) * itemsize
            sizes[places[name]] = sizes.get(places[name], 0.0) + own
    for at, size in sizes.items():
        if len(at) > 1:  # tied: the ranks of all its places together
            ranks = sorted(ranks[place] for ranks in device.pipelines for place in at)
            sent.all_reduce(ranks, size)
            continue
        blocks = tuple(block for block in device.copies if _place(plan, block[0]) == at[0])
        levels = plan.cluster.levels_of(blocks) if reduce.algorithm == "hierarchical" else None
        if levels is None:
            for block in blocks:
                sent.all_reduce(block, size)
            continue
        inside, between = levels
        for block in inside:
            sent.all_reduce(block, size)
        for block in between:
            sent.all_reduce(block, size / len(inside[0]))


def _place(plan: Plan, rank: int) -> int:
    return plan.device("replica").place_of(rank)
