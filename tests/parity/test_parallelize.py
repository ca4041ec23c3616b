"""parallelize: once, checked before it changes anything, and cut before it moves."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import whale_torch as wh
from tests.parity.layouts import LAYOUTS, backward, batch, build, gradients
from tests.parity.metric import relative_error
from tests.world import outcomes, world
from whale_torch.cluster import Cluster
from whale_torch.errors import CheckpointError, CommError, PlanError, WhaleError

BAR = 2e-5


def state_of(model: nn.Module) -> list[Any]:
    """Everything that an error must leave alone."""
    modules = [(name, type(m), sorted(vars(m)), sorted(vars(m)["_forward_hooks"])) for name, m in model.named_modules()]
    hooks = [len(m._state_dict_hooks) + len(m._load_state_dict_pre_hooks) for m in model.modules()]
    tensors = [(n, id(t), t.shape, t.device, tuple(vars(t))) for n, t in model.state_dict(keep_vars=True).items()]
    return [modules, hooks, tensors, [t.clone() for t in model.state_dict().values() if not t.is_meta]]


def same(found: list[Any], before: list[Any]) -> bool:
    return found[:3] == before[:3] and all(torch.equal(a, b) for a, b in zip(found[3], before[3], strict=True))


class NoRule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 6))


def refusals() -> list[tuple[str, nn.Module, dict[str, Any], type[WhaleError], str]]:
    """(what, model, options, error, its text), for 2 ranks."""
    bare = nn.Sequential(nn.Linear(6, 4), NoRule())
    wh.annotate(bare, {"1": wh.split()})
    three = nn.Sequential(nn.Linear(6, 4))
    wh.annotate(three, {"0": wh.split(size=3)})
    staged = nn.Sequential(nn.Linear(6, 4))
    wh.annotate(staged, {"0": wh.recompute()})
    sparse = nn.Sequential(nn.Embedding(6, 4, sparse=True))
    wh.annotate(sparse, {"0": wh.split()})
    other = wh.plan(nn.Linear(2, 2), cluster=Cluster((2,)))
    return [
        ("no rule", bare, {}, PlanError, "no split rule for NoRule '1'"),
        ("size", three, {}, PlanError, "2 ranks cannot be cut into groups of 3"),
        ("not run", staged, {}, WhaleError, "this version runs"),
        ("option", sparse, {}, PlanError, "sparse=True cannot be split"),
        ("plan", build("own"), {"plan": other}, PlanError, "the saved plan is for another model"),
        ("cluster", build("own"), {"cluster": Cluster((4,))}, PlanError, r"the cluster described has ranks \[4\]"),
        ("weights", build("own"), {"weights": build("own").head.state_dict()}, CheckpointError, "do not fit Net"),
    ]


def refused(rank: int, n: int) -> list[tuple[str, bool]]:
    out = []
    for what, model, options, kind, text in refusals():
        before = state_of(model)
        with pytest.raises(kind, match=text):
            wh.parallelize(model, **options)
        out.append((what, same(state_of(model), before)))
    return out


def test_an_error_leaves_the_model_as_it_was() -> None:
    for found in world(2, refused):
        assert [what for what, unchanged in found if not unchanged] == []
        assert len(found) == len(refusals())


def fails_late(module: nn.Module) -> None:
    """On rank 1, after the ranks asked one another about another module, and after rank 0 may be through."""
    if torch.distributed.get_rank() == 1 and getattr(module, "out_features", 0) == 6:
        raise OSError("no values for this layer")
    for p in module.parameters(recurse=False):
        nn.init.normal_(p)


def fails_at_once(module: nn.Module) -> None:
    raise KeyError("lost")


def foreign_errors(rank: int, n: int, folder: str) -> list[tuple[str, bool]]:
    with wh.split():
        head = nn.Linear(6, 4)
    torch.save(nn.Sequential(nn.Linear(4, 6), head).state_dict(), f"{folder}/here{rank}.pt")
    cases: list[tuple[str, dict[str, Any], type[WhaleError], str]] = [
        ("cpu", {"weights": f"{folder}/here0.pt" if rank == 0 else "/nowhere.pt"}, CheckpointError,
         "rank 1 was refused, and not every rank with it: /nowhere.pt is not there"),
        ("cpu", {"weights": f"{folder}"}, CheckpointError, "holds no weights that can be read here"),
        ("meta", {"init_fn": fails_late}, PlanError,
         "rank 1 was refused, and not every rank with it: OSError: no values for this layer"),
        ("meta", {"init_fn": fails_at_once}, PlanError, "KeyError: 'lost'"),
    ]  # fmt: skip
    out = []
    for device, options, kind, text in cases:
        with torch.device(device), wh.split():
            model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        before = state_of(model)
        with pytest.raises(kind, match=text) as caught:
            wh.parallelize(model, timeout=20.0, **options)
        out.append((str(caught.value), same(state_of(model), before)))
    return out


def test_errors_of_other_kinds_reach_every_rank(tmp_path: Path) -> None:
    first, second = world(2, foreign_errors, str(tmp_path))
    assert first == second
    assert all(unchanged for _, unchanged in first)


def told(rank: int, n: int) -> list[str]:
    """What the interpreter would print of errors: of a plan, on all ranks and on one."""
    printed = []
    for size in (n + 1, n + 1 if rank == 0 else n):
        with wh.split(size=size):
            model = nn.Linear(4, 8)
        try:
            wh.parallelize(model)
        except PlanError:
            printed.append(traceback.format_exc())
    return printed


@pytest.mark.parametrize("n", [1, 2])
def test_an_error_is_printed_once(n: int) -> None:
    for printed in world(n, told):
        assert [text.count("cannot be cut into groups") for text in printed] == [1, 1]
        assert all("another exception" not in text and "direct cause" not in text for text in printed)
    assert all("_split_size" in text for text in world(n, told)[0]), "where it was found"


def ends_before(rank: int, n: int) -> None:
    if rank == 1:
        raise SystemExit(3)
    wh.parallelize(nn.Linear(2, 2), timeout=5.0)


def test_a_rank_that_ended_before_is_told() -> None:
    mine = outcomes(2, ends_before, init=True, timeout=40)[0]
    assert isinstance(mine.error, CommError) and "'wh.parallelize' over world (ranks [0, 1])" in str(mine.error)


def twice(rank: int, n: int) -> None:
    model = wh.parallelize(build("own"))
    before = state_of(model.head)
    for target, text in (
        (model, "this model is parallelized already"),
        (nn.Sequential(model), "its member '0' is parallelized already"),
        (model.features, r"this Sequential belongs to a parallelized model \(as its 'features.0.weight'\)"),
        (model.head, r"belongs to a parallelized model \(as its 'head.weight'\)"),
    ):
        with pytest.raises(PlanError, match=text):
            wh.parallelize(target)
    assert same(state_of(model.head), before)
    with pytest.raises(PlanError, match=r"takes an nn.Module, got list"):
        wh.parallelize([model])  # type: ignore[arg-type]


def test_a_model_is_parallelized_once() -> None:
    world(2, twice)


@pytest.mark.parametrize("layout", [name for name, worlds in LAYOUTS.items() if 1 in worlds])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_world_of_one_without_torchrun_is_plain_torch(layout: str, optimizer: type[torch.optim.Optimizer]) -> None:
    """In this very process: no process group, no environment."""
    assert not torch.distributed.is_initialized()
    plain, model = build(layout), wh.parallelize(build(layout))
    theirs, mine = optimizer(plain.parameters(), lr=0.05), optimizer(model.parameters(), lr=0.05)
    for step in range(3):
        for m, o in ((plain, theirs), (model, mine)):
            o.zero_grad()
            backward(m, *batch(seed=step))
            wh.clip_grad_norm_(m, 0.5)
            o.step()
    assert relative_error(wh.full_state_dict(model), plain.state_dict()) < BAR
    assert type(model.state_dict()["head.weight"]) is Tensor
    assert wh.data_rank(model) == (0, 1)
    x, _ = batch()
    assert torch.allclose(model.eval()(x), plain.eval()(x), atol=1e-6)
    scaler = wh.GradScaler(model, init_scale=8.0)
    backward(model.train(), *batch(), scale=scaler.scale)
    scaler.step(mine)
    scaler.update()
    assert not torch.distributed.is_initialized()
    assert wh.reduce(3.0) == 3.0


def moved(rank: int, n: int) -> list[tuple[str, tuple[int, ...]]]:
    """What reaches the device: every tensor's shape at the moment it moves."""
    seen = []
    model = build("own")
    to = nn.Module._apply

    def apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        def looking(t: Tensor) -> Tensor:
            seen.append(tuple(t.shape))
            return fn(t)

        return to(self, looking, recurse)

    nn.Module._apply = apply
    wh.parallelize(model, device="cpu")
    assert all(p.device.type == "cpu" for p in model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    assert names
    return [(name, tuple(p.shape)) for name, p in model.named_parameters() if tuple(p.shape) not in seen] + [
        ("whole", shape) for shape in seen if shape == (11, 8)
    ]


def test_cut_parameters_move_as_parts() -> None:
    assert world(2, moved) == [[], []]


def different_models(rank: int, n: int) -> str:
    with pytest.raises(PlanError) as caught:
        wh.parallelize(build("own" if rank else "replica"))
    return str(caught.value)


def test_ranks_that_built_another_model_are_told() -> None:
    texts = world(3, different_models)
    assert len(set(texts)) == 1
    assert "ranks [1, 2] plan another model than rank 0" in texts[0]


def penalised(rank: int, n: int) -> float:
    """A gradient through kept values: the distance from a state_dict."""
    plain, model = build("own"), wh.parallelize(build("own"))
    pairs = [(m, {k: v.clone() for k, v in m.state_dict().items()}) for m in (plain, model)]
    for m, kept in pairs:
        m.load_state_dict(build("own", seed=3).state_dict())
        sum(F.mse_loss(p, kept[k], reduction="sum") for k, p in m.named_parameters()).backward()
    return relative_error(gradients(model), gradients(plain))


def test_a_penalty_on_kept_values_has_a_gradient() -> None:
    assert max(world(2, penalised)) < BAR


class Counted(nn.Module):
    """No whole parameter, but a buffer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([float(rank)]))
        with wh.split():
            self.head = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.scale)


def _buffer(rank: int, n: int) -> float:
    return float(wh.parallelize(Counted(rank + 5)).scale)


def test_buffers_start_equal_where_every_parameter_is_cut() -> None:
    assert world(2, _buffer) == [5.0, 5.0]


def _wrapped(rank: int, n: int, where: str) -> str:
    model: nn.Module = nn.Linear(4, 6)
    with pytest.raises((wh.PlanError, RuntimeError)) as caught:
        if where == "inside":
            dist.init_process_group("gloo")
            wh.parallelize(nn.Sequential(DistributedDataParallel(model)), default=wh.replica())
        elif where == "a member":
            whole = wh.parallelize(nn.Sequential(nn.Tanh(), model), default=wh.split())
            whole[1] = DistributedDataParallel(model)
            whole(torch.ones(2, 4))
        elif where == "a parent":
            DistributedDataParallel(nn.Sequential(wh.parallelize(model, default=wh.split())))(torch.ones(2, 4))
        else:
            DistributedDataParallel(wh.parallelize(model, default=wh.split()))
    return str(caught.value)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("inside", "0 is wrapped in DistributedDataParallel"),
        ("around", "is not needed"),
        ("a member", "1 is wrapped in DistributedDataParallel"),
        ("a parent", "this Linear runs inside a DistributedDataParallel"),
    ],
)
def test_torchs_ddp_is_kept_off(where: str, text: str) -> None:
    assert all(text in found for found in world(2, _wrapped, where))
