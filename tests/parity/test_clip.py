"""wh.clip_grad_norm_: the norm of one process, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import whale_torch as wh
from tests.parity.layouts import LAYOUTS, backward, batch, build, gradients, mine
from tests.parity.metric import relative_error
from tests.world import world
from whale_torch.errors import LossError, PlanError

NORMS: list[Any] = [2.0, 1.0, 3.5, "inf"]
BAR = 2e-5


def expected(layout: str, norm_type: Any, max_norm: float) -> tuple[float, dict[str, torch.Tensor]]:
    model = build(layout)
    backward(model, *batch())
    total = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    return float(total), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def clipped(rank: int, n: int, how: str) -> dict[str, tuple[float, float, float]]:
    """(relative error of the norm, worst gradient, norm) of every layout this world runs, and kind of norm."""
    out = {}
    for layout in (name for name, worlds in LAYOUTS.items() if n in worlds):
        model = wh.parallelize(build(layout))
        for number, norm_type in enumerate(NORMS):
            norm, grads = expected(layout, norm_type, 0.05)
            model.zero_grad()
            backward(model, *mine(model, *batch()))
            if how == "torch":
                total = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
            elif number % 2:
                total = wh.clip_grad_norm_((p for p in model.parameters()), 0.05, norm_type, foreach=True)
            else:
                total = wh.clip_grad_norm_(model, 0.05, norm_type, foreach=False)
            found = abs(float(total) - norm) / norm, relative_error(gradients(model), grads), float(total)
            out[f"{layout}, norm {norm_type}"] = found
    return out


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_norm_and_gradients_are_those_of_one_process(n: int) -> None:
    of_ranks = world(n, clipped, "wh")
    assert of_ranks[0]
    for case, (norm_error, grad_error, norm) in of_ranks[0].items():
        assert norm_error < BAR, case
        assert grad_error < BAR, case
        assert [found[case][2] for found in of_ranks] == [norm] * n, f"{case}: the norm differs between ranks"


def test_the_suite_catches_a_local_norm() -> None:
    found = world(4, clipped, "torch")
    for case in ("shared, norm 2.0", "mixed, norm 2.0", "two sizes, norm 1.0"):
        assert max(max(of_rank[case][:2]) for of_rank in found) > 100 * BAR


def counted_twice(rank: int, n: int, layout: str) -> float:
    """The mutation: every copy counts."""
    from whale_torch.optim import clip

    model = wh.parallelize(build(layout))
    backward(model, *mine(model, *batch()))
    norm, _ = expected(layout, 2.0, 0.05)
    shared = clip.all_reduce
    clip.all_reduce = lambda x, group, **kw: shared(x.mul_(2), group, **kw)
    return abs(float(wh.clip_grad_norm_(model, 0.05)) - norm) / norm


def test_the_suite_catches_gradients_counted_twice() -> None:
    assert min(world(2, counted_twice, "own")) > 100 * BAR


def odd_gradients(rank: int, n: int) -> dict[str, Any]:
    model = build("own")
    model.features.requires_grad_(False)
    wh.parallelize(model)
    out: dict[str, Any] = {"none": float(wh.clip_grad_norm_(model, 1.0))}
    backward(model, *mine(model, *batch()))
    plain = build("own")
    plain.features.requires_grad_(False)
    backward(plain, *batch())
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    out["frozen"] = abs(float(wh.clip_grad_norm_(model, 0.05) - norm)) / float(norm)
    assert model.features[0].weight.grad is None
    some = [model.head.weight]
    out["only cut"] = abs(float(wh.clip_grad_norm_(some, 9.0) - plain.head.weight.grad.norm())) / float(norm)
    out["one"] = abs(float(wh.clip_grad_norm_(model.head.weight, 9.0) - plain.head.weight.grad.norm())) / float(norm)
    for value, norm_type in [("nan", 2.0), ("nan", "inf"), ("inf", "inf")]:
        if rank == 1:
            model.head.weight.grad[0, 0] = float(value)
        try:
            wh.clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)
            out[f"{value} {norm_type}"] = "passed"
        except LossError as error:
            out[f"{value} {norm_type}"] = str(error)
        model.head.weight.grad.zero_()
    with pytest.raises(PlanError, match="6 parameters, of which 2 belong to no parallelized model"):
        wh.clip_grad_norm_([*list(model.block.parameters()), *nn.Linear(2, 2).parameters()], 1.0)
    with pytest.raises(PlanError, match="norm_type is -1"):
        wh.clip_grad_norm_(model, 1.0, -1)
    return out


def test_frozen_missing_and_broken_gradients() -> None:
    found = world(2, odd_gradients)
    for out in found:
        assert out["none"] == 0.0
        assert max(out["frozen"], out["only cut"], out["one"]) < BAR
        assert "of order 2 of the gradients of 10 parameters is nan" in out["nan 2.0"]
        assert "of order inf of the gradients of 10 parameters is nan" in out["nan inf"]
        assert "of order inf of the gradients of 10 parameters is inf" in out["inf inf"]
    assert found[0] == found[1]


def sparse_gradients(rank: int, n: int) -> tuple[float, float]:
    model = wh.parallelize(build("replica"))
    plain = build("replica")
    for m in (model, plain):
        for i, p in enumerate(m.parameters()):
            p.grad = torch.full_like(p, 0.1 * (i + 1))
    where, values = torch.tensor([[0, 2, 0]]), torch.arange(24.0).view(3, 8) / 7
    for m in (model, plain):
        m.features[0].weight.grad = None
    first = model.block.down.weight
    first.grad = torch.sparse_coo_tensor(
        where, values[:, :1].expand(3, first.shape[1]).clone(), first.shape, check_invariants=True
    )
    plain.block.down.weight.grad = first.grad.to_dense()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    total = wh.clip_grad_norm_(model, 0.5)
    error = float((first.grad.to_dense() - plain.block.down.weight.grad).abs().max())
    return abs(float(total - norm)) / float(norm), error


def test_sparse_gradients_count() -> None:
    for norm_error, grad_error in world(2, sparse_gradients):
        assert norm_error < BAR
        assert grad_error < BAR


def test_parameters_of_a_plain_model_are_torchs() -> None:
    plain, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.load_state_dict(plain.state_dict())
    for m in (plain, other):
        m(torch.ones(2, 3)).sum().backward()
    assert wh.clip_grad_norm_(plain, 0.1) == nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    assert torch.equal(plain.weight.grad, other.weight.grad)
    assert wh.clip_grad_norm_([], 1.0) == 0.0


def test_a_model_that_was_never_parallelized_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """With scopes and among several ranks; a plain model is torch's there too."""
    model, plain = build("own"), nn.Linear(2, 2)
    assert wh.clip_grad_norm_(model, 1.0) == 0.0
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PlanError, match=r"got a Net with scopes that is not parallelized: each of 2 ranks") as caught:
        wh.clip_grad_norm_(model, 1.0)
    assert caught.value.fix == "model = wh.parallelize(model) first" and "layouts.py" in str(caught.value.where)
    assert wh.clip_grad_norm_(plain, 1.0) == 0.0


def _in_another_order(rank: int, n: int, layout: str) -> float:
    """The parameters of rank 1 come in another order, as those of a set do."""
    model = wh.parallelize(build(layout))
    norm, _ = expected(layout, 2.0, 0.05)
    backward(model, *mine(model, *batch()))
    listed = list(model.parameters())
    found = wh.clip_grad_norm_(listed[::-1] if rank == 1 else listed, 0.05)
    return abs(float(found) - norm) / norm


@pytest.mark.parametrize("layout", ["replica", "own"])
def test_the_order_of_the_parameters_is_of_no_account(layout: str) -> None:
    assert max(world(2, _in_another_order, layout)) < BAR
