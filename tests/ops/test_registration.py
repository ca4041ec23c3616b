"""Each op is a good citizen of torch: opcheck, torch.compile, and the compiled kernel is the one that answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from whale_torch import ops
from whale_torch.ops import library, schemas

N, K, D = 6, 11, 4
TARGET = torch.tensor([0, 10, -100, 3, 4, 5])
COEF = torch.linspace(0, 1, N)


def moe_arguments() -> dict[str, list[tuple[Any, ...]]]:
    logits, x, y, weights = torch.randn(N, K), torch.randn(N, D), torch.randn(2 * N, D), torch.rand(N, 2)
    scores, experts, probs = ops.moe_route(logits, 2)
    positions, _, _ = ops.moe_positions(experts, K, capacity=torch.ones(K, dtype=torch.int64))
    out, rows, lengths = torch.zeros(N, D), torch.zeros(2 * N, D), torch.tensor([[1, 2], [0, 3]])
    return {
        "moe_route": [(logits, 2, False, None, 1), (logits[:, :10].bfloat16(), 2, True, torch.rand(10), 2)],
        "moe_route_backward": [
            (probs, experts, scores, None, False, 1, torch.float32),
            (probs[:, :10].contiguous(), experts.clamp(max=9), None, probs[:, :10], True, 2, torch.bfloat16),
        ],
        "moe_positions": [
            (experts, K, None, None, True, None),
            (experts, K, torch.ones(K, dtype=torch.int64), 2, False, torch.randperm(N)),
        ],
        "moe_permute": [(x, positions, rows), (x, positions, rows.bfloat16())],
        "moe_combine": [(y, positions, weights, out), (y.bfloat16(), positions, None, out)],
        "moe_combine_backward": [(x, y, positions, weights, rows)],
        "moe_chunk_sort": [(x, lengths, False, out), (x, lengths, True, out)],
        "moe_scatter": [(x, positions, rows), (x, positions, rows.bfloat16())],
        "moe_collect": [(y, positions, weights, out, torch.zeros(2 * N, D))],
        "moe_scatter_backward": [(x, torch.randn(2 * N, D), positions, weights, rows)],
        "moe_activate": [
            (x, None, 0, out),
            (x.bfloat16(), x.bfloat16(), 3, out.bfloat16()),
        ],
        "moe_activate_backward": [
            (x.clone(), x, None, 1, None, torch.zeros(D), None),
            (x.clone(), x, x, 2, x.clone(), torch.zeros(D), torch.zeros(D)),
        ],
    }


def example_arguments() -> dict[str, list[tuple[Any, ...]]]:
    logits, weight, x = torch.randn(N, K), torch.rand(K), torch.randn(N, D)
    tensors = [torch.randn(3), torch.randn(2, 2).t()]
    grad = (COEF + 3, TARGET, 0, COEF, COEF)
    linear = (x, torch.randn(K, D), torch.randn(K))
    return {
        "bucket_pack": [(tensors, [0, 3], torch.zeros(8), 0.5), (tensors, [0, 3], torch.zeros(8).bfloat16(), 1.0)],
        "bucket_unpack": [(torch.randn(8), [0, 3], tensors, 0.5)],
        "bucket_amax": [(tensors,)],
        "softmax_stats": [(logits, TARGET, 0, None, False), (logits.bfloat16(), TARGET, 2, weight, True)],
        "softmax_grad": [(logits, *grad, None, None), (logits.t().contiguous().t(), *grad, COEF, weight)],
        "softmax_grad_": [(logits.clone(), *grad, None, None), (logits.bfloat16(), *grad, COEF, weight)],
        **moe_arguments(),
        "copy_blocks": [(torch.arange(8).byte(), torch.tensor([(0, 4, 2), (3, 0, 4)]), torch.zeros(8).byte())],
        "post_flag": [(torch.zeros(2, 16).int(), 1, 3)],
        "await_flags": [(torch.zeros(2, 16).int(), [0, 1], 0, 0)],
        "crc32c": [(torch.arange(8).byte(), 3, 0), (torch.zeros(0).byte(), 3, 9)],
        "linear_softmax_stats": [(*linear, TARGET, 0, None, False, 4), (*linear[:2], None, TARGET, 0, weight, True, 4)],
        "linear_softmax_grad": [(*linear, *grad, None, None, 4), (*linear[:2], None, *grad, COEF, weight, 4)],
    }


@pytest.mark.parametrize("name", schemas.OPS)
def test_opcheck(name: str) -> None:
    for arguments in example_arguments()[name]:
        torch.library.opcheck(library.op(name), arguments)


def _compiled_programs() -> list[Callable[[], Any]]:
    logits, weight, x = torch.randn(N, K), torch.rand(K), torch.randn(N, D)
    tensors, flat = [torch.randn(3), torch.randn(2, 2).t()], torch.randn(8)
    matrix = torch.randn(K, D)

    def pack() -> Any:
        fresh = torch.zeros(8)
        ops.bucket_pack(tensors, [0, 3], fresh, 0.5)
        return fresh * 2

    def unpack() -> Any:
        fresh = [torch.zeros(3), torch.zeros(2, 2)]
        found = ops.bucket_unpack(flat, [0, 3], fresh, 0.5)
        return fresh, found

    def inplace() -> Any:
        return ops.softmax_grad(logits * 1, COEF, TARGET, 0, COEF, COEF, None, None, inplace=True) + 1

    return [
        pack,
        unpack,
        inplace,
        lambda: ops.bucket_amax(tensors) + 1,
        lambda: ops.softmax_stats(logits, TARGET, 0, weight, True) + 1,
        lambda: ops.softmax_grad(logits, COEF, TARGET, 0, COEF, COEF, COEF, weight, inplace=False) + 1,
        lambda: library.op("crc32c")(torch.arange(8).byte(), 3, 0) + 1,
        lambda: ops.linear_softmax_stats(x, matrix, weight, TARGET, 0, weight, True, 4) + 1,
        lambda: ops.linear_softmax_grad(x, matrix, weight, COEF, TARGET, 0, COEF, COEF, COEF, weight, 4),
    ]


def _moe_program(x: Tensor, router: Tensor, experts: Tensor) -> Tensor:
    """A whole layer: route, positions, permute, an exchange of chunks and back, experts, combine."""
    scores, chosen, probs = ops.moe_route(x @ router, 2, bias=torch.linspace(0, 0.1, K))
    positions, _, _ = ops.moe_positions(chosen, K, slots=2 * N, order=torch.arange(N).flip(0))
    rows = ops.moe_permute(x, positions, 2 * N * K)
    lengths = torch.tensor([[N, N], [0, N]])
    rows = ops.moe_chunk_sort(ops.moe_chunk_sort(rows, lengths) * 2, lengths, inverse=True)
    y = torch.bmm(rows.view(K, 2 * N, D), experts).view(-1, D)
    return ops.moe_combine(y, positions, scores).sum() + (probs**2).sum()


def test_a_layer_of_experts_compiles_with_its_gradient() -> None:
    inputs = tuple(torch.randn(shape, requires_grad=True) for shape in ((N, D), (D, K), (K, D, D)))
    expected = torch.autograd.grad(_moe_program(*inputs), inputs)
    compiled = torch.compile(_moe_program, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), inputs), expected)


@pytest.mark.parametrize("index", range(9))
def test_compiles_without_a_graph_break(index: int) -> None:
    program = _compiled_programs()[index]
    expected = program()
    torch.testing.assert_close(torch.compile(program, fullgraph=True, backend="aot_eager")(), expected, equal_nan=True)


def test_cross_entropy_compiles_with_its_gradient() -> None:
    x, matrix = torch.randn(N, D, requires_grad=True), torch.randn(K, D, requires_grad=True)

    def program() -> Any:
        return ops.linear_cross_entropy(x, matrix, None, TARGET, chunk=4) + ops.cross_entropy(x @ matrix.t(), TARGET)

    expected = torch.autograd.grad(program(), (x, matrix))
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(), (x, matrix)), expected)


def test_the_cpu_library_is_built() -> None:
    built = library.compiled()["cpu"]
    assert built.loaded, f"{built.reason}; `python setup.py build_ext --inplace` builds it and says why it cannot"


@pytest.mark.skipif(not library.compiled()["cpu"].loaded, reason="the C++ kernels are not built")
def test_the_compiled_kernel_answers() -> None:
    answers = ops.backend()
    assert list(answers) == list(schemas.OPS)
    for name in schemas.COMPILED_OPS:
        assert answers[name]["cpu"] == f"C++ ({library.isa()})"
    assert answers["linear_softmax_grad"]["cpu"] == f"Python + C++ ({library.isa()})"
    # Not only registered: none of the Python kernel's torch ops runs.
    logits = torch.randn(1, 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ops.softmax_stats(logits, torch.zeros(1, dtype=torch.int64), 0, None, True)
    called = {event.key for event in profile.key_averages()}
    assert "whale::softmax_stats" in called
    assert not called & {"aten::exp", "aten::amax", "aten::gather"}, "the Python kernel ran"
