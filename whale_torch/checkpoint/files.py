"""What a checkpoint asks of a file system: every operation on files is here, so that tests can let each one fail."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Files"]


class Files:
    """The real file system. All that it raises are OSErrors, which name the path."""

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def exists(self, path: Path) -> bool:
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def names(self, folder: Path) -> list[str]:
        """What a folder holds, in order of names."""
        return sorted(os.listdir(folder))  # noqa: PTH208 (names, not paths)

    @contextlib.contextmanager
    def create(self, path: Path) -> Iterator[int]:
        """A new file, written through its descriptor; on disk once it is left without an error."""
        with _naming(path):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                yield fd
                self.sync(fd)
            finally:
                os.close(fd)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        while data:
            written = self.write_some(fd, data, offset)
            if not written:
                raise OSError(errno.EIO, "nothing was written, and no reason given")
            data, offset = data[written:], offset + written

    def write_some(self, fd: int, data: memoryview, offset: int) -> int:
        """Bytes written, at least one of them."""
        return os.pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def sync_folder(self, path: Path) -> None:
        with _naming(path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self.sync(fd)
            finally:
                os.close(fd)

    def rename(self, path: Path, to: Path) -> None:
        path.rename(to)

    def replace(self, path: Path, to: Path) -> None:
        path.replace(to)

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        shutil.rmtree(path)

    def lock(self, path: Path, *, create: bool = True, shared: bool = False) -> int | None:
        """Takes a file's lock without waiting: a descriptor to unlock, None where another one has it.

        shared: others may share it, and a file that may only be read will do. The lock ends with its process, however
        that ends.
        """
        with _naming(path):
            flags = os.O_RDONLY if shared else os.O_RDWR | (os.O_CREAT if create else 0)
            fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
            except OSError:
                os.close(fd)
                raise
            return fd

    def unlock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a process forked in between has the descriptor too
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def open(self, path: Path) -> Iterator[int]:
        with _naming(path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                yield fd
            finally:
                os.close(fd)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Bytes read: fewer than asked for at the file's end alone."""
        done = 0
        while done < len(into):
            count = self.read_some(fd, into[done:], offset + done)
            if not count:
                break
            done += count
        return done

    def read_some(self, fd: int, into: memoryview, offset: int) -> int:
        """Bytes read; none at the file's end."""
        return os.preadv(fd, [into], offset)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of descriptors do not say which file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
