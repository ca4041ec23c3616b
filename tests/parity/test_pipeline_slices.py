"""A replica inside a stage beside a split: its modules run on slices of each micro-batch, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.split_case import gradients_of
from tests.world import world
from whale_torch.errors import PlanError, TraceError
from whale_torch.strategies.pipeline.sliced import OnSlices

BAR = 1e-5
WIDTH = 8
Batch = dict[str, Tensor]


class Layer(nn.Module):
    """Attention-like mixing over positions, then a feed-forward; members with and without a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, h: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(h + self.mix(h * mask))
        return self.down(self.up(h).relu()) + h, mask


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.first, self.second = Layer(), Layer()
        self.head = nn.Linear(WIDTH, 13)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        mask = (ids != 0).float().unsqueeze(-1)
        h, mask = self.first(self.embed(ids), mask)
        h, _ = self.second(h, mask)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), ignore_index=-100)


class TimeFirst(nn.Module):
    """The samples are the second dim of what goes through the stages, and a tensor without samples goes in too."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(5, 1, WIDTH))
        self.a, self.b, self.c = Shifted(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 13)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = F.one_hot(ids, WIDTH + 5)[..., :WIDTH].float().transpose(0, 1)
        h = self.b(self.a(h, shift=self.place)).tanh()
        return F.cross_entropy(self.c(self.a(h, shift=h.new_ones(5, 1, WIDTH))).flatten(0, 1), labels.t().flatten())


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH)

    def forward(self, h: Tensor, shift: Tensor) -> Tensor:
        out: Tensor = self.layer(h * shift + shift)[0]
        return out


class Loss(nn.Module):
    """Its scalar is seen, so it is opened; the layer inside runs on slices."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 13)

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(h).flatten(0, 1), labels.flatten())


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.b, self.loss = nn.Embedding(13, WIDTH), nn.Linear(WIDTH, WIDTH), Loss()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        out: Tensor = self.loss(self.b(self.embed(ids)), labels.clamp(min=0))
        return out


class Outputs(Net):
    """The loss is the user's, of what a split gives."""

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        mask = (ids != 0).float().unsqueeze(-1)
        out: Tensor = self.head(self.second(*self.first(self.embed(ids), mask))[0])
        return out


class Tied(Net):
    """The embedding runs on slices, the head whole, on one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def _batch(rows: int) -> Batch:
    ids = torch.randint(0, 13, (rows, 5))
    return {"ids": ids, "labels": torch.where(torch.rand(rows, 5) < 0.3, -100, ids.flip(1))}


def _positive(rows: int) -> Batch:
    return {key: x.clamp(min=0) for key, x in _batch(rows).items()}


Inside = Callable[[], tuple[Any, ...]]
SLICED: Inside = lambda: (wh.stage(), wh.replica())  # noqa: E731
SPLIT: Inside = lambda: (wh.stage(), wh.split())  # noqa: E731
WHOLE: Inside = lambda: (wh.stage(),)  # noqa: E731


def _in_stages(model: nn.Module, *stages: dict[str, Inside], **options: Any) -> nn.Module:
    scopes: dict[str, Any] = {}
    for patterns in stages:
        stage = wh.stage()
        for pattern, inside in patterns.items():
            scopes[pattern] = (stage, *inside()[1:])
    return wh.annotate(model, scopes, inside=(wh.pipeline(num_micro_batches=3, **options),))


CASES: dict[str, tuple[Callable[..., nn.Module], Callable[[int], Batch]]] = {
    "members": (
        lambda **options: _in_stages(
            Net(),
            {"embed": SLICED, r"first\.(mix|norm)": SLICED, r"first\.(up|down)": SPLIT},
            {r"second\.(mix|norm)": SPLIT, r"second\.(up|down)": SLICED, "head": SPLIT},
            **options,
        ),
        _batch,
    ),
    "layers": (
        lambda **options: _in_stages(
            Net(), {"embed": SPLIT, "first": SLICED}, {"second": WHOLE}, {"head": SPLIT}, **options
        ),
        _batch,
    ),
    "time first": (
        lambda **options: _in_stages(TimeFirst(), {"a": SLICED, "b": SPLIT}, {"c": SLICED}, **options),
        _positive,
    ),
    "loss": (
        lambda **options: _in_stages(WithLoss(), {"embed": SLICED}, {"b": SPLIT, "loss": SLICED}, **options),
        _positive,
    ),
    "outputs": (
        lambda **options: _in_stages(
            Outputs(), {"embed": SLICED, "first": SPLIT}, {"second": SLICED, "head": SPLIT}, **options
        ),
        _positive,
    ),
    "tied": (
        lambda **options: _in_stages(
            Tied(), {"embed": SLICED, "first": SLICED}, {"second": SPLIT}, {"head": WHOLE}, **options
        ),
        _batch,
    ),
}


def _trained(
    rank: int, n: int, name: str, counts: list[int], options: dict[str, Any]
) -> tuple[float, float, float, int]:
    """(errors of the loss, of gradients, of parameters after two SGD steps, modules that ran on slices)"""
    make, batch_of = CASES[name]
    torch.manual_seed(0)
    model: Any = make(**options)
    alone: Any = copy.deepcopy(model)
    wh.parallelize(model)
    index, count = wh.data_rank(model)
    counts = counts[:count]
    here = slice(sum(counts[:index]), sum(counts[: index + 1]))
    calls = _count_slices()
    torch.manual_seed(1)
    errors, gradients = [], []
    for _ in range(2):
        batch = batch_of(sum(counts))
        losses = []
        for m, given in ((model, {k: v[here] for k, v in batch.items()}), (alone, batch)):
            m.zero_grad()
            loss = _loss(m, given)
            loss.backward()
            losses.append(loss.detach())
        errors.append(float((losses[0] - losses[1]).abs()))
        gradients.append(relative_error(gradients_of(model), gradients_of(alone)))
        for m in (model, alone):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
    return max(errors), max(gradients), relative_error(wh.full_state_dict(model), alone.state_dict()), len(calls)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    if not any(isinstance(module, Outputs) for module in model.modules()):
        return model(**batch)
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def _count_slices() -> list[OnSlices]:
    calls: list[OnSlices] = []
    before = OnSlices.__call__

    def counted(self: OnSlices, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return before(self, *args, **kwargs)

    OnSlices.__call__ = counted  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize("counts", [[6, 6], [7, 2]], ids=["even", "uneven"])
@pytest.mark.parametrize(("n", "num_ranks"), [(2, 1), (4, 1), (4, 2), (3, 1), (8, 2)])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.matrix(keep=2)
def test_modules_on_slices_are_one_process(name: str, n: int, num_ranks: int, counts: list[int], schedule: str) -> None:
    results = world(n, _trained, name, counts, {"schedule": schedule, "num_ranks": num_ranks})
    for loss, gradients, state, _ in results:
        assert max(loss, gradients, state) < BAR
    assert sum(calls for *_, calls in results) > 0


class Dropped(nn.Module):
    """Random numbers inside slices, once with a checkpoint that draws them again, and behind them in whole modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = Masked(), Masked(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        ones = torch.ones(*ids.shape, WIDTH)
        return self.d(self.c(self.b(self.a(ones)))).square().mean()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(WIDTH, WIDTH, bias=False), []
        nn.init.eye_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        def masked(x: Tensor) -> Tensor:
            mask = F.dropout(torch.ones_like(x))
            self.seen.append(mask)
            return self.layer(x) * mask

        out: Tensor = checkpoint(masked, x, use_reentrant=False)
        return out


def _random(rank: int, n: int) -> tuple[float, list[list[list[float]]], list[list[float]]]:
    """(loss, masks of 'a' and 'b' by micro-batch, of the forward and of the recomputation, gradients)"""
    torch.manual_seed(0)
    model: Any = _in_stages(Dropped(), {"a": SLICED, "b": SLICED}, {"c": SPLIT, "d": WHOLE}, num_ranks=1)
    wh.parallelize(model, seed=3)
    loss = model(**_batch(6))
    loss.backward()
    masks = [[mask.flatten().tolist() for mask in part.seen] for part in (model.a, model.b)]
    return loss.item(), masks, [part.layer.weight.grad.flatten().tolist() for part in (model.a, model.b)]


def test_random_numbers_differ_on_slices_and_are_drawn_again_alike() -> None:
    first, again = world(2, _random), world(2, _random)
    assert first == again
    (loss, mine, gradients), (other_loss, theirs, other_gradients) = first
    assert loss == other_loss and gradients == other_gradients
    for part, other in zip(mine, theirs, strict=True):
        assert len(part) == 6  # three micro-batches, forward and recomputed
        assert len({tuple(mask) for mask in part}) == 3
        assert not {tuple(mask) for mask in part} & {tuple(mask) for mask in other}
    assert not {tuple(mask) for mask in mine[0]} & {tuple(mask) for mask in mine[1]}


def _evaluated(rank: int, n: int) -> tuple[float, float]:
    """(error of the outputs in eval, of those under no_grad in training)"""
    torch.manual_seed(0)
    model: Any = CASES["outputs"][0](num_ranks=2)
    alone: Any = copy.deepcopy(model)
    wh.parallelize(model)
    torch.manual_seed(1)
    errors = []
    for training in (False, True):
        ids = _positive(7)["ids"]
        with torch.no_grad():
            errors.append(float((model.train(training)(ids) - alone.train(training)(ids)).abs().max()))
    return errors[0], errors[1]


def test_outputs_are_whole() -> None:
    for errors in world(4, _evaluated):
        assert max(errors) < BAR


class Gives(nn.Module):
    """What one of its members gives, or is given, is no row for each sample."""

    def __init__(self, how: Callable[[Tensor], Tensor], before: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        self.embed, self.part, self.last = nn.Embedding(13, WIDTH), Part(how), nn.Linear(WIDTH, 13)
        self.before = before

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.part(self.before(self.embed(ids))).view(len(ids), -1, WIDTH)
        return F.cross_entropy(self.last(h).mean(1), labels[:, 0].clamp(min=0))


class Part(nn.Module):
    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(WIDTH, WIDTH), how
        self.register_buffer("count", torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        return self.how(self.layer(h))


class Counting(Part):
    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return super().forward(h)


def _gives(how: Callable[[Tensor], Tensor], **options: Any) -> nn.Module:
    return _in_stages(Gives(how, **options), {"embed": SPLIT, "part": SLICED}, {"last": WHOLE}, num_ranks=1)


def _with(part: nn.Module) -> nn.Module:
    model = Gives(lambda h: h)
    model.part = part
    return _in_stages(model, {"embed": SPLIT, "part": SLICED}, {"last": WHOLE}, num_ranks=1)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "an output of all positions": (
        lambda: _gives(lambda h: h.flatten(0, 1)),
        r"it gives a tensor of shape \(\d+, 8\) that has not one row for each sample",
    ),
    "an input of all positions": (
        lambda: _gives(lambda h: h, before=lambda h: h.flatten(0, 1)),
        r"it is given a tensor of shape \(\d+, 8\) that has not one row for each sample",
    ),
    "a buffer": (lambda: _with(Counting(lambda h: h)), r"it writes into its buffer 'part\.count'"),
    "in place": (
        lambda: _with(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))),
        r"it changes its input in place",
    ),
    "statistics": (
        lambda: _with(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(WIDTH, WIDTH))),
        r"'part\.0' is a BatchNorm1d in a wh\.replica inside a stage, beside a split",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_slices_is_refused_by_the_plan(name: str) -> None:
    make, message = REFUSED[name]
    inputs = None if name == "statistics" else _batch(6)  # names and kinds of modules tell
    with pytest.raises((TraceError, PlanError), match=message) as caught:
        wh.plan(make(), cluster=wh.Cluster.of(1, 2), sample_inputs=inputs)
    assert "leave" in str(caught.value) and "replica" in str(caught.value)


def _refused(rank: int, n: int, name: str) -> str:
    model: Any = REFUSED[name][0]()
    wh.parallelize(model)
    try:
        model(**_batch(6))
    except TraceError as error:
        return str(error)
    return ""


def test_what_has_no_slices_is_refused_by_the_first_call() -> None:
    first, second = world(2, _refused, "a buffer")
    assert first == second and "writes into its buffer" in first


def test_the_plan_says_what_slices_move() -> None:
    """6 samples of 5 positions: the output of 'part', and the gradient of its input; each rank sends half of both."""
    model = _gives(lambda h: h)
    plan = wh.plan(model, cluster=wh.Cluster.of(1, 2), sample_inputs=_batch(6))
    assert plan.pipeline is not None
    assert sum(plan.pipeline.sliced_bytes) == 2 * 6 * 5 * WIDTH * 4
    (row,) = [row for row in plan.traffic if row.what == "slices"]
    assert row.where == "2 ranks" and row.sent_bytes == 6 * 5 * WIDTH * 4
    assert "outputs of modules on slices" in str(plan)
    assert wh.Plan.from_json(plan.to_json()) == plan
