"""A layer of experts on one device: gates, capacity, losses, masks, against sums written out and published values."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import whale_torch as wh
from whale_torch import moe, ops
from whale_torch.errors import LayoutError, PlanError, WhaleError
from whale_torch.moe.balance import Coefficients, add_losses
from whale_torch.moe.capacity import Capacity, drop, without_dropped
from whale_torch.moe.routing import Routing, renormalized

TABLE = torch.tensor(
    [
        [0.60, 0.30, 0.08, 0.02],
        [0.55, 0.35, 0.06, 0.04],
        [0.50, 0.10, 0.30, 0.10],
        [0.40, 0.30, 0.20, 0.10],
        [0.10, 0.70, 0.15, 0.05],
    ]
)


class OfTable(moe.TopK):
    """Whose logits are the tokens themselves."""

    def logits(self, x: Tensor) -> Tensor:
        return x + 0 * self.weight.sum()


def _routing(k: int = 2, **options: Any) -> Routing:
    found: Routing = OfTable(4, 4, k, **options)(TABLE.log())
    return found


def _one_rank(x: Tensor) -> tuple[Tensor, slice]:
    return x, slice(0, len(x))


# ---- routes, capacity, weights


def test_the_largest_are_chosen_and_ties_go_to_the_lowest_expert() -> None:
    assert _routing().experts.tolist() == [[0, 1], [0, 1], [0, 2], [0, 1], [1, 2]]
    assert moe.TopK(3, 64, 4)(torch.zeros(2, 3)).experts.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("renormalize", ["before", "after"])
def test_dropped_by_position(renormalize: Any) -> None:
    routing = _routing(renormalize=renormalize)
    found = drop(routing, [2] * 4, _one_rank, "position")
    assert (found.experts >= 0).int().tolist() == [[1, 1], [1, 0], [0, 1], [0, 0], [1, 1]]
    weights = without_dropped(found).weights if renormalize == "after" else found.weights
    expected = {
        "before": [[0.666667, 0.333333], [0.611111, 0], [0, 0.375], [0, 0], [0.823529, 0.176471]],
        "after": [[0.666667, 0.333333], [1, 0], [0, 1], [0, 0], [0.823529, 0.176471]],
    }[renormalize]
    torch.testing.assert_close(weights, torch.tensor(expected), atol=1e-5, rtol=0)


def test_dropped_by_priority() -> None:
    """Token 4 (0.7) comes first and takes expert 1, its second choice is taken before those of the others."""
    found = drop(_routing(renormalize="none"), [1] * 4, _one_rank, "priority")
    assert (found.experts >= 0).int().tolist() == [[1, 0], [0, 0], [0, 0], [0, 0], [1, 1]]


def test_nothing_dropped() -> None:
    expected = [[0.666667, 0.333333], [0.611111, 0.388889], [0.625, 0.375], [0.571429, 0.428571], [0.823529, 0.176471]]
    torch.testing.assert_close(_routing().weights, torch.tensor(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("tokens", "num_experts", "k", "factor", "minimum", "expected"),
    [
        (5, 4, 1, 1.0, 4, 4),
        (10, 4, 1, 1.25, 0, 4),
        (7, 3, 1, 1.0, 0, 3),
        (3, 8, 1, 1.0, 0, 1),
        (100, 10, 2, 1.1, 4, 22),
    ],
)
def test_capacities(tokens: int, num_experts: int, k: int, factor: float, minimum: int, expected: int) -> None:
    capacity = Capacity(factor, minimum=minimum)
    assert capacity.of(tokens, k, num_experts, training=True) == [expected] * num_experts
    assert capacity.of(tokens, k, num_experts, training=False) is None


def test_prototypes() -> None:
    gate = moe.Prototypes(2, 4, 2)
    gate.logits = lambda x: torch.tensor([[1.0, 0, 0, 2], [0, 1, 3, 0]])  # type: ignore[method-assign]
    routing = gate(torch.zeros(2, 2))
    assert routing.experts.tolist() == [[0, 3], [1, 2]]
    expected = torch.tensor([[0.7310586, 0.8807971], [0.7310586, 0.9525741]])
    torch.testing.assert_close(routing.weights, expected)


def test_expert_choice_takes_the_best_tokens_of_each_expert() -> None:
    gate = moe.ExpertChoice(4, 4, capacity_factor=1.6)
    gate.logits = lambda x: TABLE.log()  # type: ignore[method-assign]
    routing = gate(torch.zeros(5, 4))
    assert routing.experts.tolist() == [[0, -1], [0, 1], [2, 3], [2, 3], [1, -1]]
    expected = torch.tensor([[0.6, 0], [0.55, 0.35], [0.3, 0.1], [0.2, 0.1], [0.7, 0]])
    torch.testing.assert_close(routing.weights, expected)


def test_experts_choose_first_tokens_of_equals_and_no_padding() -> None:
    gate = moe.ExpertChoice(3, 4, capacity_factor=2.0)
    mask = torch.tensor([False, True, True, False, True, True, True])
    x = torch.zeros(7, 3)
    assert gate(x, mask).experts.ge(0).all(1).tolist() == [False, True, True, False, True, False, False]
    x[1] = x[0] = float("nan")
    routing = gate(x, mask)
    assert routing.experts[[2, 4, 5]].tolist() == [[0, 1, 2, 3]] * 3 and routing.experts[[0, 1, 3, 6]].eq(-1).all()
    assert not routing.weights.isnan().any()
    none = gate(x, torch.zeros(7, dtype=torch.bool))
    assert none.experts.tolist() == [[-1]] * 7


def test_hash() -> None:
    layer = moe.MoELayer(4, 3, 2, gate=moe.Hash(10, 3, 2))
    ids = torch.tensor([[1, 7], [7, 3]])
    x = torch.randn(2, 2, 4)
    y = layer(x, token_ids=ids)
    assert torch.equal(layer.gate.table[ids.flatten()].sort(1).values, layer.gate.table[ids.flatten()].sort(1).values)
    torch.testing.assert_close(y[0, 1], layer(x[:1], token_ids=ids[:1])[0, 1])
    with pytest.raises(PlanError, match="called without"):
        layer(x)


def test_nan_goes_somewhere() -> None:
    layer = moe.MoELayer(4, 8, 2)
    x = torch.randn(5, 4)
    x[2] = float("nan")
    y = layer(x)
    assert y[2].isnan().all() and not y[[0, 1, 3, 4]].isnan().any()


# ---- losses


def _losses(routing: Routing, **of: float) -> float:
    counts = torch.bincount(routing.experts[routing.experts >= 0].long(), minlength=4)
    return float(add_losses(routing, counts, Coefficients(**of), lambda x: x, 1)[1])


def test_published_values_of_losses() -> None:
    assert _losses(_routing(1), switch=1.0) == pytest.approx(1.656, abs=1e-4)
    assert _losses(_routing(2), switch=1.0) == pytest.approx(1.3744, abs=1e-4)
    assert _losses(_routing(2), z=1.0) == pytest.approx(0.0, abs=1e-6)
    assert _losses(OfTable(4, 4, 2)(TABLE.log() + 1), z=1.0) == pytest.approx(1.0, abs=1e-4)
    assert _losses(_routing(2), importance=1.0) == pytest.approx(0.344832, abs=1e-4)
    even = torch.eye(4).repeat(3, 1) * 1e-6
    assert _losses(OfTable(4, 4, 1)(even), switch=1.0) == pytest.approx(1.0, abs=1e-4)
    assert _losses(OfTable(4, 4, 1)(torch.tensor([[3.0, 0, 0, 0]] * 5)), switch=1.0) == pytest.approx(
        3.480194, abs=1e-4
    )


def test_padding_has_no_part() -> None:
    routing = _routing()
    padded = torch.cat([TABLE.log(), torch.randn(3, 4)])
    masked = OfTable(4, 4, 2)(padded, torch.arange(8) < 5)
    for of in ({"switch": 1.0}, {"z": 1.0}, {"importance": 1.0}):
        assert _losses(masked, **of) == pytest.approx(_losses(routing, **of), abs=1e-6)
    layer = moe.MoELayer(4, 4, 2, aux_loss_coef=0.5)
    x, mask = torch.randn(2, 3, 4), torch.tensor([[True, True, False], [True, False, False]])
    y = layer(x, mask)
    assert (y[~mask] == 0).all()
    torch.testing.assert_close(y[mask], layer(x[mask]))


def test_an_even_load_has_a_finite_gradient() -> None:
    layer = moe.MoELayer(4, 4, 1, importance_coef=1.0)
    layer.gate.weight.data.zero_()
    layer(torch.randn(8, 4)).sum().backward()
    assert layer.gate.weight.grad.isfinite().all()


class Written(nn.Module):
    """The layer as a sum over experts, with the loss added by the caller."""

    def __init__(self, layer: moe.MoELayer):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, experts = self.layer.gate, self.layer.experts
        p = F.linear(x, gate.weight).softmax(1)
        w, chosen = p.topk(gate.top_k, 1)
        w = renormalized(w) if gate.renormalize == "before" else w
        out = []
        for t in range(len(x)):
            parts = []
            for s in range(gate.top_k):
                e = int(chosen[t, s])
                hidden = F.gelu(F.linear(x[t], experts.w1[e], experts.b1[e]))
                parts.append(w[t, s] * F.linear(hidden, experts.w2[e], experts.b2[e]))
            out.append(torch.stack(parts).sum(0))
        f = torch.bincount(chosen.flatten(), minlength=gate.num_experts) / chosen.numel()
        return torch.stack(out), 0.3 * gate.num_experts * (f * p.mean(0)).sum()


@pytest.mark.parametrize(("top_k", "recomputed"), [(1, False), (2, False), (3, True)])
def test_a_layer_is_the_sum_written_out_and_its_loss_is_added(top_k: int, recomputed: bool) -> None:
    torch.manual_seed(0)
    layer = moe.MoELayer(6, 5, top_k, hidden=7, aux_loss_coef=0.3).double()
    layer.gate.weight.data.normal_()
    other = copy.deepcopy(layer)
    x = torch.randn(9, 6, dtype=torch.float64)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = checkpoint(layer, a, use_reentrant=False) if recomputed else layer(a)
    expected, loss = Written(other)(b)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(moe.aux_loss(layer).double(), loss.detach())
    y.square().sum().backward()
    (expected.square().sum() + loss).backward()
    torch.testing.assert_close(a.grad, b.grad)
    for (name, p), q in zip(layer.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_steps_without_tokens_have_finite_losses(tokens: int, gate: Any) -> None:
    layer = moe.MoELayer(4, 3, 2, gate=gate, importance_coef=0.1, z_loss_coef=0.1)
    layer(torch.randn(tokens, 4), torch.zeros(tokens, dtype=torch.bool)).sum().backward()
    assert float(moe.aux_loss(layer)) == 0.0
    assert not layer.gate.weight.grad.any()


@pytest.mark.parametrize("gate", ["softmax", "sigmoid", "prototypes"])
def test_padding_may_hold_anything(gate: Any) -> None:
    layer = moe.MoELayer(4, 4, 2, gate=gate, importance_coef=0.1, z_loss_coef=0.1, capacity_factor=1.0)
    x = torch.randn(5, 4)
    found = []
    for value in (0.0, float("nan"), float("inf")):
        layer.zero_grad()
        given = x.index_fill(0, torch.tensor([1, 4]), value).requires_grad_()
        layer(given, torch.tensor([True, False, True, True, False])).sum().backward()
        found.append([given.grad, *(p.grad for p in layer.parameters()), moe.aux_loss(layer)])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=0, rtol=0)


def test_scores_that_are_all_zero_leave_a_finite_gradient() -> None:
    for logit in (-90.0, -103.0, -500.0):
        layer = moe.MoELayer(1, 3, 2, gate="sigmoid")
        layer.gate.weight.data.fill_(logit)
        layer(torch.ones(5, 1)).sum().backward()
        assert torch.isfinite(moe.aux_loss(layer)) and layer.gate.weight.grad.isfinite().all(), logit


# ---- the module


def test_autocast_leaves_float64_as_torch_does() -> None:
    layer, x = moe.MoELayer(8, 3, 2).double(), torch.randn(4, 8, dtype=torch.float64)
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(layer(x), expected)


def test_autocast_runs_experts_in_half_precision_and_the_gate_in_float32() -> None:
    layer = moe.MoELayer(16, 4, 2)
    x = torch.randn(10, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    torch.testing.assert_close(y.float(), layer(x), atol=2e-2, rtol=2e-2)
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_copies_and_state() -> None:
    layer = moe.MoELayer(4, 3, 2, expert=lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4)))
    x = torch.randn(3, 4)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer.double())).float()):
        torch.testing.assert_close(again(x), layer.float()(x))
    expected = [f"experts.{layer}__{key}" for layer in (0, 2) for key in ("bias", "weight")]
    assert sorted(layer.state_dict()) == [*expected, "gate.weight"]


@pytest.mark.parametrize("shape", [(0, 4), (1, 4), (2, 0, 4), (4,)])
def test_few_tokens(shape: tuple[int, ...]) -> None:
    layer = moe.MoELayer(4, 3, 2)
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    assert y.shape == shape
    y.sum().backward()


def _hashed(ids: Tensor) -> Tensor:
    gate = moe.Hash(5, 3)
    out: Tensor = moe.MoELayer(4, 3, 1, gate=gate)(torch.ones(len(ids) if len(ids) < 3 else 2, 4), token_ids=ids)
    return out


def test_ids_of_any_whole_dtype() -> None:
    layer = moe.MoELayer(4, 3, 1, gate=moe.Hash(5, 3))
    x, ids = torch.randn(5, 4), torch.tensor([4, 0, 0, 1, 3])
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        torch.testing.assert_close(layer(x, token_ids=ids.to(dtype)), layer(x, token_ids=ids))


@pytest.mark.parametrize(
    "options", [{"capacity_factor": float("inf")}, {"capacity_factor": 1e30}, {"min_capacity": 1 << 70}]
)
def test_huge_capacities_drop_nothing(options: dict[str, Any]) -> None:
    layer = moe.MoELayer(4, 3, 2, **{"capacity_factor": 1.0, **options})
    x = torch.randn(5, 4)
    torch.manual_seed(0)
    y = layer(x)
    assert int(layer.load.kept.sum()) == 10
    layer.capacity = Capacity()
    torch.testing.assert_close(layer(x), y)


def test_a_layer_has_the_top_k_of_its_gate() -> None:
    """12 tokens, 3 routes each, 4 experts: 9 routes an expert."""
    layer = moe.MoELayer(4, 4, gate=moe.TopK(4, 4, 3), capacity_factor=1.0, min_capacity=0)
    assert layer.top_k == 3
    layer.gate.weight.data.zero_()
    layer(torch.randn(12, 4))
    assert layer.load.kept.tolist() == [9, 9, 9, 0]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: moe.MoELayer(4, 3, 4), PlanError, "top_k is 4, and there are 3"),
        (lambda: moe.MoELayer(4, 3, 1, renormalize="before"), PlanError, "the gate gets no gradient"),
        (lambda: moe.MoELayer(4, 5, 2, gate="prototypes"), PlanError, "5 experts are no 2 equal groups"),
        (lambda: moe.MoELayer(4, 3, 2, gate="nonsense"), PlanError, "gate is 'nonsense'"),
        (lambda: moe.MoELayer(4, 3, 2, gate=moe.TopK(4, 5, 2)), PlanError, "the gate has 5 experts, the layer 3"),
        (lambda: moe.MoELayer(4, 3, 2, capacity_factor=-1.0), PlanError, "capacity_factor is -1"),
        (lambda: moe.MoELayer(4, 3, 2, expert=nn.Identity), PlanError, "Identity has no parameters"),
        (
            lambda: moe.MoELayer(4, 3, 2)(torch.ones(2, 5)),
            LayoutError,
            r"shape \(2, 5\), and the layer is for \[..., 4\]",
        ),
        (lambda: moe.MoELayer(4, 3, 2)(torch.ones(2, 4), torch.ones(2)), LayoutError, "mask is torch.float32"),
        (lambda: moe.MoELayer(0, 3, 2), PlanError, "dim is 0"),
        (lambda: moe.MoELayer(4, 3, 2, hidden=0), PlanError, "hidden=0"),
        (lambda: moe.MoELayer(4, 3, 2, chunks=1.5), PlanError, "chunks is 1.5"),
        (lambda: moe.MoELayer(4, 3, 2, wire_dtype=torch.int64), PlanError, "wire_dtype is torch.int64"),
        (lambda: moe.MoELayer(4, 3, 2, wire_dtype="bfloat16"), PlanError, "wire_dtype is 'bfloat16'"),
        (lambda: moe.MoELayer(4, 3, 2, aux_loss_coef=float("nan")), PlanError, "aux_loss_coef is nan"),
        (lambda: moe.MoELayer(4, 3, 2, z_loss_coef=-1.0), PlanError, "z_loss_coef is -1.0"),
        (lambda: moe.MoELayer(4, 3, 2, min_capacity=2.5), PlanError, "min_capacity=2.5"),
        (lambda: moe.MoELayer(4, 3, 2, expert=nn.Linear(4, 4)), PlanError, "expert is a Linear"),
        (lambda: moe.MoELayer(4, 3, 2, expert=lambda: nn.Linear(4, 5))(torch.ones(2, 4)), LayoutError, "made 5 wide"),
        (lambda: moe.MoELayer(4, 3, 2, gate=moe.TopK(5, 3, 2)), PlanError, "the gate is for tokens 5 wide"),
        (lambda: moe.ExpertChoice(4, 3, capacity_factor=float("inf")), PlanError, "capacity_factor is inf"),
        (lambda: moe.ExpertChoice(4, 3, capacity_factor=-1.0), PlanError, "capacity_factor is -1"),
        (lambda: moe.TopK(4, 3, 2, bias_rate=-0.1), PlanError, "bias_rate is -0.1"),
        (lambda: _hashed(torch.zeros(2)), LayoutError, "token_ids are torch.float32"),
        (lambda: _hashed(torch.zeros(3, dtype=torch.int64)), LayoutError, r"of shape \(3,\) for x of shape \(2, 4\)"),
        (lambda: _hashed(torch.tensor([1, 7])), PlanError, "token ids are 1 to 7, the table has 5 rows"),
        (
            lambda: moe.MoELayer(4, 3, 2)(torch.ones(2, 4), token_ids=torch.zeros(2, dtype=torch.int64)),
            PlanError,
            "token_ids are given, and a TopK gate",
        ),
        (lambda: moe.MoELayer(4, 0, 1), PlanError, "top_k is 1, and there are 0"),
        (lambda: moe.MoELayer(4, 3, 2, gate=moe.TopK(4, 3, 1)), PlanError, "a token 1 experts, the layer has top_k 2"),
        (lambda: moe.MoELayer(4, 3, 2, gate=Mute(3, 2))(torch.ones(2, 4)), LayoutError, "Mute gives a Tensor"),
        (
            lambda: moe.MoELayer(4, 3, 2, expert=moe.FeedForward(2, 4, 4)),
            PlanError,
            "are 2 experts, and the layer has 3",
        ),
        (lambda: moe.MoELayer(4, 3, hidden=8, expert=lambda: nn.Linear(4, 4)), PlanError, "expert= gives others"),
        (
            lambda: moe.MoELayer(4, 3, 2, shared=nn.Linear(4, 1))(torch.ones(5, 4)),
            LayoutError,
            r"shared expert makes \(5, 1\) of tokens \(5, 4\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, error: type[WhaleError], message: str) -> None:
    with pytest.raises(error, match=message) as told:
        make()
    assert told.value.fix


class Mute(moe.Gate):
    def route(self, x: Tensor, mask: Tensor | None) -> Any:
        return x


def test_a_layer_is_as_its_gate_says() -> None:
    layer = moe.MoELayer(4, gate=moe.TopK(4, 3, 1), capacity_factor=1.0, min_capacity=0)
    assert (layer.num_experts, layer.top_k, layer.experts.num_experts) == (3, 1, 3)
    layer(torch.randn(30, 4))
    assert layer.load is not None and int(layer.load.kept.max()) <= 10
    assert moe.MoELayer(4, gate=moe.ExpertChoice(4, 8, capacity_factor=3.0)).top_k == 3


def test_a_step_tells_the_gate_once_of_what_was_trained() -> None:
    layer = moe.MoELayer(4, 3, 1, gate=moe.TopK(4, 3, 1, bias_rate=0.5))
    told: list[list[int]] = []
    layer.gate.update = lambda counts: told.append(counts.tolist())  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    seen = torch.zeros(3, dtype=torch.int64)
    for recomputed in (False, True):
        x = torch.randn(5, 4, requires_grad=True)
        y = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
        seen += layer.load.counts
        y.sum().backward()
    layer(torch.randn(7, 4))  # nobody takes a gradient of it
    optimizer.step()
    optimizer.step()
    torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.0).step()
    assert told == [seen.tolist()]


def test_the_bias_follows_the_load() -> None:
    gate = moe.TopK(4, 4, 1, score="sigmoid", bias_rate=0.1)
    gate.update(torch.tensor([8, 0, 0, 4]))
    assert gate.bias is not None
    torch.testing.assert_close(gate.bias, torch.tensor([-0.1, 0.1, 0.1, -0.1]))
    torch.testing.assert_close(gate(torch.zeros(1, 4)).experts, torch.tensor([[1]], dtype=torch.int32))
    torch.testing.assert_close(gate(torch.zeros(1, 4)).weights, torch.tensor([[0.5]]))


def test_a_layer_whose_gate_follows_the_load_is_collected() -> None:
    layer = moe.MoELayer(4, 3, 1, gate=moe.TopK(4, 3, 1, bias_rate=0.5))
    layer(torch.randn(5, 4)).sum().backward()
    alive = weakref.ref(layer)
    del layer
    gc.collect()
    assert alive() is None


class Cosine(moe.Gate):
    """A gate of one's own, whose parameters have shapes of their own."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.into, self.each, self.heat = nn.Linear(8, 3), nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.ones(()))

    def route(self, x: Tensor, mask: Tensor | None) -> Routing:
        logits = self.into(x) @ self.each.t() * self.heat
        scores, experts, probs = ops.moe_route(logits, 2)
        return Routing(experts, scores, logits, probs, mask)


def test_gates_of_ones_own_are_recorded() -> None:
    with torch.device("meta"):
        layer = moe.MoELayer(8, 4, 2, gate=Cosine())
    y = layer(torch.empty(5, 8, device="meta"))
    y.sum().backward()
    assert y.shape == (5, 8) and all(p.grad is not None for p in layer.gate.parameters())


class Own(moe.Experts):
    def __init__(self, shape: tuple[int, ...], buffer: bool = False) -> None:
        super().__init__(4)
        self.w = nn.Parameter(torch.zeros(shape))
        if buffer:
            self.register_buffer("scale", torch.arange(4.0))


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (lambda: Own((8, 8)), r"parameter 'experts.w' has shape \[8, 8\]"),
        (lambda: Own((4, 8), buffer=True), "buffer 'experts.scale' is of all of them"),
    ],
)
def test_what_cannot_be_cut_by_experts_is_refused(experts: Any, message: str) -> None:
    layer = wh.split()(moe.MoELayer(8, 4, 2, expert=experts()))
    with pytest.raises(PlanError, match=message):
        wh.plan(nn.Sequential(layer), cluster=wh.Cluster.of(1, 2))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("slices", [2, 3])
def test_experts_in_slices_are_whole_ones(slices: int, gated: bool) -> None:
    options: dict[str, Any] = {"hidden": 12, "gated": gated, "bias": True, "capacity_factor": 0.8}
    whole, cut = moe.MoELayer(8, 5, 2, **options), moe.MoELayer(8, 5, 2, slices=slices, **options)
    cut.gate.load_state_dict(whole.gate.state_dict())
    of, given = cut.experts, dict(whole.experts.named_parameters())
    with torch.no_grad():
        for name in ("w1", "b1", "w3", "b3") if gated else ("w1", "b1"):
            of.get_parameter(name).copy_(given[name].reshape(of.get_parameter(name).shape))
        of.get_parameter("w2").copy_(given["w2"].view(5, 8, slices, -1).transpose(1, 2).flatten(0, 1))
        assert (of.get_parameter("b2").view(5, slices, 8)[:, 1:] == 0).all()
        of.get_parameter("b2")[::slices] = given["b2"]
    x, above = torch.randn(30, 8), torch.randn(30, 8)
    found = []
    for layer in (whole, cut):
        mine = x.clone().requires_grad_()
        y = layer(mine)
        y.backward(above)
        assert layer.load is not None
        found.append((y, mine.grad, layer.gate.weight.grad, layer.load.kept))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)
    gradient = of.get_parameter("b2").grad
    assert gradient is not None and whole.experts.get_parameter("b2").grad is not None
    torch.testing.assert_close(gradient[::slices], whole.experts.get_parameter("b2").grad)
    assert (gradient.view(5, slices, 8)[:, 1:] == 0).all()


def test_a_bias_of_a_slice_that_adds_none_is_not_loaded_in_silence() -> None:
    layer = moe.MoELayer(8, 2, 1, hidden=12, slices=3)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.load_state_dict(state)
    state["experts.b2"][4] = 1.0
    with pytest.raises(RuntimeError, match=r"experts\.b2 is 0 but for the first of an expert's 3 slices"):
        layer.load_state_dict(state)
    whole = moe.MoELayer(8, 2, 1, hidden=12)
    whole.load_state_dict(whole.state_dict())


def test_slices_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PlanError, match="5 slices do not divide a hidden width of 12"):
        moe.MoELayer(8, 4, hidden=12, slices=5)
    with pytest.raises(PlanError, match="slices is 2, and experts are of a form of their own"):
        moe.MoELayer(8, 4, expert=lambda: nn.Linear(8, 8), slices=2)
    with pytest.raises(PlanError, match="slices is 0"):
        moe.MoELayer(8, 4, slices=0)


def test_gates_are_built_on_meta_and_take_their_values_later() -> None:
    for gate in (lambda: moe.Hash(7, 5, 2, seed=3), lambda: moe.TopK(8, 5, 2, bias_rate=0.1)):
        with torch.device("meta"):
            model = nn.Sequential(moe.MoELayer(8, 5, 2, hidden=4, gate=gate()))
        wh.parallelize(model)
        made = dict(model[0].gate.named_buffers())
        assert made.keys() == dict(gate().named_buffers()).keys() and made
        for name, expected in gate().named_buffers():
            torch.testing.assert_close(made[name], expected)


def test_a_split_inside_an_expert_of_ones_own_is_refused() -> None:
    def built() -> nn.Module:
        with wh.split(size=2):
            return nn.Linear(8, 8)

    with pytest.raises(PlanError, match=r"wh.split\(size=2\) stands inside an expert"):
        moe.MoELayer(8, 4, expert=built)
    with wh.split():
        layer = moe.MoELayer(8, 4, expert=lambda: nn.Linear(8, 8))
    assert layer.num_experts == 4
