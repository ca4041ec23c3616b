"""Which gradients are averaged together, over which ranks, in what precision and by which algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from whale_torch.cluster import Cluster
from whale_torch.errors import PlanError
from whale_torch.planning.layout import Shard
from whale_torch.planning.placement import VirtualDevice
from whale_torch.planning.plan import Reduce
from whale_torch.planning.taskgraph import TaskGraph

__all__ = ["DEFAULT_BUCKET_BYTES", "DEFAULT_MAX_IN_FLIGHT", "local_numel", "plan_reduces"]

DEFAULT_BUCKET_BYTES = 4 << 20
DEFAULT_MAX_IN_FLIGHT = 8


def local_numel(parameter: torch.Tensor, shard: Shard | None) -> int:
    """Elements of the largest part that a rank holds."""
    if shard is None:
        return parameter.numel()
    widest = max(range(shard.num_ranks), key=lambda i: shard.widths[i])
    return torch.Size(shard.local_shape(widest)).numel()


def plan_reduces(
    parameters: Mapping[str, nn.Parameter],
    shards: Mapping[str, Shard],
    owner: Mapping[str, int],
    graphs: Sequence[TaskGraph],
    devices: Mapping[str, VirtualDevice],
    cluster: Cluster,
) -> tuple[Reduce, ...]:
    """Groups what is or may be trained by the ranks that hold a copy and by the options of its wh.replica.

    owner: TaskGraph of each parameter. Raises PlanError where a hierarchical all-reduce is asked for and cannot be.
    """
    fits = {name: cluster.levels_of(device.copies) is not None for name, device in devices.items()}
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, parameter in parameters.items():
        graph = graphs[owner[name]]
        device = devices[graph.device] if name in shards else devices["replica"]
        could_train = parameter.is_floating_point() or parameter.is_complex()
        if device.num_copies == 1 or not could_train:
            continue
        wire = graph.option("replica", "reduce_dtype")
        key = (
            device.name,
            None if wire is None or wire is parameter.dtype else str(wire).removeprefix("torch."),
            _algorithm(graph, device, fits[device.name], cluster),
            graph.option("replica", "bucket_bytes") or DEFAULT_BUCKET_BYTES,
            graph.option("replica", "max_in_flight") or DEFAULT_MAX_IN_FLIGHT,
            parameter.dtype,
        )
        groups.setdefault(key, []).append(name)
    return tuple(
        Reduce(device, wire, algorithm, bucket_bytes, in_flight, tuple(names))
        for (device, wire, algorithm, bucket_bytes, in_flight, _), names in groups.items()
    )


def _algorithm(graph: TaskGraph, device: VirtualDevice, fits: bool, cluster: Cluster) -> str:
    asked = graph.option("replica", "all_reduce", "auto")
    if asked == "hierarchical" and not fits and device.name == "replica":
        raise PlanError(
            f"{graph.label} asks for a hierarchical all-reduce, but {cluster} has "
            "no two nodes of several, equally many ranks.",
            where=graph.site,
            fix='use all_reduce="auto" or "flat"',
        )
    return "hierarchical" if fits and asked != "flat" else "flat"
