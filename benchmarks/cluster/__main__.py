"""Brings an emulated cluster up, checks its wire, all-reduces over it: `python -m benchmarks.cluster 4 2 400mbit`."""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist

from benchmarks.cluster import Cluster, ClusterError


def _all_reduce_seconds(rank: int, num_bytes: int) -> float:
    dist.init_process_group("gloo")
    buffer = torch.ones(num_bytes // 4)
    dist.all_reduce(buffer)
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(buffer)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", type=int, nargs="?", default=4)
    parser.add_argument("ranks_per_node", type=int, nargs="?", default=1)
    parser.add_argument("rate", nargs="?", default="400mbit")
    parser.add_argument("--megabytes", type=float, default=8.0)
    options = parser.parse_args()
    start = time.perf_counter()
    try:
        with Cluster(options.nodes, options.ranks_per_node, rate=options.rate) as cluster:
            print(f"{options.nodes} nodes x {options.ranks_per_node} ranks up in {time.perf_counter() - start:.2f} s")
            if options.nodes > 1:
                print(
                    f"one stream gets {cluster.measured_rate() / 1e6:.0f} of {cluster.bits_per_second / 1e6:.0f} Mbit/s"
                )
            before, start = cluster.sent_bytes(), time.perf_counter()
            seconds = cluster.run(_all_reduce_seconds, int(options.megabytes * 1e6))
            sent = max(after - first for after, first in zip(cluster.sent_bytes(), before, strict=True))
            print(
                f"all-reduce of {options.megabytes:g} MB: {max(seconds) * 1e3:.0f} ms; two of them: "
                f"{sent / 1e6:.1f} MB sent a node; world up, done and ended in {time.perf_counter() - start:.2f} s"
            )
    except ClusterError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
