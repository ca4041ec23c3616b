"""What ranks hold apart: buffers and states that differ, averages, what a stage alone has; refusals on all ranks."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import whale_torch as wh
from tests.parity.layouts import WIDTH, backward, batch, build, mine, step
from tests.world import outcomes, world


class Stages(nn.Module):
    """Running statistics, an extra state, a frozen and a scalar parameter in the second of two stages."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(dropout))
        self.b = Second()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.b(self.a(x)), y)


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(8), nn.Linear(8, 11)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.norm.bias.requires_grad_(False)
        self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.layer(self.norm(h)) * self.scale
        return out

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "of": torch.tensor(self.calls)}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]
        assert int(state["of"]) == self.calls


def _stages(seed: int = 0, *, parallel: bool = True, recorded: bool = True, **options: Any) -> Any:
    torch.manual_seed(seed)
    model = Stages(**options)
    if parallel:
        scopes = {"a": wh.stage(), "b": wh.stage()}
        wh.annotate(model, scopes, inside=(wh.replica(), wh.pipeline(num_micro_batches=2, num_ranks=2)))  # type: ignore[arg-type]
        x, y = batch(8)
        wh.parallelize(model, sample_inputs={"x": x, "y": y} if recorded else None)
    return model


def _train(model: Any, optimizer: Any, seed: int = 1) -> float:
    optimizer.zero_grad()
    x, y = batch(8, seed)
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _saved_stages(rank: int, n: int, path: str) -> list[float]:
    model = _stages()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    _train(model, optimizer)
    model.b.calls = 10 + rank  # of the first rank that has the stage counts
    own = {name: value.clone() for name, value in model.b.norm.named_buffers() if type(value) is Tensor}
    wh.save(path, step=1, model=model, optimizer=optimizer, extra={"rank": rank, "t": torch.full((2,), rank)})
    if rank == n // 2:
        torch.save(own, Path(path) / "buffers")
    return [_train(model, optimizer, seed) for seed in (2, 3)]


def _loaded_stages(rank: int, n: int, path: str, recorded: bool) -> list[Any]:
    model = _stages(7, parallel=n > 0, recorded=recorded)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    found = wh.load(path, model=model, optimizer=optimizer)
    assert found.extra["rank"] == 0 and found.extra["t"].tolist() == [0, 0]
    statistics = {k: v.clone() for k, v in model.b.norm.named_buffers() if type(v) is Tensor}
    return [model.b.calls, statistics, _train(model, optimizer, 2), _train(model, optimizer, 3)]


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("n", [2, 4])
def test_what_a_stage_alone_has(n: int, tmp_path: Path) -> None:
    losses = world(n, _saved_stages, str(tmp_path))[0]
    expected = torch.load(tmp_path / "buffers")
    for recorded in (True, False):
        for rank, (calls, statistics, *found) in enumerate(world(n, _loaded_stages, str(tmp_path), recorded)):
            assert calls == 10 + n // 2
            assert found == losses
            if rank >= n // 2 or not recorded:
                assert all(torch.equal(statistics[name], value) for name, value in expected.items())
    calls, statistics, *_ = _loaded_stages(0, 0, str(tmp_path), True)
    assert calls == 10 + n // 2
    assert all(torch.equal(statistics[name], value) for name, value in expected.items())


def _statistics(rank: int, n: int, path: str) -> dict[str, Tensor]:
    """Each replica has running statistics of its own: rank 0's count."""
    torch.manual_seed(0)
    model = wh.parallelize(nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 11)))
    x, y = batch()
    backward(model, *mine(model, x, y))
    average = AveragedModel(model, use_buffers=True)
    wh.save(path, step=1, model=model, average=average)
    return {name: value.clone() for name, value in model.named_buffers()}


def test_statistics_are_those_of_the_first_rank(tmp_path: Path) -> None:
    first, second = world(2, _statistics, str(tmp_path))
    assert not torch.equal(first["1.running_mean"], second["1.running_mean"])
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 11))
    average = AveragedModel(model, use_buffers=True)
    wh.load(tmp_path, model=model, average=average)
    for name, value in first.items():
        assert torch.equal(model.state_dict()[name], value)
        assert torch.equal(average.module.state_dict()[name], value)


def _with_average(rank: int, n: int, layout: str, path: str, save: bool) -> list[float]:
    """A model, an average of its weights, two optimizers, a scaler: all in one checkpoint. The losses that follow."""
    plain = n == 0
    model = build(layout, seed=0 if save else 5)
    before = [torch.optim.Adam(part.parameters(), lr=0.05) for part in (model.features, model.block)]
    if not plain:
        wh.parallelize(model)  # behind two of the optimizers
    optimizer = {
        "features": before[0],
        "block": before[1],
        "head": torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9),
    }
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    scaler = torch.amp.GradScaler("cpu") if plain else wh.GradScaler(model)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizer.values()]
    given: dict[str, Any] = {"model": model, "optimizer": optimizer, "average": average, "scaler": scaler}
    given |= {f"scheduler{number}": one for number, one in enumerate(schedulers)}

    def train(seed: int) -> float:
        x, y = batch(12, seed)
        rows = (x, y) if plain else tuple(mine(model, x, y))
        for one in optimizer.values():
            one.zero_grad()
        loss = backward(model, *rows, scale=scaler.scale)
        for one in optimizer.values():
            scaler.step(one)
        scaler.update()
        average.update_parameters(model)
        for one in schedulers:
            one.step()
        if plain:
            return float(loss)
        return float(wh.reduce(loss, weight=len(rows[0]), model=model))

    if save:
        train(1), train(2)
        wh.save(path, step=2, **given)
    else:
        wh.load(path, **given)
    losses = [train(3), train(4)]
    state = average.state_dict() if plain else wh.full_state_dict(average)
    return [*losses, *(float(value.double().sum()) for value in state.values())]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("own", 2), ("mixed", 4)), (("mixed", 4), ("own", 3)), (("shared", 2), ("replica", 1)),
        (("replica", 2), ("two sizes", 2)), (("own", 3), ("plain", 0)), (("plain", 0), ("own", 2)),
    ],
)  # fmt: skip
@pytest.mark.matrix(keep=2)
def test_all_of_a_training_goes_on(source: tuple[str, int], target: tuple[str, int], tmp_path: Path) -> None:
    def run(of: tuple[str, int], save: bool) -> list[list[float]]:
        layout, n = of
        if n == 0:
            return [_with_average(0, 0, "replica", str(tmp_path), save)]
        return world(n, _with_average, layout, str(tmp_path), save)

    expected = run(source, True)[0]
    for found in run(target, False):
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-4


class Position:
    """A state of each rank."""

    def __init__(self, value: Any):
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def _positions(rank: int, n: int, path: str, save: bool) -> list[Any]:
    model = wh.parallelize(build("replica"))
    given = {"where": Position(torch.full((2,), rank) if save else None), "alike": Position("x" if save else None)}
    given["groups"] = Position(rank if save else None)  # as an optimizer's are called
    if save:
        wh.save(path, step=0, model=model, **given)
        return []
    wh.load(path, model=model, alike=given["alike"])
    wh.load(path, model=model, **given)
    return [given["where"].value.tolist(), given["alike"].value, given["groups"].value]


def test_states_that_differ_are_kept_of_each(tmp_path: Path) -> None:
    world(2, _positions, str(tmp_path), True)
    assert world(2, _positions, str(tmp_path), False) == [[[0, 0], "x", 0], [[1, 1], "x", 1]]
    for one in outcomes(3, _positions, str(tmp_path), False):
        assert isinstance(one.error, wh.CheckpointError)
        assert "state 'where' differs between the 2 ranks that saved it, and 3 load it" in str(one.error)


def _random(rank: int, n: int, path: str, save: bool, layout: str = "replica") -> Any:
    model = wh.parallelize(build(layout))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random.seed(rank)
    if save:
        torch.rand(3)
        wh.save(path, step=0, model=model, optimizer=optimizer)
        found = "restored"
    else:
        found = wh.load(path, model=model, optimizer=optimizer).rng
    return found, float(torch.rand(())), random.random()


def test_random_states_of_ranks(tmp_path: Path) -> None:
    """Each feed goes on with its own; another number of feeds has others, none twice; ranks of a feed are alike."""
    saved = world(2, _random, str(tmp_path), True)
    assert saved[0][1] != saved[1][1]
    assert world(2, _random, str(tmp_path), False) == saved
    more = world(3, _random, str(tmp_path), False)
    assert {one[0] for one in more} == {"derived"} and len({one[1] for one in more} | {one[1] for one in saved}) == 5
    two = world(4, _random, str(tmp_path), False, "shared")
    assert [one[:2] for one in two] == [saved[0][:2]] * 2 + [saved[1][:2]] * 2


def _drops(rank: int, n: int, path: str, save: bool) -> list[float]:
    model = _stages(dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if save:
        _train(model, optimizer)
        wh.save(path, step=1, model=model, optimizer=optimizer)
    else:
        wh.load(path, model=model, optimizer=optimizer)
    return [_train(model, optimizer, seed) for seed in (2, 3, 4)]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.matrix(keep=1)
def test_dropout_goes_on_in_pipelines(n: int, tmp_path: Path) -> None:
    saved = world(n, _drops, str(tmp_path), True, timeout=120)
    assert world(n, _drops, str(tmp_path), False, timeout=120) == saved


def _refusals(rank: int, n: int, path: str, what: str) -> None:
    model: Any = wh.parallelize(build("own"))
    optimizer = torch.optim.Adam(model.parameters())
    x, y = batch()
    step(model, optimizer, *mine(model, x, y))
    extra: dict[str, Any] = {}
    if what == "a part":
        extra["head"] = model.state_dict()["head.weight"]
    elif what == "a state of another shape":
        optimizer.state[model.head.weight]["exp_avg"] = torch.zeros(3)
    elif what == "one rank's dtype" and rank == 1:
        model.half()
    elif what == "one rank's object" and rank == 1:
        wh.save(path, step=0, model=model, more=Position(object()))
    elif what == "one rank's object":
        wh.save(path, step=0, model=model, more=Position(1))
    wh.save(path, step=0, model=model, optimizer=optimizer, extra=extra)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("a part", "'extra/head' is one rank's part of 'head.weight'"),
        ("a state of another shape", "'optimizer/head.weight/exp_avg' has shape [3]"),
        ("one rank's object", "'states/more/value' is a object"),
        ("one rank's dtype", "as float32 [11, 8] and as float16 [11, 8]"),
    ],
)
def test_ranks_refuse_together(what: str, text: str, tmp_path: Path) -> None:
    for one in outcomes(2, _refusals, str(tmp_path), what, timeout=30):
        assert isinstance(one.error, wh.CheckpointError), one
        assert text in str(one.error)
    assert not list(tmp_path.glob("step-????????"))


def _from_meta(rank: int, n: int, path: str, layout: str) -> bool:
    """A model built without memory, then loaded."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = build(layout)
    wh.parallelize(model)
    wh.load(path, model=model)
    full = wh.full_state_dict(model)
    return all(torch.equal(full[key], value) for key, value in build("replica", seed=3).state_dict().items())


def test_models_without_memory(tmp_path: Path) -> None:
    wh.save(tmp_path, step=0, model=build("replica", seed=3))
    assert world(2, _from_meta, str(tmp_path), "own") == [True, True]


class Counts(torch.optim.SGD):
    """Its state has numbers of Python and nests."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    count = self.state[p].get("count", 0) + 1
                    self.state[p] |= {"count": count, "seen": [count, torch.tensor([count])], "name": "x"}


def _counted(rank: int, n: int, path: str, save: bool) -> list[Any]:
    from whale_torch.optim import element_wise

    element_wise(Counts)
    model = _stages(0 if save else 3)
    optimizer = Counts(model.parameters(), lr=0.1)
    if save:
        _train(model, optimizer), _train(model, optimizer)
        wh.save(path, step=0, model=model, optimizer=optimizer)
    else:
        wh.load(path, model=model, optimizer=optimizer)
    return [(len(s), s["count"], int(s["seen"][1])) for s in optimizer.state.values() if s]


def test_states_of_optimizers_may_be_numbers(tmp_path: Path) -> None:
    saved = world(2, _counted, str(tmp_path), True)
    assert world(2, _counted, str(tmp_path), False) == saved
    assert all(one == (3, 2, 2) or one == (4, 2, 2) for found in saved for one in found) and all(saved)
    model = _stages(5, parallel=False)
    optimizer = Counts(model.parameters(), lr=0.1)
    wh.load(tmp_path, model=model, optimizer=optimizer)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {optimizer.state[p]["count"] for p in trained} == {2} and len(optimizer.state) == len(trained)


def _one_from_many(rank: int, n: int, path: str) -> bool:
    """A dense block is loaded into parts, by another name."""
    model: Any = wh.parallelize(build("own"))
    wh.load(path, model=model, assign={"head": "tail"}, unexpected_ok=True)
    part = wh.full_state_dict(model)["head.weight"]
    saved = build("replica", seed=2)
    return torch.equal(part, saved.head.weight + 1) and torch.equal(model.block.up.weight, saved.block.up.weight)


def test_assigned_names_are_cut(tmp_path: Path) -> None:
    model: Any = build("replica", seed=2)
    model.tail = copy.deepcopy(model.head)
    with torch.no_grad():
        model.tail.weight += 1
    wh.save(tmp_path, step=0, model=model)
    assert world(2, _one_from_many, str(tmp_path)) == [True, True]


def _part_of_many(rank: int, n: int, path: str) -> bool:
    """Each rank holds some rows of a slice of what was one tensor."""
    model: Any = wh.parallelize(build("own"))
    optimizer = torch.optim.Adam(model.parameters())
    wh.load(path, model=model, optimizer=optimizer, assign={"head": "stack[5:16]"}, rng=False)
    head = wh.full_state_dict(model)["head.weight"]
    moment = optimizer.state[model.head.weight]["exp_avg"]
    return torch.equal(head, torch.load(Path(path) / "expected")) and torch.equal(moment * 10, model.head.weight)


def test_slices_are_cut(tmp_path: Path) -> None:
    model: Any = build("replica", seed=2)
    model.stack, head = nn.Linear(model.head.in_features, 20), model.head
    del model.head
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = p.detach().clone()
    optimizer.step()  # whose first moment is a tenth of the gradient
    with torch.no_grad():
        model.stack.weight.copy_(optimizer.state[model.stack.weight]["exp_avg"] * 10)
    wh.save(tmp_path, step=0, model=model, optimizer=optimizer)
    torch.save(model.stack.weight.detach()[5:16].clone(), tmp_path / "expected")
    assert head.weight.shape == (11, 8)
    assert world(2, _part_of_many, str(tmp_path)) == [True, True]
