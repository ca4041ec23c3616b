"""Mixture of experts over ranks where something is at its limit: ranks without experts or tokens, other dtypes."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.split_case import gradients_of
from tests.world import world
from whale_torch import moe
from whale_torch.comm.route_costs import RouteCosts

DIM = 4


class Scaling(moe.Experts):
    """Experts of one's own, which make nothing of nothing."""

    def __init__(self) -> None:
        super().__init__(1)
        self.w = nn.Parameter(torch.randn(1, DIM))

    def forward(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        return torch.cat([part * w for part, w in zip(x.split(list(rows)), self.w, strict=True)])


EXPERTS: dict[str, Any] = {
    "feed-forward": lambda: None,
    "modules": lambda: lambda: nn.Sequential(nn.Linear(DIM, 3), nn.ReLU(), nn.Linear(3, DIM)),
    "wide at the end": lambda: lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM)),
    "own": Scaling,
}


def _in_experts(**options: Any) -> Any:
    built = {} if "expert" in options else {"hidden": 3}
    with wh.split():
        layer = moe.MoELayer(DIM, **({"num_experts": 3, "top_k": 2} | built | options))
    return nn.Sequential(layer)


def _few_experts(rank: int, n: int) -> dict[str, float]:
    """Errors of gradients where one of the ranks has the only expert, and tokens want no gradient."""
    errors = {}
    for name, expert in EXPERTS.items():
        torch.manual_seed(0)
        model = _in_experts(num_experts=1, top_k=1, expert=expert())
        alone = copy.deepcopy(model)
        wh.parallelize(model, timeout=20)
        for half in (False, True):
            torch.manual_seed(1)
            x = torch.randn(3 * n, DIM)
            for m, part in ((model, slice(3 * rank, 3 * rank + 3)), (alone, slice(None))):
                m.zero_grad()
                with torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext():
                    y = m(x[part])
                y.float().square().mean().backward()
            errors[f"{name}, {half}"] = relative_error(gradients_of(model), gradients_of(alone)) / (1e3 if half else 1)
    return errors


def test_a_rank_without_experts_goes_along() -> None:
    for errors in world(2, _few_experts):
        assert max(errors.values()) < 2e-5, errors


def _unlike(rank: int, n: int, what: str) -> str:
    model = _in_experts()
    wh.parallelize(model, timeout=20)
    x = torch.randn(3, DIM)
    if rank == 1 and what == "sent as":
        model[0].wire_dtype = torch.bfloat16
    try:
        with (
            torch.set_grad_enabled(what != "autocast"),
            torch.autocast("cpu", torch.bfloat16, enabled=rank == 1 and what == "autocast"),
        ):
            model(x.requires_grad_(what == "with a gradient" and rank == 1))
        return "nothing was said"
    except wh.LayoutError as error:
        return str(error)


@pytest.mark.parametrize("what", ["autocast", "with a gradient", "sent as"])
def test_tokens_that_ranks_send_each_in_its_own_way_are_refused_on_all(what: str) -> None:
    said = world(2, _unlike, what)
    assert said[0] == said[1] and what in said[0] and "ranks:  0, 1" in said[0], said


def _evaluated_first(rank: int, n: int) -> None:
    model = _in_experts()
    wh.parallelize(model, timeout=20)
    for tokens in (3, 3000):  # the second time in more memory than there was
        with torch.inference_mode():
            model.eval()(torch.randn(tokens, DIM))
        for _ in range(2):
            model.train()(torch.randn(tokens, DIM)).sum().backward()


def test_training_goes_on_after_inference_mode() -> None:
    world(2, _evaluated_first)


def _pickled(rank: int, n: int) -> float:
    torch.manual_seed(0)
    layer = moe.MoELayer(DIM, 3, 2, capacity_factor=1.0, eval_capacity_factor=1.0)
    model: Any = wh.parallelize(nn.Sequential(layer), timeout=20)
    again = pickle.loads(pickle.dumps(model))
    x = torch.randn(5, DIM)
    copied = copy.deepcopy(model).eval()(x)  # on all ranks, as the model
    if rank == 0:
        again.eval()(x)  # of one process
    return float((copied - model.eval()(x)).detach().abs().max())


def test_a_pickle_of_whole_experts_is_of_one_process() -> None:
    assert world(2, _pickled) == [0.0, 0.0]


class Failing(nn.Module):
    """An expert that raises an error when it is told to."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        if Failing.fails:
            raise ValueError("an error in an expert")
        out: Tensor = self.linear(x)
        return out


def _goes_on_after_an_error(rank: int, n: int) -> list[str]:
    """What becomes of three evaluations, the second of which fails in the midst on rank 0, by way of shared memory."""
    model = _in_experts(expert=Failing)
    wh.parallelize(model, timeout=3)
    rows = model[0]._rows
    rows._costs = RouteCosts((1,), {route: (0.0 if route == "shared" else 1.0,) for route in rows.routes()})
    said = []
    for step in range(3):
        Failing.fails = step == 1 and rank == 0
        try:
            with torch.no_grad():
                model.eval()(torch.randn(4, DIM))
            said.append("done")
        except (ValueError, wh.CommError) as error:
            said.append(type(error).__name__)
    return said


def test_a_rank_that_goes_on_after_an_error_is_not_answered_by_rows() -> None:
    first, other = world(2, _goes_on_after_an_error)
    assert first == ["done", "ValueError", "CommError"] and other[:2] == ["done", "CommError"]


class Beside(nn.Module):
    """A layer of experts between split layers of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        with wh.split():
            self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
            self.experts = moe.MoELayer(DIM, 3, 2, hidden=3)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        out: Tensor = self.down(self.experts(up) + up)
        return out


class Doubled(moe.FeedForward):
    """Whose forward is not what it inherits."""

    def forward(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        return 2 * super().forward(x, rows)


def _times_3(module: nn.Module, given: Any, out: Tensor) -> Tensor:
    return 3 * out


class Halved(moe.TopK):
    """Whose weights are of half precision, which a third of one is not; it learns nothing, as gradients are too."""

    def __init__(self) -> None:
        super().__init__(DIM, 3, 2, renormalize="none")
        self.weight.requires_grad_(False)

    def route(self, x: Tensor, mask: Tensor | None) -> moe.Routing:
        found = super().route(x, mask)
        return replace(found, weights=found.weights.bfloat16())


def _hooked(**options: Any) -> nn.Module:
    model: Any = _in_experts(**options)
    model[0].experts.register_forward_hook(_times_3)
    return model  # type: ignore[no-any-return]


def _patched() -> nn.Module:
    """Whose experts' forward is replaced on the object."""
    model: Any = _in_experts(renormalize="none")
    model[0].experts.forward = _from_outside
    return model  # type: ignore[no-any-return]


def _from_outside(x: Tensor, rows: Sequence[int]) -> Tensor:
    return 3 * x


ONE_PROCESS: dict[str, Any] = {
    "beside a split layer": Beside,
    "a forward of its own": lambda: _in_experts(expert=Doubled(3, DIM, 3)),
    "weights in half precision": lambda: _in_experts(gate=Halved()),
    "weights in half precision, through gloo": lambda: _in_experts(gate=Halved(), node_memory=False),
    "a hook on experts": _hooked,
    "a hook on experts, through gloo": lambda: _hooked(node_memory=False),
    "a forward from outside": _patched,
}


def _as_one_process(rank: int, n: int) -> dict[str, float]:
    errors = {}
    for name, make in ONE_PROCESS.items():
        torch.manual_seed(0)
        model = make()
        alone = copy.deepcopy(model)
        wh.parallelize(model, timeout=20)
        torch.manual_seed(1)
        x = torch.randn(3 * n, DIM)
        model(x[3 * rank : 3 * rank + 3]).square().mean().backward()
        alone(x).square().mean().backward()
        errors[name] = relative_error(gradients_of(model), gradients_of(alone))
    return errors


def test_what_is_beside_a_layer_and_in_its_experts_is_respected() -> None:
    for errors in world(3, _as_one_process):
        assert max(errors.values()) < 2e-5, errors


def _observed(rank: int, n: int) -> tuple[float, int]:
    """(how far outputs and gradients are from those without a hook on one of the ranks, calls that it saw)"""
    model = _in_experts()
    wh.parallelize(model, timeout=20)
    x, found, seen = torch.randn(5, DIM), [], []
    for _ in range(2):
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        found.append({"y": y.detach(), **{name: grad.clone() for name, grad in gradients_of(model).items()}})
        if rank == 1:
            model[0].experts.register_forward_hook(lambda *given: seen.append(given))
    return relative_error(*found), len(seen)


def test_a_hook_on_the_experts_of_one_rank_sees_them() -> None:
    (first, none), (other, one) = world(2, _observed)
    assert max(first, other) < 2e-5 and (none, one) == (0, 1)


def _after_errors(rank: int, n: int) -> float:
    """How much evaluations differ before and after errors that all ranks had."""
    model = _in_experts()
    wh.parallelize(model, timeout=5)
    x = torch.randn(5, DIM)
    before = model(x).detach()
    for _ in range(4):
        with pytest.raises(RuntimeError, match="dtype"):  # weights are of another
            model(x.double())
    model(x).sum().backward()
    return float((model(x) - before).detach().abs().max())


def test_ranks_go_on_after_an_error_of_all() -> None:
    assert world(2, _after_errors) == [0.0, 0.0]


class Staged(nn.Module):
    """A layer of experts in front of a loss, in two stages."""

    def __init__(self, *, loss: bool) -> None:
        super().__init__()
        with wh.pipeline(num_micro_batches=2):
            with wh.stage():
                self.first = nn.Linear(DIM, DIM)
            with wh.stage():
                self.experts = moe.MoELayer(DIM, 3, 2, hidden=3, aux_loss_coef=1.0)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(self.first(x))
        return y.square().mean() if self.loss else y


def _accumulated(rank: int, n: int) -> list[float]:
    """How far gradients of half a loss are from half the gradients, where the loss is in a pipeline and where not."""
    errors = []
    for inside in (True, False):
        torch.manual_seed(0)
        model: Any = Staged(loss=inside)
        x = torch.randn(6, DIM)
        wh.parallelize(model, sample_inputs=x, timeout=20)
        found = []
        for factor in (1.0, 0.5):
            model.zero_grad()
            model.experts.loss_factor = factor
            y = model(x)
            ((y if inside else y.square().mean()) * factor).backward()
            found.append({name: grad / factor for name, grad in gradients_of(model).items()})
        errors.append(relative_error(*found))
    return errors


def test_a_factor_of_the_loss_counts_once() -> None:
    for errors in world(2, _accumulated):
        assert max(errors) < 2e-5, errors


def _biased(rank: int, n: int) -> float:
    """How far biases are, after three steps, from those of one process that saw the tokens of all ranks."""
    torch.manual_seed(0)
    model = _in_experts(gate=moe.TopK(DIM, 3, 2, bias_rate=0.5))
    alone = copy.deepcopy(model)
    wh.parallelize(model, timeout=20)
    torch.manual_seed(1)
    for _ in range(3):
        x = torch.randn(5 * n, DIM)
        for m, part in ((model, slice(5 * rank, 5 * rank + 5)), (alone, slice(None))):
            m(x[part]).sum().backward()
            torch.optim.SGD(m.parameters(), lr=0.0).step()
    return float((model[0].gate.bias - alone[0].gate.bias).abs().max())


def test_biases_follow_the_load_of_all_ranks() -> None:
    assert world(3, _biased) == [0.0] * 3
