"""Memory that the ranks of one node share: slots in which all of them write and read, and flags.

It is a file in /dev/shm without a name, which one rank makes and the others open by its descriptor: nothing is left of
it, whatever ends the processes and when. The same proves that they are on one host. A rank holds a lock on the file for
as long as its process lives; by it the others tell a rank that is late from one that is gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import mmap
import os
import secrets
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from whale_torch import ops
from whale_torch.comm.collectives import broadcast, gather_equal
from whale_torch.comm.failure import explain
from whale_torch.mesh import Group
from whale_torch.ops.library import compiled
from whale_torch.ops.shared import FLAG_NUMBERS

__all__ = ["NUM_SLOTS", "Flag", "NodeMemory", "Refusal"]

_LOG = logging.getLogger("whale_torch")
_FOLDER = Path("/dev/shm")
_TOKEN = struct.Struct("=qq")  # a random number behind what the file holds
_LOOK_EVERY_MS = 50
_LEAST_BYTES = 1 << 16  # of a slot
_SHARE_OF_FREE = 2  # one part in so many of what is free: loaders of data need their own
NUM_SLOTS = 3
"""Exchanges that may be under way: each has a slot of its own."""


class Flag(IntEnum):
    """What a rank tells the others of its node about an exchange, by its number in the flag of its slot.

    A flag a slot: exchanges may end in another order than they began. Counts have one of their own, so that a rank
    which an error took out of an exchange, and which begins anew with them, is not taken for one that sends rows.
    """

    WRITTEN = 0
    ARRIVED = 1
    READ = 2
    COUNTED = 3


class Refusal(IntEnum):
    """Why ranks share no memory."""

    NONE = 0
    NO_KERNELS = 1
    NO_FILE = 2
    OTHER_HOST = 3
    TOO_SMALL = 4

    def text(self, rank: int, wanted_bytes: int) -> str:
        return {
            Refusal.NO_KERNELS: "the compiled kernels are missing",
            Refusal.NO_FILE: f"no file can be made in {_FOLDER}",
            Refusal.OTHER_HOST: f"a file that a rank of its node made in {_FOLDER} cannot be opened",
            Refusal.TOO_SMALL: f"{_FOLDER} has no room for {wanted_bytes} bytes",
        }[self] + f" (rank {rank})"


class NodeMemory:
    """The slots of one node, as one of its ranks sees them.

    everyone: the ranks that take one decision, of this node and others. inside: those of this node. timeout: how long a
    rank is waited for. refused: why no memory is shared, or none beyond `most_bytes` a slot; None where all is well.
    """

    def __init__(self, everyone: Group, inside: Group, timeout: timedelta):
        self._everyone, self._inside, self._timeout = everyone, inside, timeout
        self.refused: str | None = None
        self.most_bytes: int | None = None
        self.number = 0
        self.capacity = 0
        self._slots: Tensor | None = None
        self._lock = -1
        num_bytes = len(Flag) * NUM_SLOTS * inside.size * FLAG_NUMBERS * 4
        flags = self._share(num_bytes, (0, num_bytes), lock=True)
        self._flags = None if flags is None else flags.view(torch.int32).view(-1, FLAG_NUMBERS)

    def __del__(self) -> None:
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                os.close(self._lock)

    @property
    def usable(self) -> bool:
        """Whether the ranks share any memory."""
        return self._flags is not None

    def provide(self, num_bytes: int) -> bool:
        """Whether every node has slots of so many bytes; makes larger ones where they are not.

        Every rank of `everyone` asks for the same number at the same place among its exchanges.
        """
        if self._slots is not None and num_bytes <= self.capacity:
            return True
        if not self.usable or (self.most_bytes is not None and num_bytes > self.most_bytes):
            return False
        capacity = max(_LEAST_BYTES, 1 << max(num_bytes - 1, 0).bit_length())
        share = -(-capacity * NUM_SLOTS // self._inside.size)
        slots = self._share(capacity * NUM_SLOTS, (share * self._inside.index, share))
        if slots is None:
            self.most_bytes = num_bytes - 1
            return False
        self._slots, self.capacity, self.most_bytes = slots, capacity, None
        return True

    def slot(self, number: int) -> Tensor:
        """What the ranks of the node write in an exchange, and read: [capacity] bytes."""
        assert self._slots is not None
        return self._slots.narrow(0, number % NUM_SLOTS * self.capacity, self.capacity)

    def post(self, flag: Flag, number: int) -> None:
        """Tells the others of the node how far this rank is."""
        assert self._flags is not None
        ops.post_flag(self._flags, self._first(flag, number) + self._inside.index, number)

    def wait(self, flag: Flag, number: int, name: str, places: Sequence[int] | None = None) -> None:
        """Waits until ranks of the node, all or those at `places`, are as far as that.

        Raises CommError, naming the rank, where one is gone or does not come in time.
        """
        assert self._flags is not None
        size, deadline = self._inside.size, math.inf
        first = self._first(flag, number)
        asked = [first + place for place in (range(size) if places is None else places)]
        while (late := ops.await_flags(self._flags, asked, number, _LOOK_EVERY_MS)) >= 0:
            deadline = min(deadline, time.monotonic() + self._timeout.total_seconds())
            place = late % size
            rank = self._inside.ranks[place]
            if self._is_gone(place) and ops.await_flags(self._flags, [late], number, 0) >= 0:
                raise explain(self._inside, name, ConnectionError(f"the process of rank {rank} is gone"))
            if time.monotonic() > deadline:
                seconds = f"{self._timeout.total_seconds():g} s"
                raise explain(self._inside, name, TimeoutError(f"rank {rank} did not come within {seconds}"))

    def _first(self, flag: Flag, number: int) -> int:
        """Place of the first rank's flag for an exchange."""
        return (flag * NUM_SLOTS + number % NUM_SLOTS) * self._inside.size

    def _is_gone(self, place: int) -> bool:
        """Whether nobody holds a rank's lock; ours is not asked, as one process never excludes itself."""
        if place == self._inside.index:
            return False
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError:
            return False
        fcntl.lockf(self._lock, fcntl.LOCK_UN, 1, place)
        return True

    def _share(self, size: int, mine: tuple[int, int], *, lock: bool = False) -> Tensor | None:
        """[size] bytes that the ranks of the node have in common; None on all ranks if one of `everyone` is refused.

        mine: (start, size) of the part that this rank reserves. lock: it holds its lock on the file from now on, as a
        process: no child of it holds the lock longer, and to close the file would lose it.
        """
        first, token = self._inside.index == 0, _TOKEN.unpack(secrets.token_bytes(_TOKEN.size))
        code, fd = _make_file(size, token) if first else (Refusal.NONE, -1)
        told = broadcast(torch.tensor([os.getpid(), fd, *token]), self._inside, name="memory of a node").tolist()
        if not first:
            code, fd = _open_file(told[0], told[1], size, (told[2], told[3]))
        shared = None
        if code is Refusal.NONE:
            code, shared = _map_file(fd, size, mine)
        if code is Refusal.NONE and lock:
            fcntl.lockf(fd, fcntl.LOCK_EX, 1, self._inside.index)
            self._lock, fd = fd, -1
        codes = gather_equal(torch.tensor([int(code)]), self._everyone, name="memory of a node").flatten().tolist()
        if fd >= 0:
            os.close(fd)
        place = next((place for place, number in enumerate(codes) if number), None)
        if place is None:
            return shared
        self._refuse(Refusal(codes[place]).text(self._everyone.ranks[place], size))
        return None

    def _refuse(self, reason: str) -> None:
        if self.refused is None and self._everyone.index == 0:
            _LOG.warning("whale_torch: rows of %s travel by sockets inside nodes: %s", self._everyone.name, reason)
        self.refused = reason


def _make_file(size: int, token: tuple[int, int]) -> tuple[Refusal, int]:
    """A file of so many bytes, which has no name, and the token behind them."""
    if not compiled()["cpu"].loaded:
        return Refusal.NO_KERNELS, -1
    try:
        space = os.statvfs(_FOLDER)
        # no blocks at all: no limit
        if space.f_blocks and space.f_bavail * space.f_frsize < size * _SHARE_OF_FREE:
            return Refusal.TOO_SMALL, -1
        fd = os.open(_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return _because(error), -1
    try:
        os.pwrite(fd, _TOKEN.pack(*token), size)
    except OSError as error:
        os.close(fd)
        return _because(error), -1
    return Refusal.NONE, fd


def _open_file(pid: int, fd: int, size: int, token: tuple[int, int]) -> tuple[Refusal, int]:
    """The file that another process of this host has open under that number."""
    if fd < 0:
        return Refusal.OTHER_HOST, -1
    try:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return Refusal.OTHER_HOST, -1
    if os.pread(opened, _TOKEN.size, size) != _TOKEN.pack(*token):
        os.close(opened)
        return Refusal.OTHER_HOST, -1
    return Refusal.NONE, opened


def _map_file(fd: int, size: int, mine: tuple[int, int]) -> tuple[Refusal, Tensor | None]:
    """The file's bytes; a rank reserves its own, so that a full file system is an error now.

    Else it would be a signal later, in the middle of a copy.
    """
    try:
        os.posix_fallocate(fd, *mine)
        with torch.inference_mode(False):  # what is made in it could be written in it alone
            return Refusal.NONE, torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
    except OSError as error:
        return _because(error), None


def _because(error: OSError) -> Refusal:
    return Refusal.TOO_SMALL if error.errno in (errno.ENOSPC, errno.ENOMEM) else Refusal.NO_FILE
