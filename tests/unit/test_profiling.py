"""Measured seconds of modules, and pipelines that are balanced by them."""

from __future__ import annotations

import threading
import time
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale_torch as wh
from tests.world import world
from whale_torch.profiling import mean_seconds, module_seconds

CPU = torch.device("cpu")


class Slow(nn.Module):
    """A linear layer that takes its time, which no count of operations shows."""

    def __init__(self, seconds: float):
        super().__init__()
        self.linear, self.seconds = nn.Linear(4, 4), seconds

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:  # and not one of a recording
            time.sleep(self.seconds)
        return self.linear(x).relu_()


def net() -> nn.Sequential:
    """Of six equal layers the first two take nearly all of the time."""
    torch.manual_seed(0)
    return nn.Sequential(*(Slow(0.05 if number < 2 else 0.0) for number in range(6)))


def stages(model: nn.Module, **options: Any) -> tuple[tuple[str, ...], ...]:
    plan = wh.plan(
        wh.pipeline(model, num_stages=2, **options), cluster=wh.Cluster.of(1, 2), sample_inputs=torch.ones(4, 4)
    )
    assert plan.pipeline is not None
    return plan.pipeline.stages


def test_measured_seconds_balance_what_operations_do_not_show() -> None:
    assert stages(net()) == (("0", "1", "2"), ("3", "4", "5"))
    assert stages(net(), balance="measured") == (("0",), ("1", "2", "3", "4", "5"))
    plan = wh.plan(
        wh.pipeline(net(), num_stages=2, balance="measured"),
        cluster=wh.Cluster.of(1, 2),
        sample_inputs=torch.ones(4, 4),
    )
    assert "balanced by measured seconds of forward and backward" in str(plan)


def test_measuring_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    seconds = module_seconds(model, torch.randn(5, 4), CPU, where="here")
    torch.manual_seed(1)
    module_seconds(model, torch.ones(5, 4), CPU, where="here")
    assert torch.equal(torch.rand(3), expected)
    assert set(seconds) == {"0", "1", "2", "3", "4"} and min(seconds.values()) > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_module_that_is_called_twice_takes_twice_as_long() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.once, self.twice = Slow(0.05), Slow(0.05)

        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            return self.twice(self.twice(self.once(x))) * scale

    seconds = module_seconds(Twice(), {"x": torch.ones(2, 4), "scale": 2.0}, CPU, where="here")
    assert 1.5 < seconds["twice"] / seconds["once"] < 2.5


def test_the_mean_is_over_all_ranks() -> None:
    assert mean_seconds([{"a": 1.0, "b": 2.0}, {"a": 3.0, "c": 1.0}]) == {"a": 2.0}


def test_what_cannot_be_measured_raises() -> None:
    with torch.device("meta"):
        model = net()
    with pytest.raises(wh.PlanError, match="meta device was to be balanced by measured times"):
        stages(model, balance="measured")
    with pytest.raises(wh.PlanError, match=r"a forward fails on these sample_inputs: RuntimeError"):
        wh.plan(wh.pipeline(net(), num_stages=2, balance="measured"), sample_inputs=torch.ones(4, 3))
    with pytest.raises(wh.PlanError, match="nothing says what its model is fed"):
        wh.plan(wh.pipeline(net(), num_stages=2, balance="measured"))
    with wh.pipeline(balance="measured"):
        with wh.stage():
            staged = nn.Sequential(nn.Linear(4, 4))
    for samples in (None, torch.ones(2, 4)):  # nothing is measured first
        with pytest.raises(wh.PlanError, match="balance says how a pipeline is cut by count"):
            wh.plan(nn.Sequential(staged), sample_inputs=samples)
        with pytest.raises(wh.PlanError, match=r"wh\.pipeline\(balance='measured'\) holds no wh\.stage\(\)"):
            wh.plan(wh.pipeline(net(), balance="measured"), sample_inputs=samples)


class _Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("no way back")


class Odd(nn.Module):
    """forward: of the layer and its input."""

    def __init__(self, forward: Any):
        super().__init__()
        self.linear, self.run = nn.Linear(4, 4), forward

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.run(self.linear, x)
        return out


def _writes(linear: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch._foreach_mul_([linear.bias], 2.0)
    return linear(x)


def test_modules_that_do_not_run_by_themselves_or_change_the_model_are_named() -> None:
    def odd(run: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), Odd(run), nn.Linear(4, 4))

    with pytest.raises(wh.PlanError, match=r"module '1' fails when it is run by itself, .*: ValueError: no way back"):
        stages(odd(lambda linear, x: _Stop.apply(linear(x))), balance="measured")
    model: Any = odd(_writes)
    before = model[1].linear.bias.detach().clone()
    with pytest.raises(wh.PlanError, match=r"a forward writes into the parameter '1\.linear\.bias'"):
        stages(model, balance="measured")
    assert torch.equal(model[1].linear.bias, before)
    for options in ({}, {"balance": "measured"}):
        model = odd(lambda linear, x: linear(x))
        model.lock = threading.Lock()
        with pytest.raises(wh.TraceError, match=r"this Sequential cannot be copied: TypeError: .*lock"):
            stages(model, **options)


def test_what_samples_may_be() -> None:
    with torch.inference_mode():
        inputs = torch.ones(4, 4)
    for samples in (inputs, UserDict(input=torch.ones(4, 4))):
        plan = wh.plan(
            wh.pipeline(net(), num_stages=2, balance="measured"), cluster=wh.Cluster.of(1, 2), sample_inputs=samples
        )
        assert plan.pipeline is not None and plan.pipeline.stages[0] == ("0",)
    with pytest.raises(wh.PlanError, match="sample_inputs of 0 samples"):
        wh.plan(wh.pipeline(net(), num_stages=2), sample_inputs=torch.ones(0, 4))


def _trained(rank: int, n: int) -> Any:
    model = net()
    whole = net()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
    wh.pipeline(model, num_stages=2, num_micro_batches=2, balance="measured")
    wh.parallelize(model, sample_inputs=x)
    plan = wh.plan(model)
    assert plan.pipeline is not None
    for own in (model, whole):
        optimizer = torch.optim.SGD(own.parameters(), 0.1)
        own(x).square().mean().backward()
        optimizer.step()
    state = wh.full_state_dict(model)
    errors = [(state[name] - value).abs().max().item() for name, value in whole.state_dict().items()]
    return plan.pipeline.stages, max(errors)


def test_ranks_agree_on_what_they_measured() -> None:
    (first, error), (second, _) = world(2, _trained)
    assert first == second == (("0",), ("1", "2", "3", "4", "5"))
    assert error < 1e-6
