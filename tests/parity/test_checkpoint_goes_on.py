"""All of a training in one checkpoint: dropout, a rate that falls, a scaler that skips, an average; in the same layout
the losses that follow are those of the run that went on, bit by bit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import whale_torch as wh
from tests.parity.checkpoint_cases import LAYOUTS, ROWS, batch, build
from tests.world import outcomes, world
from whale_torch.planning.layout import balanced
from whale_torch.strategies.runtime import is_parallelized

STEPS, MORE = 3, 3
SKIPPED = 1  # step with an overflow
BAR = 1e-5
ALIKE = [
    ("plain", "adam"), ("replica on 2", "amsgrad"), ("split on 2", "adam"), ("split on 3", "momentum"),
    ("nested on 4", "amsgrad"), ("2 stages", "adam"), ("4 stages", "momentum"), ("2 stages of 2", "amsgrad"),
    ("experts on 2", "adam"), ("experts on 4", "momentum"),
]  # fmt: skip
APART = [
    ("split on 4", "split on 3", "adam"), ("4 stages", "nested on 4", "amsgrad"), ("plain", "4 stages", "adam"),
    ("replica on 2", "2 stages", "momentum"), ("experts on 2", "experts on 4", "amsgrad"),
    ("split on 2", "plain", "amsgrad"),
]  # fmt: skip


def _training(name: str, optimizer: str, seed: int, dropout: float) -> dict[str, Any]:
    model, made = build(name, optimizer, seed, dropout)
    options: dict[str, Any] = {"init_scale": 64.0, "growth_interval": 2}
    parallel = is_parallelized(model)
    return {
        "model": model,
        "optimizer": made,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(made, 0.9),
        "scaler": wh.GradScaler(model, **options) if parallel else torch.amp.GradScaler("cpu", **options),
        "average": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)),
    }


def _step(of: dict[str, Any], number: int) -> list[float]:
    """Of two parts, whose gradients are added up: the loss, the rate, the scale, a sum over the average."""
    model, scaler = of["model"], of["scaler"]
    parallel = is_parallelized(model)
    index, feeds = wh.data_rank(model) if parallel else (0, 1)
    sizes = balanced(ROWS, feeds)
    x, y = (one.split(sizes)[index].chunk(2) for one in batch(number))
    of["optimizer"].zero_grad()
    total = 0.0
    for part in range(2):
        with wh.no_sync(model) if parallel and part == 0 else contextlib.nullcontext():
            loss = model(x[part], y[part])
            scaler.scale(loss / 2).backward()
        total += float(loss.detach()) / 2
    if number == SKIPPED:
        p = next(p for p in model.parameters() if p.grad is not None and p.numel())
        p.grad.flatten()[0] = float("inf")
    scaler.step(of["optimizer"])
    scaler.update()
    of["scheduler"].step()
    if feeds > 1:
        total = float(wh.reduce(torch.tensor(total), weight=len(x[0]), model=model))
    found = [total, of["optimizer"].param_groups[0]["lr"], scaler.get_scale()]
    of["average"].update_parameters(model)
    return [*found, float(sum(value.double().sum() for value in _whole(of["average"]).values()))]


def _save(rank: int, n: int, name: str, optimizer: str, dropout: float, path: str) -> list[list[float]]:
    of = _training(name, optimizer, 0, dropout)
    scales = [_step(of, number)[2] for number in range(STEPS)]
    assert scales[SKIPPED] == scales[0] / 2, "a step was skipped"
    folder = wh.save(path, step=STEPS, **of)
    average = _whole(of["average"])
    if rank == 0:
        torch.save(average, folder / "average")
    return [_step(of, STEPS + number) for number in range(MORE)]


def _load(rank: int, n: int, name: str, optimizer: str, dropout: float, path: str) -> list[list[float]]:
    of = _training(name, optimizer, 7, dropout)
    folder = wh.load(path, **of).path
    expected = torch.load(folder / "average")
    assert all(torch.equal(expected[key], value) for key, value in _whole(of["average"]).items())
    return [_step(of, STEPS + number) for number in range(MORE)]


def _whole(average: AveragedModel) -> dict[str, torch.Tensor]:
    state = wh.full_state_dict(average) if dist.is_initialized() else average.state_dict()
    return {key: value.clone() for key, value in state.items()}


def _run(name: str, fn: Any, *args: Any) -> list[Any]:
    return world(max(LAYOUTS[name].world, 1), fn, name, *args, timeout=120)


@pytest.mark.parametrize(("name", "optimizer"), ALIKE)
@pytest.mark.matrix(keep=2)
def test_a_training_goes_on_bit_by_bit(name: str, optimizer: str, tmp_path: Path) -> None:
    expected = _run(name, _save, optimizer, 0.3, str(tmp_path))
    assert _run(name, _load, optimizer, 0.3, str(tmp_path)) == expected


@pytest.mark.parametrize(("source", "target", "optimizer"), APART)
@pytest.mark.matrix(keep=0)
def test_a_training_goes_on_elsewhere(source: str, target: str, optimizer: str, tmp_path: Path) -> None:
    expected = _run(source, _save, optimizer, 0.0, str(tmp_path))[0]
    for found in _run(target, _load, optimizer, 0.0, str(tmp_path)):
        for one, other in zip(found, expected, strict=True):
            assert one[:3] == pytest.approx(other[:3], rel=BAR)


def _in_the_midst(rank: int, n: int, name: str, path: str) -> str:
    """A checkpoint has no gradients, so of a step that has begun a part would be lost."""
    model, optimizer = build(name, "adam")
    feeds = wh.data_rank(model)[1]
    x, y = (one.chunk(feeds)[wh.data_rank(model)[0]] for one in batch(0))
    with wh.no_sync(model):
        model(x, y).backward()
        with pytest.raises(wh.CheckpointError, match="step that has begun"):
            wh.save(path, step=0, model=model, optimizer=optimizer)
    with pytest.raises(wh.CheckpointError, match="step that has begun") as caught:
        wh.save(path, step=0, model=model, optimizer=optimizer)
    model(x, y).backward()
    optimizer.step()
    wh.save(path, step=1, model=model, optimizer=optimizer)
    with wh.no_sync(model):
        model(x, y).backward()
    optimizer.zero_grad()
    wh.save(path, step=2, model=model, optimizer=optimizer)
    return str(caught.value)


@pytest.mark.parametrize("name", ["replica on 2", "2 stages"])
def test_a_step_that_has_begun_is_not_saved(name: str, tmp_path: Path) -> None:
    for one in outcomes(2, _in_the_midst, name, str(tmp_path)):
        assert one.error is None, one
        assert "wh.no_sync" in one.value
