"""Activations, with gates and sums: kernels against the specification, on every instruction set."""

from __future__ import annotations

import math

import pytest
import torch
from activation_agreement import check_activation
from op_agreement import DTYPES

from whale_torch import ops
from whale_torch.errors import LayoutError
from whale_torch.ops import activation_reference as reference
from whale_torch.ops.activation import FUNCTIONS


@pytest.mark.matrix(keep=6)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_agrees(isa: str, dtype: torch.dtype, function: str, gated: bool) -> None:
    check_activation("cpu", 37, 70, dtype, function, gated=gated)


@pytest.mark.parametrize("n, d", [(0, 4), (4, 0), (1, 1), (33, 129), (100, 64)])
def test_every_size_agrees(isa: str, n: int, d: int) -> None:
    check_activation("cpu", n, d, torch.float32, "gelu", gated=True)


def test_gelu_is_exact_far_out() -> None:
    x = torch.tensor([[-9.0, -6.0, -4.0, 0.0, 6.0, float("inf"), float("nan")]])
    out = torch.empty_like(x)
    expected = [v * 0.5 * math.erfc(-v / math.sqrt(2)) for v in x[0, :6].tolist()]
    for kernel in (ops.moe_activate, lambda h, _, out: reference.moe_activate(h, None, 0, out)):
        kernel(x, "gelu", out)
        torch.testing.assert_close(out[0, :6].double(), torch.tensor(expected, dtype=torch.float64), rtol=4e-6, atol=0)
        assert out[0, 6].isnan()


def test_relu_keeps_nan() -> None:
    x, out = torch.tensor([[-1.0, 2.0, float("nan")]]), torch.empty(1, 3)
    ops.moe_activate(x, "relu", out)
    assert out[0, :2].tolist() == [0, 2] and out[0, 2].isnan()


def test_autograd_refuses_what_it_saved_before() -> None:
    h = torch.randn(3, 4)
    for write in (
        lambda saved: ops.moe_activate(h, "gelu", saved),
        lambda saved: ops.moe_activate_backward(saved, h, "gelu"),
        lambda saved: ops.moe_activate_backward(h.clone(), h, "gelu", u=h, du=saved),
        lambda saved: ops.moe_activate_backward(h.clone(), h, "gelu", dbias=saved[0]),
    ):
        y = torch.randn(3, 4, requires_grad=True).exp()
        write(y.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_result_does_not_depend_on_threads() -> None:
    threads, found = torch.get_num_threads(), []
    h, above = torch.randn(3001, 321), torch.randn(3001, 321)
    for number in (1, 2, 3, 7):
        torch.set_num_threads(number)
        grad, sums = above.clone(), torch.zeros(321)
        ops.moe_activate_backward(grad, h, "gelu", dbias=sums)
        found.append((grad, sums))
    torch.set_num_threads(threads)
    for grad, sums in found[1:]:
        assert torch.equal(grad, found[0][0]) and torch.equal(sums, found[0][1])


def test_wrong_arguments_are_named() -> None:
    h, out = torch.randn(3, 4), torch.empty(3, 4)
    with pytest.raises(LayoutError, match="function is 'selu'"):
        ops.moe_activate(h, "selu", out)
    with pytest.raises(LayoutError, match=r"out is torch.float32 \(3, 5\)"):
        ops.moe_activate(h, "gelu", torch.empty(3, 5))
    with pytest.raises(LayoutError, match="h is not contiguous"):
        ops.moe_activate(torch.randn(4, 3).t(), "gelu", out)
    with pytest.raises(LayoutError, match=r"dbias is torch.float64 \(4,\); sums are torch.float32 \(4,\)"):
        ops.moe_activate_backward(out, h, "gelu", dbias=torch.zeros(4, dtype=torch.float64))
    with pytest.raises(LayoutError, match="come together"):
        ops.moe_activate_backward(out, h, "gelu", u=h)
    with pytest.raises(LayoutError, match="come together"):
        ops.moe_activate_backward(out, h, "gelu", du=h)


def test_the_python_kernel_broadcasts_and_drops_nothing() -> None:
    h, narrow = torch.randn(3, 4), torch.randn(1, 4)
    with pytest.raises(LayoutError, match=r"u is torch.float32 \(1, 4\), others are torch.float32 \(3, 4\)"):
        reference.moe_activate(h, narrow, 0, torch.empty(3, 4))
    with pytest.raises(LayoutError, match="come together"):
        reference.moe_activate_backward(h.clone(), h, h, 0, None, None, None)
    with pytest.raises(LayoutError, match=r"dbias is torch.float64 \(4,\); sums are torch.float32 \(4,\)"):
        reference.moe_activate_backward(h.clone(), h, None, 0, None, torch.zeros(4, dtype=torch.float64), None)
