"""Rows from rank to rank: every route gives what indexing all ranks' rows gives, and so do gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.world import world
from whale_torch.comm.all2all import AllToAll
from whale_torch.comm.splits import Splits
from whale_torch.errors import LayoutError
from whale_torch.mesh import start

KINDS = 3


def _counts(ranks: int, how: str) -> Tensor:
    """[source, goal, kind]."""
    generator = torch.Generator().manual_seed(ranks)
    counts = torch.randint(0, 4, (ranks, ranks, KINDS), generator=generator)
    if how == "even":
        return torch.full_like(counts, 2)
    if how == "to one":
        counts[:, : ranks - 1] = 0
    if how == "from one":
        counts[1:] = 0
    if how == "nothing":
        counts.zero_()
    return counts


def _rows(rank: int, splits: Splits, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(int(splits.matrix[rank].sum()), *shape, generator=generator, dtype=torch.float64).to(dtype)


def _expected(splits: Splits, me: int, all_rows: list[Tensor]) -> Tensor:
    parts = [rows.split(splits.matrix[rank].tolist())[me] for rank, rows in enumerate(all_rows)]
    return torch.cat(parts)


def _exchange(rank: int, n: int, how: str) -> list[str]:
    rows = AllToAll(start(), "rows", (tuple(range(n)),))
    counts = _counts(n, how)
    splits = rows.splits(counts[rank])
    assert splits.counts.equal(counts)
    for route in rows.routes():
        for shape, dtype in (((5,), torch.float32), ((2, 3), torch.bfloat16), ((), torch.float64), ((0,), torch.int64)):
            mine = [_rows(r, splits, shape, dtype) for r in range(n)]
            out = rows(mine[rank], splits, route=route)
            assert out.equal(_expected(splits, rank, mine)), (route, shape)
            assert rows(out, splits.transposed, route=route).equal(mine[rank])
        _gradients(rank, n, rows, splits, route)
        _overlapping(rank, n, rows, splits, route)
    return rows.routes()


def _gradients(rank: int, n: int, rows: AllToAll, splits: Splits, route: str) -> None:
    mine = [_rows(r, splits, (4,), torch.float64).requires_grad_() for r in range(n)]
    weights = [_rows(r, splits.transposed, (4,), torch.float64) for r in range(n)]
    out = rows(mine[rank], splits, route=route)
    (grad,) = torch.autograd.grad((out**3 * weights[rank]).sum(), mine[rank], create_graph=True)
    loss = sum((_expected(splits, r, mine) ** 3 * weights[r]).sum() for r in range(n))
    (expected,) = torch.autograd.grad(loss, mine[rank], create_graph=True)  # type: ignore[arg-type]
    torch.testing.assert_close(grad, expected)
    (second,) = torch.autograd.grad(grad.square().sum(), mine[rank])
    loss = sum(torch.autograd.grad(loss, mine, create_graph=True)[r].square().sum() for r in range(n))  # type: ignore[arg-type]
    torch.testing.assert_close(second, torch.autograd.grad(loss, mine[rank])[0])  # type: ignore[arg-type]


def _overlapping(rank: int, n: int, rows: AllToAll, splits: Splits, route: str) -> None:
    """Chunks begun before any is finished, there, and back while the next are under way."""
    chunks = [_rows(rank, splits, (3,), torch.float32).add_(i).requires_grad_() for i in range(6)]
    there = [rows.begin(x, splits, route=route) for x in chunks]
    back = [rows.begin(flight.finish() * 2, splits.transposed, route=route) for flight in there]
    out = [flight.finish() for flight in back]
    for x, y in zip(chunks, out, strict=True):
        assert y.equal(x * 2)
    torch.stack([y.sum() for y in out]).sum().backward()
    assert all(x.grad is not None and bool((x.grad == 2).all()) for x in chunks)


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (2, 2), (3, 3), (4, 2), (4, 4), (2, 1), (6, 3), (6, 2)])
@pytest.mark.parametrize("how", ["even", "uneven", "to one", "from one", "nothing"])
def test_routes_give_the_rows_of_all_ranks(ranks: int, per_node: int, how: str) -> None:
    found = world(ranks, _exchange, how, local_world_size=per_node)
    assert all(routes == found[0] for routes in found)
    levels = 1 < per_node < ranks
    expected = ["flat", "two-level", "two-level shared", "leader"] if levels else ["flat", "shared"]
    assert found[0] == (expected if per_node > 1 else ["flat"])


def _chosen(rank: int, n: int) -> tuple[list[str], object]:
    rows = AllToAll(start(), "rows", (tuple(range(n)),))
    splits = rows.splits(_counts(n, "uneven")[rank])
    mine = [_rows(r, splits, (40,), torch.float32) for r in range(n)]
    assert rows(mine[rank], splits).equal(_expected(splits, rank, mine))
    costs = rows.measure()
    assert rows.measure() is costs  # once
    sizes = (1, 300, 5000, 100_000)
    assert rows.route_of(splits, 160) == rows.route_of(splits.transposed, 160)
    return [costs.best(size) for size in sizes], costs


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("per_node", [4, 2])
def test_all_ranks_choose_one_route(per_node: int) -> None:
    found = world(4, _chosen, local_world_size=per_node)
    assert all(choice == found[0] for choice in found)


def _half_wire(rank: int, n: int) -> None:
    rows = AllToAll(start(), "rows", (tuple(range(n)),))
    splits = rows.splits(_counts(n, "uneven")[rank])
    for route in rows.routes():
        mine = [_rows(r, splits, (4,), torch.float32).requires_grad_() for r in range(n)]
        out = rows(mine[rank], splits, wire_dtype=torch.bfloat16, route=route)
        assert out.dtype is torch.float32
        assert out.equal(_expected(splits, rank, mine).bfloat16().float())
        weight = torch.rand(out.shape, generator=torch.Generator().manual_seed(rank))
        (out * weight).sum().backward()
        grads = rows(weight, splits.transposed, route=route)
        assert mine[rank].grad is not None and mine[rank].grad.equal(grads.bfloat16().float())
        whole = rows(torch.arange(len(mine[rank])), splits, wire_dtype=torch.float16, route=route)
        assert whole.dtype is torch.int64


def test_half_precision_is_cast_where_it_is_sent() -> None:
    world(4, _half_wire, local_world_size=2)


def _wrong(rank: int, n: int) -> list[str]:
    rows = AllToAll(start(), "tokens", (tuple(range(n)),))
    splits = rows.splits(torch.ones(n, dtype=torch.int64))
    said = []
    for call in (
        lambda: rows(torch.zeros(n + 1, 2), splits),
        lambda: rows.splits(torch.ones(n + 1, dtype=torch.int64)),
        lambda: rows.splits(torch.tensor([-1] * n)),
        lambda: rows(torch.zeros(n, 2), splits, route="two-level"),
    ):
        with pytest.raises(LayoutError) as error:
            call()
        said.append(error.value.what)
    return said


def test_rows_that_nobody_counted() -> None:
    (said, _) = world(2, _wrong)
    assert said == [
        "tokens: (3, 2) is to be sent, and its counts say 2 rows.",
        "counts of tokens: 3 numbers for the 2 ranks of tokens.",
        "counts of tokens: a rank cannot be sent -1 rows.",
        "tokens: rows cannot go by 'two-level' here.",
    ]
