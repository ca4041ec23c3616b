"""Blocks and flags in shared memory: the compiled kernels do what the Python ones say, across processes too."""

from __future__ import annotations

import time

import pytest
import torch

from whale_torch import ops
from whale_torch.errors import LayoutError
from whale_torch.ops import reference
from whale_torch.ops.shared import FLAG_NUMBERS


def _flags(places: int) -> torch.Tensor:
    return torch.zeros(places, FLAG_NUMBERS, dtype=torch.int32)


@pytest.mark.parametrize("sizes", [[], [0], [5], [0, 3, 0, 0, 70_000, 1, 0], [3_000_000, 2_000_000]])
def test_blocks_agree(sizes: list[int]) -> None:
    source = torch.randint(0, 256, (sum(sizes) + 10,), dtype=torch.uint8)
    starts = torch.tensor([0, *sizes]).cumsum(0)[:-1]
    size = torch.tensor(sizes, dtype=torch.int64)
    blocks = torch.stack([starts + 3, (starts + size - sum(sizes)).neg() + 7, size], 1)  # in the other order
    found, expected = torch.zeros(sum(sizes) + 20, dtype=torch.uint8), torch.zeros(sum(sizes) + 20, dtype=torch.uint8)
    ops.copy_blocks(source, blocks, found)
    reference.copy_blocks(source, blocks, expected)
    assert found.equal(expected)


@pytest.mark.parametrize("block", [(0, 0, 9), (0, 5, 4), (-1, 0, 2), (0, -1, 2), (0, 0, -1), (2**62, 0, 2**62)])
def test_a_block_outside_is_refused(block: tuple[int, int, int]) -> None:
    with pytest.raises(LayoutError, match="are outside"):
        ops.copy_blocks(torch.zeros(8, dtype=torch.uint8), torch.tensor([block]), torch.zeros(8, dtype=torch.uint8))


def test_other_tensors_are_refused() -> None:
    data = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(LayoutError, match=r"source is torch\.float32"):
        ops.copy_blocks(torch.zeros(8), torch.zeros(1, 3, dtype=torch.int64), data)
    with pytest.raises(LayoutError, match=r"blocks are torch\.float32"):
        ops.copy_blocks(data, torch.zeros(1, 3), data)
    with pytest.raises(RuntimeError, match="no flag 2 among 2"):
        ops.post_flag(_flags(2), 2, 1)


@pytest.mark.parametrize("kernels", ["compiled", "Python"])
def test_flags_wait_for_a_number(kernels: str) -> None:
    of = ops if kernels == "compiled" else reference
    flags = _flags(3)
    of.post_flag(flags, 0, 5)
    of.post_flag(flags, 2, 4)
    assert of.await_flags(flags, [0, 2], 4, 0) == -1
    assert of.await_flags(flags, [], 9, 0) == -1
    before = time.monotonic()
    assert of.await_flags(flags, [0, 2], 5, 40) == 2
    assert 0.03 < time.monotonic() - before < 5
    last = 2**31 - 1
    of.post_flag(flags, 1, last)
    assert of.await_flags(flags, [1], last + 1, 0) == 1
    of.post_flag(flags, 1, last + 2)  # numbers go on past the largest
    assert of.await_flags(flags, [1], last, 0) == of.await_flags(flags, [1], last + 2, 0) == -1
