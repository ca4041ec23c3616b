"""File systems that fail: layers to pass as files= that see every operation of a save or a load before it happens."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from whale_torch.checkpoint.files import Files

__all__ = ["Failing", "Pieces", "Slow", "Watched"]


class Watched(Files):
    """Calls `before(operation, path)` ahead of each operation; sync costs nothing. ops: those that came."""

    def __init__(self) -> None:
        self.ops: list[tuple[str, Path]] = []
        self.paths: dict[int, Path] = {}

    def before(self, operation: str, path: Path) -> None:
        self.ops.append((operation, path))

    def make_folder(self, path: Path) -> None:
        self.before("make_folder", path)
        super().make_folder(path)

    def exists(self, path: Path) -> bool:
        self.before("exists", path)
        return super().exists(path)

    def names(self, folder: Path) -> list[str]:
        self.before("names", folder)
        return super().names(folder)

    @contextlib.contextmanager
    def create(self, path: Path) -> Iterator[int]:
        self.before("create", path)
        with super().create(path) as fd:
            self.paths[fd] = path
            yield fd

    @contextlib.contextmanager
    def open(self, path: Path) -> Iterator[int]:
        self.before("open", path)
        with super().open(path) as fd:
            self.paths[fd] = path
            yield fd

    def write_some(self, fd: int, data: memoryview, offset: int) -> int:
        self.before("write", self.paths[fd])
        return super().write_some(fd, data, offset)

    def read_some(self, fd: int, into: memoryview, offset: int) -> int:
        self.before("read", self.paths[fd])
        return super().read_some(fd, into, offset)

    def begin_sync(self, fd: int, offset: int, size: int) -> None:
        self.before("begin_sync", self.paths[fd])
        super().begin_sync(fd, offset, size)

    def begin_read(self, fd: int, offset: int, size: int) -> None:
        self.before("begin_read", self.paths[fd])
        super().begin_read(fd, offset, size)

    @contextlib.contextmanager
    def look(self, fd: int, offset: int, buffer: memoryview) -> Iterator[memoryview]:
        self.before("look", self.paths[fd])
        with super().look(fd, offset, buffer) as data:
            yield data

    def size(self, fd: int) -> int:
        self.before("size", self.paths[fd])
        return super().size(fd)

    def sync(self, fd: int) -> None:
        self.before("sync", self.paths[fd])

    def sync_folder(self, path: Path) -> None:
        self.before("sync_folder", path)

    def rename(self, path: Path, to: Path) -> None:
        self.before("rename", path)
        super().rename(path, to)

    def replace(self, path: Path, to: Path) -> None:
        self.before("replace", path)
        super().replace(path, to)

    def remove(self, path: Path) -> None:
        self.before("remove", path)
        super().remove(path)

    def remove_folder(self, path: Path) -> None:
        self.before("remove_folder", path)
        super().remove_folder(path)

    def lock(self, path: Path, *, create: bool = True, shared: bool = False) -> int | None:
        self.before("lock", path)
        return super().lock(path, create=create, shared=shared)


class Failing(Watched):
    """The `at`-th operation raises an OSError, as the kernel does; `then` all that come after it too."""

    def __init__(self, at: int, number: int = errno.EIO, *, then: bool = False):
        super().__init__()
        self.at, self.number, self.then = at, number, then

    def before(self, operation: str, path: Path) -> None:
        super().before(operation, path)
        count = len(self.ops) - 1
        if count == self.at or (self.then and count > self.at):
            named = (
                []
                if operation in ("write", "begin_sync", "sync", "read", "begin_read", "look", "size")
                else [str(path)]
            )  # a descriptor has no name
            raise OSError(self.number, os.strerror(self.number), *named)


class Pieces(Watched):
    """Reads and writes at most so many bytes at a time."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def write_some(self, fd: int, data: memoryview, offset: int) -> int:
        return super().write_some(fd, data[: self.most], offset)

    def read_some(self, fd: int, into: memoryview, offset: int) -> int:
        return super().read_some(fd, into[: self.most], offset)

    @contextlib.contextmanager
    def look(self, fd: int, offset: int, buffer: memoryview) -> Iterator[memoryview]:
        yield buffer[: self.read(fd, buffer, offset)]


class Slow(Watched):
    """Sleeps before the operations that `when` chooses."""

    def __init__(self, seconds: float, when: Callable[[str, Path], bool]):
        super().__init__()
        self.seconds, self.when = seconds, when

    def before(self, operation: str, path: Path) -> None:
        super().before(operation, path)
        if self.when(operation, path):
            time.sleep(self.seconds)
