"""Buckets: every pair of dtypes, every layout, exact to the bit."""

from __future__ import annotations

import pytest
import torch
from op_agreement import DTYPES, bucket_tensors, check_amax, check_pack, check_unpack

from whale_torch import ops
from whale_torch.errors import LayoutError


@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("flat", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_pack_agrees(isa: str, source: torch.dtype, flat: torch.dtype, scale: float) -> None:
    check_pack("cpu", source, flat, scale)
    check_pack("cpu", source, flat, scale, special=True)


@pytest.mark.parametrize("scale", [1.0, 128.0])
@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("flat", DTYPES)
def test_unpack_agrees(isa: str, flat: torch.dtype, to: torch.dtype, scale: float) -> None:
    check_unpack("cpu", flat, to, scale)
    check_unpack("cpu", flat, to, scale, special=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_agrees(isa: str, dtype: torch.dtype) -> None:
    check_amax("cpu", dtype)


def test_every_half_converts_as_torch_does(isa: str) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for half in (torch.float16, torch.bfloat16):
        values = bits.view(half)
        flat = torch.empty(2**16)
        ops.bucket_pack([values], [0], flat)
        torch.testing.assert_close(flat, values.float(), rtol=0, atol=0, equal_nan=True)


def test_floats_round_to_halves_as_torch_does(isa: str) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**20,), generator=generator).to(torch.int32)
    # Ties, the edges of the subnormals and of the overflow, and NaNs with every bit or only the lowest set.
    edges = torch.tensor(
        [0x33000000, 0x33000001, 0x38800000, 0x387FFFFF, 0x477FEFFF, 0x477FF000, 0x7FFFFFFF, 0x7F800001]
    )
    values = torch.cat((bits, edges.to(torch.int32), (edges.to(torch.int64) + 2**31).to(torch.int32))).view(
        torch.float32
    )
    for half in (torch.float16, torch.bfloat16):
        flat = torch.empty(values.numel(), dtype=half)
        ops.bucket_pack([values], [0], flat)
        torch.testing.assert_close(flat, values.to(half), rtol=0, atol=0, equal_nan=True)


def test_result_does_not_depend_on_threads() -> None:
    threads = torch.get_num_threads()
    tensors = [*bucket_tensors(torch.float32), torch.randn(300_001)]
    offsets = [sum(t.numel() for t in tensors[:i]) for i in range(len(tensors))]
    flats = []
    for number in (1, 2, 3, 7):
        torch.set_num_threads(number)
        flats.append(torch.zeros(sum(t.numel() for t in tensors), dtype=torch.bfloat16))
        ops.bucket_pack(tensors, offsets, flats[-1], 1 / 3)
    torch.set_num_threads(threads)
    assert all(torch.equal(flat, flats[0]) for flat in flats)


def test_no_tensors() -> None:
    flat = torch.ones(3)
    ops.bucket_pack([], [], flat)
    assert ops.bucket_unpack(flat, [], []).item() == 0.0
    assert ops.bucket_amax([]).item() == 0.0
    assert flat.tolist() == [1.0, 1.0, 1.0]


def test_autograd_sees_what_was_written() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    ops.bucket_unpack(torch.tensor([1.0, 2.0, 3.0]), [0], [parameter], 2.0)
    assert parameter.tolist() == [2.0, 4.0, 6.0]
    kept = torch.ones(3, requires_grad=True)
    saved = (kept * 1.0).exp()
    ops.bucket_unpack(torch.zeros(3), [0], [saved])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(LayoutError, match=r"tensors\[1\] takes elements 3\.\.7 of a bucket of 6"):
        ops.bucket_pack([torch.ones(3), torch.ones(4)], [0, 3], torch.zeros(6))
    with pytest.raises(LayoutError, match=r"tensors\[0\] takes elements -1\.\.2 of a bucket of 6"):
        ops.bucket_unpack(torch.zeros(6), [-1], [torch.ones(3)])
    with pytest.raises(LayoutError, match="1 offsets for 2 tensors"):
        ops.bucket_pack([torch.ones(3), torch.ones(3)], [0], torch.zeros(6))
    with pytest.raises(LayoutError, match=r"flat has shape \(2, 3\)"):
        ops.bucket_pack([torch.ones(3)], [0], torch.zeros(2, 3))
    with pytest.raises(LayoutError, match=r"tensors\[1\] is torch.int64"):
        ops.bucket_amax([torch.ones(3), torch.ones(3, dtype=torch.int64)])
