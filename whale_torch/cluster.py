"""The cluster a plan is made for: measured, described in a file, or invented."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from whale_torch.errors import PlanError

__all__ = ["Cluster"]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes, ranks of each node, the device kind and the links.

    ranks_of_nodes: number of ranks on each node; ranks are numbered node by node.
    device: "cpu", "cuda", ...
    inter_node_bytes_per_s: rate of one node's link to the others.
    intra_node_bytes_per_s: rate of one rank's link to the others of its node.
    latency_s: time of one small message.
    flops_per_s, memory_bytes: of one rank; None where unknown.
    """

    ranks_of_nodes: tuple[int, ...]
    device: str = "cpu"
    inter_node_bytes_per_s: float = 35e9 / 8
    intra_node_bytes_per_s: float = 100e9
    latency_s: float = 50e-6
    flops_per_s: float | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.ranks_of_nodes or min(self.ranks_of_nodes) < 1:
            raise PlanError(
                f"a cluster needs at least one rank on each node, got ranks_of_nodes={self.ranks_of_nodes}.",
                fix="Cluster.of(nodes=8, ranks_per_node=8)",
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

    def node_of(self, rank: int) -> int:
        """Number of the node that `rank` runs on."""
        for node, count in enumerate(self.ranks_of_nodes):
            if rank < count:
                return node
            rank -= count
        raise AssertionError("rank outside the cluster")

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ranks_of_nodes": list(self.ranks_of_nodes)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Cluster:
        return Cluster(**{**data, "ranks_of_nodes": tuple(data["ranks_of_nodes"])})

    def __str__(self) -> str:
        each = self.ranks_per_node
        ranks = f"{self.num_nodes} nodes x {each} ranks" if each else f"{self.num_ranks} ranks on nodes of {list(self.ranks_of_nodes)}"
        return f"{ranks}, {self.device}, {self.inter_node_bytes_per_s * 8 / 1e9:.3g} Gbit/s between nodes"
