"""Process groups: the only reader of torchrun's environment, and the only place that makes groups."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import socket
import threading
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before any world is there: its functions would hold it by their defaults
from torch.distributed.rendezvous import rendezvous

from whale_torch import gloo
from whale_torch.cluster import Cluster
from whale_torch.errors import PlanError
from whale_torch.exits import failed, watch_exit
from whale_torch.restarts import store_of_this_start

__all__ = ["Group", "Mesh", "Surroundings", "TwoLevels", "start", "surroundings", "world_now"]

DEFAULT_TIMEOUT = timedelta(minutes=10)


class Group:
    """Some ranks and the process group that joins them (None for a rank alone); copies of a model share it.

    name: what messages call it. ranks: global numbers in order. index: this rank's place among them.
    levels: the same ranks inside nodes and between nodes, where exchanges should cross a node's link once.
    """

    levels: TwoLevels | None = None

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int, process_group: dist.ProcessGroup | None):
        self.name, self.ranks, self.rank = name, ranks, rank
        self.index = ranks.index(rank)
        self.size = len(ranks)
        self.process_group = process_group
        self.sequence = 0
        self.num_calls = 0
        self.sent_by: dict[str, float] = {}

    @property
    def sent_bytes(self) -> float:
        """Bytes this rank has sent in all collectives of the group so far."""
        return sum(self.sent_by.values())

    def count(self, sent_bytes: float, operation: str) -> None:
        """Notes one collective of an operation and the bytes this rank sends in it."""
        self.sent_by[operation] = self.sent_by.get(operation, 0.0) + sent_bytes
        self.num_calls += 1

    def hold(self) -> None:
        """Messages are under way: until `release`, no other model takes over the process group of this one."""
        _pool.held.add(self)

    def release(self) -> None:
        """No message is under way."""
        _pool.held.discard(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a process group cannot be pickled")

    def __repr__(self) -> str:
        return f"Group({self.name}, ranks {list(self.ranks)})"


@dataclass(frozen=True)
class TwoLevels:
    """A group's ranks of one node, and its ranks at the same place on all nodes; rank = node * inside.size + place."""

    inside: Group
    between: Group


@dataclass(slots=True)
class _Private:
    """A process group that one model has for itself, and the group of that model."""

    key: tuple[Any, ...]
    process_group: dist.ProcessGroup | None
    user: weakref.ref[Group]


def world_now() -> weakref.ref[dist.ProcessGroup] | None:
    """The world's own group, equal as long as it is the same one; a strong reference would keep its threads alive."""
    world = dist.group.WORLD
    return None if world is None else weakref.ref(world)


class _Pool:
    """Groups of the models of one process: they live as long as the world's own group.

    groups: shared by all models. private: one after another, in an order equal on all ranks. free: numbers of private
    ones that no rank uses any more, as the ranks told each other. held: groups with messages under way.
    """

    def __init__(self) -> None:
        self.world: weakref.ref[dist.ProcessGroup] | None = None
        self.groups: dict[tuple[Any, ...], Group] = {}
        self.private: list[_Private] = []
        self.free: set[int] = set()
        self.held: set[Group] = set()
        self.made: weakref.WeakSet[Group] = weakref.WeakSet()

    def of_this_world(self) -> _Pool:
        if self.world != (world := world_now()):
            self.clear()
            self.world = world
        return self

    def clear(self) -> None:
        for kept in (self.groups, self.private, self.free, self.held):
            kept.clear()

    def unused(self) -> set[int]:
        """Numbers of private groups whose model is gone on this rank."""
        if len(self.private) - len(self.free) > _MANY:
            gc.collect()  # a model is a cycle of objects, so it stays until someone looks
        return {number for number, private in enumerate(self.private) if private.user() is None}

    def take_over(self, key: tuple[Any, ...], name: str, block: tuple[int, ...], rank: int) -> Group | None:
        """A group over the process group of a model that is gone on all ranks, None where there is none for `key`."""
        number = min((n for n in self.free if self.private[n].key == key), default=None)
        if number is None:
            return None
        self.free.remove(number)
        group = Group(name, block, rank, self.private[number].process_group)
        self.private[number].user = weakref.ref(group)
        return group


_MANY = 16
_pool = _Pool()
PRIVATE_CHANNELS = ("gradients", "sparse gradients")
"""Channels whose order of messages only one model knows: no two models that live share their groups."""


class Mesh:
    """All groups of one model: made on all ranks in one order, each block of ranks once a channel.

    Raises PlanError where the blocks do not cut the world.
    """

    def __init__(self, rank: int, world: int, device: torch.device, cluster: Cluster, timeout: timedelta):
        self.rank, self.world, self.device, self.cluster, self.timeout = rank, world, device, cluster, timeout
        self._groups: dict[tuple[Any, ...], Group] = {}

    def two_levels(self, name: str, blocks: tuple[tuple[int, ...], ...], *, channel: str = "") -> Group:
        """As group, with levels where every block spans several nodes, with several and equally many ranks on each."""
        group = self.group(name, blocks, channel=channel)
        levels = self.cluster.levels_of(blocks)
        if levels is not None and group.levels is None:
            inside, between = levels
            group.levels = TwoLevels(
                self.group(f"{name} inside a node", inside, channel=channel),
                self.group(f"{name} between nodes", between, channel=channel),
            )
        return group

    def group(self, name: str, blocks: tuple[tuple[int, ...], ...], *, channel: str = "") -> Group:
        """The block of `blocks` that holds this rank; every rank calls it with the same blocks.

        channel: blocks on different channels never wait for each other (gradients beside activations).
        """
        private = channel.startswith(PRIVATE_CHANNELS) or self.world == 1
        groups = self._groups if private else self._shared()
        key = (channel, blocks, self.device.type, self.timeout)
        if key not in groups:
            groups[key] = self._private(key, name, blocks) if private else self._make(name, blocks)
            _pool.made.add(groups[key])
        return groups[key]

    def _make(self, name: str, blocks: tuple[tuple[int, ...], ...]) -> Group:
        mine: Group | None = None
        for block in blocks:
            process_group = self._join(block) if len(block) > 1 else None
            if self.rank in block:
                mine = Group(name, block, self.rank, process_group)
        if mine is None:
            raise AssertionError(f"rank {self.rank} is in none of {blocks}")
        return mine

    def _private(self, key: tuple[Any, ...], name: str, blocks: tuple[tuple[int, ...], ...]) -> Group:
        """A group that no living model has: that of one that is gone, or a new one."""
        if self.world == 1:
            return self._make(name, blocks)
        pool = _pool.of_this_world()
        block = next((block for block in blocks if self.rank in block), ())
        group = pool.take_over(key, name, block, self.rank)
        if group is None:
            group = self._make(name, blocks)
            pool.private.append(_Private(key, group.process_group, weakref.ref(group)))
        return group

    def _shared(self) -> dict[tuple[Any, ...], Group]:
        return _pool.of_this_world().groups

    def _join(self, block: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Makes one group; ranks outside it take part, since all count the groups made so far."""
        # new_group does not inherit the time-out of the world's group
        host = gloo.register(os.environ.get("GLOO_SOCKET_IFNAME", ""))
        group: dist.ProcessGroup | None = dist.new_group(
            list(block), timeout=self.timeout, backend=_backend(self.device, host)
        )
        return group

    def groups(self) -> list[Group]:
        """The groups of this model, and those it may share with other models."""
        return [*self._groups.values(), *([] if self.world == 1 else self._shared().values())]

    def everyone(self, *, channel: str = "") -> Group:
        return self.two_levels("world", (tuple(range(self.world)),), channel=channel)


_DEVICE_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}


def _backend(device: torch.device, host: str) -> str:
    """Small host-side messages always travel by gloo, so that no device is waited for."""
    return host if device.type == "cpu" else f"cpu:{host},{device.type}:{_DEVICE_BACKENDS[device.type]}"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a launcher told this process, without joining anything: None where it said nothing. cores: usable here."""

    rank: int | None
    world: int | None
    node: int | None
    local_world: int | None
    cores: int


def surroundings() -> Surroundings:
    """The environment as torchrun writes it, and the cores of this process."""

    def read(name: str) -> int | None:
        return _integer(name, 0) if name in os.environ else None

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Surroundings(read("RANK"), read("WORLD_SIZE"), read("GROUP_RANK"), read("LOCAL_WORLD_SIZE"), cores)


_LEAVE_S = 5.0


def _end(*, ours: bool) -> None:
    """Leaves the world at the end of the process, so that nothing is leaked or warned about.

    ours: whether start made the world; one that the script made ends when the script says. After an error the other
    ranks may never come: then the process just ends.
    """
    if failed():
        return
    held: list[object] = [group.process_group for group in _pool.made]
    if ours and dist.is_initialized():
        held.append(dist.group.WORLD)
        dist.destroy_process_group()
    if not dist.is_initialized():
        _pool.clear()
        for group in list(_pool.made):
            group.process_group = None
        gloo.forget_devices()
        # The last reference joins gloo's threads: one that still runs when the interpreter goes can abort the process.
        # With a message under way they run until its time-out, for which nobody waits.
        last = threading.Thread(target=held.clear, daemon=True)
        last.start()
        last.join(_LEAVE_S)


@functools.cache
def _end_with_process(*, ours: bool) -> None:
    atexit.register(_end, ours=ours)


def start(device: torch.device | str | None = None, timeout: timedelta | None = None) -> Mesh:
    """Joins the ranks that torchrun started (one process alone otherwise) and says what cluster they form.

    A process group that the script started itself is used as it is. device: this rank's; default cuda:LOCAL_RANK where
    CUDA is there, else cpu. Raises PlanError for a device without a way to communicate, for an environment that names
    a world but no rank, and where ranks of one node are not numbered side by side.
    """
    timeout = timeout or DEFAULT_TIMEOUT
    world = dist.get_world_size() if dist.is_initialized() else _integer("WORLD_SIZE", 1)
    device = _device(device, world)
    ours = not dist.is_initialized()
    if ours:
        if world == 1:
            return Mesh(0, 1, device, Cluster.of(device=device.type), timeout)
        if "RANK" not in os.environ:
            raise PlanError(
                f"WORLD_SIZE is {world} but RANK is not set.", fix="start with torchrun --nproc-per-node N script.py"
            )
        _join_world(_backend(device, "gloo"), timeout)
    rank = dist.get_rank()
    _end_with_process(ours=ours)
    watch_exit(rank)
    return Mesh(rank, world, device, _cluster_of_world(world, device), timeout)


def _join_world(backend: str, timeout: timedelta) -> None:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        dist.init_process_group(backend, timeout=timeout)
        return
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    store = store_of_this_start(store, rank, world, timeout)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world)


def _integer(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not value.isdecimal() or int(value) < (1 if name.endswith("SIZE") else 0):
        raise PlanError(
            f"the environment says {name}={value!r}, which is not a number of ranks.",
            fix="start with torchrun --nproc-per-node N script.py",
        )
    return int(value)


def _device(asked: torch.device | str | None, world: int) -> torch.device:
    local_rank = _integer("LOCAL_RANK", 0)
    if asked is None:
        asked = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(asked)
    if device.type == "meta" or (world > 1 and device.type not in ("cpu", *_DEVICE_BACKENDS)):
        raise PlanError(
            f"{world} ranks cannot train on device '{device}'.",
            fix=f"device= one of cpu, {', '.join(_DEVICE_BACKENDS)}",
        )
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if not count:
        raise PlanError(
            f"device='{device}' was asked for, but torch sees no CUDA device on this machine.",
            fix='leave device out, which takes what is there, or say device="cpu" (see python -m whale_torch)',
        )
    index = local_rank if device.index is None else device.index
    if index >= count:
        raise PlanError(
            f"this rank wants cuda:{index} (LOCAL_RANK {local_rank}), but torch sees {count} CUDA devices.",
            fix=f"start at most {count} ranks a node (torchrun --nproc-per-node), or pass device=",
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _cluster_of_world(world: int, device: torch.device) -> Cluster:
    """Which ranks share a node: by torchrun's numbers, or by host name where another launcher started them."""
    if world == 1:
        return Cluster.of(device=device.type)
    pool = _pool.of_this_world()
    mine = os.environ.get("GROUP_RANK") or socket.gethostname()
    told: list[Any] = [None] * world
    dist.all_gather_object(told, (mine, pool.unused()))
    pool.free = set.intersection(*(unused for _, unused in told))
    nodes = [node for node, _ in told]
    in_order = list(dict.fromkeys(nodes))
    blocks = [node for node in in_order for _ in range(nodes.count(node))]
    if nodes != blocks:
        raise PlanError(
            f"ranks of one node are not numbered side by side: ranks 0 to {world - 1} are on nodes {nodes}.",
            fix="start the ranks with torchrun",
        )
    return Cluster(tuple(nodes.count(node) for node in in_order), device=device.type)
