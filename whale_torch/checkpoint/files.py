"""What a checkpoint asks of a file system: every operation on files is here, so that tests can let each one fail."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Files"]


class Files:
    """The real file system. All that it raises are OSErrors, which name the path."""

    def make_folder(self, path: Path, *, exist_ok: bool = False) -> None:
        path.mkdir(parents=True, exist_ok=exist_ok)

    @contextlib.contextmanager
    def create(self, path: Path) -> Iterator[int]:
        """A new file, written through its descriptor; on disk once it is left without an error."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            yield fd
            self.sync(fd)
        finally:
            os.close(fd)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(fd, data, offset)
            data, offset = data[written:], offset + written

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def sync_folder(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(fd)
        finally:
            os.close(fd)

    def rename(self, path: Path, to: Path) -> None:
        path.rename(to)

    def replace(self, path: Path, to: Path) -> None:
        path.replace(to)

    def remove_folder(self, path: Path) -> None:
        shutil.rmtree(path)

    @contextlib.contextmanager
    def open(self, path: Path) -> Iterator[int]:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Bytes read: fewer than asked for at the file's end alone."""
        done = 0
        while done < len(into):
            count = os.preadv(fd, [into[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size
