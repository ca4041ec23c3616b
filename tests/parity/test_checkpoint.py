"""What is saved in one layout is loaded into any other, bit by bit, and goes on as if nothing had been."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import whale_torch as wh
from tests.parity.checkpoint_cases import LAYOUTS, OPTIMIZERS, build, pairs, step, whole
from tests.world import world

BAR = 1e-5
STEPS, MORE = 2, 2
_GROUP = 7


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="checkpoints-")


def _trained(rank: int, n: int, name: str, optimizer: str, path: str) -> list[float]:
    """Trains, saves, writes what one process would hold, and gives the losses of the steps that follow."""
    model, made = build(name, optimizer)
    for number in range(STEPS):
        step(model, made, number)
    folder = wh.save(path, step=STEPS, model=model, optimizer=made, extra={"name": name, "at": torch.tensor([STEPS])})
    state = whole(model, made)
    if rank == 0:
        torch.save(state, folder / "expected")
    return [step(model, made, STEPS + number) for number in range(MORE)]


@functools.cache
def _saved(name: str, optimizer: str) -> tuple[str, list[float]]:
    path = Path(_folder().name) / f"{name} {optimizer}"
    path.mkdir()
    return str(path), _run(name, _trained, name, optimizer, str(path))[0]


def _run(name: str, fn: Any, *args: Any) -> list[Any]:
    n = LAYOUTS[name].world
    return world(max(n, 1), fn, *args, timeout=120)


def _loaded(rank: int, n: int, name: str, given: list[tuple[str, str, str]]) -> list[list[float]]:
    """Loads what each layout saved; the losses of the steps that follow."""
    losses = []
    for source, optimizer, path in given:
        model, made = build(name, optimizer, seed=7)
        found = wh.load(path, model=model, optimizer=made)
        assert (found.step, found.extra["name"], found.extra["at"].tolist()) == (STEPS, source, [STEPS])
        assert found.path == Path(path) / "step-00000002"
        expected, moments = torch.load(found.path / "expected")
        state, mine = whole(model, made)
        _same(state, expected)
        _same(mine, moments)
        if "head.weight" in dict(model.named_parameters(remove_duplicate=False)) and hasattr(model.head, "weight"):
            if model.head.bias is None:
                assert model.head.weight is model.embed.weight
        assert [group["lr"] for group in made.param_groups] == [0.1 if optimizer == "momentum" else 0.01, 0.02]
        losses.append([step(model, made, STEPS + number) for number in range(MORE)])
    return losses


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for key, value in expected.items():
        assert found[key].dtype is value.dtype and torch.equal(found[key], value), key


def _pairs() -> list[tuple[str, tuple[str, ...]]]:
    """Each layout, and those from which it loads, a few at a time."""
    found = []
    for name in LAYOUTS:
        sources = [source for source, target in pairs() if target == name]
        found += [(name, tuple(sources[first : first + _GROUP])) for first in range(0, len(sources), _GROUP)]
    return found


PAIRS = _pairs()
assert sum(len(sources) for _, sources in PAIRS) >= 60


@pytest.mark.parametrize(("name", "sources"), PAIRS, ids=[f"{a} from {'; '.join(b)}" for a, b in PAIRS])
@pytest.mark.matrix(keep=1)
def test_any_layout_loads_what_any_other_saved(name: str, sources: tuple[str, ...]) -> None:
    kinds = list(OPTIMIZERS)
    given = [(source, kinds[list(LAYOUTS).index(source) % len(kinds)]) for source in sources]
    saved = [_saved(source, optimizer) for source, optimizer in given]
    loads = [(source, optimizer, path) for (source, optimizer), (path, _) in zip(given, saved, strict=True)]
    for found in _run(name, _loaded, name, loads):
        for source, losses, (_, expected) in zip(sources, found, saved, strict=True):
            bar = 0.0 if source == name else BAR
            assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= bar, (source, losses, expected)
