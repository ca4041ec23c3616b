"""The training loop around a pipelined model stays what it was: accumulation, clipping, scaling, dropout, freezing."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.pipeline_cases import CASES, WIDTH, annotated
from tests.parity.split_case import gradients_of
from tests.world import world

BAR = 1e-5
ROWS = [5, 4]


class _Both:
    """A pipelined model and its one-process twin, fed the same global batches."""

    def __init__(
        self, rank: int, name: str = "chain", prepare: Callable[[Any], None] = lambda model: None, **options: Any
    ):
        torch.manual_seed(0)
        self.case = CASES[name]
        self.model: Any = annotated(self.case, num_micro_batches=3, **options)
        prepare(self.model)
        self.alone: Any = copy.deepcopy(self.model)
        wh.parallelize(self.model)
        index, count = wh.data_rank(self.model)
        self.counts = ROWS[:count]
        self.here = slice(sum(self.counts[:index]), sum(self.counts[: index + 1]))
        torch.manual_seed(1)

    def batch(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        whole = self.case.batch(sum(self.counts))
        return {key: value[self.here] for key, value in whole.items()}, whole

    def error(self) -> float:
        return relative_error(gradients_of(self.model), gradients_of(self.alone))


def _handed_over(rank: int, n: int) -> bool:
    """Whether the parameters get the very tensors in which the schedule gathered their gradients."""
    both = _Both(rank)
    loss = both.model(**both.batch()[0])
    gathered = {grad.data_ptr() for grad in loss.grad_fn.held if grad is not None}
    loss.backward()
    return gathered == {p.grad.data_ptr() for p in both.model.parameters() if p.grad is not None}


@pytest.mark.parametrize("n", [1, 2])
def test_gradients_are_handed_over_and_not_copied(n: int) -> None:
    assert all(world(n, _handed_over))


def _adafactor(rank: int, n: int) -> float:
    """Reads whole parameters, which a stage has."""
    both = _Both(rank)
    optimizers = [torch.optim.Adafactor(model.parameters(), lr=0.1) for model in (both.model, both.alone)]
    for _ in range(2):
        mine, whole = both.batch()
        both.model(**mine).backward()
        both.alone(**whole).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = wh.full_state_dict(both.model)
    return max((state[name] - value).abs().max().item() for name, value in both.alone.state_dict().items())


@pytest.mark.parametrize("n", [2, 4])
def test_an_optimizer_that_reads_whole_parameters_steps_on_those_of_a_stage(n: int) -> None:
    assert max(world(n, _adafactor)) < 1e-4


def _accumulated(rank: int, n: int, how: str, name: str = "chain", **options: Any) -> float:
    both = _Both(rank, name, **options)
    for number in range(3):
        mine, whole = both.batch()
        if (how == "no_sync" and number < 2) or (how == "no_sync between" and number == 1):
            with wh.no_sync(both.model):
                both.model(**mine).backward()
        elif how == "scaled":
            (0.5 * both.model(**mine)).backward()
        elif how == "zero between":
            loss = both.model(**mine)
            both.model.zero_grad()
            both.alone.zero_grad()
            loss.backward()
        else:
            both.model(**mine).backward()
        (both.alone(**whole) * (0.5 if how == "scaled" else 1.0)).backward()
    return both.error()


@pytest.mark.parametrize("how", ["plain", "no_sync", "no_sync between", "scaled", "zero between"])
@pytest.mark.parametrize("name", ["chain", "tied"])
@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.matrix(keep=1)
def test_gradients_accumulate(how: str, name: str, n: int) -> None:
    assert max(world(n, _accumulated, how, name)) < BAR


def _together(rank: int, n: int) -> float:
    """Two forwards, one backward of their sum."""
    both = _Both(rank)
    (first, all_first), (second, all_second) = both.batch(), both.batch()
    (both.model(**first) + 2 * both.model(**second)).backward()
    (both.alone(**all_first) + 2 * both.alone(**all_second)).backward()
    return both.error()


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.matrix(keep=1)
def test_two_forwards_and_one_backward(n: int) -> None:
    assert max(world(n, _together)) < BAR


def _clipped(rank: int, n: int, name: str, norm_type: float) -> tuple[float, float, float]:
    both = _Both(rank, name)
    mine, whole = both.batch()
    both.model(**mine).backward()
    both.alone(**whole).backward()
    found = wh.clip_grad_norm_(both.model, 0.1, norm_type)
    expected = nn.utils.clip_grad_norm_(both.alone.parameters(), 0.1, norm_type)
    return float(found), float(expected), both.error()


@pytest.mark.parametrize("name", ["chain", "tied"])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.matrix(keep=1)
def test_the_norm_is_that_of_one_process(name: str, norm_type: float, n: int) -> None:
    for found, expected, error in world(n, _clipped, name, norm_type):
        assert found == pytest.approx(expected, rel=1e-5)
        assert error < BAR


def _scaled(rank: int, n: int) -> tuple[list[float], list[bool], float]:
    """Scales, whether steps were skipped, and the error of the last gradients."""
    both = _Both(rank)
    scaler = wh.GradScaler(both.model, init_scale=2.0**14, growth_interval=1)
    optimizer = torch.optim.SGD(both.model.parameters(), lr=0.0)
    scales, skipped, error = [], [], 0.0
    for number in range(3):
        mine, whole = both.batch()
        optimizer.zero_grad()
        both.alone.zero_grad()
        scaler.scale(both.model(**mine)).backward()
        if number == 1 and rank == n - 1:  # an overflow in the last stage
            next(p for p in both.model.parameters() if p.grad is not None).grad[0] = torch.inf
        before = scaler.get_scale()
        scaler.unscale_(optimizer)
        if number == 2:
            both.alone(**whole).backward()
            error = both.error()
        scaler.step(optimizer)
        scaler.update()
        scales.append(before)
        skipped.append(scaler.get_scale() < before)
    return scales, skipped, error


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.matrix(keep=1)
def test_an_overflow_in_one_stage_skips_the_step_everywhere(n: int) -> None:
    for scales, skipped, error in world(n, _scaled):
        assert scales == [2.0**14, 2.0**15, 2.0**14]
        assert skipped == [False, True, False]
        assert error < BAR


def _torchs_scaler(rank: int, n: int) -> None:
    both = _Both(rank)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(both.model.parameters(), lr=0.1)
    mine, _ = both.batch()
    scaler.scale(both.model(**mine)).backward()
    scaler.step(optimizer)


def test_torchs_own_scaler_raises() -> None:
    with pytest.raises(
        wh.PlanError, match=r"looks for overflow in this rank's gradients alone, but '\S+' is one stage's"
    ):
        world(2, _torchs_scaler)


class _Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)), nn.Linear(WIDTH, WIDTH)
        self.c = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.dropout(self.b(self.a(x)), 0.5, self.training)
        return F.cross_entropy(self.c(h), y)


def _dropped(rank: int, n: int, schedule: str) -> tuple[list[float], dict[str, list[float]]]:
    torch.manual_seed(0)
    model: Any = _Dropped()
    scopes = {name: wh.stage() for name in "abc"}
    wh.annotate(model, scopes, inside=wh.pipeline(num_micro_batches=3, schedule=schedule))  # type: ignore[call-overload]
    wh.parallelize(model)
    torch.manual_seed(1)
    x, y = torch.randn(6, WIDTH), torch.randint(5, (6,))
    losses = []
    for _ in range(2):
        loss = model(x, y)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses, {name: grad.flatten().tolist() for name, grad in gradients_of(model).items()}


def test_dropout_depends_on_no_schedule_and_no_number_of_ranks() -> None:
    first = world(1, _dropped, "1f1b")[0]
    assert first[0][0] != first[0][1]
    for n, schedule in ((1, "gpipe"), (2, "interleaved"), (3, "1f1b"), (3, "zero_bubble")):
        for losses, gradients in world(n, _dropped, schedule):
            assert losses == pytest.approx(first[0], rel=1e-6)
            for name, values in gradients.items():
                assert values == pytest.approx(first[1][name], rel=1e-4, abs=1e-7)


def _frozen(rank: int, n: int, pattern: str, **options: Any) -> float:
    def freeze(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name[0] not in pattern)

    both = _Both(rank, prepare=freeze, **options)
    for _ in range(2):
        mine, whole = both.batch()
        both.model(**mine).backward()
        both.alone(**whole).backward()
    return both.error()


@pytest.mark.parametrize("pattern", ["a", "b", "d", "ab", "cd", "abc"])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.matrix(keep=1)
def test_frozen_stages(pattern: str, n: int) -> None:
    assert max(world(n, _frozen, pattern)) < BAR


def _autocast(rank: int, n: int, **options: Any) -> float:
    both = _Both(rank, **options)
    mine, whole = both.batch()
    with torch.autocast("cpu", torch.bfloat16):
        both.model(**mine).backward()
        for rows in torch.arange(len(whole["y"])).tensor_split(3):
            part = both.alone(**{key: value[rows] for key, value in whole.items()})
            (part * (len(rows) / len(whole["y"]))).backward()
    return both.error()


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.matrix(keep=1)
def test_autocast(n: int) -> None:
    assert max(world(n, _autocast)) < 5e-3  # beside the micro-batches one after the other, in bfloat16


def _in_parts(rank: int, n: int, how: str) -> list[float]:
    options = {"schedule": "zero_bubble"}
    if how == "autocast":
        return [_autocast(rank, n, **options) / 500]  # its bar is that much higher
    if how == "frozen":
        return [_frozen(rank, n, pattern, **options) for pattern in ("a", "b", "d", "ab", "abc")]
    return [_accumulated(rank, n, how, **options)]


@pytest.mark.parametrize("how", ["plain", "no_sync", "scaled", "autocast", "frozen"])
@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.matrix(keep=0)
def test_a_backward_in_two_parts_changes_nothing_of_it(how: str, n: int) -> None:
    for errors in world(n, _in_parts, how):
        assert max(errors) < BAR


def _used(rank: int, n: int) -> list[str]:
    """What the user is told of outputs that a pipeline in training does not have, and of a second backward."""
    said = []
    both = _Both(rank, "nests")
    mine, _ = both.batch()
    out = both.model(**mine)
    for use in (lambda z: z + 1, lambda z: z.argmax(1), lambda z: torch.relu(z), lambda z: z[0]):
        with pytest.raises(wh.LayoutError) as caught:
            use(out["logits"])
        said.append(str(caught.value))
    assert float(out["accuracy"]) >= 0
    out["loss"].backward()
    with pytest.raises((wh.LossError, RuntimeError)) as again:
        out["loss"].backward()
    return [*said, str(again.value)]


def test_what_a_pipeline_does_not_have_says_why() -> None:
    for *uses, again in world(2, _used):
        for text in uses:
            assert "output of shape (" in text and "model.eval()" in text
        assert "second time" in again or "twice" in again


def _evaluated(rank: int, n: int) -> tuple[float, int, int]:
    both = _Both(rank, "outputs")
    mine, _ = both.batch()
    both.model.eval()
    with torch.no_grad():
        error = float((both.model(**mine) - both.alone.eval()(**mine)).abs().max())
        programs = len(both.model._whale_runtime.programs)
        both.model(**mine)
    return error, programs, len(both.model._whale_runtime.programs)


@pytest.mark.parametrize("n", [1, 3, 4, 8])
@pytest.mark.matrix(keep=1)
def test_every_rank_gets_what_a_pipeline_evaluates(n: int) -> None:
    for error, before, after in world(n, _evaluated):
        assert error < 1e-6
        assert before == after


def _numbers(rank: int, n: int, name: str) -> float:
    """Loss and accuracy in evaluation, of the pipeline's own batch; replicas may evaluate more or less often."""
    both = _Both(rank, name)
    error = 0.0
    both.model.eval()
    both.alone.eval()
    with torch.no_grad():
        for _ in range(2 + both.here.start):
            mine, _ = both.batch()
            found, expected = both.model(**mine), both.alone(**mine)
            if isinstance(expected, Tensor):
                found, expected = {"loss": found}, {"loss": expected}
            error = max(error, *(float((found[key] - expected[key]).abs().max()) for key in expected))
    return error


@pytest.mark.parametrize("name", ["chain", "nests", "losses"])
@pytest.mark.parametrize("n", [1, 4, 8])
@pytest.mark.matrix(keep=1)
def test_numbers_in_evaluation_are_those_of_the_whole_batch(name: str, n: int) -> None:
    assert max(world(n, _numbers, name)) < 1e-6


def _frozen_later(rank: int, n: int) -> float:
    both = _Both(rank)
    error = 0.0
    for frozen in ("", "ab", "d"):
        for m in (both.model, both.alone):
            m.zero_grad()
            for name, parameter in m.named_parameters():
                parameter.requires_grad_(name[0] not in frozen)
        mine, whole = both.batch()
        both.model(**mine).backward()
        both.alone(**whole).backward()
        error = max(error, both.error())
    return error


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.matrix(keep=1)
def test_what_is_frozen_later(n: int) -> None:
    assert max(world(n, _frozen_later)) < BAR


def _replaced(rank: int, n: int) -> None:
    both = _Both(rank)
    mine, _ = both.batch()
    both.model(**mine).backward()
    both.model.d = nn.Linear(WIDTH, 5)
    both.model(**mine)


def test_a_parameter_that_is_replaced_later_is_refused() -> None:
    with pytest.raises(wh.PlanError, match=r"parameter 'd\.weight' was replaced after wh\.parallelize"):
        world(2, _replaced)


def _copied(rank: int, n: int) -> str:
    both = _Both(rank)
    mine, _ = both.batch()
    both.model(**mine).backward()
    with pytest.raises(wh.PlanError) as caught, torch.no_grad():
        copy.deepcopy(both.model).eval()(**mine)
    return str(caught.value)


def test_a_copy_of_a_pipelined_model_runs_nothing() -> None:
    for text in world(2, _copied):
        assert "has the values of this rank's stages only" in text and "wh.full_state_dict(model)" in text


def _recorded(rank: int, n: int) -> list[tuple[int, bool]]:
    """Kinds of calls that the current plan tells, and whether its text does."""
    both = _Both(rank)
    plans = [wh.plan(both.model)]
    for rows in (6, 6, 7):
        both.model(**both.case.batch(rows))
        plans.append(wh.plan(both.model))
    both.model.eval()
    with torch.no_grad():
        both.model(**both.case.batch(6))
    plans.append(wh.plan(both.model))
    assert plans[0] == plans[-1]
    return [(plan.programs, f"{plan.programs} kind" in str(plan)) for plan in plans]


def test_the_current_plan_tells_how_many_kinds_of_calls_were_recorded() -> None:
    for found in world(2, _recorded):
        assert found == [(0, False), (1, True), (1, True), (2, True), (3, True)]


class _Refused(nn.Module):
    """Between its stages it reads a value where the length is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return h.sum() if h.shape[1] % 2 and h.max() > 0 else self.b(h).sum()


def _many_kinds(rank: int, n: int) -> int:
    model: Any = _Refused()
    wh.parallelize(wh.annotate(model, {"a": wh.stage(), "b": wh.stage()}, inside=wh.pipeline()))
    with mock.patch("whale_torch.strategies.pipeline.programs._MOST", 3):
        for length in (1, 2, 3, 4, 6, 8, 2, 10):
            with pytest.raises(wh.TraceError) if length % 2 else contextlib.nullcontext():
                model(torch.ones(4, length, WIDTH)).backward()
    return len(model._whale_runtime.programs)


def test_calls_that_were_refused_are_no_programs_to_forget() -> None:
    assert world(1, _many_kinds) == [3]


class _Mixed(nn.Module):
    """The first and the last stage share a weight in bfloat16 and one in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.a, self.b = nn.Embedding(7, WIDTH, dtype=torch.bfloat16), nn.Linear(WIDTH, WIDTH), nn.Module()
        self.b.head, self.b.c = nn.Linear(WIDTH, 7, bias=False, dtype=torch.bfloat16), nn.Linear(WIDTH, WIDTH)
        self.b.head.weight, self.b.c.weight = self.words.weight, self.a.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.b.c(self.a(self.words(x).float()).tanh())
        return F.cross_entropy(self.b.head(h.bfloat16()).float(), y)


def _mixed(rank: int, n: int) -> tuple[float, float, set[tuple[torch.dtype, ...]]]:
    """Errors of the float32 and of the bfloat16 gradients, and which dtypes are averaged together."""
    torch.manual_seed(0)
    model: Any = _Mixed()
    alone = copy.deepcopy(model)
    wh.annotate(
        model,
        {"words|a": wh.stage(), r"b\.head|b\.c": wh.stage()},
        inside=(wh.replica(), wh.pipeline(num_micro_batches=2, num_ranks=2)),
    )
    wh.parallelize(model)
    index, count = wh.data_rank(model)
    torch.manual_seed(1)
    x, y = torch.randint(7, (8,)), torch.randint(7, (8,))
    model(x.tensor_split(count)[index], y.tensor_split(count)[index]).backward()
    alone(x, y).backward()
    found, expected = gradients_of(model), gradients_of(alone)
    half = {name for name, value in expected.items() if value.dtype is torch.bfloat16}
    errors = [
        relative_error({k: found[k].float() for k in names}, {k: expected[k].float() for k in names})
        for names in (expected.keys() - half, half)
    ]
    kinds = {tuple({p.dtype for p in one.parameters}) for one in model._whale_runtime.reducers}
    return errors[0], errors[1], kinds


@pytest.mark.parametrize("n", [2, 4])
def test_ties_of_several_dtypes_are_averaged_each_in_its_own(n: int) -> None:
    for single, half, kinds in world(n, _mixed):
        assert single < 5e-3 and half < 3e-2  # activations pass through bfloat16
        assert kinds == {(torch.float32,), (torch.bfloat16,)}
