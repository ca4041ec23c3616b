"""A store for the ranks of one start: torchrun's own outlives them, with the addresses of ranks that have died."""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from whale_torch.errors import CommError

__all__ = ["store_of_this_start"]

_KEY = "whale/start"
_POLL_S = 0.01


def store_of_this_start(store: Any, rank: int, world: int, timeout: timedelta) -> Any:
    """The same store under a name that the ranks of this start agree on.

    Each tells a random word and takes for an answer only what names that word; so nothing that earlier ranks have left
    counts, at whatever moment they died, and no number of starts is needed, which differs between nodes.
    Raises CommError where not all come in time.
    """
    mine = secrets.token_hex(8)
    store.set(f"{_KEY}/word/{rank}", mine)
    name = _welcome(store, mine, world, timeout) if rank == 0 else _welcomed(store, rank, mine, timeout)
    return dist.PrefixStore(f"{_KEY}/{name}", store)  # type: ignore[attr-defined]


def _welcome(store: Any, name: str, world: int, timeout: timedelta) -> str:
    """Tells every rank the name, until it has thanked for it."""
    end = time.monotonic() + timeout.total_seconds()
    answered: dict[int, str] = {}
    waiting = list(range(1, world))
    while waiting:
        for rank in waiting:
            if store.check([f"{_KEY}/word/{rank}"]):
                word = store.get(f"{_KEY}/word/{rank}").decode()
                if answered.get(rank) != word:
                    answered[rank] = word
                    store.set(f"{_KEY}/answer/{word}", name)
        waiting = [rank for rank in waiting if not store.check([f"{_KEY}/thanks/{name}/{rank}"])]
        if waiting and time.monotonic() > end:
            raise _late(f"rank 0 waited for ranks {waiting}", timeout)
        if waiting:
            time.sleep(_POLL_S)
    return name


def _welcomed(store: Any, rank: int, word: str, timeout: timedelta) -> str:
    try:
        store.wait([f"{_KEY}/answer/{word}"], timeout)
    except dist.DistStoreError as error:
        raise _late(f"rank {rank} waited for rank 0", timeout) from error
    name: str = store.get(f"{_KEY}/answer/{word}").decode()
    store.set(f"{_KEY}/thanks/{name}/{rank}", "")
    return name


def _late(text: str, timeout: timedelta) -> CommError:
    return CommError(
        f"{text}, and {timeout.total_seconds():.0f} s were not enough: not all ranks came to the start.",
        fix="look at what the other ranks printed, or give wh.parallelize a longer timeout=",
    )
