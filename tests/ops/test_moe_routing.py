"""Routes and positions: kernels against the specification, values known beforehand, ties, NaN, threads, gradients."""

from __future__ import annotations

import pytest
import torch
from moe_agreement import check_positions, check_route, check_route_backward, draw_experts
from op_agreement import DTYPES

from whale_torch import ops
from whale_torch.errors import LayoutError

# Five tokens, four experts; feed `P.log()` as logits.
P = torch.tensor(
    [
        [0.6, 0.3, 0.08, 0.02],
        [0.55, 0.35, 0.06, 0.04],
        [0.5, 0.1, 0.3, 0.1],
        [0.4, 0.3, 0.2, 0.1],
        [0.1, 0.7, 0.15, 0.05],
    ]
)
SIZES = [(1, 1, 1), (3, 4, 1), (17, 8, 2), (33, 64, 8), (16, 13, 13), (40, 200, 5)]


@pytest.mark.matrix(keep=9)
@pytest.mark.parametrize("n, e, k", [(0, 5, 2), *SIZES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_route_agrees(isa: str, n: int, e: int, k: int, dtype: torch.dtype) -> None:
    for score in ("softmax", "sigmoid"):
        for biased in (False, True):
            check_route("cpu", n, e, k, dtype, score=score, biased=biased)
            check_route("cpu", n, e, k, dtype, score=score, special=True)
    check_route_backward("cpu", n, e, k, dtype)


@pytest.mark.matrix(keep=6)
@pytest.mark.parametrize("layout", ["dense", "wide rows", "transposed"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_route_in_groups_agrees(isa: str, dtype: torch.dtype, groups: int, layout: str) -> None:
    for score in ("softmax", "sigmoid"):
        check_route("cpu", 37, 24, 4, dtype, score=score, groups=groups, layout=layout)
        check_route("cpu", 37, 24, 4, dtype, score=score, groups=groups, layout=layout, special=True)
        for of_scores, of_probs in ((True, False), (False, True), (False, False)):
            check_route_backward(
                "cpu", 37, 24, 4, dtype, score=score, groups=groups, of_scores=of_scores, of_probs=of_probs
            )


def test_prototypes_route_within_their_block() -> None:
    scores, experts, probs = ops.moe_route(torch.tensor([[1.0, 0, 0, 2], [0, 1, 3, 0]]), 2, groups=2)
    assert experts.tolist() == [[0, 3], [1, 2]]
    torch.testing.assert_close(scores, torch.tensor([[0.7310586, 0.8807971], [0.7310586, 0.9525741]]))
    torch.testing.assert_close(probs.view(2, 2, 2).sum(2), torch.ones(2, 2))


def test_ties_go_to_the_lowest_expert(isa: str) -> None:
    for e, k in ((8, 3), (64, 4)):
        for score in ("softmax", "sigmoid"):
            for bias in (None, torch.full((e,), 0.5)):
                assert ops.moe_route(torch.zeros(20, e), k, score=score, bias=bias)[1].tolist() == [list(range(k))] * 20
    # Beyond what a sigmoid or a softmax can tell apart, the logits still can.
    logits = torch.tensor([[20.0, 30.0, 40.0, -200.0, -190.0]])
    assert ops.moe_route(logits, 5, score="sigmoid")[1].tolist() == [[2, 1, 0, 4, 3]]


def test_nan_is_below_everything_and_never_a_second_choice(isa: str) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan, 1.0, -inf, nan], [nan, nan, nan, nan], [-inf, nan, -inf, 3.0]])
    expected = [[1, 2, 0, 3], [0, 1, 2, 3], [3, 0, 2, 1]]
    for score in ("softmax", "sigmoid"):
        for k in (1, 2, 3, 4):
            assert ops.moe_route(logits, k, score=score)[1].tolist() == [row[:k] for row in expected]


def test_the_bias_only_selects() -> None:
    logits, bias = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([1.0, 0.0, 0.0])
    scores, experts, _ = ops.moe_route(logits, 1, score="sigmoid", bias=bias)
    assert experts.tolist() == [[0]] and scores.tolist() == [[0.5]]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_route_gradcheck(score: str, groups: int) -> None:
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: ops.moe_route(z, 4, score=score, groups=groups)[::2], (logits,))
    assert torch.autograd.gradgradcheck(lambda z: ops.moe_route(z, 4, score=score, groups=groups)[::2], (logits,))
    # One result alone: the other's gradient is None.
    assert torch.autograd.gradcheck(lambda z: ops.moe_route(z, 4, score=score, groups=groups)[0], (logits,))
    assert torch.autograd.gradcheck(lambda z: ops.moe_route(z, 4, score=score, groups=groups)[2], (logits,))


def test_route_gradient_is_in_the_logits_dtype() -> None:
    logits = torch.randn(7, 8).bfloat16().requires_grad_()
    scores, experts, _ = ops.moe_route(logits, 2)
    assert not experts.requires_grad
    assert torch.autograd.grad(scores.sum(), logits)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("slot_major", [True, False])
def test_positions_known_beforehand(slot_major: bool) -> None:
    _, experts, _ = ops.moe_route(P.log(), 2)
    assert experts.tolist() == [[0, 1], [0, 1], [0, 2], [0, 1], [1, 2]]
    positions, counts, kept = ops.moe_positions(experts, 4, slots=5, slot_major=slot_major)
    assert counts.tolist() == kept.tolist() == [4, 4, 2, 0]
    rank = [[0, 1], [1, 2], [2, 0], [3, 3], [0, 1]] if slot_major else [[0, 0], [1, 1], [2, 0], [3, 2], [3, 1]]
    assert (positions % 5).tolist() == rank and torch.equal(positions // 5, experts)
    positions, counts, kept = ops.moe_positions(experts, 4, capacity=torch.full((4,), 2), slot_major=slot_major)
    assert counts.tolist() == [4, 4, 2, 0] and kept.tolist() == [2, 2, 2, 0]
    kept_routes = [[1, 1], [1, 0], [0, 1], [0, 0], [1, 1]] if slot_major else [[1, 1], [1, 1], [0, 1], [0, 0], [0, 1]]
    assert (positions >= 0).int().tolist() == kept_routes
    assert sorted(positions[positions >= 0].tolist()) == list(range(6))


@pytest.mark.matrix(keep=5)
@pytest.mark.parametrize("n, k, e", [(0, 2, 3), (1, 1, 1), (5, 2, 4), (100, 3, 7), (3000, 8, 64)])
@pytest.mark.parametrize("slot_major", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
def test_positions_agree(n: int, k: int, e: int, slot_major: bool, ordered: bool) -> None:
    for padding in (False, True):
        options = {"slot_major": slot_major, "ordered": ordered, "padding": padding}
        mean = -(-n * k // e)
        check_positions("cpu", n, k, e, **options)
        check_positions("cpu", n, k, e, capacity=mean, **options)
        check_positions("cpu", n, k, e, slots=mean + 1, **options)
        check_positions("cpu", n, k, e, capacity=mean, slots=mean, **options)
        check_positions("cpu", n, k, e, slots=n * k + 1, **options)
        check_positions("cpu", n, k, e, slots=0, **options)


def test_all_routes_to_one_expert_and_none() -> None:
    experts = torch.full((6, 1), 2, dtype=torch.int32)
    positions, counts, kept = ops.moe_positions(experts, 4)
    assert positions[:, 0].tolist() == list(range(6)) and counts.tolist() == kept.tolist() == [0, 0, 6, 0]
    positions, counts, kept = ops.moe_positions(torch.full_like(experts, -1), 4)
    assert positions.unique().tolist() == [-1] and not counts.any() and not kept.any()


def test_important_tokens_first() -> None:
    experts = torch.zeros(4, 1, dtype=torch.int32)
    order = torch.tensor([0.1, 0.9, 0.2, 0.8]).argsort(descending=True)
    positions, _, kept = ops.moe_positions(experts, 1, capacity=torch.tensor([2]), order=order)
    assert positions[:, 0].tolist() == [-1, 0, -1, 1] and kept.tolist() == [2]


def test_result_does_not_depend_on_threads() -> None:
    threads = torch.get_num_threads()
    logits = torch.randn(20_001, 16)
    results = []
    for number in (1, 2, 3, 7):
        torch.set_num_threads(number)
        scores, experts, probs = ops.moe_route(logits, 4)
        positions = [ops.moe_positions(experts, 16, slot_major=major, slots=5000)[0] for major in (True, False)]
        grad = ops.moe_route_backward(probs, experts, scores, probs)
        results.append((scores, experts, probs, grad, *positions))
    torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(result, results[0], strict=True))


def test_wrong_arguments_are_named() -> None:
    logits, experts = torch.randn(3, 6), draw_experts(3, 2, 6, padding=False)
    with pytest.raises(LayoutError, match=r"logits are torch.float32 of shape \(3,\)"):
        ops.moe_route(logits[:, 0], 1)
    with pytest.raises(LayoutError, match="k is 7, and there are 6 experts"):
        ops.moe_route(logits, 7)
    with pytest.raises(LayoutError, match="4 groups do not divide 6 experts and k = 4"):
        ops.moe_route(logits, 4, groups=4)
    with pytest.raises(LayoutError, match="score is 'relu'"):
        ops.moe_route(logits, 1, score="relu")
    with pytest.raises(LayoutError, match=r"bias has shape \(3,\) for 6 experts"):
        ops.moe_route(logits, 1, bias=torch.zeros(3))
    with pytest.raises(LayoutError, match=r"dscores has shape \(3, 1\), not \(3, 2\)"):
        ops.moe_route_backward(logits, experts, torch.zeros(3, 1), None)
    with pytest.raises(LayoutError, match=r"experts are torch.int64 of shape \(3, 2\)"):
        ops.moe_positions(experts.long(), 6)
    with pytest.raises(LayoutError, match=r"an expert is \d, and there are 2, counted from 0"):
        ops.moe_positions(torch.full((3, 1), 2, dtype=torch.int32), 2)
    with pytest.raises(LayoutError, match=r"capacity is torch.int64 of shape \(2,\), not int64 of shape \(6,\)"):
        ops.moe_positions(experts, 6, capacity=torch.ones(2, dtype=torch.int64))
    with pytest.raises(LayoutError, match="a capacity is -1"):
        ops.moe_positions(experts, 6, capacity=torch.full((6,), -1))
    with pytest.raises(LayoutError, match="order is no permutation of the 3 tokens"):
        ops.moe_positions(experts, 6, order=torch.tensor([0, 1, 1]))
    with pytest.raises(LayoutError, match="rows are numbered in int32"):
        ops.moe_positions(experts, 6, slots=2**30)
