"""JSON texts that end in a checksum of themselves: the index and the pointers."""

from __future__ import annotations

from pathlib import Path

from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.payload import ANOTHER, checksum
from whale_torch.errors import CheckpointError

__all__ = ["read_sealed", "seal"]

_MARK = b',"checksum":"'
_TAIL = len(_MARK) + len('01234567"}')


def seal(text: str) -> bytes:
    """A JSON object, of at least one key, with its checksum as the last one."""
    body = bytearray(text.encode().removesuffix(b"}"))
    return bytes(body) + _MARK + b'%08x"}' % checksum(memoryview(body))


def read_sealed(path: Path, files: Files) -> str:
    """The whole text. Raises CheckpointError, naming the file, where it is not as it was written."""
    with files.open(path) as fd:
        data = bytearray(files.size(fd))
        read = files.read(fd, memoryview(data), 0)
    body = data[:-_TAIL]
    if read != len(data) or data != body + _MARK + b'%08x"}' % checksum(memoryview(body)):
        raise CheckpointError(
            f"{path} is damaged: its {len(data)} bytes are not what was written.",
            fix=ANOTHER,
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is no text: {error}.", fix=ANOTHER) from error
