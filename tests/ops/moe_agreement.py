"""Compares the dispatch kernels that a device runs with the specification, `whale_torch.ops.moe_reference`, on CPU."""

from __future__ import annotations

import torch
from op_agreement import strided_like
from torch import Tensor

from whale_torch import ops
from whale_torch.ops import moe_reference as reference
from whale_torch.ops.precision import arithmetic_dtype, statistics_dtype

NAN, INF = float("nan"), float("inf")


def _generator(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(number * 31**power for power, number in enumerate(numbers)))


def _on(device: str, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def _tolerance(*dtypes: torch.dtype) -> dict[str, float]:
    if set(dtypes) == {torch.float64}:
        return {"rtol": 1e-11, "atol": 1e-13}
    halves = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
    return {"rtol": max([4e-6, *(halves.get(dtype, 0.0) for dtype in dtypes)]), "atol": 2e-6}


def put_specials(logits: Tensor) -> None:
    """NaN, both infinities, whole rows of each and of ties."""
    n, e = logits.shape
    for row, value in enumerate((NAN, INF, -INF)):
        if row < n:
            logits[row, :: max(1, e // 2)] = value
    for row, value in enumerate((NAN, -INF, 0.0, 2.5), start=3):
        if row < n:
            logits[row] = value
    if n > 7:
        logits[7] = torch.where(torch.arange(e) % 2 == 0, 0.0, -0.0).to(logits.dtype)


def check_route(
    device: str, n: int, e: int, k: int, dtype: torch.dtype, *, score: str = "softmax", biased: bool = False,
    groups: int = 1, special: bool = False, layout: str = "dense",
) -> None:  # fmt: skip
    generator = _generator(n, e, k)
    wide = 3 * torch.randn(n, e + 3, generator=generator, dtype=torch.float64)
    logits = wide.to(dtype)[:, 1 : e + 1]
    logits = {"dense": logits.contiguous(), "wide rows": logits, "transposed": logits.t().contiguous().t()}[layout]
    if special:
        put_specials(logits)
    bias = torch.randn(e, generator=generator).to(statistics_dtype(dtype)) if biased else None
    expected = reference.moe_route(logits, k, score == "sigmoid", bias, groups)
    actual = ops.moe_route(
        strided_like(logits, device), k, score=score, bias=None if bias is None else bias.to(device), groups=groups
    )
    for one, two in zip(actual, expected, strict=True):
        assert one.shape == two.shape and one.dtype == two.dtype
        assert one.is_contiguous() and two.is_contiguous()  # as the schema's fake says
    experts = actual[1].cpu()
    if n:
        assert experts.min() >= 0 and experts.max() < e
        assert all(len(set(row)) == k for row in experts.tolist())
    assert torch.equal(experts, expected[1])
    tolerance = _tolerance(statistics_dtype(dtype))
    for index in (0, 2):
        torch.testing.assert_close(actual[index].cpu(), expected[index], **tolerance, equal_nan=True)


def check_route_backward(
    device: str, n: int, e: int, k: int, dtype: torch.dtype, *, score: str = "softmax", groups: int = 1,
    of_scores: bool = True, of_probs: bool = True,
) -> None:  # fmt: skip
    generator = _generator(n, e, k, 1)
    wide = statistics_dtype(dtype)
    logits = torch.randn(n, e, generator=generator, dtype=torch.float64).to(wide)
    _, experts, probs = reference.moe_route(logits, k, score == "sigmoid", None, groups)
    experts[::3] = -1
    dscores = torch.randn(n, k, generator=generator).to(wide) if of_scores else None
    dprobs = torch.randn(n, e, generator=generator).to(wide) if of_probs else None
    probs = probs.t().contiguous().t()
    expected = reference.moe_route_backward(probs, experts, dscores, dprobs, score == "sigmoid", groups, dtype)
    actual = ops.moe_route_backward(
        *_on(device, probs, experts, dscores, dprobs), score=score, groups=groups, dtype=dtype
    )
    assert actual.dtype == dtype
    assert actual.is_contiguous() and expected.is_contiguous()
    torch.testing.assert_close(actual.cpu(), expected, **_tolerance(dtype))


def draw_experts(n: int, k: int, e: int, padding: bool) -> Tensor:
    """k distinct experts a token, or none for some tokens and routes."""
    generator = _generator(n, k, e, 2)
    # Skewed, so that some experts get most tokens and some none.
    keys = torch.rand(n, e, generator=generator) + torch.linspace(1, 0, e) ** 2
    experts = keys.topk(k, dim=1).indices.to(torch.int32) if n else torch.empty(0, k, dtype=torch.int32)
    if padding:
        experts[::5] = -1
        experts[1::7, 0] = -1
    return experts


def check_positions(
    device: str, n: int, k: int, e: int, *, capacity: int | None = None, slots: int | None = None,
    slot_major: bool = True, ordered: bool = False, padding: bool = False,
) -> None:  # fmt: skip
    experts = draw_experts(n, k, e, padding).t().contiguous().t()
    generator = _generator(n, k, e, 3)
    capacities = None if capacity is None else torch.randint(0, 2 * capacity + 1, (e,), generator=generator)
    order = torch.randperm(n, generator=generator) if ordered else None
    expected = reference.moe_positions(experts, e, capacities, slots, slot_major, order)
    on_device = _on(device, experts, capacities, order)
    actual = ops.moe_positions(
        on_device[0], e, capacity=on_device[1], slots=slots, slot_major=slot_major, order=on_device[2]
    )
    for one, two in zip(actual, expected, strict=True):
        assert one.dtype == two.dtype
        assert one.is_contiguous() and two.is_contiguous()
        assert torch.equal(one.cpu(), two)


def draw_rows(n: int, k: int, rows: int | None = None) -> tuple[Tensor, int]:
    """(positions, rows): distinct rows for three routes in four, some rows for nobody."""
    rows = n * k + 3 if rows is None else rows
    generator = _generator(n, k, 4)
    positions = torch.randperm(n * k, generator=generator).to(torch.int32).view(n, k)
    positions[torch.rand(n, k, generator=generator) < 0.25] = -1
    return torch.where(positions < rows, positions, -1), rows


def _draw(shape: tuple[int, int], dtype: torch.dtype, layout: str, *seed: int) -> Tensor:
    wide = torch.randn(shape[0], shape[1] + 5, generator=_generator(*shape, *seed), dtype=torch.float64).to(dtype)
    rows = wide[:, 2 : shape[1] + 2]
    return {"dense": rows.contiguous(), "wide rows": rows, "transposed": rows.t().contiguous().t()}[layout]


def check_permute(
    device: str, n: int, k: int, d: int, dtype: torch.dtype, to: torch.dtype, *, layout: str = "dense"
) -> None:
    x, (positions, rows) = _draw((n, d), dtype, layout, 5), draw_rows(n, k)
    if n and d:
        x[0, 0], x[-1, -1] = NAN, INF
    expected = torch.full((rows, d), 7.0, dtype=to)
    reference.moe_permute(x, positions, expected)
    on_device = strided_like(x, device)
    actual = ops.moe_permute(on_device, positions.to(device), rows, dtype=to)
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    out = torch.full((rows, d), 7.0, dtype=to, device=device)
    assert ops.moe_permute(on_device, positions.to(device), rows, dtype=to, out=out) is out
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def check_combine(
    device: str, n: int, k: int, d: int, dtype: torch.dtype, to: torch.dtype, *, weighted: bool = True,
    layout: str = "dense",
) -> None:  # fmt: skip
    positions, rows = draw_rows(n, k)
    y = _draw((rows, d), dtype, layout, 6)
    # What nobody points at is garbage.
    used = torch.zeros(rows, dtype=torch.bool)
    used[positions[positions >= 0].long()] = True
    y[~used] = NAN
    weights = torch.randn(n, k, generator=_generator(n, k, 7)).to(arithmetic_dtype(dtype, to)) if weighted else None
    if weights is not None:
        weights[positions < 0] = NAN
    expected = torch.full((n, d), 7.0, dtype=to)
    reference.moe_combine(y, positions, weights, expected)
    assert not expected.isnan().any()
    on_device = strided_like(y, device)
    arguments = _on(device, positions, weights)
    actual = ops.moe_combine(on_device, *arguments, dtype=to)
    torch.testing.assert_close(actual.cpu(), expected, **_tolerance(dtype, to))
    out = torch.full((n, d), 7.0, dtype=to, device=device)
    assert ops.moe_combine(on_device, *arguments, dtype=to, out=out) is out
    assert torch.equal(out, actual)


def check_combine_backward(
    device: str, n: int, k: int, d: int, dtype: torch.dtype, of_dy: torch.dtype, *, layout: str = "dense"
) -> None:
    positions, rows = draw_rows(n, k)
    y, dy = _draw((rows, d), dtype, layout, 6), _draw((n, d), of_dy, layout, 8)
    used = torch.zeros(rows, dtype=torch.bool)
    used[positions[positions >= 0].long()] = True
    y[~used] = NAN
    weights = torch.randn(n, k, generator=_generator(n, k, 7)).to(arithmetic_dtype(dtype, of_dy))
    weights[positions < 0] = NAN
    drows = torch.full((rows, d), 7.0, dtype=dtype)
    dweights = reference.moe_combine_backward(dy, y, positions, weights, drows)
    arguments = (strided_like(dy, device), strided_like(y, device), *_on(device, positions, weights))
    actual = ops.moe_combine_backward(*arguments)
    tolerance = _tolerance(dtype, of_dy)
    torch.testing.assert_close(actual[0].cpu(), drows, **tolerance)
    assert not actual[0].cpu()[~used].any()
    # A sum over d products of size 1 rounds relative to what is summed.
    torch.testing.assert_close(
        actual[1].cpu(), dweights, rtol=tolerance["rtol"], atol=tolerance["atol"] * max(1, d) ** 0.5
    )
    out = torch.full((rows, d), 7.0, dtype=dtype, device=device)
    again = ops.moe_combine_backward(*arguments, out=out)
    assert again[0] is out and torch.equal(out, actual[0]) and torch.equal(again[1], actual[1])


def check_chunk_sort(
    device: str, sources: int, experts: int, d: int, dtype: torch.dtype, *, layout: str = "dense"
) -> None:
    generator = _generator(sources, experts, d, 9)
    lengths = torch.randint(0, 9, (sources, experts), generator=generator) * torch.randint(
        0, 2, (sources, experts), generator=generator
    )
    for behind in (0, 4):
        x = _draw((int(lengths.sum()) + behind, d), dtype, layout, 10)
        for inverse in (False, True):
            expected = torch.full(x.shape, 7.0, dtype=dtype)
            reference.moe_chunk_sort(x, lengths, inverse, expected)
            on_device = strided_like(x, device)
            actual = ops.moe_chunk_sort(on_device, lengths.to(device), inverse=inverse)
            assert torch.equal(actual.cpu(), expected)
            back = ops.moe_chunk_sort(actual, lengths.to(device), inverse=not inverse)
            assert torch.equal(back.cpu()[: len(x) - behind], x[: len(x) - behind])
            assert not back[len(x) - behind :].any()
            out = torch.full(x.shape, 7.0, dtype=dtype, device=device)
            assert ops.moe_chunk_sort(on_device, lengths.to(device), inverse=inverse, out=out) is out
            assert torch.equal(out.cpu(), expected)
