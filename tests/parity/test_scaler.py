"""wh.GradScaler: all ranks skip together, whatever one of them found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import whale_torch as wh
from tests.parity.layouts import backward, batch, build, mine
from tests.parity.metric import relative_error
from tests.world import world
from whale_torch.errors import PlanError, WhaleError

BAR = 2e-5
STEPS, OVERFLOWS = 5, (1, 3)


def loop(model: nn.Module, scaler: torch.amp.GradScaler, rows: Any, clip: Any, fused: bool | None) -> list[float]:
    """Five steps, two of them with an overflow in one entry of the head's gradient; the scales after each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, *rows(step), scale=scaler.scale)
        if step in OVERFLOWS:
            overflow(model)
        if clip is not None:
            scaler.unscale_(optimizer)
            clip(model)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def overflow(model: nn.Module) -> None:
    """In the head's last row, on the last rank alone."""
    if torch.distributed.is_initialized() and torch.distributed.get_rank() < torch.distributed.get_world_size() - 1:
        return
    model.head.weight.grad[-1, 0] = float("inf")


def trained(
    rank: int, n: int, layout: str, fused: bool | None, with_clip: bool
) -> tuple[list[float], list[float], float]:
    plain = build(layout)
    torch_clip = (lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1)) if with_clip else None
    whale_clip = (lambda m: wh.clip_grad_norm_(m, 0.1)) if with_clip else None
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    expected = loop_in_one_process(plain, torch_scaler, torch_clip, fused)
    model = wh.parallelize(build(layout))
    scaler = wh.GradScaler(model, init_scale=1024.0, growth_interval=2)
    scales = loop(model, scaler, lambda step: mine(model, *batch(seed=step)), whale_clip, fused)
    state = scaler.state_dict()
    other = wh.GradScaler(model)
    other.load_state_dict(state)
    assert other.get_scale() == scales[-1]
    return scales, expected, relative_error(wh.full_state_dict(model), plain.state_dict())


def loop_in_one_process(plain: nn.Module, scaler: torch.amp.GradScaler, clip: Any, fused: bool | None) -> list[float]:
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05, fused=fused)
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(plain, *batch(seed=step), scale=scaler.scale)
        if step in OVERFLOWS:
            plain.head.weight.grad[-1, 0] = float("inf")
        if clip is not None:
            scaler.unscale_(optimizer)
            clip(plain)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize(
    ("layout", "n", "fused", "with_clip"),
    [
        ("own", 2, None, False),
        ("own", 3, None, True),
        ("shared", 2, True, False),
        ("mixed", 4, True, True),
        ("own", 1, None, True),
    ],
)
def test_all_ranks_skip_as_one_process_does(layout: str, n: int, fused: bool | None, with_clip: bool) -> None:
    for scales, expected, error in world(n, trained, layout, fused, with_clip):
        assert scales == expected
        assert error < BAR


def own_opinion(rank: int, n: int) -> tuple[list[float], list[float], float]:
    """The mutation: each rank believes itself, and nobody compares copies."""
    from whale_torch.comm import drift
    from whale_torch.optim import scaler

    drift.FIRST_STEPS = 0
    scaler.all_reduce = lambda x, group, **kw: x
    return trained(rank, n, "own", None, False)


def test_the_suite_catches_ranks_of_different_opinion() -> None:
    (first, expected, _), (second, _, error) = world(2, own_opinion)
    assert first != expected
    assert second == expected
    assert error > 100 * BAR


def torchs_scaler(rank: int, n: int) -> str:
    model = wh.parallelize(build("own"))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with pytest.raises(PlanError) as caught:
        loop(model, scaler, lambda step: mine(model, *batch()), None, None)
    return str(caught.value)


def test_torchs_scaler_is_refused_on_cut_parameters() -> None:
    for text in world(2, torchs_scaler):
        assert "GradScaler looks for overflow in this rank's gradients alone" in text
        assert "'head.weight' is cut over 2 ranks" in text
        assert "wh.GradScaler(model)" in text


def torchs_scaler_on_replicas(rank: int, n: int) -> tuple[list[float], list[float]]:
    plain, model = build("replica"), wh.parallelize(build("replica"))
    off = torch.amp.GradScaler("cpu", enabled=False)
    loop(wh.parallelize(build("own")), off, lambda step: mine(model, *batch()), None, None)
    one = loop_in_one_process(plain, torch.amp.GradScaler("cpu", init_scale=4.0), None, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = mine(model, *batch())
        backward(model, x * float("inf") if step in OVERFLOWS and rank == 0 else x, y, scale=scaler.scale)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, one


def test_torchs_scaler_stays_right_on_replicas_and_when_disabled() -> None:
    for scales, one in world(2, torchs_scaler_on_replicas):
        assert scales == one


def no_gradient(rank: int, n: int, everywhere: bool) -> Any:
    """Parameters without gradients on one rank, or on all."""
    model = wh.parallelize(build("own"))
    scaler = wh.GradScaler(model, init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(torch.ones(1))
    if not everywhere and rank == 0:
        model.head.weight.grad = torch.full_like(model.head.weight, float("nan"))
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def test_a_rank_without_gradients_joins() -> None:
    assert world(2, no_gradient, False) == [2.0, 2.0]
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        world(2, no_gradient, True)


def test_it_needs_a_parallelized_model() -> None:
    with pytest.raises(WhaleError, match=r"wh.GradScaler needs a parallelized model, got Linear"):
        wh.GradScaler(nn.Linear(2, 2))
