"""CRC32C: every kernel and instruction set against the polynomial's definition, bit by bit."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from whale_torch import ops
from whale_torch.errors import LayoutError
from whale_torch.ops import checksum_reference, library

KNOWN = {
    b"": 0,
    b"123456789": 0xE3069283,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
}
EDGES = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 95, 96, 97, 511, 512, 513, 575, 576, 767, 768, 1023, 1024, 12288]


def bit_by_bit(data: bytes, start: int = 0) -> int:
    """The definition: all ones, each bit from the lowest, the reflected polynomial, inverted at the end."""
    crc = start ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def tensor_of(data: bytes, misalignment: int = 0) -> Tensor:
    return torch.tensor([0] * misalignment + list(data), dtype=torch.uint8)[misalignment:]


def python_kernel(data: Tensor, start: int = 0) -> int:
    return int(checksum_reference.crc32c(data, len(data), start)) if len(data) else start


@pytest.mark.parametrize("data", KNOWN, ids=[f"{len(data)} bytes" for data in KNOWN])
def test_known_values(data: bytes, isa: str) -> None:
    assert bit_by_bit(data) == ops.crc32c(tensor_of(data)) == python_kernel(tensor_of(data)) == KNOWN[data]


def test_lengths_and_misalignments(isa: str) -> None:
    draw = random.Random(0)
    for misalignment in (0, 1, 3, 4, 7, 8, 33):
        data = draw.randbytes(12500)
        whole = tensor_of(data, misalignment)
        prefix = [0]  # the checksums of all prefixes
        for byte in data:
            prefix.append(bit_by_bit(bytes([byte]), prefix[-1]))
        for size in [*EDGES, *(draw.randrange(12500) for _ in range(20))]:
            assert ops.crc32c(whole[:size]) == prefix[size], (size, misalignment)


@pytest.mark.parametrize("size", [54215, 54216, 54217, 70000])
def test_long_data(size: int, isa: str) -> None:
    data = random.Random(size).randbytes(size)
    expected = bit_by_bit(data, 0x12345678)
    assert ops.crc32c(tensor_of(data, 1), 0x12345678) == expected
    assert python_kernel(tensor_of(data, 1), 0x12345678) == expected


@pytest.mark.parametrize(
    "size", [*EDGES[1:], 6776, 6777, 6778, 104_559, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20 + 54_321]
)
def test_the_python_kernel_agrees(size: int) -> None:
    data = torch.randint(0, 256, (size + 5,), dtype=torch.uint8)[5:]
    for start in (0, 1, 0xFFFFFFFF):
        assert python_kernel(data, start) == ops.crc32c(data, start)


def test_splits_and_combinations(isa: str) -> None:
    draw = random.Random(1)
    data = tensor_of(draw.randbytes(70_000))
    whole = ops.crc32c(data)
    for cut in (0, 1, 511, 69_999, 70_000, *(draw.randrange(70_000) for _ in range(20))):
        first, second = data[:cut], data[cut:]
        assert ops.crc32c(second, ops.crc32c(first)) == whole
        assert ops.crc32c_combine(ops.crc32c(first), ops.crc32c(second), len(second)) == whole


def test_the_python_kernel_under_another_default_device() -> None:
    data = tensor_of(random.Random(3).randbytes(70_000))
    expected = ops.crc32c(data)
    checksum_reference._powers.cache_clear()
    with torch.device("meta"):
        assert python_kernel(data) == expected
    assert python_kernel(data) == expected


def test_combinations_over_petabytes() -> None:
    zeros, num_zeros = ops.crc32c(torch.zeros(1, dtype=torch.uint8)), 1
    while num_zeros < 2**50:
        if num_zeros <= 2**20:
            assert zeros == ops.crc32c(torch.zeros(num_zeros, dtype=torch.uint8))
        zeros, num_zeros = ops.crc32c_combine(zeros, zeros, num_zeros), 2 * num_zeros
    first = KNOWN[b"123456789"]
    behind = ops.crc32c_combine(zeros, first, 9)
    assert ops.crc32c_combine(ops.crc32c_combine(first, zeros, num_zeros), first, 9) == ops.crc32c_combine(
        first, behind, num_zeros + 9
    )


@pytest.mark.parametrize("size, chunk_bytes", [(0, 5), (10, 1), (10, 3), (12, 3), (7, 2**62), (3_500_000, 1_000_000)])
@pytest.mark.parametrize("threads", [1, 3])
def test_chunks(size: int, chunk_bytes: int, threads: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    expected = [ops.crc32c(data[first : first + chunk_bytes]) for first in range(0, size, chunk_bytes)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert ops.crc32c_chunks(data, chunk_bytes) == expected
    finally:
        torch.set_num_threads(before)
    assert checksum_reference.crc32c(data, chunk_bytes, 0).tolist() == expected


def another_thread_runs_during(work: Callable[[], object]) -> bool:
    """Whether this thread never waits half as long as another one computes for `work`: that has not Python's lock."""
    seconds: list[float] = []

    def other() -> None:
        begin = time.thread_time()
        work()
        seconds.append(time.thread_time() - begin)

    thread = threading.Thread(target=other)
    longest, last = 0.0, time.perf_counter()
    thread.start()
    while thread.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return max(longest, time.perf_counter() - last) < seconds[0] / 2


@pytest.mark.skipif(not library.compiled()["cpu"].loaded, reason="the C++ kernels are not built")
def test_other_python_threads_run_meanwhile() -> None:
    op, data, best = library.op("crc32c"), torch.zeros(1 << 28, dtype=torch.uint8), library.isa()
    assert best is not None
    library.use_isa("baseline")  # the slow one: waits for a core are short beside it
    try:
        assert any(another_thread_runs_during(lambda: op(data, 1 << 28, 0)) for _ in range(10))
    finally:
        library.use_isa(best)


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: ops.crc32c(torch.zeros(3)), r"data is torch\.float32 \(3,\) on cpu; checksums are of 1-D bytes on cpu"),
    (lambda: ops.crc32c(torch.zeros(2, 2, dtype=torch.uint8)), r"data is torch\.uint8 \(2, 2\) on cpu;"),
    (lambda: ops.crc32c(torch.zeros(4, dtype=torch.uint8)[::2]), r"data is torch\.uint8 \(2,\) on cpu, not contiguous"),
    (lambda: ops.crc32c(torch.zeros(4, dtype=torch.uint8, device="meta")), r"data is torch\.uint8 \(4,\) on meta"),
    (lambda: ops.crc32c(torch.zeros(1, dtype=torch.uint8), -1), "start is -1, not of 32 bits"),
    (lambda: ops.crc32c(torch.zeros(0, dtype=torch.uint8), 1 << 32), "start is 4294967296, not of 32 bits"),
    (lambda: ops.crc32c_chunks(torch.zeros(1, dtype=torch.uint8), 0), "chunk_bytes is 0"),
    (lambda: ops.crc32c_combine(1 << 32, 0, 1), "first is 4294967296"),
    (lambda: ops.crc32c_combine(0, -3, 1), "second is -3"),
    (lambda: ops.crc32c_combine(0, 0, -1), "second_bytes is -1"),
]


@pytest.mark.parametrize("call, message", WRONG, ids=[message for _, message in WRONG])
def test_mistakes_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        call()
    assert caught.value.fix


@pytest.mark.skipif(not library.compiled()["cpu"].loaded, reason="the C++ kernels are not built")
def test_the_compiled_kernel_refuses_what_it_cannot_read() -> None:
    data = torch.zeros(4, dtype=torch.uint8)
    for arguments in ((data.float(), 1, 0), (data[::2], 1, 0), (data, 0, 0), (data, 1, -1), (data, 1, 1 << 32)):
        with pytest.raises(RuntimeError, match="crc32c: "):
            library.op("crc32c")(*arguments)
