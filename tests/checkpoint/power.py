"""A disk that loses power: a log of what the ranks of a save did to files, and what a power cut leaves of it.

What was not synced need not be there: neither what was written to a file, nor an entry of a folder, and entries reach
the disk in any order. Only a rename is there as a whole or not at all.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whale_torch.checkpoint.files import Files

__all__ = ["MODES", "Logged", "after"]

MODES = ("killed", "synced", "ordered", "any")
"""Of what was not synced a cut leaves all (the processes died, not the machine), nothing, of each folder what came
first, or anything."""


class Logged(Files):
    """Logs each change of files, in one order for all ranks, and dies at one, alone or with all the others.

    own: the change of this rank at which it dies. everyone: that of all ranks together at which all of them die. Of a
    write at which it dies half is done.
    """

    def __init__(self, root: Path, log: Path, *, own: int | None = None, everyone: int | None = None):
        self._root, self._log, self._own, self._everyone = root, log, own, everyone
        self._dead, self._paths = False, dict[int, Path]()
        self.changes = 0

    @contextlib.contextmanager
    def _change(self, what: str, path: Path, *more: Any) -> Iterator[list[Any]]:
        """A change of files; what is yielded is logged, also where the rank dies at it."""
        record = [what, str(path.relative_to(self._root)), *more]
        with self._log.open("a+b") as log:
            fcntl.flock(log, fcntl.LOCK_EX)
            log.seek(0)
            everyone, own = len(log.readlines()), self.changes
            self.changes += 1
            now = everyone == self._everyone or own == self._own
            self._dead = self._dead or (self._everyone is not None and everyone > self._everyone)
            if self._dead or (now and what != "write"):
                self._dead = True
                raise OSError(errno.EIO, "killed")
            if now:
                record[3] = record[3][: len(record[3]) // 2]
            yield record
            log.write(json.dumps(record).encode() + b"\n")
            if now:
                self._dead = True
                raise OSError(errno.EIO, "killed")

    def make_folder(self, path: Path) -> None:
        with self._change("folder", path):
            super().make_folder(path)

    @contextlib.contextmanager
    def create(self, path: Path) -> Iterator[int]:
        with contextlib.ExitStack() as stack:
            with self._change("create", path):
                fd = stack.enter_context(super().create(path))
            self._paths[fd] = path
            yield fd

    def write_some(self, fd: int, data: memoryview, offset: int) -> int:
        text = base64.b64encode(data).decode()
        with self._change("write", self._paths[fd], offset, text) as record:
            return super().write_some(fd, memoryview(_bytes(record[3])), offset)

    def sync(self, fd: int) -> None:
        with self._change("sync", self._paths[fd]):
            pass

    def sync_folder(self, path: Path) -> None:
        with self._change("sync", path):
            pass

    def rename(self, path: Path, to: Path) -> None:
        with self._change("rename", path, to.name):
            super().rename(path, to)

    def replace(self, path: Path, to: Path) -> None:
        with self._change("rename", path, to.name):
            super().replace(path, to)

    def remove(self, path: Path) -> None:
        with self._change("remove", path):
            super().remove(path)

    def remove_folder(self, path: Path) -> None:
        for one in sorted(path.iterdir()):
            self.remove(one)
        with self._change("remove", path):
            path.rmdir()

    def lock(self, path: Path, *, create: bool = True, shared: bool = False) -> int | None:
        if path.exists() or not create or shared:
            return super().lock(path, create=create, shared=shared)
        with self._change("create", path):
            return super().lock(path)


def _bytes(text: str) -> bytes:
    return base64.b64decode(text[: len(text) // 4 * 4])


@dataclass
class _Node:
    """A file or a folder, as the processes see it and as it is on disk. pending: unsynced changes of a folder."""

    data: bytearray | None = None
    entries: dict[str, _Node] = field(default_factory=dict)
    disk_data: bytes = b""
    disk_entries: dict[str, _Node] = field(default_factory=dict)
    pending: list[dict[str, _Node | None]] = field(default_factory=list)

    def change(self, change: dict[str, _Node | None]) -> None:
        self.pending.append(change)
        _apply(self.entries, change)

    def sync(self) -> None:
        self.disk_data = bytes(self.data or b"")
        self.disk_entries, self.pending = dict(self.entries), []


def _apply(entries: dict[str, _Node], change: dict[str, _Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def after(base: Path, log: Path, to: Path, mode: str, rng: random.Random) -> None:
    """Makes the folder `to`: what is left of `base` after the changes in the log and a power cut."""
    root = _read(base)
    for line in log.read_text().splitlines() if log.exists() else ():
        what, path, *more = json.loads(line)
        folder = root
        for part in Path(path).parts[:-1]:
            folder = folder.entries[part]
        name = Path(path).name
        if what == "folder":
            folder.change({name: _Node()})
        elif what == "create":
            folder.change({name: _Node(data=bytearray())})
        elif what == "remove":
            folder.change({name: None})
        elif what == "rename":
            folder.change({name: None, more[0]: folder.entries[name]})
        elif what == "sync":
            (folder.entries[name] if name else root).sync()
        else:
            data, part = folder.entries[name].data, _bytes(more[1])
            assert data is not None
            data[more[0] : more[0] + len(part)] = part
    _write(root, to, mode, rng)


def _read(path: Path) -> _Node:
    if path.is_dir():
        node = _Node(entries={one.name: _read(one) for one in path.iterdir()})
    else:
        node = _Node(data=bytearray(path.read_bytes()))
    node.sync()
    return node


def _write(node: _Node, to: Path, mode: str, rng: random.Random) -> None:
    if node.data is not None:
        to.write_bytes(_kept_data(node, mode, rng))
        return
    entries = dict(node.disk_entries)
    most = rng.randint(0, len(node.pending))
    for number, change in enumerate(node.pending):
        if mode == "killed" or (mode == "ordered" and number < most) or (mode == "any" and rng.random() < 0.5):
            _apply(entries, change)
    to.mkdir()
    for name, one in entries.items():
        _write(one, to / name, mode, rng)


def _kept_data(node: _Node, mode: str, rng: random.Random) -> bytes:
    assert node.data is not None
    if mode == "killed" or bytes(node.data) == node.disk_data:
        return bytes(node.data)
    if mode == "synced":
        return node.disk_data
    length = rng.randint(0, len(node.data))
    begun = bytes(node.data[:length])
    return rng.choice([begun, begun.ljust(len(node.data), b"\0"), node.disk_data])
