"""Memory that the ranks of one node share: a mailbox of each rank, in which the others write, and flags.

Files in /dev/shm without a name: the name is gone as soon as all ranks have mapped the file, so that nothing is left
whatever ends the processes. That ranks are on one host is proved by a file that one makes and the others find. A rank
holds a lock for as long as its process lives; by it the others tell one that is late from one that is gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import secrets
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
_TOKEN_BYTES = 16
_LOOK_EVERY_MS = 50
_LEAST_BYTES = 1 << 14  # of a mailbox
NUM_SLOTS = 3
"""Exchanges that may be under way: each has mailboxes of its own."""


class Flag(IntEnum):
    """What a rank tells the others of its node, each with the number of the exchange."""

    WRITTEN = 0
    ARRIVED = 1
    READ = 2


class Refusal(IntEnum):
    """Why ranks share no memory."""

    NONE = 0
    NO_KERNELS = 1
    NO_FOLDER = 2
    OTHER_HOST = 3
    TOO_SMALL = 4

    def text(self, rank: int, wanted_bytes: int) -> str:
        return {
            Refusal.NO_KERNELS: "the compiled kernels are missing",
            Refusal.NO_FOLDER: f"{_FOLDER} cannot be written",
            Refusal.OTHER_HOST: f"a file that a rank of its node made in {_FOLDER} is not there",
            Refusal.TOO_SMALL: f"{_FOLDER} has no room for {wanted_bytes} bytes",
        }[self] + f" (rank {rank})"


class NodeMemory:
    """The mailboxes of the ranks of one node, as one of them sees them.

    everyone: the ranks that take one decision, of this node and others. inside: those of this node. timeout: how long a
    rank is waited for. refused: why no memory is shared, or none beyond `most_bytes` a mailbox; None where all is well.
    """

    def __init__(self, everyone: Group, inside: Group, timeout: timedelta):
        self._everyone, self._inside, self._timeout = everyone, inside, timeout
        self.refused: str | None = None
        self.most_bytes: int | None = None
        self.number = 0
        self.capacity = 0
        self._slots: list[Tensor] = []
        self._lock = -1
        self._flags = torch.empty(0)
        num_bytes = len(Flag) * inside.size * FLAG_NUMBERS * 4
        flags = self._share([num_bytes], 1, lock=True)
        if flags:
            self._flags = flags[0][:num_bytes].view(torch.int32).view(-1, FLAG_NUMBERS)

    @property
    def usable(self) -> bool:
        """Whether the ranks share any memory."""
        return self._flags.numel() > 0

    def __del__(self) -> None:
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                os.close(self._lock)

    def provide(self, num_bytes: int) -> bool:
        """Whether every rank has mailboxes of so many bytes; makes larger ones where they are not.

        Every rank of `everyone` asks for the same number at the same place among its exchanges.
        """
        if self._slots and num_bytes <= self.capacity:
            return True
        if not self.usable or (self.most_bytes is not None and num_bytes > self.most_bytes):
            return False
        capacity = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
        slots = self._share([capacity * self._inside.size] * NUM_SLOTS, self._inside.size)
        if slots:
            self._slots, self.capacity, self.most_bytes = slots, capacity, None
        else:
            self.most_bytes = num_bytes - 1
        return bool(slots)

    def slot(self, number: int) -> Tensor:
        """All mailboxes of the node for an exchange, one after the other: [ranks * capacity] bytes."""
        return self._slots[number % NUM_SLOTS]

    def mailbox(self, number: int, place: int) -> Tensor:
        """One rank's mailbox for an exchange: [capacity] bytes."""
        return self.slot(number).narrow(0, place * self.capacity, self.capacity)

    def post(self, flag: Flag, number: int) -> None:
        """Tells the others of the node how far this rank is."""
        ops.post_flag(self._flags, flag * self._inside.size + self._inside.index, number)

    def wait(self, flag: Flag, number: int, name: str, places: Sequence[int] | None = None) -> None:
        """Waits until ranks of the node, all or those at `places`, are as far as that.

        Raises CommError, naming the rank, where one is gone or does not come in time.
        """
        size = self._inside.size
        asked = [flag * size + place for place in (range(size) if places is None else places)]
        deadline = time.monotonic() + self._timeout.total_seconds()
        while (late := ops.await_flags(self._flags, asked, number, _LOOK_EVERY_MS)) >= 0:
            place = late % size
            rank = self._inside.ranks[place]
            if self._is_gone(place) and ops.await_flags(self._flags, [late], number, 0) >= 0:
                raise explain(self._inside, name, ConnectionError(f"the process of rank {rank} is gone"))
            if time.monotonic() > deadline:
                seconds = f"{self._timeout.total_seconds():g} s"
                raise explain(self._inside, name, TimeoutError(f"rank {rank} did not come within {seconds}"))

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

    def _share(self, sizes: list[int], num_parts: int, *, lock: bool = False) -> list[Tensor]:
        """Bytes in files that all ranks of the node map, of each of which a rank reserves its part; none if refused.

        All ranks of `everyone` are refused if one is, and say so alike. lock: this rank holds its lock on the first
        file from now on. It is the process's, so no child holds it longer, and any close of the file would lose it.
        """
        first = self._inside.index == 0
        token = secrets.token_bytes(_TOKEN_BYTES)
        files: list[int] = []
        code = _unfit() if first else Refusal.NONE
        total = sum(sizes) + _TOKEN_BYTES * len(sizes)
        if first and code is Refusal.NONE:
            code, files = _make_files(token, sizes, total)
        told = torch.tensor(list(token), dtype=torch.uint8)
        broadcast(told, self._inside, name="memory of a node")
        token = bytes(told.tolist())
        if not first:
            code, files = _open_files(token, sizes)
        shared: list[Tensor] = []
        try:
            if code is Refusal.NONE:
                code, shared = _map_files(files, sizes, num_parts, self._inside.index)
            if code is Refusal.NONE and lock:
                self._lock = files.pop(0)
                fcntl.lockf(self._lock, fcntl.LOCK_EX, 1, self._inside.index)
            codes = gather_equal(torch.tensor([int(code)]), self._everyone, name="memory of a node").flatten().tolist()
        finally:
            for fd in files:
                os.close(fd)
            if first:
                _unlink(token, len(sizes))
        place = next((place for place, number in enumerate(codes) if number), None)
        if place is None:
            return shared
        self._refuse(Refusal(codes[place]).text(self._everyone.ranks[place], total))
        return []

    def _refuse(self, reason: str) -> None:
        if self.refused is None and self._everyone.index == 0:
            _LOG.warning("whale_torch: rows of %s travel by sockets inside nodes: %s", self._everyone.name, reason)
        self.refused = reason


def _unfit() -> Refusal:
    if not compiled()["cpu"].loaded:
        return Refusal.NO_KERNELS
    return Refusal.NONE if os.access(_FOLDER, os.W_OK | os.X_OK) else Refusal.NO_FOLDER


def _path(token: bytes, index: int) -> Path:
    return _FOLDER / f"whale-{token.hex()}-{index}"


def _make_files(token: bytes, sizes: list[int], total: int) -> tuple[Refusal, list[int]]:
    """Files of so many bytes and the token behind them, which nobody else may open."""
    space = os.statvfs(_FOLDER)
    if space.f_blocks and space.f_bavail * space.f_frsize < total:
        return Refusal.TOO_SMALL, []
    files: list[int] = []
    try:
        for index, size in enumerate(sizes):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            files.append(os.open(_path(token, index), flags, 0o600))
            os.ftruncate(files[-1], size + _TOKEN_BYTES)
            os.pwrite(files[-1], token, size)
    except OSError as error:
        return _because(error), files
    return Refusal.NONE, files


def _open_files(token: bytes, sizes: list[int]) -> tuple[Refusal, list[int]]:
    """The files that another rank made, if this is its host."""
    files: list[int] = []
    try:
        for index, size in enumerate(sizes):
            files.append(os.open(_path(token, index), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
            if os.pread(files[-1], _TOKEN_BYTES, size) != token:
                return Refusal.OTHER_HOST, files
    except OSError:
        return Refusal.OTHER_HOST, files
    return Refusal.NONE, files


def _map_files(files: list[int], sizes: list[int], num_parts: int, part: int) -> tuple[Refusal, list[Tensor]]:
    """Each file's bytes; a rank's own part is reserved by it, so that a full file system is an error here.

    Later it would be a signal, in the middle of a copy.
    """
    mapped: list[Tensor] = []
    try:
        for fd, size in zip(files, sizes, strict=True):
            own = size // num_parts
            os.posix_fallocate(fd, own * min(part, num_parts - 1), own)
            mapped.append(torch.frombuffer(mmap.mmap(fd, size + _TOKEN_BYTES), dtype=torch.uint8)[:size])
    except OSError as error:
        return _because(error), []
    return Refusal.NONE, mapped


def _because(error: OSError) -> Refusal:
    return Refusal.TOO_SMALL if error.errno in (errno.ENOSPC, errno.ENOMEM) else Refusal.NO_FOLDER


def _unlink(token: bytes, count: int) -> None:
    for index in range(count):
        with contextlib.suppress(OSError):
            _path(token, index).unlink()
