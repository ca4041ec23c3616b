"""Ranks that meet at a store which has what earlier ones left, at whatever moment those died."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from whale_torch.errors import CommError
from whale_torch.restarts import store_of_this_start

SHORT, LONG = timedelta(seconds=0.3), timedelta(seconds=20)


def start(store: dist.Store, ranks: list[int], world: int, timeout: timedelta) -> dict[int, str]:
    """What each of the ranks that came finds: the first rank's word under a name that all of them agree on."""
    found: dict[int, str] = {}

    def run(rank: int) -> None:
        try:
            mine = store_of_this_start(store, rank, world, timeout)
            if rank == 0:
                mine.set("said", f"{id(found)}")
            mine.wait(["said"], timeout)
            found[rank] = mine.get("said").decode()
        except (CommError, dist.DistStoreError) as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("before", [[], [[0, 1, 2]], [[1, 2]], [[0], [0, 2]], [[0, 1, 2], [2, 1], [0, 1]]])
def test_each_start_has_a_store_of_its_own(before: list[list[int]]) -> None:
    store = dist.HashStore()
    for ranks in before:
        start(store, ranks, 3, LONG if len(ranks) == 3 else SHORT)
    found = start(store, [2, 0, 1], 3, LONG)
    assert len(found) == 3 and len(set(found.values())) == 1 and found[0].isdecimal()


def test_ranks_that_do_not_come_are_named() -> None:
    found = start(dist.HashStore(), [0, 1], 3, SHORT)
    assert "rank 0 waited for ranks [2]" in found[0] and "fix:" in found[0]
    assert "rank 1 waited for rank 0" in start(dist.HashStore(), [1], 3, SHORT)[1]
