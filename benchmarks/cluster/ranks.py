"""One rank of an emulated cluster: forked from the owner, moved to its node, given torchrun's environment."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster.namespaces import INTERFACE, Namespace, die_with_parent, node_address

__all__ = ["Place", "Rank", "fork_rank"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs: its number, its node, and the sizes around it."""

    rank: int
    node: int
    nodes: int
    ranks_per_node: int
    port: int

    def environment(self) -> dict[str, str]:
        """What torchrun would set for this rank."""
        world = self.nodes * self.ranks_per_node
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(self.rank % self.ranks_per_node),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "GROUP_RANK": str(self.node),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "MASTER_ADDR": node_address(0),
            "MASTER_PORT": str(self.port),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }


@dataclass(slots=True)
class Rank:
    """The owner's end of a rank: its process, the pipe of its result, the file that takes its stderr."""

    place: Place
    pid: int
    result_fd: int
    stderr_fd: int

    def stderr_tail(self, num_bytes: int = 4000) -> str:
        """The last part of what the rank wrote to stderr."""
        size = os.fstat(self.stderr_fd).st_size
        return os.pread(self.stderr_fd, num_bytes, max(0, size - num_bytes)).decode(errors="replace").strip()

    def close(self) -> None:
        os.close(self.result_fd)
        os.close(self.stderr_fd)


def fork_rank(place: Place, namespace: Namespace, release: tuple[int, int], work: Callable[[], Any]) -> Rank:
    """Forks a rank that runs `work`, sends its pickled result, and ends when the owner closes `release`."""
    read_fd, write_fd = os.pipe()
    stderr_fd = os.memfd_create(f"rank{place.rank}-stderr")
    owner = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(owner)
            os.close(release[1])
            _be_rank(place, namespace, write_fd, stderr_fd, work)
            os.read(release[0], 1)  # a rank that left early would take its store and sockets from the others
        finally:
            os._exit(0)
    os.close(write_fd)
    return Rank(place, pid, read_fd, stderr_fd)


def _be_rank(place: Place, namespace: Namespace, write_fd: int, stderr_fd: int, work: Callable[[], Any]) -> None:
    os.dup2(stderr_fd, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=2)  # the owner asks a hung rank where it is
    try:
        namespace.enter()
        os.environ.update(place.environment())
        torch.set_num_threads(1)
        answer = pickle.dumps((None, work()))
    except BaseException as error:
        answer = pickle.dumps((f"{type(error).__name__}: {error}\n{traceback.format_exc()}", None))
    sys.stdout.flush()
    with open(write_fd, "wb") as pipe:
        pipe.write(answer)
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # peers may have failed; the answer is out
            dist.destroy_process_group()
