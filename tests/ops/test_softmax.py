"""Softmax statistics and gradient: kernels against the specification, and the loss they make against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from op_agreement import DTYPES, SIZES, check_grad, check_stats
from torch import Tensor

from whale_torch import ops
from whale_torch.errors import LayoutError

LAYOUTS = ["dense", "wide rows", "transposed"]


@pytest.mark.parametrize("k", [*SIZES, 5000])
@pytest.mark.parametrize("n", [0, 1, 3, 17])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_size_agrees(isa: str, n: int, k: int, dtype: torch.dtype) -> None:
    check_stats("cpu", n, k, dtype)
    check_grad("cpu", n, k, dtype)
    check_grad("cpu", n, k, dtype, inplace=True)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_option_agrees(isa: str, dtype: torch.dtype, layout: str, smoothing: bool, weighted: bool) -> None:
    for special in (False, True):
        options = {"layout": layout, "smoothing": smoothing, "weighted": weighted, "special": special}
        check_stats("cpu", 9, 2500, dtype, **options)
        check_grad("cpu", 9, 2500, dtype, **options)
        check_grad("cpu", 9, 2500, dtype, inplace=True, **options)


def test_many_rows_agree() -> None:
    check_stats("cpu", 1023, 17, torch.float32)
    check_grad("cpu", 1023, 17, torch.bfloat16)


def test_large_logits_neither_overflow_nor_lose_the_largest() -> None:
    logits = torch.tensor([[1e4, 1e4 - 1, -1e4], [-1e30, -1e30, -1e30], [3e38, -3e38, 0.0]])
    stats = ops.softmax_stats(logits, torch.zeros(3, dtype=torch.int64), 0, None, False)
    assert stats[0].tolist() == pytest.approx([1e4, -1e30, 3e38])
    assert stats[1].tolist() == pytest.approx([1 + torch.tensor(-1.0).exp().item(), 3.0, 1.0])


def test_shards_combine_to_the_whole() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(5, 30, dtype=torch.float64), torch.randint(0, 30, (5,))
    parts = [ops.softmax_stats(logits[:, a:b], target, a, None, True) for a, b in ((0, 11), (11, 11), (11, 30))]
    largest = torch.stack([p[0] for p in parts]).amax(0)
    total = sum((p[1] * (p[0] - largest).exp() for p in parts), torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(largest + total.log(), logits.logsumexp(1))
    torch.testing.assert_close(sum(p[2] for p in parts), logits.gather(1, target[:, None])[:, 0])
    torch.testing.assert_close(sum(p[3] for p in parts), logits.sum(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_result_does_not_depend_on_threads(dtype: torch.dtype) -> None:
    threads = torch.get_num_threads()
    logits, target = torch.randn(65, 3001).to(dtype), torch.randint(0, 3001, (65,))
    coef = torch.rand(65)
    results = []
    for number in (1, 2, 3, 7):
        torch.set_num_threads(number)
        stats = ops.softmax_stats(logits, target, 0, None, True)
        grad = ops.softmax_grad(logits, stats[0], target, 0, coef, coef, coef, None, inplace=False)
        results.append((stats, grad))
    torch.set_num_threads(threads)
    for stats, grad in results[1:]:
        assert torch.equal(stats, results[0][0])
        assert torch.equal(grad, results[0][1])


def _grads(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cross_entropy_is_torchs(dtype: torch.dtype, weighted: bool, smoothing: float) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(33, 401, dtype=dtype)).requires_grad_()
    target = torch.randint(0, 401, (33,))
    target[[2, 30]] = -100
    weight = torch.rand(401, dtype=dtype) if weighted else None
    expected = _grads(F.cross_entropy(logits, target, weight=weight, label_smoothing=smoothing), logits)
    tolerance = {"rtol": 1e-12, "atol": 1e-14} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-7}
    for inplace in (False, True):
        loss = ops.cross_entropy(logits, target, weight=weight, label_smoothing=smoothing, inplace=inplace)
        torch.testing.assert_close(_grads(loss, logits), expected, **tolerance)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_gradcheck(smoothing: float) -> None:
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    target, weight = torch.tensor([0, 5, -100, 2]), torch.rand(6, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda z: ops.cross_entropy(z, target, weight=weight, label_smoothing=smoothing), (logits,)
    )


@pytest.mark.parametrize("label", [6, -1])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_label_that_is_no_class_is_never_a_number(weighted: bool, label: int) -> None:
    logits, target = torch.randn(3, 6, requires_grad=True), torch.tensor([0, label, -100])
    weight = torch.rand(6) if weighted else None
    for loss in (
        ops.cross_entropy(logits, target, weight=weight),
        ops.linear_cross_entropy(logits, torch.eye(6), None, target, class_weight=weight, chunk=4),
    ):
        (gradient,) = torch.autograd.grad(loss, logits)
        assert loss.isnan() and gradient[:2].isnan().any()


def test_writing_over_logits_is_seen_by_autograd() -> None:
    inputs = torch.randn(3, 4, requires_grad=True)
    logits = inputs.exp()
    coef = torch.ones(3)
    ops.softmax_grad(logits, coef, torch.zeros(3, dtype=torch.int64), 0, coef, coef, None, None, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logits.sum().backward()


def test_wrong_arguments_are_named() -> None:
    logits, target, coef = torch.randn(3, 4), torch.zeros(3, dtype=torch.int64), torch.ones(3)
    with pytest.raises(LayoutError, match=r"target is torch.int32 of shape \(3,\); 3 rows need int64"):
        ops.softmax_stats(logits, target.int(), 0, None, False)
    with pytest.raises(LayoutError, match=r"class_weight has shape \(5,\) for 4 classes"):
        ops.softmax_stats(logits, target, 0, torch.ones(5), False)
    with pytest.raises(LayoutError, match="logits has 3 dims, not 2"):
        ops.softmax_stats(logits[None], target, 0, None, False)
    with pytest.raises(LayoutError, match=r"lse is torch.float64 of shape \(3,\)"):
        ops.softmax_grad(logits, coef.double(), target, 0, coef, coef, None, None, inplace=False)
    with pytest.raises(LayoutError, match=r"target_coef is torch.float32 of shape \(4,\)"):
        ops.softmax_grad(logits, coef, target, 0, coef, torch.ones(4), None, None, inplace=False)
