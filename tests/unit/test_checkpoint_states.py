"""What a checkpoint of one process holds, and how it comes back: tensors of all kinds, optimizers, states, choices."""

from __future__ import annotations

import copy
import gc
import inspect
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader, Dataset

import whale_torch as wh
from tests.world import world
from whale_torch.checkpoint import random_states
from whale_torch.checkpoint.contents import OPTIONS
from whale_torch.errors import CheckpointError


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 4)
        if tied:
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)).tanh())
        return out


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        return loss

    return float(optimizer.step(closure).detach())


def _net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def _equal(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[key]) for key, value in ours.items())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p),
    "fused": lambda p: torch.optim.Adam(p, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3),
    "tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on(name: str, tmp_path: Path) -> None:
    model = _net()
    optimizer = OPTIMIZERS[name](model.parameters())
    for number in range(3):
        _step(model, optimizer, number)
    wh.save(tmp_path, step=3, model=model, optimizer=optimizer)
    expected = [_step(model, optimizer, number) for number in (3, 4)]
    other = _net(5)
    again = OPTIMIZERS[name](other.parameters())
    wh.load(tmp_path, model=other, optimizer=again)
    assert [_step(other, again, number) for number in (3, 4)] == expected
    assert _equal(model, other)


def test_groups_go_by_names(tmp_path: Path) -> None:
    """Another order of groups and of parameters, parameters by name, frozen ones; how steps are computed is not taken
    over."""
    model = _net()
    model.last.bias.requires_grad_(False)
    parameters = dict(model.named_parameters())
    thin = [name for name in parameters if parameters[name].dim() < 2]
    wide = [name for name in parameters if name not in thin]
    groups = [{"params": [parameters[n] for n in names]} for names in (wide, thin)]
    optimizer = torch.optim.AdamW([groups[0], {**groups[1], "weight_decay": 0.0, "lr": 0.5}], foreach=False)
    _step(model, optimizer, 0)
    wh.save(tmp_path, step=1, model=model, optimizer=optimizer)
    expected = _step(model, optimizer, 1)
    other = _net(3)
    other.last.bias.requires_grad_(False)
    parameters = dict(other.named_parameters())
    again = torch.optim.AdamW(
        [{"params": [(n, parameters[n]) for n in names[::-1]]} for names in (thin, wide)], lr=9.0, foreach=True
    )
    wh.load(tmp_path, model=other, optimizer=again)
    assert [(g["lr"], g["weight_decay"], g["foreach"]) for g in again.param_groups] == [
        (0.5, 0.0, True),
        (1e-3, 0.01, True),
    ]
    assert again.param_groups[0]["param_names"] == thin[::-1]
    assert _step(other, again, 1) == expected
    one = torch.optim.AdamW(other.parameters())
    with pytest.raises(CheckpointError, match=r"'first.weight' and 'first.bias' are in one group"):
        wh.load(tmp_path, model=other, optimizer=one)


def test_state_in_place_is_used_again(tmp_path: Path) -> None:
    model = _net()
    optimizer = torch.optim.Adam(model.parameters())
    _step(model, optimizer, 0)
    wh.save(tmp_path, step=1, model=model, optimizer=optimizer)
    held = optimizer.state[model.first.weight]["exp_avg"]
    kept, version = held.clone(), held._version
    _step(model, optimizer, 1)
    wh.load(tmp_path, model=model, optimizer=optimizer)
    assert optimizer.state[model.first.weight]["exp_avg"] is held
    assert torch.equal(held, kept) and held._version > version


def test_state_in_place_whose_elements_share_memory_is_replaced(tmp_path: Path) -> None:
    model = _net()
    optimizer = torch.optim.Adam(model.parameters())
    _step(model, optimizer, 0)
    wh.save(tmp_path, step=1, model=model, optimizer=optimizer)
    other = torch.optim.Adam(model.parameters())
    other.state[model.first.weight]["exp_avg"] = torch.zeros(()).expand(6, 4)
    wh.load(tmp_path, model=model, optimizer=other)
    p = model.first.weight
    assert torch.equal(other.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])
    _step(model, other, 1)


def test_options_are_the_same_in_any_order(tmp_path: Path) -> None:
    model = _net()
    parts = [{"params": list(model.first.parameters()), "weight_decay": 0.0}, {"params": list(model.last.parameters())}]
    saved = torch.optim.Adam(parts, lr=0.1)
    assert list(saved.param_groups[0]) != list(saved.param_groups[1])
    wh.save(tmp_path, step=1, model=model, optimizer=saved)
    one = torch.optim.Adam([*model.first.parameters(), *model.last.parameters()])
    wh.load(tmp_path, model=model, optimizer=one)
    assert one.param_groups[0]["lr"] == 0.1


def test_several_optimizers(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[Net, dict[str, torch.optim.Optimizer]]:
        model = _net(seed)
        return model, {
            "a": torch.optim.Adam(model.first.parameters()),
            "b": torch.optim.SGD(model.last.parameters(), lr=0.1, momentum=0.9),
        }

    def step(model: Net, made: dict[str, torch.optim.Optimizer]) -> float:
        made["a"].zero_grad(), made["b"].zero_grad()
        loss = model(torch.ones(3, 4) * torch.arange(3)[:, None]).square().mean()
        loss.backward()
        made["a"].step(), made["b"].step()
        return float(loss.detach())

    model, made = build(0)
    step(model, made)
    wh.save(tmp_path, step=1, model=model, optimizer=made)
    expected = [step(model, made), step(model, made)]
    other, again = build(1)
    wh.load(tmp_path, model=other, optimizer=again)
    assert [step(other, again), step(other, again)] == expected
    with pytest.raises(CheckpointError, match=r"no optimizer c; it has .*@a.*@b"):
        wh.load(tmp_path, model=other, optimizer={"c": again["a"]})
    with pytest.raises(CheckpointError, match=r"has no optimizer; it has"):
        wh.load(tmp_path, model=other, optimizer=again["a"])


def test_two_models_and_an_average(tmp_path: Path) -> None:
    """An adversary with an optimizer of its own, and an average of weights."""

    def build(seed: int) -> dict[str, Any]:
        model, adversary = _net(seed), _net(seed + 1)
        return {
            "model": model,
            "optimizer": torch.optim.Adam(model.parameters()),
            "adversary": adversary,
            "against": torch.optim.SGD(adversary.parameters(), lr=0.1, momentum=0.9),
            "average": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)),
        }

    def train(of: dict[str, Any], number: int) -> list[float]:
        losses = [_step(of["model"], of["optimizer"], number), _step(of["adversary"], of["against"], number)]
        of["average"].update_parameters(of["model"])
        return losses

    of = build(0)
    train(of, 0)
    wh.save(tmp_path, step=1, **of)
    expected = train(of, 1)
    again = build(4)
    found = wh.load(tmp_path, **again)
    assert not found.missing
    assert train(again, 1) == expected
    for name in ("model", "adversary", "average"):
        assert _equal(of[name], again[name])
    alone = _net(9)
    wh.load(tmp_path, model=alone)  # the rest is left out


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=3, cycle_momentum=False),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.PolynomialLR(o, 4)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "swa": lambda o: SWALR(o, 0.05),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on(name: str, tmp_path: Path) -> None:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = SCHEDULERS[name](optimizer)

    def step(model: nn.Module, optimizer: Any, scheduler: Any, number: int) -> list[float]:
        loss = _step(model, optimizer, number)
        scheduler.step(*[1.0] if name == "plateau" else [])
        return [loss, *(group["lr"] for group in optimizer.param_groups)]

    for number in range(3):
        step(model, optimizer, scheduler, number)
    wh.save(tmp_path, step=3, model=model, optimizer=optimizer, scheduler=scheduler)
    expected = [step(model, optimizer, scheduler, number) for number in range(3, 7)]
    other = _net(2)
    again = torch.optim.SGD(other.parameters(), lr=0.1)
    rates = SCHEDULERS[name](again)
    wh.load(tmp_path, model=other, optimizer=again, scheduler=rates)
    assert [step(other, again, rates, number) for number in range(3, 7)] == expected


def test_a_scaler_goes_on(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.update(4.0)
    wh.save(tmp_path, step=0, scaler=scaler)
    again = torch.amp.GradScaler("cpu")
    wh.load(tmp_path, scaler=again)
    assert again.state_dict() == scaler.state_dict() and again.get_scale() == 4.0


def test_random_states_go_on(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [float(torch.rand(())), random.random(), random.gauss(0, 1), float(np.random.rand()), np.random.randn()]

    random.gauss(0, 1), np.random.randn()  # the other of two is kept
    model = _net()
    optimizer = torch.optim.SGD(model.parameters())
    wh.save(tmp_path, step=0, model=model, optimizer=optimizer)
    expected = draw()
    assert wh.load(tmp_path, model=model).rng == "kept"
    assert draw() != expected
    assert wh.load(tmp_path, model=model, optimizer=optimizer).rng == "restored"
    assert draw() == expected
    assert wh.load(tmp_path, rng=True).rng == "restored"
    assert draw() == expected
    wh.save(tmp_path, step=1, model=model, optimizer=optimizer, rng=False)
    assert wh.load(tmp_path, model=model, optimizer=optimizer).rng == "kept"
    with pytest.raises(CheckpointError, match="no random states"):
        wh.load(tmp_path, rng=True)


def test_a_plain_process_keeps_the_random_state_of_its_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """tests/gpu has the same on one."""
    seen: list[Tensor] = []
    monkeypatch.setattr(random_states, "_gpu_of", lambda mesh, model: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.arange(16, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: seen.append(state))
    wh.save(tmp_path, step=0, model=_net())
    wh.load(tmp_path, model=_net(), rng=True)
    assert [one.tolist() for one in seen] == [list(range(16))]


ODD = [
    torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.bool,
    torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64,
]  # fmt: skip


class Odd(nn.Module):
    """Tensors of every dtype, empty ones, single ones, and of strides that are not rows."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)

        def some(*shape: int) -> Tensor:
            return torch.randint(0, 2, shape, generator=draw) + seed % 2

        for number, dtype in enumerate(ODD):
            for name, shape in (("single", ()), ("some", (3, 5)), ("empty", (0, 2))):
                self.register_buffer(f"{name}{number}", some(*shape).to(dtype))
        self.turned = nn.Parameter(torch.randn(4, 6, generator=draw).t())
        self.image = nn.Parameter(torch.randn(2, 3, 4, 5, generator=draw).to(memory_format=torch.channels_last))
        self.strided = nn.Parameter(torch.randn(8, 8, generator=draw)[::2, 1::3])
        self.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64, generator=draw).conj())
        self.single = nn.Parameter(torch.randn(6, generator=draw)[::2][:1])
        self.register_buffer("none", None)
        self.register_buffer("left_out", torch.randn(2, generator=draw), persistent=False)


def test_tensors_of_every_kind(tmp_path: Path) -> None:
    model, other = Odd(2), Odd(3)
    strides = {name: p.stride() for name, p in other.named_parameters()}
    left = other.left_out.clone()
    wh.save(tmp_path, step=0, model=model)
    wh.load(tmp_path, model=other)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
        assert other.state_dict()[name].dtype is value.dtype
    assert {name: p.stride() for name, p in other.named_parameters()} == strides
    assert torch.equal(other.left_out, left)


def test_moments_have_the_strides_of_their_parameters(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.Adam(model.parameters(), fused=True)

    model, optimizer = build()
    model(torch.randn(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    wh.save(tmp_path, step=0, model=model, optimizer=optimizer)
    other, again = build()
    wh.load(tmp_path, model=other, optimizer=again)
    for name in ("exp_avg", "exp_avg_sq"):
        ours, theirs = again.state[other.weight][name], optimizer.state[model.weight][name]
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


class Extra(nn.Module):
    """An extra state."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value, self.layer = value, nn.Linear(2, 2)

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


@pytest.mark.parametrize(
    "value", [{"a": [1, torch.ones(2)]}, torch.arange(3), "text", None], ids=["dict", "tensor", "text", "none"]
)
def test_extra_states(value: Any, tmp_path: Path) -> None:
    wh.save(tmp_path, step=0, model=nn.Sequential(Extra(value)))
    other = nn.Sequential(Extra(torch.zeros(3)))
    wh.load(tmp_path, model=other)
    found = other[0].value
    assert repr(found) == repr(value)


class Halved(nn.Module):
    """It gives something else than its memory, and makes something of what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.loaded = nn.Parameter(torch.randn(3)), 0
        self.twice = self.weight.detach() * 2

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach() / 2
        destination[f"{prefix}kind"] = "halved"

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        assert state[f"{prefix}kind"] == "halved"
        self.weight.data.copy_(state[f"{prefix}weight"] * 2)
        self.twice, self.loaded = self.weight.detach() * 2, self.loaded + 1


def test_modules_that_give_and_take_in_their_own_way(tmp_path: Path) -> None:
    model, other = nn.Sequential(Halved(), nn.Linear(2, 2)), nn.Sequential(Halved(), nn.Linear(2, 2))
    wh.save(tmp_path, step=0, model=model)
    wh.load(tmp_path, model=other)
    assert torch.equal(other[0].weight, model[0].weight) and torch.equal(other[0].twice, model[0].twice)
    assert torch.equal(other[1].weight, model[1].weight)
    assert other[0].loaded == 1


def test_a_module_that_gives_what_was_a_tensor_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model, other = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(2, 2)), nn.Sequential(Halved(), nn.Linear(2, 2))
    wh.save(tmp_path, step=0, model=model)
    before = other[1].weight.detach().clone()
    with pytest.raises(wh.CheckpointError, match=r"0\.weight is a tensor in the checkpoint.*Nothing was changed"):
        wh.load(tmp_path, model=other, missing_ok=True)
    assert torch.equal(other[1].weight, before)


def test_hooks_of_loading_run(tmp_path: Path) -> None:
    model, other = _net(), _net(1)
    seen: list[float] = []
    other.last.register_load_state_dict_post_hook(lambda module, keys: seen.append(float(module.weight.detach().sum())))
    wh.save(tmp_path, step=0, model=model)
    wh.load(tmp_path, model=other)
    assert seen == [float(model.last.weight.detach().sum())]
    assert _equal(model, other)


def test_ties(tmp_path: Path) -> None:
    model = _net(tied=True)
    wh.save(tmp_path / "tied", step=0, model=model)
    index = (tmp_path / "tied" / "step-00000000" / "index.json").read_text()
    assert '"ties":{"model/last.weight":"model/first.weight"}' in index
    other = _net(1, tied=True)
    wh.load(tmp_path / "tied", model=other)
    assert other.last.weight is other.first.weight and _equal(model, other)
    apart = _net(1, tied=True)
    apart.last.weight = nn.Parameter(torch.zeros(4, 4))
    wh.load(tmp_path / "tied", model=apart)
    assert torch.equal(apart.last.weight, model.first.weight) and apart.last.weight is not apart.first.weight
    apart.last.weight.data.zero_()
    wh.save(tmp_path / "apart", step=0, model=apart)
    with pytest.raises(
        CheckpointError, match=r"first.weight and last.weight are one tensor in the model, and their values differ"
    ):
        wh.load(tmp_path / "apart", model=other)
    assert _equal(model, other)


def test_what_has_no_values_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    for model, text in (
        (meta, r"'model/weight' is on the meta device"),
        (nn.LazyLinear(3), r"'weight' is not initialised"),
    ):
        with pytest.raises(CheckpointError, match=text):
            wh.save(tmp_path, step=0, model=model)
    wh.save(tmp_path / "x", step=0, model=nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="meta device"):
        wh.load(tmp_path / "x", model=meta)
    sparse = nn.Module()
    sparse.register_buffer("table", torch.eye(3).to_sparse())
    with pytest.raises(CheckpointError, match=r"'model/table' is torch.sparse_coo, not dense"):
        wh.save(tmp_path, step=1, model=sparse)


def test_states_that_are_none_are_refused(tmp_path: Path) -> None:
    model = _net()
    for given, text in (
        ({"thing": 3}, r"thing= is a int, without state_dict"),
        ({"optimizer": model}, r"optimizer is a Net"),
        ({"extra": {"a": object()}}, r"'extra/a' is a object"),
        ({"extra": [1]}, r"extra is a list"),
        ({"model": model.state_dict()}, r"model is of OrderedDict"),
        ({"if_busy": "no"}, r"if_busy is 'no'"),
        ({"optimizer": torch.optim.SGD(_net().parameters())}, r"SGD has a parameter of shape \[6, 4\] that is none"),
    ):
        with pytest.raises(CheckpointError, match=text):
            wh.save(tmp_path, step=0, **{"model": model, **given})
    assert not list(tmp_path.glob("step-????????"))
    with pytest.raises(CheckpointError, match="an optimizer without its model"):
        wh.save(tmp_path, step=0, optimizer=torch.optim.SGD(model.parameters()))
    wh.save(tmp_path, step=0, model=model, scheduler=lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1))
    with pytest.raises(CheckpointError, match=r"no state 'schedule' \(close: 'scheduler'\)"):
        wh.load(tmp_path, model=model, schedule=torch.amp.GradScaler("cpu"))


def test_what_does_not_fit_is_told_with_close_names(tmp_path: Path) -> None:
    model = _net()
    wh.save(tmp_path, step=0, model=model)
    other = _net(1)
    other.lasts, other.tail = other.last, nn.Linear(1, 1)
    del other.last
    before = copy.deepcopy(other)
    with pytest.raises(CheckpointError) as caught:
        wh.load(tmp_path, model=other)
    text = str(caught.value)
    assert "missing 'lasts.bias' (close: 'last.bias')" in text and "'tail.weight'" in text
    assert "unexpected 'last.bias' (close: 'lasts.bias')" in text
    assert "missing_ok=True" in text and "unexpected_ok=True" in text
    assert _equal(other, before)
    with pytest.raises(CheckpointError, match="unexpected"):
        wh.load(tmp_path, model=other, missing_ok=True)
    found = wh.load(tmp_path, model=other, missing_ok=True, unexpected_ok=True)
    assert found.missing == ("lasts.bias", "lasts.weight", "tail.bias", "tail.weight")
    assert found.unexpected == ("last.bias", "last.weight")
    assert torch.equal(other.first.weight, model.first.weight) and torch.equal(other.tail.weight, before.tail.weight)
    wide = _net(1)
    wide.last = nn.Linear(6, 5)
    kept = copy.deepcopy(wide)
    with pytest.raises(CheckpointError, match=r"last.weight has shape \(4, 6\), the model \(5, 6\)"):
        wh.load(tmp_path, model=wide, missing_ok=True, unexpected_ok=True)
    assert _equal(wide, kept)


def test_dtypes_change_on_request_alone(tmp_path: Path) -> None:
    model = _net()
    optimizer = torch.optim.Adam(model.parameters())
    _step(model, optimizer, 0)
    wh.save(tmp_path, step=0, model=model, optimizer=optimizer)
    half = _net(1).to(torch.bfloat16)
    again = torch.optim.Adam(half.parameters())
    with pytest.raises(CheckpointError, match=r"(?s)first.weight is float32, the model's bfloat16.*dtype=\"cast\""):
        wh.load(tmp_path, model=half)
    wh.load(tmp_path, model=half, optimizer=again, dtype="cast")
    assert torch.equal(half.first.weight, model.first.weight.bfloat16())
    moment = again.state[half.first.weight]["exp_avg"]
    assert torch.equal(moment, optimizer.state[model.first.weight]["exp_avg"].bfloat16())
    assert again.state[half.first.weight]["step"].dtype is torch.float32
    counts = nn.Module()
    counts.register_buffer("n", torch.zeros(2, dtype=torch.int32))
    wh.save(tmp_path / "n", step=0, model=counts)
    counts.n = counts.n.float()
    with pytest.raises(CheckpointError, match=r"n is int32, the model's float32"):
        wh.load(tmp_path / "n", model=counts, dtype="cast")
    with pytest.raises(CheckpointError, match="dtype is 'half'"):
        wh.load(tmp_path, model=model, dtype="half")  # type: ignore[arg-type]


def test_a_part_is_loaded(tmp_path: Path) -> None:
    model = _net()
    optimizer = torch.optim.Adam(model.parameters())
    _step(model, optimizer, 0)
    wh.save(tmp_path, step=0, model=model, optimizer=optimizer)
    other = _net(1)
    again = torch.optim.Adam(other.parameters(), lr=0.5)
    _step(other, again, 5)
    before, moment = copy.deepcopy(other), again.state[other.last.weight]["exp_avg"].clone()
    wh.load(tmp_path, model=other, optimizer=again, only=["first", r"norm\..*"], rng=False)
    assert torch.equal(other.first.weight, model.first.weight)
    assert torch.equal(other.norm.running_mean, model.norm.running_mean)
    assert torch.equal(other.last.weight, before.last.weight)
    assert torch.equal(again.state[other.last.weight]["exp_avg"], moment)
    assert torch.equal(again.state[other.first.weight]["exp_avg"], optimizer.state[model.first.weight]["exp_avg"])
    with pytest.raises(CheckpointError, match=r"pattern 'firsts' matches nothing of the model. Close names: 'first'"):
        wh.load(tmp_path, model=other, only="firsts")
    with pytest.raises(CheckpointError, match=r"'\(' is not a regular expression"):
        wh.load(tmp_path, model=other, only="(")


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def test_many_are_loaded_from_one(tmp_path: Path) -> None:
    model, other = Layers(1), Layers(3)
    optimizer = torch.optim.Adam(model.parameters())
    _step(model, optimizer, 0)
    wh.save(tmp_path, step=0, model=model, optimizer=optimizer)
    again = torch.optim.Adam(other.parameters())
    wh.load(tmp_path, model=other, optimizer=again, assign={r"layers\.\d": "layers.0"})
    for layer in other.layers:
        assert torch.equal(layer.weight, model.layers[0].weight)
        state = again.state[layer.weight]
        assert torch.equal(state["exp_avg"], optimizer.state[model.layers[0].weight]["exp_avg"])
    assert again.state[other.layers[0].weight]["step"] is not again.state[other.layers[1].weight]["step"]
    _step(other, again, 1)
    assert not torch.equal(other.layers[0].weight, other.layers[1].weight)
    wh.save(tmp_path, step=1, model=other)
    swapped = Layers(2)
    wh.load(tmp_path, model=swapped, assign={r"layers\.([01])\.(.*)": r"layers.\1.\2"}, unexpected_ok=True)
    assert torch.equal(swapped.layers[1].weight, other.layers[1].weight)
    with pytest.raises(
        CheckpointError, match=r"'layers.0.weight' is to be loaded from 'layer.0.weight'.*close: 'layers.0"
    ):
        wh.load(tmp_path, model=other, assign={r"layers\.0": "layer.0"})
    with pytest.raises(CheckpointError, match=r"matches nothing"):
        wh.load(tmp_path, model=other, assign={r"layers\.7": "layers.0"})
    with pytest.raises(CheckpointError, match=r"'layers.\\\\2' does not follow"):
        wh.load(tmp_path, model=other, assign={r"layers\.(\d)": r"layers.\2"})


class Projections(nn.Module):
    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(4, 6 if len(names) == 3 else 18))
        self.experts = nn.Parameter(torch.randn(3, 4, 5) if len(names) == 1 else torch.randn(4, 5))


def test_slices_of_one_are_loaded(tmp_path: Path) -> None:
    model, other = Projections("a"), Projections("qkv")
    optimizer, again = (torch.optim.Adam(one.parameters()) for one in (model, other))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    wh.save(tmp_path, step=0, model=model, optimizer=optimizer)
    assign = {"q": "a[0:6]", "k": "a[6:12]", r"v\.(.*)": r"a.\1[12:]", "experts": "experts[1, :]"}
    wh.load(tmp_path, model=other, optimizer=again, assign=assign)
    for number, name in enumerate("qkv"):
        for one, whole in zip(getattr(other, name).parameters(), model.a.parameters(), strict=True):
            assert torch.equal(one, whole[6 * number : 6 * number + 6])
            for kind in ("exp_avg", "exp_avg_sq"):
                expected = optimizer.state[whole][kind][6 * number : 6 * number + 6]
                assert torch.equal(again.state[one][kind], expected)
            assert again.state[one]["step"] == 1
    assert torch.equal(other.experts, model.experts[1])
    assert torch.equal(again.state[other.experts]["exp_avg"], optimizer.state[model.experts]["exp_avg"][1])
    for wrong, text in {
        "a[0:7]": r"q.weight has shape \(7, 4\), the model \(6, 4\)", "a[13:19]": r"no part \[13:19\]",
        "a[0:6:2]": "ends in no slice", "a[0:6,:,:]": "has no part", "a[99]": "has no part",
    }.items():  # fmt: skip
        with pytest.raises(CheckpointError, match=text):
            wh.load(tmp_path, model=other, assign=assign | {"q": wrong})


def test_a_model_that_has_more_is_loaded_without_its_optimizer(tmp_path: Path) -> None:
    model = _net()
    wh.save(tmp_path, step=0, model=model)
    with pytest.raises(CheckpointError, match="has no optimizer"):
        wh.load(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters()))
    optimizer = torch.optim.Adam([model.first.weight])
    _step(model, optimizer, 0)
    wh.save(tmp_path, step=1, model=model, optimizer=optimizer)
    more = torch.optim.Adam(model.parameters())
    with pytest.raises(CheckpointError, match=r"(?s)no state of parameters: missing 'first.bias'.*missing_ok"):
        wh.load(tmp_path, model=model, optimizer=more)
    wh.load(tmp_path, model=model, optimizer=more, missing_ok=True)
    assert set(more.state) == {model.first.weight}


def test_what_is_loaded_trains_on_through_graphs(tmp_path: Path) -> None:
    """A backward through values that a load has changed since is refused by autograd."""
    model = _net()
    wh.save(tmp_path, step=0, model=model)
    loss = model(torch.ones(2, 4)).square().mean()
    wh.load(tmp_path, model=model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_optimizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    model = _net()
    adam = torch.optim.Adam(model.parameters())
    wh.save(tmp_path, step=0, model=model, optimizer=adam)
    for other in (torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adafactor(model.parameters())):
        with pytest.raises(CheckpointError, match=rf"'betas'.*this {type(other).__name__} has"):
            wh.load(tmp_path, model=model, optimizer=other)
    torch.optim.lr_scheduler.StepLR(adam, 2)  # has an option of its own in the groups
    wh.save(tmp_path, step=1, model=model, optimizer=adam)
    wh.load(tmp_path, model=model, optimizer=torch.optim.AdamW(model.parameters()))


class Lookahead(torch.optim.SGD):
    """Has weights of its own, beside the state of parameters."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": torch.ones(3)}


def _beside(optimizer: torch.optim.Optimizer, p: nn.Parameter, key: Any, value: Any) -> torch.optim.Optimizer:
    optimizer.state[p][key] = value
    return optimizer


BESIDE: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "an entry of state_dict": (lambda model: Lookahead(model.parameters()), "'slow'"),
    "a state of no parameter": (
        lambda model: _beside(torch.optim.SGD(model.parameters()), "all", "n", 1),  # type: ignore[arg-type]
        "'all'",
    ),
    "a name with a slash": (
        lambda model: _beside(torch.optim.SGD(model.parameters()), next(model.parameters()), "a/b", torch.ones(2)),
        "'a/b'",
    ),
    "a number for a name": (
        lambda model: _beside(torch.optim.SGD(model.parameters()), next(model.parameters()), 1, torch.ones(2)),
        "holds 1",
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_an_optimizers_state_that_would_be_lost_is_refused(name: str, tmp_path: Path) -> None:
    build, text = BESIDE[name]
    model = _net()
    with pytest.raises(CheckpointError, match=text):
        wh.save(tmp_path, step=0, model=model, optimizer=build(model))


def test_what_is_loaded_in_inference_mode_is_trained(tmp_path: Path) -> None:
    model = _net()
    optimizer = torch.optim.Adam(model.parameters())
    _step(model, optimizer, 0)
    with torch.inference_mode():
        wh.save(tmp_path, step=0, model=model, optimizer=optimizer)
    other = _net(1)
    again = torch.optim.Adam(other.parameters())
    with torch.inference_mode():
        wh.load(tmp_path, model=other, optimizer=again)
    assert _step(model, optimizer, 1) == _step(other, again, 1)


def test_a_default_device_is_for_others(tmp_path: Path) -> None:
    model = _net()
    optimizer = torch.optim.Adam(model.parameters())
    _step(model, optimizer, 0)
    with torch.device("meta"):
        wh.save(tmp_path, step=0, model=model, optimizer=optimizer, extra={"x": torch.ones(2, device="cpu")})
    other = _net(1)
    again = torch.optim.Adam(other.parameters())
    with torch.device("meta"):
        assert wh.load(tmp_path, model=other, optimizer=again).extra["x"].tolist() == [1, 1]
    assert _step(model, optimizer, 1) == _step(other, again, 1)


def test_what_has_no_memory_of_its_own_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("pair", TwoTensor(torch.ones(2), torch.ones(2)))
    with pytest.raises(CheckpointError, match="'model/pair' is a TwoTensor, which has no memory of its own"):
        wh.save(tmp_path, step=0, model=model)


def test_an_expanded_tensor_is_told_before_anything_changes(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    wh.save(tmp_path, step=0, model=model)
    other = nn.Linear(2, 2)
    other.bias = nn.Parameter(torch.zeros(1).expand(2))
    with pytest.raises(CheckpointError, match=r"elements of bias share memory.*Nothing was changed"):
        wh.load(tmp_path, model=other)


def test_compiled_models_have_their_own_names(tmp_path: Path) -> None:
    model, average = _net(), _net(1)
    optimizer = torch.optim.Adam(model.parameters())
    _step(model, optimizer, 0)
    compiled: Any = torch.compile(model, backend="eager")
    wh.save(tmp_path, step=0, model=compiled, optimizer=optimizer, average=torch.compile(average, backend="eager"))
    other, again = _net(2), _net(3)
    wh.load(tmp_path, model=other, optimizer=torch.optim.Adam(other.parameters()), average=again)
    assert _equal(other, model) and _equal(again, average)
    third: Any = torch.compile(_net(4), backend="eager")
    wh.load(tmp_path, model=third)
    assert _equal(third._orig_mod, model)


def _ddp(rank: int, n: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    model = _net()
    around = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(around.parameters())
    _step(model, optimizer, 0)
    if rank == 0:
        wh.save(folder, step=0, model=around, optimizer=optimizer)
    torch.distributed.barrier()
    plain, again = _net(1), nn.parallel.DistributedDataParallel(_net(2))
    wh.load(folder, model=plain, optimizer=torch.optim.Adam(plain.parameters()))
    wh.load(folder, model=again)
    assert _equal(plain, model) and _equal(again.module, model)


def test_a_model_in_ddp_has_its_own_names(tmp_path: Path) -> None:
    world(2, _ddp, tmp_path)


def test_a_state_that_does_not_fit_is_told_what_takes_it(tmp_path: Path) -> None:
    model = _net()
    average = torch.optim.swa_utils.AveragedModel(model)
    wh.save(tmp_path, step=0, model=model, average=average)
    with pytest.raises(CheckpointError, match="the checkpoint's 'average' does not fit Net: missing") as one:
        wh.load(tmp_path, model=model, average=_net(1), unexpected_ok=True)
    assert "unexpected_ok= are of model= alone; an AveragedModel takes this one" in str(one.value)
    again = torch.optim.swa_utils.AveragedModel(_net(1))
    wh.load(tmp_path, average=again)
    assert _equal(again.module, model)


def test_a_slip_in_an_option_is_told_the_option(tmp_path: Path) -> None:
    given = {name for call in (wh.save, wh.load) for name in inspect.signature(call).parameters}
    assert set(OPTIONS) == given - {"run_dir", "path", "files", "states"}
    with pytest.raises(CheckpointError, match=r"keeplast= is a int.*\n  fix:    keep_last= or plain data"):
        wh.save(tmp_path, step=0, model=_net(), keeplast=3)
    wh.save(tmp_path, step=0, model=_net())
    with pytest.raises(CheckpointError, match=r"mising_ok= is a bool.*\n  fix:    missing_ok= or plain data"):
        wh.load(tmp_path, model=_net(), mising_ok=True)


def test_what_is_around_a_parallelized_model_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(wh.parallelize(_net()))
    for call in (lambda: wh.save(tmp_path, step=0, model=model), lambda: wh.load(tmp_path, model=model)):
        with pytest.raises(CheckpointError, match="Sequential is around a parallelized model"):
            call()


def test_groups_do_not_share_their_options(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    wh.save(tmp_path, step=0, model=model, optimizer=torch.optim.SGD([{"params": model.parameters(), "own": {"a": 1}}]))
    again = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}])
    wh.load(tmp_path, model=model, optimizer=again)
    first, second = (group["own"] for group in again.param_groups)
    first["a"] = 2
    assert second == {"a": 1}


class _Collects:
    def __init__(self) -> None:
        self.seen: list[bool] = []

    def state_dict(self) -> dict[str, int]:
        self.seen.append(gc.isenabled())
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen.append(gc.isenabled())


class _NoText:
    """Its names are bytes that are no text, as Python reads them from a folder."""

    def __init__(self) -> None:
        self.held = {"\udc80\n": torch.arange(3)}

    def state_dict(self) -> dict[str, Tensor]:
        return self.held

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.held = state


def test_names_that_are_no_text(tmp_path: Path) -> None:
    folder = tmp_path / "\udcff\n"
    wh.save(folder, step=0, state=_NoText())
    state = _NoText()
    state.held = {}
    wh.load(folder, state=state)
    assert list(state.held) == ["\udc80\n"] and torch.equal(state.held["\udc80\n"], torch.arange(3))


class _Forks:
    """Begins a worker when it is asked for its state, as a loader does whose workers keep it."""

    collects: list[bool]

    def state_dict(self) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            loader = DataLoader(
                _Collecting(), num_workers=1, timeout=20, multiprocessing_context="fork", batch_size=None
            )
            return {"collects": list(loader)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.collects = state["collects"]


class _Collecting(Dataset[bool]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> bool:
        return gc.isenabled()


def test_workers_that_begin_meanwhile_collect_garbage(tmp_path: Path) -> None:
    state = _Forks()
    wh.save(tmp_path, step=0, state=state)
    wh.load(tmp_path, state=state)
    assert state.collects == [True] and gc.isenabled()
    gc.disable()
    try:
        wh.save(tmp_path, step=1, state=state)
        wh.load(tmp_path, state=state)
    finally:
        gc.enable()
    assert state.collects == [False]


def test_garbage_is_collected_again_behind_a_save_and_a_load(tmp_path: Path) -> None:
    state = _Collects()
    wh.save(tmp_path, step=0, state=state)
    assert gc.isenabled()
    wh.load(tmp_path, state=state)
    assert gc.isenabled() and state.seen == [False, False]
    with pytest.raises(CheckpointError):
        wh.save(tmp_path, step=0, state=state)
    assert gc.isenabled()
    gc.disable()
    try:
        wh.load(tmp_path, state=state)
        assert not gc.isenabled()
    finally:
        gc.enable()
