"""Linear and softmax in chunks of the vocabulary against the two done whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from whale_torch import ops
from whale_torch.errors import LayoutError


def _case(dtype: torch.dtype, with_bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(19, 12, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(53, 12, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(53, dtype=torch.float64).to(dtype).requires_grad_() if with_bias else None
    target = torch.randint(0, 53, (19,))
    target[3] = -100
    return x, weight, bias, target


@pytest.mark.parametrize("chunk", [1, 10, 53, 1000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_linear_cross_entropy_is_torchs(dtype: torch.dtype, with_bias: bool, smoothing: float, chunk: int) -> None:
    x, weight, bias, target = _case(dtype, with_bias)
    inputs = [t for t in (x, weight, bias) if t is not None]
    # bf16 is measured against the exact result: torch's own bf16 loss is less exact than ours.
    exact = [t.detach().double().requires_grad_() for t in inputs]
    logits = F.linear(*exact) if with_bias else F.linear(exact[0], exact[1])
    whole = F.cross_entropy(logits, target, label_smoothing=smoothing, weight=torch.arange(1.0, 54).double())
    expected = [whole.detach(), *torch.autograd.grad(whole, exact)]
    loss = ops.linear_cross_entropy(
        x, weight, bias, target, label_smoothing=smoothing, chunk=chunk, class_weight=torch.arange(1.0, 54)
    )
    actual = [loss.detach(), *torch.autograd.grad(loss, inputs)]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for one, two in zip(actual, expected, strict=True):
        assert one.dtype == dtype
        assert (one.double() - two).abs().max() <= tolerance * two.abs().max()


def test_stats_and_grad_of_a_shard() -> None:
    x, weight, bias, target = _case(torch.float64, with_bias=True)
    assert bias is not None
    logits = F.linear(x, weight, bias).detach()
    stats = ops.linear_softmax_stats(x, weight[20:], bias[20:], target, 20, None, True, 7)
    torch.testing.assert_close(stats, ops.softmax_stats(logits[:, 20:], target, 20, None, True))
    coefs = (*(torch.rand(19, dtype=torch.float64) for _ in range(3)), None)
    lse = logits.logsumexp(1)
    dx, dweight, dbias = ops.linear_softmax_grad(x, weight[20:], bias[20:], lse, target, 20, *coefs, 7)
    grad = ops.softmax_grad(logits[:, 20:], lse, target, 20, *coefs, inplace=False)
    torch.testing.assert_close(dx, grad @ weight[20:].detach())
    torch.testing.assert_close(dweight, grad.t() @ x.detach())
    torch.testing.assert_close(dbias, grad.sum(0))
    assert ops.linear_softmax_grad(x, weight[20:], None, lse, target, 20, *coefs, 7)[2] is None


@pytest.mark.parametrize(("n", "k"), [(0, 5), (5, 0)])
def test_empty(n: int, k: int) -> None:
    x, weight, target = torch.randn(n, 4), torch.randn(k, 4), torch.zeros(n, dtype=torch.int64)
    stats = ops.linear_softmax_stats(x, weight, None, target, 0, None, True, 2)
    assert stats.shape == (4, n)
    assert (stats[0] == -float("inf")).all()
    coef = torch.ones(n)
    dx, dweight, dbias = ops.linear_softmax_grad(x, weight, None, coef, target, 0, coef, coef, None, None, 2)
    assert torch.equal(dx, torch.zeros(n, 4))
    assert torch.equal(dweight, torch.zeros(k, 4))
    assert dbias is None


def test_wrong_arguments_are_named() -> None:
    x, weight, target = torch.randn(3, 4), torch.randn(6, 5), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(LayoutError, match="x has 4 features, weight 5"):
        ops.linear_cross_entropy(x, weight, None, target)
    with pytest.raises(LayoutError, match=r"weight is torch.bfloat16, x is torch.float32"):
        ops.linear_cross_entropy(x, weight[:, :4].bfloat16(), None, target)
    with pytest.raises(LayoutError, match=r"bias has shape \(5,\), weight 6 rows"):
        ops.linear_cross_entropy(x, weight[:, :4], torch.zeros(5), target)
    with pytest.raises(LayoutError, match="chunk is 0"):
        ops.linear_cross_entropy(x, weight[:, :4], None, target, chunk=0)
