"""Scatter, collect and the gradient, in memory that others use too: as permute and combine, and others' rows stay."""

from __future__ import annotations

import pytest
import torch
from moe_agreement import draw_rows
from op_agreement import DTYPES

from whale_torch import ops
from whale_torch.errors import LayoutError


@pytest.mark.matrix(keep=4)
@pytest.mark.parametrize("n, k, d", [(0, 2, 8), (1, 1, 1), (9, 3, 17), (33, 2, 130)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_permute_and_combine(isa: str, n: int, k: int, d: int, dtype: torch.dtype) -> None:
    positions, rows = draw_rows(n, k)
    used = torch.zeros(rows, dtype=torch.bool)
    used[positions[positions >= 0].long()] = True
    x, dy, weights = torch.randn(n, d).to(dtype), torch.randn(n, d).to(dtype), torch.rand(n, k)
    place = torch.full((rows, d), 7.0, dtype=dtype)
    ops.moe_scatter(x, positions, place)
    assert torch.equal(place[used], ops.moe_permute(x, positions, rows)[used])
    assert (place[~used] == 7).all()

    out, kept = ops.moe_collect(place, positions, weights)
    assert torch.equal(out, ops.moe_combine(place, positions, weights))
    route = (positions.flatten() >= 0).nonzero().flatten()
    assert torch.equal(kept[route], place[positions.flatten()[route].long()])

    drows, dweights = ops.moe_combine_backward(dy, place, positions, weights)
    found = torch.full((rows, d), 7.0, dtype=dtype)
    of_weights = ops.moe_scatter_backward(dy, kept, positions, weights, found)
    torch.testing.assert_close(of_weights, dweights)
    assert torch.equal(found[used], drows[used])
    assert (found[~used] == 7).all()


def test_rows_are_cast() -> None:
    positions = torch.tensor([[1, -1], [0, 2]], dtype=torch.int32)
    x, place = torch.randn(2, 5), torch.zeros(3, 5, dtype=torch.bfloat16)
    ops.moe_scatter(x, positions, place)
    assert torch.equal(place, x[[1, 0, 1]].bfloat16())


def test_autograd_refuses_what_it_saved_before() -> None:
    positions = torch.tensor([[1], [0]], dtype=torch.int32)
    x, weights = torch.randn(2, 5), torch.rand(2, 1)
    for write in (
        lambda saved: ops.moe_scatter(x, positions, saved),
        lambda saved: ops.moe_scatter_backward(x, x, positions, weights, saved),
    ):
        y = torch.randn(2, 5, requires_grad=True).exp()
        write(y.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_wrong_arguments_are_named() -> None:
    positions = torch.tensor([[0, 3]], dtype=torch.int32)
    with pytest.raises(LayoutError, match="a position is 3, and there are 3 rows"):
        ops.moe_scatter(torch.zeros(1, 4), positions, torch.zeros(3, 4))
    with pytest.raises(LayoutError, match=r"rows are \(4, 5\), and tokens have 4 features"):
        ops.moe_scatter(torch.zeros(1, 4), positions, torch.zeros(4, 5))
