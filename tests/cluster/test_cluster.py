"""The emulated cluster: torchrun's environment, real traffic on shaped links, clear failures, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.cluster import Cluster, ClusterError, ModelledLayer, refusal, sent_bytes
from benchmarks.cluster.namespaces import bits_per_second

_MISSING = refusal()
needs_namespaces = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING and f"{_MISSING[0]}; {_MISSING[1]}"))
_REPOSITORY = Path(__file__).resolve().parents[2]


def _all_reduce(rank: int, numel: int) -> dict[str, object]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    dist.init_process_group("gloo")
    dist.barrier()
    before = sent_bytes()
    dist.barrier()  # nobody sends before all have read
    total = torch.full((numel,), float(rank))
    dist.all_reduce(total)
    dist.barrier()
    sent = sent_bytes() - before
    dist.barrier()
    return {
        "environment": [os.environ[name] for name in names],
        "total": total.mean().item(),
        "sent": sent,
        "namespace": Path("/proc/self/ns/net").stat().st_ino,
        "threads": torch.get_num_threads(),
    }


@needs_namespaces
def test_ranks_live_on_their_nodes_with_torchruns_environment() -> None:
    with Cluster(nodes=2, ranks_per_node=2, rate="400mbit", timeout=60) as cluster:
        results = cluster.run(_all_reduce, 500_000)
        assert [result["environment"] for result in results] == [
            ["0", "4", "0", "2", "0", "10.77.0.1", "eth0"],
            ["1", "4", "1", "2", "0", "10.77.0.1", "eth0"],
            ["2", "4", "0", "2", "1", "10.77.0.1", "eth0"],
            ["3", "4", "1", "2", "1", "10.77.0.1", "eth0"],
        ]
        assert [result["total"] for result in results] == [6.0] * 4
        assert [result["threads"] for result in results] == [1] * 4
        assert [result["namespace"] for result in results] == [cluster.inodes[0]] * 2 + [cluster.inodes[1]] * 2
        # A ring over 4 ranks crosses each node's link once: 2 x 3/4 of 2 MB, and headers.
        assert all(3.0e6 < result["sent"] < 3.6e6 for result in results), [result["sent"] for result in results]
        assert cluster.run(_all_reduce, 8)[3]["total"] == 6.0


@needs_namespaces
def test_the_wire_has_the_rate_asked_for() -> None:
    with Cluster(nodes=2, rate="100mbit") as cluster:
        assert max(cluster.measured_rate() for _ in range(3)) == pytest.approx(96e6, rel=0.1)


def _fail(rank: int) -> int:
    if rank == 2:
        print("a line on stderr", file=sys.stderr)
        raise ValueError("7 rows do not fit 5")
    time.sleep(60)
    return rank


@needs_namespaces
def test_a_failing_rank_ends_the_run_with_its_traceback() -> None:
    start = time.monotonic()
    with Cluster(nodes=2, ranks_per_node=2) as cluster, pytest.raises(ClusterError) as caught:
        cluster.run(_fail)
    assert time.monotonic() - start < 20
    for text in ("rank 2 of 4 (node 1) failed", "ValueError: 7 rows do not fit 5", "a line on stderr"):
        assert text in str(caught.value)


def _die(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@needs_namespaces
def test_a_killed_rank_is_named() -> None:
    with (
        Cluster(nodes=2) as cluster,
        pytest.raises(ClusterError, match=r"rank 1 of 2 .*failed:\nit died without an answer \(signal 9\)"),
    ):
        cluster.run(_die)


def _hang(rank: int) -> int:
    if rank == 1:
        time.sleep(60)
    return rank


@needs_namespaces
def test_a_late_rank_is_named_with_the_line_it_stood_at() -> None:
    with Cluster(nodes=2) as cluster, pytest.raises(ClusterError) as caught:
        cluster.run(_hang, timeout=1)
    assert "ranks [1] of 2 gave no answer in 1 s" in str(caught.value)
    assert "in _hang" in str(caught.value)
    assert caught.value.ranks == (1,)


@needs_namespaces
def test_two_clusters_side_by_side_do_not_meet() -> None:
    with Cluster(nodes=2) as one, Cluster(nodes=2) as other:
        assert not set(one.inodes) & set(other.inodes)
        assert one.run(_all_reduce, 8)[0]["total"] == other.run(_all_reduce, 8)[0]["total"] == 1.0


_OWNER = """
import os, sys, time
from benchmarks.cluster import Cluster
def work(rank):
    os.write(1, f"pid {os.getpid()}\\n".encode())
    time.sleep(120)
with Cluster(nodes=2, ranks_per_node=2) as cluster:
    print("inodes", *cluster.inodes, flush=True)
    cluster.run(work)
"""


def _namespaces_in_use() -> set[int]:
    inodes = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            inodes.add((process / "ns" / "net").stat().st_ino)
        except OSError:
            continue  # it ended while we looked
    return inodes


@needs_namespaces
def test_a_killed_owner_leaves_nothing_behind() -> None:
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        inodes = {int(word) for word in owner.stdout.readline().split()[1:]}
        pids = [int(owner.stdout.readline().split()[1]) for _ in range(4)]
        assert len(inodes) == 3
        assert len(inodes & _namespaces_in_use()) == 2  # a descriptor alone holds the one of the bridge
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (
        any(Path(f"/proc/{pid}").exists() for pid in pids) or inodes & _namespaces_in_use()
    ):
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not inodes & _namespaces_in_use()
    assert subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout == links


@needs_namespaces
def test_without_root_it_says_what_and_how_to_fix_it() -> None:
    script = "import os; from benchmarks.cluster import refusal; os.setgid(65534); os.setuid(65534); print(refusal())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=_REPOSITORY, timeout=60, check=False
    )
    assert "network namespaces need root, this process has uid 65534" in done.stdout, done.stderr
    assert "run it with sudo" in done.stdout


def test_a_refusal_is_an_error_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.cluster.namespaces.shutil.which", lambda *_, **__: None)
    monkeypatch.setattr("benchmarks.cluster.namespaces.sys.platform", "linux")
    with (
        pytest.raises(ClusterError, match=r"the command `ip` is not on the path(.|\n)*install iproute2"),
        Cluster(nodes=2),
    ):
        pass


def test_rates_are_read_as_tc_spells_them() -> None:
    assert [bits_per_second(rate) for rate in ("400mbit", "1.5gbit", "9600bit")] == [4e8, 1.5e9, 9600.0]
    with pytest.raises(ValueError, match="rate '400mb'"):
        bits_per_second("400mb")


def test_modelled_compute_takes_time_a_row_but_no_cpu() -> None:
    layer = ModelledLayer(5, forward_s=0.01, backward_s=0.02)
    x = torch.ones(3, 2, requires_grad=True)
    wall, cpu = time.perf_counter(), time.process_time()
    layer(x).sum().backward()
    assert time.perf_counter() - wall >= 0.09
    assert time.process_time() - cpu < 0.05
    assert x.grad is not None and layer.weight.grad is not None
    torch.testing.assert_close(x.grad, torch.ones(3, 2))
    torch.testing.assert_close(layer.weight.grad, torch.full((5,), 3 / 3))  # 3 rows of x, weight in 3 rows of 2
    with torch.no_grad():
        layer.weight.copy_(torch.arange(5.0))
    torch.testing.assert_close(layer(x), x + torch.tensor([6 / 3, 4 / 3]))
