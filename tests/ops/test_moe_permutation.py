"""Permute, combine, their gradients and the sort of chunks: kernels against the specification, whatever rows hold."""

from __future__ import annotations

import pytest
import torch
from moe_agreement import check_chunk_sort, check_combine, check_combine_backward, check_permute, draw_rows
from op_agreement import DTYPES

from whale_torch import ops
from whale_torch.errors import LayoutError

SIZES = [(0, 2, 8), (1, 1, 1), (5, 2, 0), (9, 3, 17), (33, 2, 1023), (20, 9, 40)]


@pytest.mark.matrix(keep=8)
@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_dtypes_agrees(isa: str, dtype: torch.dtype, to: torch.dtype) -> None:
    check_permute("cpu", 19, 2, 70, dtype, to)
    check_combine("cpu", 19, 2, 70, dtype, to)
    check_combine("cpu", 19, 2, 70, dtype, to, weighted=False)
    check_combine_backward("cpu", 19, 2, 70, dtype, to)


@pytest.mark.matrix(keep=6)
@pytest.mark.parametrize("n, k, d", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_size_agrees(isa: str, n: int, k: int, d: int, dtype: torch.dtype) -> None:
    check_permute("cpu", n, k, d, dtype, dtype)
    check_combine("cpu", n, k, d, dtype, dtype)
    check_combine_backward("cpu", n, k, d, dtype, dtype)


@pytest.mark.parametrize("layout", ["wide rows", "transposed"])
def test_every_layout_agrees(isa: str, layout: str) -> None:
    check_permute("cpu", 9, 3, 17, torch.float32, torch.bfloat16, layout=layout)
    check_combine("cpu", 9, 3, 17, torch.float32, torch.bfloat16, layout=layout)
    check_combine_backward("cpu", 9, 3, 17, torch.float32, torch.bfloat16, layout=layout)
    check_chunk_sort("cpu", 3, 4, 17, torch.float32, layout=layout)


@pytest.mark.matrix(keep=6)
@pytest.mark.parametrize("k", range(1, 20))
def test_every_number_of_routes_agrees(isa: str, k: int) -> None:
    check_combine("cpu", 6, k, 33, torch.float32, torch.float32)


@pytest.mark.matrix(keep=5)
@pytest.mark.parametrize("sources, experts", [(1, 1), (4, 1), (1, 5), (3, 4), (0, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunk_sort_agrees(sources: int, experts: int, dtype: torch.dtype) -> None:
    check_chunk_sort("cpu", sources, experts, 6, dtype)
    check_chunk_sort("cpu", sources, experts, 0, dtype)


def test_chunks_known_beforehand() -> None:
    x = torch.arange(6.0)[:, None]  # source 0: one row for expert 0, two for 1; source 1: three for 0
    lengths = torch.tensor([[1, 2], [3, 0]])
    assert ops.moe_chunk_sort(x, lengths)[:, 0].tolist() == [0, 3, 4, 5, 1, 2]


def test_combine_sums_halves_in_float32() -> None:
    y = torch.tensor([[256.0], [1.0], [1.0], [-256.0]]).bfloat16()
    positions = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
    assert ops.moe_combine(y, positions).tolist() == [[2.0]]


def test_result_does_not_depend_on_threads() -> None:
    threads = torch.get_num_threads()
    n, k, d = 3001, 4, 65
    positions, rows = draw_rows(n, k)
    x, y, weights = torch.randn(n, d), torch.randn(rows, d), torch.rand(n, k)
    lengths = torch.randint(0, 200, (8, 8))
    chunks = torch.randn(int(lengths.sum()) + 1, d)
    results = []
    for number in (1, 2, 3, 7):
        torch.set_num_threads(number)
        results.append(
            (
                ops.moe_permute(x, positions, rows),
                ops.moe_combine(y, positions, weights),
                *ops.moe_combine_backward(x, y, positions, weights),
                ops.moe_chunk_sort(chunks, lengths),
            )
        )
    torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(result, results[0], strict=True))


@pytest.mark.parametrize("weighted", [False, True])
def test_gradcheck(weighted: bool) -> None:
    positions, rows = draw_rows(5, 3)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    y = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(5, 3, dtype=torch.float64, requires_grad=True) if weighted else None
    assert torch.autograd.gradcheck(lambda x: ops.moe_permute(x, positions, rows), (x,))
    assert torch.autograd.gradgradcheck(lambda x: ops.moe_permute(x, positions, rows), (x,))
    inputs = (y,) if weights is None else (y, weights)
    assert torch.autograd.gradcheck(lambda *inputs: ops.moe_combine(inputs[0], positions, *inputs[1:]), inputs)
    assert torch.autograd.gradgradcheck(lambda *inputs: ops.moe_combine(inputs[0], positions, *inputs[1:]), inputs)
    lengths = torch.tensor([[3, 0, 2], [4, 1, 0]])
    assert torch.autograd.gradcheck(lambda y: ops.moe_chunk_sort(y, lengths), (y,))
    assert torch.autograd.gradcheck(lambda y: ops.moe_chunk_sort(y, lengths, inverse=True), (y,))


def test_gradients_keep_their_dtypes() -> None:
    positions, rows = draw_rows(6, 2)
    x, weights = torch.randn(6, 8, requires_grad=True), torch.rand(6, 2).bfloat16().requires_grad_()
    rows_of_x = ops.moe_permute(x, positions, rows, dtype=torch.bfloat16)
    result = ops.moe_combine(rows_of_x, positions, weights, dtype=torch.float32)
    assert rows_of_x.dtype == torch.bfloat16 and result.dtype == torch.float32
    grads = torch.autograd.grad(result.sum(), (x, rows_of_x, weights))
    assert [grad.dtype for grad in grads] == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_a_row_that_nobody_names_has_no_gradient() -> None:
    positions = torch.tensor([[0, -1], [2, 4]], dtype=torch.int32)
    y = torch.randn(6, 3)
    y[[1, 3, 5]] = float("nan")
    y.requires_grad_()
    weights = torch.tensor([[1.0, float("inf")], [2.0, 3.0]], requires_grad=True)
    result = ops.moe_combine(y, positions, weights)
    dy, dweights = torch.autograd.grad(result.sum(), (y, weights))
    assert not result.isnan().any()
    assert dy[:, 0].tolist() == [1.0, 0.0, 2.0, 0.0, 3.0, 0.0]
    assert dweights[0, 1] == 0 and not dweights.isnan().any()


def test_autograd_sees_what_was_written() -> None:
    positions, rows = draw_rows(4, 2)
    x = torch.randn(4, 3, requires_grad=True)
    saved = ops.moe_permute(x, positions, rows).exp()
    with torch.no_grad():
        ops.moe_permute(x, positions, rows, out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()
    with pytest.raises(LayoutError, match="out is given where a gradient is wanted"):
        ops.moe_permute(x, positions, rows, out=torch.empty(rows, 3))


def test_wrong_arguments_are_named() -> None:
    positions = torch.tensor([[0, 3], [1, -1]], dtype=torch.int32)
    x, y = torch.randn(2, 5), torch.randn(4, 5)
    with pytest.raises(LayoutError, match="a position is 3, and there are 3 rows"):
        ops.moe_permute(x, positions, 3)
    with pytest.raises(LayoutError, match="a position is 3, and there are 3 rows"):
        ops.moe_combine(y[:3], positions)
    with pytest.raises(LayoutError, match="a position is 3, and there are 3 rows"):
        ops.moe_combine_backward(x, y[:3], positions, torch.ones(2, 2))
    with pytest.raises(
        LayoutError, match=r"positions is torch.int32 of shape \(2, 2\), not torch.int32 of shape \(4, k\)"
    ):
        ops.moe_permute(y, positions, 4)
    with pytest.raises(LayoutError, match=r"positions is torch.int64 of shape \(2, 2\)"):
        ops.moe_combine(y, positions.long())
    with pytest.raises(LayoutError, match=r"weights are torch.float32 of shape \(2, 1\), positions have \(2, 2\)"):
        ops.moe_combine(y, positions, torch.ones(2, 1))
    with pytest.raises(LayoutError, match=r"x is torch.int64 of shape \(2, 5\)"):
        ops.moe_permute(x.long(), positions, 4)
    with pytest.raises(LayoutError, match=r"out is torch.float32 of shape \(3, 5\) on cpu; the result is contiguous"):
        ops.moe_permute(x, positions, 4, out=torch.empty(3, 5))
    with pytest.raises(LayoutError, match=r"dy is torch.float32 of shape \(4, 5\), the result has shape \(2, 5\)"):
        ops.moe_combine_backward(y, y, positions, torch.ones(2, 2))
    with pytest.raises(LayoutError, match=r"chunks of \[\[3, 2\]\] rows do not fit 4 rows"):
        ops.moe_chunk_sort(y, torch.tensor([[3, 2]]))
    with pytest.raises(LayoutError, match=r"chunks of \[\[5, -2\]\] rows do not fit 4 rows"):
        ops.moe_chunk_sort(y, torch.tensor([[5, -2]]))
