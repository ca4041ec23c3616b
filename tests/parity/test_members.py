"""Parameters and modules that change after wh.parallelize: what would train unaveraged raises, the rest is right."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.replica_cases import gradients
from tests.world import world
from whale_torch.strategies.members import Members

BAR = 2e-5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.features[2].weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.features[2].weight
        with wh.split():
            self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tied(self.features(x)))


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Adapted(Wrapped):
    """As adapters are injected: the old layer inside, a new one beside it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.low = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.low(x)


def _compile(model: Any) -> None:
    model.features = torch.compile(model.features, backend="eager")


def _wrap(model: Any) -> None:
    model.features[0] = Wrapped(model.features[0])


def _retie(model: Any) -> None:
    model.tied.weight = model.features[2].weight


def _freeze_wrapped(model: Any) -> None:
    _wrap(model)
    model(torch.ones(1, 6))
    model.features[0].requires_grad_(False)


def _take_away(model: Any) -> None:
    model.tied = nn.Identity()
    model(torch.ones(1, 6))
    model.features[0].requires_grad_(False)


LEGAL: dict[str, Callable[[Any], None]] = {
    "nothing": lambda model: None, "compile": _compile, "wrap": _wrap, "tie again": _retie,
    "freeze what is wrapped": _freeze_wrapped, "take away": _take_away,
}  # fmt: skip


def _batch(rank: int, n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(4 * n, 6, generator=generator), torch.randint(10, (4 * n,), generator=generator)
    return x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]


def _changed(rank: int, n: int, change: str) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model = wh.parallelize(Net())
    LEGAL[change](model)
    x, y = _batch(rank, n)
    for _ in range(2):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
    return gradients(model)


@pytest.mark.parametrize("change", LEGAL)
def test_what_brings_no_parameter_is_legal(change: str) -> None:
    torch.manual_seed(0)
    model = Net()
    LEGAL[change](model)
    x, y = (torch.cat(parts) for parts in zip(*(_batch(rank, 2) for rank in range(2)), strict=True))
    F.cross_entropy(model(x), y).backward()
    for found in world(2, _changed, change):
        assert relative_error(found, gradients(model)) <= BAR


def _converted(rank: int, n: int) -> tuple[dict[str, Tensor | None], str]:
    torch.manual_seed(0)
    model: Any = wh.parallelize(Net())
    x, y = _batch(rank, n)
    F.cross_entropy(model(x), y).backward()
    model.zero_grad()
    model.double()
    F.cross_entropy(model(x.double()), y).backward()
    found = gradients(model)
    model.features[0].float()
    with pytest.raises(wh.PlanError) as caught:
        model(x)
    return found, str(caught.value)


def test_a_converted_model_averages_in_its_dtype() -> None:
    torch.manual_seed(0)
    model = Net().double()
    x, y = (torch.cat(parts) for parts in zip(*(_batch(rank, 2) for rank in range(2)), strict=True))
    F.cross_entropy(model(x.double()), y).backward()
    for found, text in world(2, _converted):
        assert relative_error(found, gradients(model)) <= 1e-13
        assert re.search(r"'\S+' is torch.float\d\d, '\S+' is torch.float\d\d, and their gradients are averaged", text)


def _new_head(model: Any) -> None:
    model.head = nn.Linear(8, 10)


def _adapt(model: Any) -> None:
    model.features[2] = Adapted(model.features[2])


def _add_parameter(model: Any) -> None:
    model.features[1].scale = nn.Parameter(torch.ones(()))


def _untie(model: Any) -> None:
    model.tied.weight = nn.Parameter(torch.zeros(8, 8))


ILLEGAL: dict[str, tuple[Callable[[Any], None], str]] = {
    "new head": (_new_head, "parameter 'head.weight' was replaced after wh.parallelize"),
    "adapt": (_adapt, "parameter 'features.2.low.weight' was added after wh.parallelize"),
    "add": (_add_parameter, "parameter 'features.1.scale' was added after wh.parallelize"),
    "untie": (_untie, "parameter 'tied.weight' was replaced after wh.parallelize"),
}


def _refused(rank: int, n: int) -> dict[str, str]:
    said = {}
    for name, (change, _) in ILLEGAL.items():
        model = wh.parallelize(Net())
        model(torch.ones(2, 6))
        change(model)
        with torch.no_grad():
            model(torch.ones(2, 6))
        try:
            model(torch.ones(2, 6))
        except wh.PlanError as refused:
            said[name] = str(refused)
    return said


def test_what_would_train_unaveraged_is_refused() -> None:
    for said in world(2, _refused):
        assert {name: text in said.get(name, "") for name, (_, text) in ILLEGAL.items()} == dict.fromkeys(ILLEGAL, True)


def test_a_look_costs_microseconds() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    members = Members(model)

    def took() -> float:
        begin = time.perf_counter()
        for _ in range(100):
            members.check(model)
        return (time.perf_counter() - begin) / 100

    assert min(took() for _ in range(10)) < 50e-6
