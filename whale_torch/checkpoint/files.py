"""What a checkpoint asks of a file system: every operation on files is here, so that tests can let each one fail."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Files"]

_MAPPED_BYTES = 1 << 18  # what is shorter is read in less time than it is mapped
_START_WRITING, _POPULATE_READ = 2, 22  # of sync_file_range and madvise, in the kernel's headers
_locked: set[int] = set()  # descriptors


def _let_go() -> None:
    """In a forked process (a DataLoader's worker, say), which would keep its parent's locks when that has died."""
    for fd in _locked:
        with contextlib.suppress(OSError):
            os.close(fd)
    _locked.clear()


os.register_at_fork(after_in_child=_let_go)


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

    def begin_sync(self, fd: int, offset: int, size: int) -> None:
        """Lets the disk begin with what was written, where there is a way to; how that ends, `sync` tells."""
        start_writing = getattr(_libc(), "sync_file_range", None)
        if start_writing is not None:
            start_writing(fd, ctypes.c_int64(offset), ctypes.c_int64(size), _START_WRITING)

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
        if path.is_symlink():  # to where it was moved; what lies there is not ours to remove
            path.unlink()
        else:
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
            _locked.add(fd)
            return fd

    def unlock(self, fd: int) -> None:
        if fd not in _locked:  # of the process that this one was forked from
            return
        _locked.discard(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_UN)
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

    def begin_read(self, fd: int, offset: int, size: int) -> None:
        """Lets the disk begin to read, where there is a way to."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)

    @contextlib.contextmanager
    def look(self, fd: int, offset: int, buffer: memoryview) -> Iterator[memoryview]:
        """Bytes of a file, as many as the buffer has, fewer at the file's end: where the kernel has them, else read.

        For files that nobody changes: of one that is cut short meanwhile a look would end the process.
        """
        mapped = _mapped(fd, offset, len(buffer)) if len(buffer) >= _MAPPED_BYTES else None
        if mapped is None:
            yield buffer[: self.read(fd, buffer, offset)]
            return
        skipped = offset % mmap.ALLOCATIONGRANULARITY
        with mapped, memoryview(mapped) as whole, whole[skipped : skipped + len(buffer)] as part:
            yield part

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _mapped(fd: int, offset: int, size: int) -> mmap.mmap | None:
    """A file's bytes in memory, from the page before `offset` on; None where they cannot all be had so.

    Private and writable, as torch takes no other memory; all pages are there at once, so that what cannot be read
    is told now, by an error that `read` then finds.
    """
    skipped = offset % mmap.ALLOCATIONGRANULARITY
    try:
        found = mmap.mmap(
            fd, skipped + size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=offset - skipped
        )
    except (OSError, ValueError):  # of a file that ends before
        return None
    try:
        found.madvise(_POPULATE_READ)
    except OSError:  # a kernel before 5.14, or what a read will tell
        found.close()
        return None
    return found


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of descriptors do not say which file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
