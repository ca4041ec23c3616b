"""gloo groups that share one device: one thread of a process polls the sockets of all of its groups.

torch gives every gloo group a device of its own, and with it a thread that wakes up a hundred times a second. A
parallelized model has about ten groups; on a host with many ranks the polling alone would fill its cores.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

__all__ = ["BACKEND", "forget_devices", "register"]

BACKEND = "whale_gloo"
_WORKERS = 2  # threads of a group that run its collectives, for each device: torch's own number


@functools.cache
def _devices(interfaces: str) -> list[Any]:
    gloo = dist.ProcessGroupGloo
    if not interfaces:
        return [gloo.create_default_device()]
    return [gloo.create_device(interface=name) for name in interfaces.split(",")]


def forget_devices() -> None:
    """Lets go of the devices, whose threads end with their last group."""
    _devices.cache_clear()


@functools.cache
def register(interfaces: str) -> str:
    """The backend's name, known to torch.distributed from now on.

    interfaces: names with commas between, as in GLOO_SOCKET_IFNAME; empty for the one of this host's name.
    """

    def make(wanted: Any, _: Any) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = _devices(interfaces)
        options._threads = _WORKERS * len(options._devices)
        options._timeout = wanted.timeout
        return dist.ProcessGroupGloo(wanted.store, wanted.group_rank, wanted.group_size, options)

    dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["cpu"])
    return BACKEND
