"""Gates, what they choose and what of it is dropped: groups of experts, masks, ties, numbers that are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.test_moe import TABLE, OfTable
from whale_torch import moe
from whale_torch.errors import PlanError

DIM, E = 6, 8


class Own(moe.Gate):
    """The expert that a token's first feature names; the larger its second one, the sooner its turn."""

    def route(self, x: Tensor, mask: Tensor | None) -> moe.Routing:
        experts = x[:, :1].int()
        return moe.Routing(experts, torch.ones(experts.shape), mask=mask, priority=x[:, 1])


GATES: dict[str, Any] = {
    "switch": lambda: moe.TopK(DIM, E, 1),
    "gshard": lambda: moe.TopK(DIM, E, 2, second="random", renormalize="after"),
    "jitter": lambda: moe.TopK(DIM, E, 3, jitter=0.1),
    "sigmoid": lambda: moe.TopK(DIM, E, 3, score="sigmoid", bias_rate=0.1),
    "groups": lambda: moe.TopK(DIM, E, 2, num_groups=4, top_groups=2),
    "biased groups": lambda: moe.TopK(DIM, E, 3, score="sigmoid", bias_rate=0.1, num_groups=2, top_groups=1, scale=2.5),
    "prototypes": lambda: moe.Prototypes(DIM, E, 2),
    "expert choice": lambda: moe.ExpertChoice(DIM, E),
}
SCARCE = {"capacity_factor": 0.5, "eval_capacity_factor": 0.5, "min_capacity": 1}
DROPS: dict[str, dict[str, Any]] = {
    "dropless": {},
    "by position": SCARCE,
    "by priority": {**SCARCE, "drop": "priority"},
    "each its own": {"capacity": [1, 2, 3, 0, 1, 2, 3, 4]},
}


@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("gate", GATES)
def test_padding_is_as_if_it_were_not_there(gate: str, drop: str) -> None:
    """Outputs, losses, gradients, counts, biases: whatever padding holds, and wherever it is."""
    torch.manual_seed(0)
    options = {"aux_loss_coef": 0.1, "z_loss_coef": 0.1, "importance_coef": 0.1, **DROPS[drop]}
    layer = moe.MoELayer(DIM, E, hidden=5, gate=GATES[gate](), **options)
    layer.gate.weight.data.normal_()
    x, mask = torch.randn(12, DIM), torch.tensor([0, 1, 1, 0, 1, 1, 1, 1, 0, 1, 0, 1], dtype=torch.bool)
    told: list[list[int]] = []
    if layer.gate.follows_load:
        layer.gate.update = lambda counts: told.append(counts.tolist())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    found = []
    for padding in (None, 7.0, float("nan")):
        layer.zero_grad()
        given = x[mask] if padding is None else torch.where(mask.unsqueeze(1), x, padding)
        layer.train(gate not in ("gshard", "jitter"))  # what a token draws depends on its place
        y = layer(given, None if padding is None else mask)
        y = y if padding is None else y[mask]
        (y * torch.arange(1.0, 9.0).unsqueeze(1)).sum().backward()
        optimizer.step()
        load = layer.load
        gradients = [p.grad for p in layer.parameters()]
        found.append([y.detach(), load.counts, load.kept, load.loss, *gradients])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b)
    assert len({str(one) for one in told}) <= 1
    assert (found[0][2].sum() < found[0][1].sum()) == (drop != "dropless")


@pytest.mark.parametrize("gate", GATES)
def test_what_is_no_number_goes_to_experts_that_there_are(gate: str) -> None:
    torch.manual_seed(0)
    made = GATES[gate]()
    x = torch.randn(5, DIM)
    x[1], x[3] = float("nan"), float("inf")
    experts = made(x).experts
    assert experts.min() >= -1 and experts.max() < E
    assert all(len(set(row)) == len(row) for row in ([e for e in row if e >= 0] for row in experts.tolist()))
    layer = moe.MoELayer(DIM, E, gate=made, capacity_factor=0.5, min_capacity=1, drop="priority")
    assert layer(x)[[0, 2, 4]].isfinite().all()


def test_a_token_that_is_no_number_takes_its_turn_last() -> None:
    layer = moe.MoELayer(DIM, E, 1, capacity=[1] * E, drop="priority", gate=GATES["switch"]())
    x = torch.ones(3, DIM)
    x[0] = float("nan")
    layer(torch.cat([x, -x]))
    layer.gate.weight.data.zero_()  # all go to expert 0
    y = layer(x)
    assert y[1].abs().sum() > 0 and (y[[0, 2]] == 0).all()


def test_equal_scores_go_to_the_lowest_groups_and_experts() -> None:
    for options in ({}, {"score": "sigmoid", "bias_rate": 0.1}):
        gate = moe.TopK(DIM, 12, 4, num_groups=4, top_groups=2, **options)  # type: ignore[arg-type]
        gate.weight.data.zero_()
        assert gate(torch.randn(3, DIM)).experts.tolist() == [[0, 1, 2, 3]] * 3


def test_groups_are_chosen_by_their_best_or_their_two_best() -> None:
    """Two groups: (0.60, 0.02) and (0.30, 0.08) would be the columns 0, 3 and 1, 2 of the table's first row."""
    logits = TABLE[:, [0, 3, 1, 2]].log()
    best = [OfTable(4, 4, 2, num_groups=2, top_groups=1, group_best=n)(logits).experts.tolist() for n in (1, 2)]
    assert best[0] == [[0, 1], [0, 1], [0, 1], [0, 1], [2, 3]]
    assert best[1] == [[0, 1], [0, 1], [0, 1], [0, 1], [2, 3]]
    row = torch.tensor([[0.4, 0.05, 0.3, 0.25]]).log()
    best = [OfTable(4, 4, 2, num_groups=2, top_groups=1, group_best=n)(row).experts.tolist() for n in (1, 2)]
    assert best == [[[0, 1]], [[2, 3]]]


def test_groups_are_those_of_deepseek() -> None:
    """V3's router of transformers: with a bias, weights renormalized and scaled; and its gradient."""
    v3 = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = v3.DeepseekV3Config(
        hidden_size=DIM, num_local_experts=16, n_group=4, topk_group=2, num_experts_per_tok=3, routed_scaling_factor=2.5
    )
    torch.manual_seed(0)
    theirs = v3.DeepseekV3TopkRouter(config)
    ours = moe.TopK(DIM, 16, 3, score="sigmoid", bias_rate=0.1, num_groups=4, top_groups=2, scale=2.5)
    theirs.weight.data.normal_()
    theirs.e_score_correction_bias.uniform_(-0.5, 0.5)
    ours.weight.data.copy_(theirs.weight)
    ours.bias.copy_(theirs.e_score_correction_bias)  # type: ignore[union-attr]
    x = torch.randn(200, DIM)
    _, weights, experts = theirs(x)
    routing = ours(x)
    dense = [torch.zeros(200, 16).scatter(1, e.long(), w) for e, w in ((experts, weights), routing_of(routing))]
    torch.testing.assert_close(dense[0], dense[1])
    assert not torch.equal(moe.TopK.route(ours, x, None).experts.sort(1).values, _ungrouped(ours, x).sort(1).values)
    seed = torch.randn(200, 16)
    for out in dense:
        (out * seed).sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def routing_of(routing: moe.Routing) -> tuple[Tensor, Tensor]:
    return routing.experts, routing.weights


def _ungrouped(gate: moe.TopK, x: Tensor) -> Tensor:
    other = moe.TopK(DIM, gate.num_experts, gate.top_k, score=gate.score, bias_rate=0.1)  # type: ignore[arg-type]
    other.load_state_dict(gate.state_dict())
    return other(x).experts


def test_a_gate_of_ones_own_says_whose_turn_it_is() -> None:
    layer = moe.MoELayer(2, 3, 1, hidden=4, gate=Own(3, 1), capacity=[1, 1, 0])
    x = torch.tensor([[0.0, 1.0], [0.0, 5.0], [1.0, 2.0], [2.0, 9.0], [1.0, float("nan")]])
    y = layer(x)
    assert (y.abs().sum(1) > 0).tolist() == [False, True, True, False, False]


def test_a_hash_asks_no_ids_of_padding() -> None:
    layer = moe.MoELayer(4, 3, 1, gate=moe.Hash(10, 3))
    ids, x = torch.tensor([3, -100, 9]), torch.randn(3, 4)
    y = layer(x, torch.tensor([True, False, True]), token_ids=ids)
    torch.testing.assert_close(y[[0, 2]], layer(x[[0, 2]], token_ids=ids[[0, 2]]))
    assert (y[1] == 0).all()


def test_jitter_and_a_drawn_second_expert_are_for_training() -> None:
    torch.manual_seed(0)
    x = torch.randn(400, DIM)
    jittered, drawn = (GATES[name]() for name in ("jitter", "gshard"))
    assert not torch.equal(jittered(x).logits, jittered(x).logits)
    assert torch.equal(jittered.eval()(x).logits, jittered(x).logits)
    ratio = jittered.train().logits(torch.ones(1, DIM)) / jittered.eval().logits(torch.ones(1, DIM))
    assert ratio.isfinite().all()
    drawn.weight.data.normal_()
    kept = drawn(x).experts[:, 1] >= 0
    sure = 2 * drawn.eval()(x).weights[:, 1].detach()
    assert (drawn(x).experts >= 0).all()
    assert abs(float(kept.float().mean() - sure.clamp(max=1).mean())) < 0.08


def test_gshards_loss_counts_first_choices() -> None:
    layers = [
        moe.MoELayer(4, 4, 2, gate=OfTable(4, 4, 2), aux_loss_coef=1.0, **of) for of in ({}, {"aux_loss_of": "first"})
    ]
    for layer, expected in zip(layers, (1.3744, 1.656), strict=True):
        layer(TABLE.log())
        assert float(moe.aux_loss(layer)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: moe.TopK(4, 6, 2, num_groups=4), "6 experts are no 4 equal groups"),
        (lambda: moe.TopK(4, 6, 2, num_groups=6, top_groups=1), "top_groups is 1: of 6 groups of 1 experts"),
        (lambda: moe.TopK(4, 6, 2, num_groups=3, top_groups=4), "top_groups is 4"),
        (lambda: moe.TopK(4, 6, 2, num_groups=3, top_groups=2, group_best=3), "group_best is 3"),
        (lambda: moe.ExpertChoice(4, 6, capacity_factor=0.0), "capacity_factor is 0"),
        (lambda: moe.MoELayer(4, 3, 2, capacity=[1, 2]), r"capacity is \[1, 2\]"),
        (lambda: moe.MoELayer(4, 4, 2, gate="prototypes", aux_loss_of="first"), "with a Prototypes gate"),
    ],
)
def test_options_that_do_not_fit_are_refused(make: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


def test_a_bias_stays_in_float32_where_a_model_is_cast() -> None:
    """Of steps of 0.001 bfloat16 loses those beyond 0.25."""
    with torch.device("meta"):
        made = moe.TopK(DIM, E, 2, bias_rate=0.001)
    counts = torch.arange(E) + 1000  # of which bfloat16 makes two numbers
    for gate in (moe.TopK(DIM, E, 2, bias_rate=0.001), made.to_empty(device="cpu")):
        gate.reset_parameters()
        gate.to(torch.bfloat16)
        for _ in range(300):
            gate.update(counts)
        assert gate.weight.dtype is torch.bfloat16 and gate.bias is not None
        expected = torch.tensor([0.3] * (E // 2) + [-0.3] * (E // 2))
        torch.testing.assert_close(gate.bias, expected, rtol=1e-4, atol=0)
    assert moe.TopK(DIM, E, 2, bias_rate=0.1).double().get_buffer("bias").dtype is torch.float64
