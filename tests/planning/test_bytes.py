"""What a plan says a step moves is what the groups count when the step runs."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import whale_torch as wh
from tests.parity.nesting import Case, Net, Part, annotate, batches, loss_of
from tests.parity.test_nesting import NESTINGS
from tests.world import world
from whale_torch.mesh import Mesh
from whale_torch.planning.cost import price
from whale_torch.planning.plan import Plan
from whale_torch.strategies.runtime import runtime_of


def even(case: Case) -> Case:
    return replace(case, rows=(4,) * len(case.rows))


CASES = {name: even(case) for name, case in NESTINGS.items() if case.world in (3, 4, 8)}
CASES |= {
    "tokens": replace(CASES["mixed rows, 4"], length=3),
    "ids": replace(CASES["two own sizes, 4"], vocabulary=7),
    "tied": replace(CASES["classifier, 4"], vocabulary=11, tied=True),
    "loss inside": replace(CASES["mixed rows, 4"], loss="inside"),
    "frozen features": replace(CASES["classifier, 4"], frozen=r"(inputs|parts)\..*"),
    "narrow": replace(CASES["row cuts, 4"], parts=(Part("glu", 3, CASES["row cuts, 4"].parts[0].scopes),)),
}


def _sent(mesh: Mesh) -> dict[str, float]:
    total: dict[str, float] = {}
    for group in mesh.groups():
        for operation, sent in group.sent_by.items():
            total[operation] = total.get(operation, 0.0) + sent
    return total


def _build(case: Case) -> tuple[Net, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model = Net(case)
    for name, p in model.named_parameters():
        p.requires_grad_(not re.fullmatch(case.frozen, name))
    annotate(model, case)
    return model, tuple(t[: case.rows[0]] for t in batches(case, 1)[0])


def _inputs(case: Case, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return batch if case.loss == "inside" else batch[:1]


def _step(rank: int, n: int, cases: dict[str, Case]) -> dict[str, tuple[str, dict[str, float]]]:
    """The plan of each case and what its first step sent."""
    found = {}
    for name, case in cases.items():
        model, batch = _build(case)
        default = wh.split() if case.default else None
        wh.parallelize(model, sample_inputs=_inputs(case, batch), default=default, timeout=30)
        mesh = runtime_of(model, "the test").mesh
        before = _sent(mesh)
        loss_of(model, batch, case).backward()
        sent = {what: total - before.get(what, 0.0) for what, total in _sent(mesh).items()}
        found[name] = (wh.plan(model).to_json(), {what: size for what, size in sent.items() if size})
    return found


@cache
def steps(n: int) -> list[dict[str, tuple[str, dict[str, float]]]]:
    return world(n, _step, {name: case for name, case in CASES.items() if case.world == n}, timeout=120)


def _by_operation(plan: Plan) -> dict[str, float]:
    total: dict[str, float] = {}
    for traffic in plan.traffic:
        total[traffic.what] = total.get(traffic.what, 0.0) + traffic.sent_bytes
    return total


@pytest.mark.matrix(keep=6)
@pytest.mark.parametrize("name", CASES)
def test_a_plan_with_sample_inputs_counts_every_operation_of_a_step(name: str) -> None:
    case = CASES[name]
    gradients, predicted_gradients = 0.0, 0.0
    for rank in steps(case.world):
        text, sent = rank[name][0], dict(rank[name][1])
        plan = Plan.from_json(text)
        if plan.cuts:
            assert plan.assumption == "counted on a step of 4 rows a rank"
        predicted = _by_operation(plan)
        gradients += sum(sent.pop(what) for what in list(sent) if what.startswith("gradient"))
        predicted_gradients += predicted.pop("gradients", 0.0)
        if plan.cuts:
            assert predicted == pytest.approx(sent)
    assert gradients == pytest.approx(predicted_gradients, rel=0.02)


def test_without_cuts_a_plan_counts_gradients_and_row_counts() -> None:
    for name in ("replica only, 4", "replica only, 8"):
        for rank in steps(CASES[name].world):
            text, sent = rank[name]
            assert Plan.from_json(text).sent_bytes == pytest.approx(sum(sent.values()), rel=0.02)


@pytest.mark.parametrize("kind", ["ffn", "glu"])
@pytest.mark.parametrize(
    "name", ["classifier, 4", "classifier, 8", "all ranks one replica, 4", "mixed rows, 4", "mixed rows, 8"]
)
def test_the_estimate_without_sample_inputs_is_close(name: str, kind: str) -> None:
    case = CASES[name]
    case = replace(case, parts=tuple(replace(part, kind=kind) for part in case.parts), rows=(64,) * len(case.rows))
    model, batch = _build(case)
    cluster = wh.Cluster.of(1, case.world)
    counted = wh.plan(model, cluster=cluster, sample_inputs=_inputs(case, batch))
    assumed = wh.plan(model, cluster=cluster)
    assert "once" in assumed.assumption and "counted" in counted.assumption
    assert price(replace(assumed, rows_per_rank=case.rows[0]), model).sent_bytes == pytest.approx(
        counted.sent_bytes, rel=0.05
    )


class Reads(torch.nn.Module):
    """Control flow that needs values."""

    def __init__(self) -> None:
        super().__init__()
        with wh.split():
            self.head = torch.nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(x) if float(x.sum()) > 0 else self.head(-x)


def test_a_model_that_needs_values_keeps_the_estimate_and_says_why() -> None:
    plan = wh.plan(Reads(), cluster=wh.Cluster.of(1, 4), sample_inputs=torch.ones(2, 4))
    assert "does not run without values: " in plan.assumption and "at 2 rows a rank" in plan.assumption
    assert "does not run without values" in str(plan)
    assert plan.traffic


class Gathers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with wh.split():
            self.scores = torch.nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(x).softmax(-1)


def test_a_plan_names_gathers_before_anything_runs() -> None:
    plan = wh.plan(Gathers(), cluster=wh.Cluster.of(1, 4), sample_inputs=torch.ones(2, 4))
    (gather,) = plan.gathers
    assert gather.operation == "softmax" and "test_bytes.py" in gather.site
    assert "softmax" in str(plan)


def test_a_rehearsal_leaves_the_model_and_the_generators_alone() -> None:
    model, batch = _build(CASES["mixed rows, 4"])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    kinds = [type(m) for m in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    wh.plan(model, cluster=wh.Cluster.of(1, 4), sample_inputs=batch[:1])
    assert torch.equal(torch.rand(3), expected)
    assert [type(m) for m in model.modules()] == kinds
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class Encoder(torch.nn.Module):
    """Attention by heads and a feed-forward pair, twice, and a head over everything."""

    def __init__(self) -> None:
        super().__init__()
        with wh.replica(), wh.split(size=2):
            self.layers = torch.nn.ModuleList(
                torch.nn.TransformerEncoderLayer(8, 4, 16, dropout=0.1, batch_first=True) for _ in range(2)
            )
        with wh.split():
            self.head = torch.nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with wh.split():
            self.body = torch.nn.Sequential(
                torch.nn.Conv2d(3, 8, 3),
                torch.nn.BatchNorm2d(8),
                torch.nn.ReLU(),
                torch.nn.Conv2d(8, 6, 3),
                torch.nn.Flatten(),
                torch.nn.Linear(6 * 16, 5),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


MODELS = {"encoder": (Encoder, (4, 5, 8)), "convolutions": (Convolutions, (4, 3, 8, 8))}


def _step_of(rank: int, n: int, name: str) -> tuple[str, dict[str, float]]:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    x = torch.randn(shape)
    model = wh.parallelize(build(), sample_inputs=x, timeout=30)
    mesh = runtime_of(model, "the test").mesh
    before = _sent(mesh)
    z = model(x)
    torch.nn.functional.cross_entropy(z, torch.zeros(4, dtype=torch.int64)).backward()
    sent = {what: total - before.get(what, 0.0) for what, total in _sent(mesh).items()}
    return wh.plan(model).to_json(), {
        what: size for what, size in sent.items() if size and not what.startswith("gradient")
    }


@pytest.mark.parametrize("name", MODELS)
def test_attention_and_convolutions_are_counted_too(name: str) -> None:
    for text, sent in world(4, _step_of, name):
        plan = Plan.from_json(text)
        assert plan.assumption == "counted on a step of 4 rows a rank"
        predicted = _by_operation(plan)
        predicted.pop("gradients", None)
        assert predicted == pytest.approx(sent)
