"""Process groups: the only reader of torchrun's environment, and the only place that makes groups."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from whale_torch.cluster import Cluster
from whale_torch.errors import PlanError

__all__ = ["Group", "Mesh", "start"]

DEFAULT_TIMEOUT = timedelta(minutes=10)


class Group:
    """Some ranks and the process group that joins them (None for a rank alone); copies of a model share it.

    name: what messages call it. ranks: global numbers in order. index: this rank's place among them.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int, process_group: dist.ProcessGroup | None):
        self.name, self.ranks, self.rank = name, ranks, rank
        self.index = ranks.index(rank)
        self.size = len(ranks)
        self.process_group = process_group
        self.sequence = 0
        self.sent_bytes = 0.0
        self.num_calls = 0

    def count(self, sent_bytes: float) -> None:
        """Notes one collective and the bytes this rank sends in it."""
        self.sent_bytes += sent_bytes
        self.num_calls += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a process group cannot be pickled")

    def __repr__(self) -> str:
        return f"Group({self.name}, ranks {list(self.ranks)})"


class Mesh:
    """All groups of one process: made on all ranks in one order, each block of ranks once.

    Raises PlanError where the blocks do not cut the world.
    """

    def __init__(self, rank: int, world: int, device: torch.device, cluster: Cluster, timeout: timedelta):
        self.rank, self.world, self.device, self.cluster, self.timeout = rank, world, device, cluster, timeout
        self._groups: dict[tuple[str, tuple[tuple[int, ...], ...]], Group] = {}

    def group(self, name: str, blocks: tuple[tuple[int, ...], ...], *, channel: str = "") -> Group:
        """The block of `blocks` that holds this rank; every rank calls it with the same blocks.

        channel: blocks on different channels never wait for each other (gradients beside activations).
        """
        key = (channel, blocks)
        if key not in self._groups:
            mine: Group | None = None
            for block in blocks:
                process_group = None
                if len(block) > 1:
                    process_group = dist.new_group(list(block), timeout=self.timeout, backend=_backend(self.device))
                if self.rank in block:
                    mine = Group(name, block, self.rank, process_group)
            if mine is None:
                raise AssertionError(f"rank {self.rank} is in none of {blocks}")
            self._groups[key] = mine
        return self._groups[key]

    def everyone(self, *, channel: str = "") -> Group:
        return self.group("world", (tuple(range(self.world)),), channel=channel)


def _backend(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{_DEVICE_BACKENDS.get(device.type, 'nccl')}"


_DEVICE_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}


def _ask_store(key: str, value: str | None = None) -> str | None:
    """Reads or writes one key of the world's store without waiting; None where it is absent or the store is gone."""
    try:
        store = dist.distributed_c10d._get_default_store()
        if value is not None:
            store.set(key, value)
            return value
        return store.get(key).decode() if store.check([key]) else None
    except (RuntimeError, ValueError, OSError):  # the store lives in a rank that may have ended; then nothing is known
        return None


def note_place(group: Group, place: str) -> None:
    """Tells the other ranks in which operation this one failed."""
    _ask_store(f"whale/place/{group.rank}", place)


def place_of_rank(group: Group, rank: int) -> str | None:
    """The operation in which `rank` failed, if it noted one."""
    return _ask_store(f"whale/place/{rank}")


def failure_of(group: Group, rank: int) -> str | None:
    """The error with which `rank` ended, if it noted one."""
    return _ask_store(f"whale/failure/{rank}")


def _note_failures(rank: int) -> None:
    """Lets an error that ends this process be read by the ranks that wait for it."""
    earlier = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _ask_store(f"whale/failure/{rank}", f"{kind.__name__}: {error}")
        earlier(kind, error, trace)

    sys.excepthook = hook


def start(device: torch.device | str | None = None, timeout: timedelta | None = None) -> Mesh:
    """Joins the ranks that torchrun started (one process alone otherwise) and says what cluster they form.

    device: this rank's; default cuda:LOCAL_RANK where CUDA is there, else cpu.
    Raises PlanError where a running process group contradicts torchrun's environment.
    """
    timeout = timeout or DEFAULT_TIMEOUT
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device is None:
        device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        if world == 1:
            return Mesh(0, 1, device, Cluster.of(device=device.type), timeout)
        if "RANK" not in os.environ:
            raise PlanError(f"WORLD_SIZE is {world} but RANK is not set.", fix="start with torchrun --nproc-per-node N script.py")
        dist.init_process_group(_backend(device), timeout=timeout)
        _note_failures(dist.get_rank())
    rank, world = dist.get_rank(), dist.get_world_size()
    return Mesh(rank, world, device, _cluster_of_world(world, device), timeout)


def _cluster_of_world(world: int, device: torch.device) -> Cluster:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    counts: list[int | None] = [None] * world
    if world == 1:
        return Cluster.of(device=device.type)
    dist.all_gather_object(counts, (int(os.environ.get("GROUP_RANK", dist.get_rank() // max(local, 1))), local))
    nodes: dict[int, int] = {}
    for node, _ in counts:  # type: ignore[misc]
        nodes[node] = nodes.get(node, 0) + 1
    ordered = [node for node, _ in counts]  # type: ignore[misc]
    if ordered != sorted(ordered):
        raise PlanError(f"ranks of one node are not numbered side by side: nodes of ranks 0.. are {ordered}.", fix="start the ranks with torchrun")
    return Cluster(tuple(nodes[node] for node in sorted(nodes)), device=device.type)
