"""Memory that ranks of a node share for their rows: it grows, it may be refused, nobody waits in it for the dead."""

from __future__ import annotations

import copy
import errno
import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.world import outcomes, world
from whale_torch import ops
from whale_torch.comm import node_memory
from whale_torch.comm.all2all import AllToAll, Underway
from whale_torch.errors import CommError
from whale_torch.exits import Word, leave_word
from whale_torch.mesh import start
from whale_torch.ops.shared import FLAG_NUMBERS

TIMEOUT = 3.0


def _pass_on(rank: int, n: int, path: str) -> None:
    flags = torch.from_file(path, shared=True, size=n * FLAG_NUMBERS, dtype=torch.int32).view(n, FLAG_NUMBERS)
    for number in range(1, 301):
        if rank:
            assert ops.await_flags(flags, [rank - 1], number, 20_000) == -1
        ops.post_flag(flags, rank, number)
        assert ops.await_flags(flags, [n - 1], number, 20_000) == -1


def test_a_process_that_sleeps_is_woken(tmp_path: Path) -> None:
    (tmp_path / "flags").write_bytes(bytes(4 * 3 * FLAG_NUMBERS))
    world(3, _pass_on, str(tmp_path / "flags"))


def _rows(n: int, **options: Any) -> AllToAll:
    return AllToAll(start(**options), "rows", (tuple(range(n)),))


def _swap(rows: AllToAll, count: int, route: str) -> None:
    """Rows of each rank to each, and a look at what came."""
    n, me = rows.group.size, rows.group.rank
    splits = rows.splits(torch.full((n,), count))
    sent = (torch.arange(n).repeat_interleave(count) + 10 * me)[:, None].expand(-1, 7).contiguous()
    expected = (10 * torch.arange(n).repeat_interleave(count) + me)[:, None].expand(-1, 7)
    assert rows(sent, splits, route=route).equal(expected)


def _grows(rank: int, n: int) -> list[int]:
    rows, found = _rows(n), []
    assert rows._node is not None
    module = nn.Linear(1, 1)
    module.rows = rows  # type: ignore[assignment]
    assert copy.deepcopy(module).rows is rows
    for count in (1, 500, 3, 4000, 0):
        for route in rows.routes():
            _swap(rows, count, route)
        found.append(rows._node.memory.capacity)
    return found


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("per_node", [3, 2])
def test_slots_grow(per_node: int) -> None:
    ranks = 3 if per_node == 3 else 4
    found = world(ranks, _grows, local_world_size=per_node)
    assert all(capacities == found[0] for capacities in found)
    assert found[0][0] < found[0][1] == found[0][2] < found[0][3] == found[0][4]


def _small(rank: int, n: int, how: str) -> tuple[str | None, list[str]]:
    real = os.statvfs
    if how == "statvfs":
        node_memory.os = SimpleNamespace(**{**vars(os), "statvfs": lambda _: _space(real("/dev/shm"), 1 << 17)})
    else:
        node_memory.os = SimpleNamespace(**{**vars(os), "posix_fallocate": _full if rank == n - 1 else _room})
    rows = _rows(n)
    for count in (1, 10_000, 2):
        for route in rows.routes():
            _swap(rows, count, route)
    return rows.refused, rows.routes()


def _space(space: os.statvfs_result, num_bytes: int) -> Any:
    return SimpleNamespace(f_blocks=1, f_frsize=space.f_frsize, f_bavail=num_bytes // space.f_frsize)


def _room(fd: int, start: int, size: int) -> None:
    os.posix_fallocate(fd, start, size)


def _full(fd: int, start: int, size: int) -> None:
    if size > 1 << 16:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.posix_fallocate(fd, start, size)


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("per_node", [2, 4])
@pytest.mark.parametrize("how", ["statvfs", "fallocate"])
def test_rows_that_dev_shm_has_no_room_for_go_by_sockets(how: str, per_node: int) -> None:
    found = world(4, _small, how, local_world_size=per_node)
    assert len(set(map(str, found))) == 1
    refused, routes = found[0]
    assert refused is not None and refused.startswith("/dev/shm has no room for ")
    assert refused.endswith(f"(rank {0 if how == 'statvfs' else 3})")
    assert "leader" in routes or "shared" in routes  # for what is small


def test_a_file_that_cannot_be_filled_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(node_memory, "os", SimpleNamespace(**{**vars(os), "pwrite": full}))
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert node_memory._make_file(1 << 16, (1, 2)) == (node_memory.Refusal.TOO_SMALL, -1)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def _apart(rank: int, n: int, apart: bool) -> tuple[str | None, list[str]]:
    if rank == 0 and apart:  # what the others find under the number that it tells is another file
        node_memory.os = SimpleNamespace(**{**vars(os), "getpid": lambda: os.getppid()})
    rows = _rows(n)
    for route in rows.routes():
        _swap(rows, 3, route)
    return rows.refused, rows.routes()


def test_ranks_of_other_hosts_are_found_out() -> None:
    """Two ranks whose launcher says one node, and which see different files."""
    found = world(2, _apart, True)
    assert found[0][1] == found[1][1] == ["flat"]
    assert found[0][0] == "a file that a rank of its node made in /dev/shm cannot be opened (rank 1)"
    assert world(2, _apart, False)[0] == (None, ["flat", "shared"])


def _no_kernels(rank: int, n: int) -> str | None:
    node_memory.compiled = lambda: {"cpu": SimpleNamespace(loaded=False)}
    return _rows(n).refused


def test_without_compiled_kernels_rows_go_by_sockets() -> None:
    assert world(2, _no_kernels)[1] == "the compiled kernels are missing (rank 0)"


def _one_goes(rank: int, n: int, route: str, how: str) -> None:
    rows = _rows(n, timeout=timedelta(seconds=TIMEOUT if how == "late" else 60))
    splits, x = rows.splits(torch.full((n,), 5)), torch.ones(5 * n, 7)
    rows(x, splits, route=route)
    if rank == n - 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "error":
            leave_word(Word(rank, "failed", "ValueError: no such token"))  # as the hook of a script does
            raise ValueError("no such token")
        time.sleep(TIMEOUT + 3)
        return
    rows(x, splits, route=route)


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("how", ["killed", "error", "late"])
@pytest.mark.parametrize(
    ("per_node", "route"), [(3, "flat"), (3, "shared"), (2, "two-level"), (2, "two-level shared"), (2, "leader")]
)
def test_a_rank_that_does_not_come_is_named(per_node: int, route: str, how: str) -> None:
    n = per_node if per_node == 3 else 2 * per_node
    found = outcomes(n, _one_goes, route, how, local_world_size=per_node, timeout=30)
    beside = [o for o in found[:-1] if o.rank >= n - per_node]  # on its node
    for o in found[:-1]:
        assert isinstance(o.error, CommError), o.output
        assert o.seconds < (TIMEOUT + 10 if how == "late" else 12), (o.rank, o.seconds)
    for o in beside:
        said = str(o.error)
        assert n - 1 in o.error.ranks, said  # type: ignore[union-attr]
        if how == "error":
            assert f"rank {n - 1} ended: ValueError: no such token" in said
        elif route in ("shared", "two-level shared"):
            gone, late = f"the process of rank {n - 1} is gone", f"rank {n - 1} did not come within {TIMEOUT:g} s"
            assert (gone if how == "killed" else late) in said


def _killed_with_much(rank: int, n: int) -> None:
    rows = _rows(n)
    assert rows._node is not None and rows._node.memory.provide(_MUCH // 4)
    os.kill(os.getpid(), signal.SIGKILL)


_MUCH = 1 << 28


def test_nothing_is_left_of_killed_ranks() -> None:
    names, free = set(Path("/dev/shm").iterdir()), _free()
    outcomes(2, _killed_with_much)
    assert free - _free() < _MUCH // 4
    assert set(Path("/dev/shm").iterdir()) <= names


def _free() -> int:
    space = os.statvfs("/dev/shm")
    return space.f_bavail * space.f_frsize


def _any_order(rank: int, n: int, seed: int) -> None:
    """Exchanges of many sizes and routes, of which several are under way and any is finished next."""
    alike, own = random.Random(seed), random.Random(rank)
    rows = _rows(n)
    under_way: list[tuple[Underway, torch.Tensor]] = []
    for number in range(60):
        generator = torch.Generator().manual_seed(alike.randrange(1 << 30))
        counts = torch.randint(0, alike.choice([2, 4, 50, 2000]), (n, n), generator=generator)
        counts[alike.randrange(n)] *= alike.randrange(2)
        splits = rows.splits(counts[rank])
        width = alike.choice([1, 3, 16])
        tags = torch.arange(n * n).view(n, n) + number * n * n
        sent = tags[rank].repeat_interleave(counts[rank])[:, None].expand(-1, width)
        expected = tags[:, rank].repeat_interleave(counts[:, rank])[:, None].expand(-1, width)
        if own.random() < 0.1:
            time.sleep(0.005)
        under_way.append((rows.begin(sent, splits, route=alike.choice(rows.routes())), expected))
        while len(under_way) > alike.randrange(6):
            flight, came = under_way.pop(alike.randrange(len(under_way)))
            assert flight.finish().equal(came), number
    for flight, came in under_way:
        assert flight.finish().equal(came)


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("n", "per_node"), [(4, 2), (3, 3), (2, 2)])
def test_exchanges_end_in_any_order(n: int, per_node: int, seed: int) -> None:
    world(n, _any_order, seed, local_world_size=per_node)
