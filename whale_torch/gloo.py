"""gloo groups that share one device: one thread of a process polls the sockets of all of its groups.

torch gives every gloo group a device of its own, and with it a thread that wakes up a hundred times a second. A
parallelized model has about ten groups; on a host with many ranks the polling alone would fill its cores.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch.distributed as dist

__all__ = ["BACKEND", "forget_devices", "register"]

BACKEND = "whale_gloo"
_WORKERS = 2  # threads of a group that run its collectives; torch's own number for one device


@functools.cache
def _devices() -> list[Any]:
    """One for each interface that GLOO_SOCKET_IFNAME names, else the one of this host's name."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    gloo = dist.ProcessGroupGloo
    if not names:
        return [gloo.create_default_device()]
    return [gloo.create_device(interface=name) for name in names.split(",")]


def forget_devices() -> None:
    """Lets go of the devices, whose threads end with their last group."""
    _devices.cache_clear()


def _make(wanted: Any, _: Any) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = _devices()
    options._threads = _WORKERS * len(options._devices)
    options._timeout = wanted.timeout
    return dist.ProcessGroupGloo(wanted.store, wanted.group_rank, wanted.group_size, options)


@functools.cache
def register() -> str:
    """The backend's name, known to torch.distributed from now on."""
    dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu"])
    return BACKEND
