"""Optimizers on parts: element-wise ones are those of one process, others are refused before their first step."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.layouts import backward, batch, build, mine, step
from tests.parity.metric import relative_error
from tests.world import world
from whale_torch.errors import CheckpointError, CommError, PlanError
from whale_torch.optim import element_wise

BAR = 2e-5
STEPS = 3
ELEMENT_WISE: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adam foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True, "amsgrad": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "SGD fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "eps": 1e-4, "centered": True, "momentum": 0.5}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0, "eps": 1e-3}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1}),
}


def moved(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Any) -> None:
    for number in range(STEPS):
        step(model, optimizer, *rows(number))


def after_steps(rank: int, n: int, layout: str, names: list[str], before: bool) -> dict[str, float]:
    """The worst parameter after three steps; the optimizer built before or after parallelize."""
    out = {}
    for name in names:
        kind, options = ELEMENT_WISE[name]
        plain, model = build(layout), build(layout)
        moved(plain, kind(plain.parameters(), **options), lambda number: batch(seed=number))
        optimizer = kind(model.parameters(), **options) if before else None
        wh.parallelize(model)
        optimizer = optimizer or kind(model.parameters(), **options)
        moved(model, optimizer, lambda number, model=model: mine(model, *batch(seed=number)))
        start, whole, expected = build(layout).state_dict(), wh.full_state_dict(model), plain.state_dict()
        out[name] = relative_error({k: whole[k] - start[k] for k in start}, {k: expected[k] - start[k] for k in start})
    return out


@pytest.mark.parametrize(
    ("layout", "n", "before"), [("own", 2, True), ("own", 3, False), ("mixed", 4, True), ("shared", 2, False)]
)
def test_element_wise_optimizers_are_those_of_one_process(layout: str, n: int, before: bool) -> None:
    # the metric divides by the largest move; sqrt(v) of tiny gradients is amplified by Adam's division
    for found in world(n, after_steps, layout, list(ELEMENT_WISE), before):
        assert max(found.values()) < 1e-3, found
        assert max(found[name] for name in ("SGD", "SGD momentum", "SGD fused", "ASGD")) < BAR, found


def tiny_head(rank: int, n: int) -> float:
    """3 columns on 4 ranks: one part is empty."""
    out = 0.0
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        model = copy.deepcopy(plain)
        wh.annotate(model, {"1": wh.split()})
        wh.parallelize(model)
        x, y = batch()
        for m, rows in ((plain, (x, y % 3)), (model, mine(model, x, y % 3))):
            optimizer = torch.optim.Adam(m.parameters(), lr=0.01, **options)
            for _ in range(STEPS):
                step(m, optimizer, *rows)
        out = max(out, relative_error(wh.full_state_dict(model), plain.state_dict()))
    return out


def test_empty_parts_step() -> None:
    assert max(world(4, tiny_head)) < BAR


class Lamb(torch.optim.Optimizer):
    """Whoever normalises by a tensor's norm is not element-wise."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / p.grad.norm(), alpha=-group["lr"])


class Lion(Lamb):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])


class QuietAdam(torch.optim.Adam):
    """Changes how it is built, not how it steps."""


class LoudAdam(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def refused(rank: int, n: int) -> dict[str, str]:
    out = {}
    model = wh.parallelize(build("own"))
    before = wh.full_state_dict(model)
    for kind in (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam, Lamb, Lion, LoudAdam):
        optimizer = kind(model.parameters())
        backward(model, *mine(model, *batch()))
        with pytest.raises(PlanError) as caught:
            optimizer.step(
                lambda: backward(model, *mine(model, *batch()))
            ) if kind is torch.optim.LBFGS else optimizer.step()
        out[kind.__name__] = str(caught.value)
    muon = torch.optim.Muon([model.head.weight, model.features[0].weight])
    with pytest.raises(PlanError) as caught:
        muon.step()
    out["Muon"] = str(caught.value)
    assert relative_error(wh.full_state_dict(model), before) == 0.0
    torch.optim.Muon([model.features[0].weight]).step()  # nothing cut
    Lamb(model.features.parameters()).step()
    QuietAdam(model.parameters()).step()
    element_wise(Lion)(model.parameters()).step()
    late = Lamb(model.features.parameters())
    late.step()
    late.add_param_group({"params": [model.head.weight]})
    with pytest.raises(PlanError, match="Lamb is not known"):
        late.step()
    return out


def test_whole_tensor_and_unknown_optimizers_are_refused() -> None:
    for found in world(2, refused):
        for name, text in found.items():
            assert "'head.weight' is cut over 2 ranks" in text, name
            assert "test_optimizers.py" in text or "layouts.py" in text, "the scope's place"
            assert "SGD, Adam" in text, "the fix"
        assert "LBFGS reads whole tensors" in found["LBFGS"]
        assert "Lamb is not known to work element by element" in found["Lamb"]
        assert "whale_torch.optim.element_wise(Lion)" in found["Lion"]
        assert "LoudAdam is not known" in found["LoudAdam"]


def stepped_before(rank: int, n: int) -> list[str]:
    out = []
    for kind, options in ((torch.optim.Adam, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {})):
        model = build("own")
        optimizer = kind(model.parameters(), lr=0.1, **options)
        backward(model, *batch())
        optimizer.step()
        optimizer.zero_grad()
        wh.parallelize(model)
        backward(model, *mine(model, *batch()))
        with pytest.raises(PlanError) as caught:
            optimizer.step()
        out.append(str(caught.value))
    return out


def test_an_optimizer_that_stepped_before_is_refused() -> None:
    adam, sgd, adagrad = world(2, stepped_before)[1]
    assert "Adam has state 'exp_avg' of the whole shape (11, 8) for 'head.weight'" in adam
    assert "this rank holds (5, 8)" in adam
    assert "after wh.parallelize" in adam
    assert "'momentum_buffer'" in sgd
    assert "'sum'" in adagrad


def state_of(rank: int, n: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    model = wh.parallelize(build("own"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = mine(model, *batch())
    for _ in range(2):
        step(model, optimizer, *rows)
    kept, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    try:
        torch.save(optimizer.state_dict(), io.BytesIO())
    except CheckpointError as error:
        out["save"] = str(error)
    optimizer.step()
    after = wh.full_state_dict(model)
    for again in (optimizer, torch.optim.AdamW(model.parameters(), lr=0.5)):
        model.load_state_dict(weights)
        again.load_state_dict(copy.deepcopy(kept))  # torch takes the tensors themselves
        again.step()
        out[f"round trip {again is optimizer}"] = relative_error(wh.full_state_dict(model), after)
        assert all(type(v) is Tensor for state in again.state.values() for v in state.values())
    replica = wh.parallelize(build("replica"))
    optimizer = torch.optim.AdamW(replica.parameters())
    backward(replica, *rows)
    optimizer.step()
    torch.save(optimizer.state_dict(), io.BytesIO())
    return out


def test_optimizer_state_works_in_memory_and_refuses_to_be_written() -> None:
    for out in world(2, state_of):
        assert "'head.weight' is cut over ranks [0, 1]" in out["save"]
        assert out["round trip True"] == out["round trip False"] == 0.0


def another_rate(rank: int, n: int, compared: bool) -> float:
    """The mutation: rank 1 steps with another rate."""
    from whale_torch.comm import drift

    if not compared:
        drift.FIRST_STEPS = 0
    plain, model = build("own"), wh.parallelize(build("own"))
    moved(plain, torch.optim.Adam(plain.parameters(), lr=0.01), lambda number: batch(seed=number))
    mine_only = torch.optim.Adam(model.parameters(), lr=0.01 + 0.001 * rank)
    moved(model, mine_only, lambda number: mine(model, *batch(seed=number)))
    return relative_error(wh.full_state_dict(model), plain.state_dict())


def test_the_suite_catches_another_rate_on_one_rank() -> None:
    assert max(world(2, another_rate, False)) > 1e-3
    with pytest.raises(CommError, match=r"the copies of '[a-z0-9.]+' differ before an optimizer's step"):
        world(2, another_rate, True)


def by_hand(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """A clip of the user's own, which puts new gradients in place of the old ones."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    for p in parameters:
        p.grad = None if p.grad is None else p.grad * (max_norm / norm)


CLIPS = {"torch's": nn.utils.clip_grad_norm_, "by hand": by_hand}


def torchs_clip(rank: int, n: int, whole: bool, clip: str) -> str:
    """A clip by this rank's norm: with replicated gradients to compare, and where everything is cut."""
    torch.manual_seed(0)
    model = build("own") if whole else nn.Sequential(nn.Linear(6, 11, bias=False))
    if not whole:
        wh.annotate(model, {"0": wh.split()})
    wh.parallelize(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model, *mine(model, *batch()))
    CLIPS[clip](list(model.parameters()), 0.05)
    with pytest.raises(CommError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("clip", CLIPS)
def test_torchs_clip_on_cut_parameters_is_found(clip: str) -> None:
    for whole in (True, False):
        for text in world(2, torchs_clip, whole, clip):
            assert "use wh.clip_grad_norm_" in text
            assert "which is cut, was multiplied by" in text or "differs between copies" in text
