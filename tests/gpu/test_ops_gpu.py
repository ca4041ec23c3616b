"""The ops on a GPU against the specification on CPU: the same checks as tests/ops."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from whale_torch import ops
from whale_torch.ops import library, schemas
from whale_torch.ops.activation import FUNCTIONS

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[1] / "ops"))
from activation_agreement import check_activation
from moe_agreement import (
    check_chunk_sort,
    check_combine,
    check_combine_backward,
    check_permute,
    check_positions,
    check_route,
    check_route_backward,
)
from op_agreement import DTYPES, SIZES, check_amax, check_grad, check_pack, check_stats, check_unpack


def test_the_cuda_kernels_answer() -> None:
    built = library.compiled()["cuda"]
    assert built.loaded, f"{built.reason}; WHALE_TORCH_CUDA=1 python setup.py build_ext --inplace says why"
    assert {ops.backend()[name]["cuda"] for name in schemas.COMPILED_OPS if name not in schemas.HOST_OPS} == {"CUDA"}


@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("flat", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_buckets_agree(source: torch.dtype, flat: torch.dtype, scale: float) -> None:
    for special in (False, True):
        check_pack("cuda", source, flat, scale, special=special)
        check_unpack("cuda", source, flat, scale, special=special)


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_agrees(dtype: torch.dtype) -> None:
    check_amax("cuda", dtype)


def test_more_tensors_than_a_launch_takes() -> None:
    tensors = [torch.randn(1 + i * 37 % 20_000, device="cuda") for i in range(301)]
    offsets = [sum(t.numel() for t in tensors[:i]) for i in range(len(tensors))]
    flat = torch.empty(sum(t.numel() for t in tensors), device="cuda")
    ops.bucket_pack(tensors, offsets, flat, 0.5)
    assert torch.equal(flat, torch.cat(tensors) * 0.5)
    assert ops.bucket_amax(tensors).item() == torch.cat(tensors).abs().max().item()


@pytest.mark.parametrize("k", [*SIZES, 5000, 100_003])
@pytest.mark.parametrize("n", [0, 1, 17])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_agrees(n: int, k: int, dtype: torch.dtype) -> None:
    check_stats("cuda", n, k, dtype)
    check_grad("cuda", n, k, dtype)
    check_grad("cuda", n, k, dtype, inplace=True)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [False, True])
@pytest.mark.parametrize("layout", ["dense", "wide rows", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_options_agree(dtype: torch.dtype, layout: str, smoothing: bool, weighted: bool) -> None:
    for special in (False, True):
        options = {"layout": layout, "smoothing": smoothing, "weighted": weighted, "special": special}
        check_stats("cuda", 9, 2500, dtype, **options)
        check_grad("cuda", 9, 2500, dtype, **options)
        check_grad("cuda", 9, 2500, dtype, inplace=True, **options)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_agree(dtype: torch.dtype, function: str, gated: bool) -> None:
    for n, d in ((0, 3), (1, 1), (100, 300), (33, 129)):
        check_activation("cuda", n, d, dtype, function, gated=gated)


def test_results_are_the_same_every_time() -> None:
    logits, target = torch.randn(257, 30_001, device="cuda"), torch.randint(0, 30_001, (257,), device="cuda")
    first = ops.softmax_stats(logits, target, 0, None, True)
    assert all(torch.equal(ops.softmax_stats(logits, target, 0, None, True), first) for _ in range(5))


def test_kernels_run_on_the_current_stream() -> None:
    side = torch.cuda.Stream()
    source = torch.ones(1 << 24, device="cuda")
    flat = torch.empty(1 << 24, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        source.fill_(3.0)
        ops.bucket_pack([source], [0], flat, 2.0)
    torch.cuda.current_stream().wait_stream(side)
    assert flat.unique().tolist() == [6.0]


@pytest.mark.parametrize("n, e, k", [(0, 5, 2), (1, 1, 1), (17, 8, 2), (129, 64, 8), (16, 13, 13), (1000, 200, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_routes_agree(n: int, e: int, k: int, dtype: torch.dtype) -> None:
    for score in ("softmax", "sigmoid"):
        for biased in (False, True):
            check_route("cuda", n, e, k, dtype, score=score, biased=biased)
        check_route("cuda", n, e, k, dtype, score=score, special=True)
        check_route_backward("cuda", n, e, k, dtype, score=score)


@pytest.mark.parametrize("layout", ["dense", "wide rows", "transposed"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_routes_in_groups_agree(groups: int, layout: str) -> None:
    for score in ("softmax", "sigmoid"):
        check_route("cuda", 37, 96, 4, torch.float32, score=score, groups=groups, layout=layout, special=True)
        check_route_backward("cuda", 37, 96, 4, torch.float32, score=score, groups=groups, of_probs=False)


@pytest.mark.parametrize("n, k, e", [(0, 2, 3), (1, 1, 1), (5, 2, 4), (100, 3, 7), (3000, 8, 64), (50_000, 2, 2000)])
@pytest.mark.parametrize("slot_major", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
def test_positions_agree(n: int, k: int, e: int, slot_major: bool, ordered: bool) -> None:
    mean = -(-n * k // e)
    for padding in (False, True):
        options = {"slot_major": slot_major, "ordered": ordered, "padding": padding}
        for limits in ({}, {"capacity": mean}, {"slots": mean + 1}, {"capacity": mean, "slots": mean}):
            check_positions("cuda", n, k, e, **limits, **options)


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_permutations_agree(dtype: torch.dtype, to: torch.dtype) -> None:
    for n, k, d in ((0, 2, 8), (1, 1, 1), (9, 3, 17), (33, 2, 1024), (20, 9, 5000)):
        check_permute("cuda", n, k, d, dtype, to)
        check_combine("cuda", n, k, d, dtype, to)
        check_combine("cuda", n, k, d, dtype, to, weighted=False)
        check_combine_backward("cuda", n, k, d, dtype, to)


@pytest.mark.parametrize("layout", ["wide rows", "transposed"])
def test_permutations_of_every_layout_agree(layout: str) -> None:
    check_permute("cuda", 9, 3, 64, torch.float32, torch.bfloat16, layout=layout)
    check_combine("cuda", 9, 3, 64, torch.float32, torch.bfloat16, layout=layout)
    check_combine_backward("cuda", 9, 3, 64, torch.float32, torch.bfloat16, layout=layout)
    check_chunk_sort("cuda", 3, 4, 64, torch.float32, layout=layout)


@pytest.mark.parametrize("sources, experts", [(1, 1), (4, 1), (1, 5), (3, 4), (8, 64), (0, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunk_sort_agrees(sources: int, experts: int, dtype: torch.dtype) -> None:
    for d in (6, 64):
        check_chunk_sort("cuda", sources, experts, d, dtype)


def test_dispatch_is_the_same_every_time() -> None:
    logits = torch.randn(10_001, 64, device="cuda").bfloat16()  # with ties

    def dispatch() -> list[torch.Tensor]:
        scores, experts, probs = ops.moe_route(logits, 8)
        positions, counts, kept = ops.moe_positions(experts, 64, slots=1000)
        rows = ops.moe_permute(logits, positions, 64_000)
        return [probs, positions, counts, kept, rows, ops.moe_combine(rows, positions, scores)]

    first = dispatch()
    for _ in range(5):
        assert all(torch.equal(one, two) for one, two in zip(dispatch(), first, strict=True))


@pytest.mark.parametrize("name", [name for name in schemas.OPS if name not in schemas.HOST_OPS])
def test_opcheck(name: str) -> None:
    from test_registration import example_arguments

    for arguments in example_arguments()[name]:
        moved = [
            [t.cuda() for t in a] if isinstance(a, list) and isinstance(a[0], torch.Tensor)
            else a.cuda() if isinstance(a, torch.Tensor) else a
            for a in arguments
        ]  # fmt: skip
        torch.library.opcheck(library.op(name), tuple(moved))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_cross_entropy_agrees(dtype: torch.dtype) -> None:
    x = torch.randn(33, 64, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(1001, 64, device="cuda", dtype=dtype, requires_grad=True)
    target = torch.randint(0, 1001, (33,), device="cuda")
    loss = ops.linear_cross_entropy(x, weight, None, target, label_smoothing=0.1, chunk=300)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    whole = torch.nn.functional.cross_entropy(exact[0] @ exact[1].t(), target, label_smoothing=0.1)
    expected = [whole.detach(), *torch.autograd.grad(whole, exact)]
    for one, two in zip([loss.detach(), *torch.autograd.grad(loss, (x, weight))], expected, strict=True):
        assert (one.double() - two).abs().max() <= (2e-2 if dtype == torch.bfloat16 else 2e-3) * two.abs().max()
