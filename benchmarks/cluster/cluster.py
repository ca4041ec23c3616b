"""The emulated cluster: builds the network, runs a function on every rank, ends everything."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.cluster.namespaces import (
    Namespace,
    bits_per_second,
    build_network,
    measure_rate,
    refusal,
    sent_bytes,
    shape_links,
)
from benchmarks.cluster.ranks import Place, Rank, fork_rank
from whale_torch.errors import WhaleError

__all__ = ["Cluster", "ClusterError"]

_GRACE_SECONDS = 1.0  # after the first failure, how long others may still report theirs


class ClusterError(WhaleError, RuntimeError):
    """The emulated cluster cannot be built, or a rank failed, died or did not answer in time."""


class Cluster:
    """Nodes with ranks, joined by links of `rate`, as a context manager.

        with Cluster(nodes=4, ranks_per_node=1, rate="400mbit") as cluster:
            results = cluster.run(step, batch_size)          # step(rank, batch_size) on every rank

    nodes, ranks_per_node: sizes; rank r lives on node r // ranks_per_node. Ranks of a node talk over its loopback.
    rate: of each node's link, each direction, in tc's spelling.
    timeout: seconds that a run may take unless told otherwise.
    Raises: ClusterError where root, `ip`, `tc` or the kernel's veth, bridge and tbf are missing.
    """

    def __init__(self, nodes: int, ranks_per_node: int = 1, *, rate: str = "400mbit", timeout: float = 600.0) -> None:
        self.nodes, self.ranks_per_node, self.rate, self.timeout = nodes, ranks_per_node, rate, timeout
        self.bits_per_second = bits_per_second(rate)
        self._namespaces: list[Namespace] = []
        self._port = 29500

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def inodes(self) -> list[int]:
        """The inodes of the network namespaces: by them /proc/<pid>/ns/net tells who is inside."""
        return [namespace.inode for namespace in self._namespaces]

    def __enter__(self) -> Cluster:
        missing = refusal()
        if missing is not None:
            raise ClusterError(f"an emulated cluster cannot run here: {missing[0]}", fix=missing[1])
        try:
            switch, members = build_network(self.nodes, self.rate)
        except subprocess.CalledProcessError as error:
            raise ClusterError(
                f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}",
                fix="load the kernel modules veth, bridge and sch_tbf",
            ) from error
        self._namespaces = [*members, switch]
        return self

    def set_rate(self, rate: str) -> None:
        """Changes the rate of every link: in the owner, or in one rank while nothing travels."""
        *members, switch = self._namespaces
        shape_links(switch, members, rate)
        self.rate, self.bits_per_second = rate, bits_per_second(rate)

    def __exit__(self, *_: object) -> None:
        for namespace in self._namespaces:
            namespace.close()
        self._namespaces = []

    def measured_rate(self) -> float:
        """Bit/s of payload that one TCP stream gets from node 0 to node 1."""
        if self.nodes < 2:
            raise ClusterError("a cluster of 1 node has no link to measure", fix="use nodes=2 or more")
        num_bytes = max(int(self.bits_per_second / 8 * 0.4), 1 << 18)
        return measure_rate(self._namespaces[0], self._namespaces[1], 1, num_bytes)

    def sent_bytes(self) -> list[int]:
        """Bytes that each node has put on its link so far, headers included."""
        counts = []
        for namespace in self._namespaces[: self.nodes]:
            with namespace.entered():
                counts.append(sent_bytes())
        return counts

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Runs `fn(rank, *args)` on every rank in a fresh process; returns what they returned, by rank.

        Each rank has torchrun's environment, one thread, and no process group yet. Results travel as pickled bytes.
        Raises: ClusterError with the first failing rank's traceback, or with the ranks that gave no answer in time and
        where they stood.
        """
        if not self._namespaces:
            raise ClusterError("this cluster is not up", fix="use it inside `with Cluster(...) as cluster:`")
        self._port += 1
        _share_memory()
        release = os.pipe()
        ranks: list[Rank] = []
        sys.stdout.flush()
        try:
            for number in range(self.world_size):
                place = Place(number, number // self.ranks_per_node, self.nodes, self.ranks_per_node, self._port)
                work = functools.partial(fn, number, *args)
                ranks.append(fork_rank(place, self._namespaces[place.node], release, work))
            answers = _collect(ranks, self.timeout if timeout is None else timeout)
            os.close(release[1])
            release = (release[0], -1)
            _wait(ranks, 10.0)
            return answers
        finally:
            for fd in release:
                if fd >= 0:
                    os.close(fd)
            _end(ranks)


@functools.cache
def _share_memory() -> None:
    """Before the first fork: what every rank would import by itself, and a heap that no rank's collector touches."""
    importlib.import_module("torch._dynamo")  # the first optimizer asks for it
    gc.collect()
    gc.freeze()


def _collect(ranks: list[Rank], timeout: float) -> list[Any]:
    """Reads every rank's answer, or raises for the ranks that failed, died or are late."""
    deadline = time.monotonic() + timeout
    parts: dict[int, bytearray] = {rank.place.rank: bytearray() for rank in ranks}
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.result_fd, selectors.EVENT_READ, rank)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for key, _ in selector.select(left):
                rank = key.data
                chunk, part = os.read(rank.result_fd, 1 << 20), parts[rank.place.rank]
                part += chunk
                if chunk:
                    continue
                selector.unregister(rank.result_fd)
                error, value = pickle.loads(part) if part else (_death(rank), None)
                if error is None:
                    answers[rank.place.rank] = value
                else:
                    failures[rank.place.rank] = error
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if failures:
        _raise_failure(ranks, failures)
    if len(answers) < len(ranks):
        _raise_late(ranks, [rank for rank in ranks if rank.place.rank not in answers], timeout)
    return [answers[rank.place.rank] for rank in ranks]


def _death(rank: Rank) -> str:
    _, status = os.waitpid(rank.pid, 0)
    rank.pid = 0
    how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit status {os.WEXITSTATUS(status)}"
    return f"it died without an answer ({how})"


def _raise_failure(ranks: list[Rank], failures: dict[int, str]) -> None:
    first = next(iter(failures))
    rank = ranks[first]
    others = f"; ranks {sorted(set(failures) - {first})} failed after it" if len(failures) > 1 else ""
    text = f"{failures[first].rstrip()}\n{rank.stderr_tail()}"
    raise ClusterError(
        f"rank {first} of {len(ranks)} (node {rank.place.node}) failed{others}:\n{text}", ranks=sorted(failures)
    )


def _raise_late(ranks: list[Rank], late: list[Rank], timeout: float) -> None:
    for rank in late:
        os.kill(rank.pid, signal.SIGUSR1)
    time.sleep(0.3)
    numbers = [rank.place.rank for rank in late]
    raise ClusterError(
        f"ranks {numbers} of {len(ranks)} gave no answer in {timeout:g} s; "
        f"rank {numbers[0]} stood at:\n{late[0].stderr_tail()}",
        fix="raise the time-out if the work is just long",
        ranks=numbers,
    )


def _wait(ranks: list[Rank], seconds: float) -> None:
    """Lets released ranks end by themselves."""
    deadline = time.monotonic() + seconds
    for rank in ranks:
        while time.monotonic() < deadline:
            pid, _ = os.waitpid(rank.pid, os.WNOHANG)
            if pid:
                rank.pid = 0
                break
            time.sleep(0.002)


def _end(ranks: list[Rank]) -> None:
    """Kills what still runs and reaps it."""
    for rank in ranks:
        if rank.pid:
            os.kill(rank.pid, signal.SIGKILL)
    for rank in ranks:
        if rank.pid:
            os.waitpid(rank.pid, 0)
            rank.pid = 0
        rank.close()
