"""The cluster a plan is made for: the running one, described in a file, or invented."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from whale_torch.errors import PlanError

__all__ = ["Blocks", "Cluster"]

Blocks = tuple[tuple[int, ...], ...]
"""Ranks in groups."""


@lru_cache(maxsize=64)
def _nodes_of(ranks_of_nodes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(node for node, count in enumerate(ranks_of_nodes) for _ in range(count))


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes, ranks of each node, the device kind and the links.

    ranks_of_nodes: number of ranks on each node; ranks are numbered node by node. Plans depend on it alone.
    device: "cpu", "cuda", ...; printed.

    The rest is None where unknown. It is checked, kept with a saved plan and printed; no plan depends on it before the
    search of wh.auto_parallel exists.
    inter_node_bytes_per_s: rate of one node's link to the others.
    intra_node_bytes_per_s: rate of one rank's link to the others of its node.
    latency_s: time of one small message.
    flops_per_s, memory_bytes: of one rank.
    """

    ranks_of_nodes: tuple[int, ...]
    device: str = "cpu"
    inter_node_bytes_per_s: float | None = None
    intra_node_bytes_per_s: float | None = None
    latency_s: float | None = None
    flops_per_s: float | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        counts = self.ranks_of_nodes
        if not counts or not all(type(count) is int and count > 0 for count in counts):
            raise PlanError(
                f"a cluster needs at least one rank on each node, got ranks_of_nodes={counts!r}.",
                fix="wh.Cluster.of(nodes=8, ranks_per_node=8), or wh.Cluster(ranks_of_nodes=(8, 8, 4))",
            )
        for name, _ in _QUANTITIES:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise PlanError(
                    f"a cluster's {name} is a positive number, got {value!r}.", fix=f"wh.Cluster.of(..., {name}=1e9)"
                )

    @staticmethod
    def of(nodes: int = 1, ranks_per_node: int = 1, **options: Any) -> Cluster:
        """A cluster of equal nodes; further options as in Cluster."""
        return Cluster(ranks_of_nodes=(ranks_per_node,) * nodes, **options)

    @property
    def num_ranks(self) -> int:
        return sum(self.ranks_of_nodes)

    @property
    def num_nodes(self) -> int:
        return len(self.ranks_of_nodes)

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks of each node where all nodes are equal, else None."""
        return self.ranks_of_nodes[0] if len(set(self.ranks_of_nodes)) == 1 else None

    @property
    def nodes(self) -> tuple[int, ...]:
        """Node of each rank."""
        return _nodes_of(self.ranks_of_nodes)

    def levels_of(self, blocks: Blocks) -> tuple[Blocks, Blocks] | None:
        """The blocks' ranks of one node, and their ranks at the same place on all nodes of a block.

        None unless every block spans several nodes, with several and equally many ranks on each.
        """
        inside: list[tuple[int, ...]] = []
        between: list[tuple[int, ...]] = []
        nodes = self.nodes
        for block in blocks:
            by_node: dict[int, list[int]] = {}
            for rank in block:
                by_node.setdefault(nodes[rank], []).append(rank)
            sizes = {len(ranks) for ranks in by_node.values()}
            if len(by_node) == 1 or len(sizes) > 1 or sizes == {1}:
                return None
            inside += [tuple(ranks) for ranks in by_node.values()]
            between += list(zip(*by_node.values(), strict=True))
        return tuple(inside), tuple(between)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Cluster:
        """A cluster from what `to_dict` gave; what is left out has its default.

        Raises PlanError for a name that no field of a cluster has.
        """
        known = {field.name for field in fields(Cluster)}
        if not isinstance(data, dict) or "ranks_of_nodes" not in data or set(data) - known:
            found = sorted(set(data) - known) if isinstance(data, dict) else type(data).__name__
            raise PlanError(
                f"this is not a description of a cluster: it has {found}, and the names known are {sorted(known)}."
                if found
                else "this is not a description of a cluster: it has no ranks_of_nodes.",
                fix='write {"ranks_of_nodes": [8, 8], "device": "cuda"}, or use cluster.save(path)',
            )
        return Cluster(**{**data, "ranks_of_nodes": tuple(data["ranks_of_nodes"])})

    def save(self, path: str | Path) -> None:
        """Writes the cluster as readable JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Reads a cluster that `save` or a person wrote. Raises PlanError where the file describes none."""
        try:
            data = json.loads(Path(path).read_text())
        except json.JSONDecodeError as error:
            raise PlanError(
                f"{path} is not JSON: {error}.", fix='write {"ranks_of_nodes": [8, 8], "device": "cuda"}'
            ) from error
        return Cluster.from_dict(data)

    def __str__(self) -> str:
        each, nodes = self.ranks_per_node, self.num_nodes
        if nodes == 1:
            ranks = f"1 node x {_counted(self.num_ranks, 'rank')}"
        elif each:
            ranks = f"{nodes} nodes x {_counted(each, 'rank')}"
        else:
            ranks = f"{self.num_ranks} ranks on nodes of {list(self.ranks_of_nodes)}"
        told = [say(value) for name, say in _QUANTITIES if (value := getattr(self, name)) is not None]
        return ", ".join([ranks, self.device, *told])


# What is known of a cluster besides its ranks, and how it reads.
_QUANTITIES: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("inter_node_bytes_per_s", lambda rate: f"{rate * 8 / 1e9:.3g} Gbit/s between nodes"),
    ("intra_node_bytes_per_s", lambda rate: f"{rate * 8 / 1e9:.3g} Gbit/s inside a node"),
    ("latency_s", lambda time: f"{time * 1e6:.3g} us a message"),
    ("flops_per_s", lambda rate: f"{rate / 1e12:.3g} Tflop/s a rank"),
    ("memory_bytes", lambda size: f"{size / 1e9:.3g} GB a rank"),
)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")
