"""Pipelines on n ranks beside one process: loss, all gradients, one SGD step, evaluation; for every schedule."""

from __future__ import annotations

import copy
import io
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.pipeline_cases import CASES, annotated
from tests.parity.split_case import gradients_of
from tests.world import world
from whale_torch.planning.schedules import NAMES, Action, Edges, from_table, make
from whale_torch.planning.schedules.actions import Kind

BAR = 1e-5


def _loss(out: Any) -> Tensor:
    return out["loss"] if isinstance(out, dict) else out


def _parts(num: int, rows: str) -> list[int]:
    return ([4] * 8 if rows == "even" else [7, 6, 3, 1, 6, 4, 2, 8])[:num]


def _in_turn(model: Any, batch: dict[str, Tensor], counts: list[int], number: int) -> Tensor:
    """One process on the micro-batches one after the other, as statistics of a batch are those of a micro-batch.

    Running ones are the first replica's, so its micro-batches come last and the others leave no trace.
    """
    total = sum(counts)
    starts = [sum(counts[:k]) for k in range(len(counts))]
    loss = torch.zeros((), dtype=next(model.parameters()).dtype)
    for start, count in reversed(list(zip(starts, counts, strict=True))):
        state = {key: value.clone() for key, value in model.named_buffers()}
        for rows in torch.arange(start, start + count).tensor_split(min(number, count)):
            loss = loss + model(**{key: value[rows] for key, value in batch.items()}) * (len(rows) / total)
        if start:
            for key, value in model.named_buffers():
                value.data.copy_(state[key])
    return loss


def _trained(
    rank: int, n: int, name: str, rows: str, steps: int, options: dict[str, Any]
) -> tuple[list[float], list[float], float, int]:
    """(errors of the loss, of gradients, of parameters after the steps, programs)"""
    case = CASES[name]
    torch.manual_seed(0)
    dtype = torch.float64 if case.updates else torch.float32  # statistics of few rows magnify what rounding does
    if case.updates:
        options = options | {"num_micro_batches": 2}
    model: Any = annotated(case, **options).to(dtype)
    alone: Any = copy.deepcopy(model)
    wh.parallelize(model)
    index, count = wh.data_rank(model)
    counts = _parts(count, rows)
    torch.manual_seed(1)
    batches = [case.batch(sum(counts)) for _ in range(steps)]
    batches = [{k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()} for batch in batches]
    here = slice(sum(counts[:index]), sum(counts[: index + 1]))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    losses, gradients = [], []
    for batch in batches:
        mine = {key: value[here] for key, value in batch.items()}
        values = []
        for m, given in ((model, mine), (alone, batch)):
            m.zero_grad()
            if case.updates and m is alone:
                loss = _in_turn(m, given, counts, options["num_micro_batches"])
            else:
                out = m(**given)
                loss = _loss(out) if case.outside is None else case.outside(out, given)
            loss.backward()
            values.append(loss.detach())
        if case.outside is None:
            losses.append(float((values[0] - values[1]).abs()))
        gradients.append(relative_error(gradients_of(model), gradients_of(alone)))
        for optimizer in optimizers:
            optimizer.step()
    state, expected = wh.full_state_dict(model), alone.state_dict()
    return losses, gradients, relative_error(state, expected), len(model._whale_runtime.programs)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rows", ["even", "uneven"])
@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.matrix(keep=2)
def test_a_pipeline_is_one_process(name: str, n: int, rows: str, schedule: str) -> None:
    options = {"num_micro_batches": 3, "schedule": schedule}
    for losses, gradients, state, _ in world(n, _trained, name, rows, 2, options):
        assert max([*losses, *gradients, state]) < BAR


def _peaks(rank: int, n: int, schedule: str, number: int) -> tuple[int, int]:
    """(forwards that waited for their backward at once, what the schedule allows)"""
    torch.manual_seed(0)
    model: Any = annotated(CASES["chain"], num_micro_batches=number, schedule=schedule)
    wh.parallelize(model)
    batch = CASES["chain"].batch(2 * number)
    model(**batch).backward()
    return model._whale_runtime.peak, make(schedule, 4, number, n).peak_in_flight[rank]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.matrix(keep=1)
def test_no_more_micro_batches_wait_than_the_schedule_says(n: int, schedule: str) -> None:
    for found, allowed in world(n, _peaks, schedule, 6):
        assert found == allowed


def _memory(rank: int, n: int) -> tuple[int, int]:
    """(bytes of the parameters' memory that a rank keeps, of all parameters)"""
    model: Any = annotated(CASES["chain"], num_micro_batches=2)
    wh.parallelize(model)
    model(**CASES["chain"].batch(4)).backward()
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert all(p.shape == q.shape for p, q in zip(model.parameters(), CASES["chain"].make().parameters(), strict=True))
    return sum(storages.values()), sum(p.nbytes for p in model.parameters())


def test_a_rank_keeps_memory_for_its_own_stages_only() -> None:
    kept = world(4, _memory)
    own = sum(found for found, _ in kept)
    assert own < kept[0][1] + 4 * 64  # and a few bytes for the shapes of the others


def _written(rank: int, n: int) -> str:
    model: Any = annotated(CASES["chain"], num_micro_batches=2)
    wh.parallelize(model)
    model(**CASES["chain"].batch(4)).backward()
    with pytest.raises(wh.CheckpointError) as caught:
        torch.save(model.state_dict(), io.BytesIO())
    before = wh.full_state_dict(model)
    model.load_state_dict({key: value + 1 for key, value in before.items()})
    after = wh.full_state_dict(model)
    assert all(torch.equal(after[key], before[key] + 1) for key in before)
    return str(caught.value)


def test_other_stages_are_not_saved_unawares() -> None:
    for text in world(2, _written):
        assert "belongs to a stage of rank" in text and "wh.full_state_dict(model)" in text


def _zero_bubble(rank: int, n: int) -> tuple[float, int, list[str], list[str]]:
    """(error, peak, what ran and what it left behind, with the calls that are kept then, as the table has it)"""
    from whale_torch.strategies.pipeline.step import Step

    ran = []

    def noted(name: str, kind: str) -> None:
        original = getattr(Step, name)

        def run(self: Any, stage: int, number: int, *rest: Any) -> None:
            original(self, stage, number, *rest)
            ran.append(f"{kind}{stage}.{number} {len(self._store)}")

        setattr(Step, name, run)

    for name, kind in (("forward", "F"), ("input_part", "I"), ("weight_part", "W"), ("backward", "B")):
        noted(name, kind)
    schedule = make("zero_bubble", 4, 4, n)
    case = CASES["chain"]
    torch.manual_seed(0)
    model: Any = annotated(case, num_micro_batches=4, schedule="zero_bubble")
    alone: Any = copy.deepcopy(model)
    wh.parallelize(model)
    batch = case.batch(8)
    for m in (model, alone):
        m(**batch).backward()
    kept, expected = 0, []
    for action in schedule.table[rank]:
        kept += {"F": 0, "I": 1, "W": -1}[action.kind]
        expected.append(f"{action} {kept}")
    peak = model._whale_runtime.peak
    assert peak == schedule.peak_in_flight[rank]
    return relative_error(gradients_of(model), gradients_of(alone)), peak, ran, expected


def test_weight_gradients_wait_as_long_as_the_schedule_says() -> None:
    for error, peak, ran, expected in world(4, _zero_bubble):
        assert error < BAR and peak == 4
        assert ran == expected


def _mutated(rank: int, n: int, how: str) -> float:
    """What the bar must catch."""
    from whale_torch.strategies.pipeline import places, run, step

    if how == "mean of means":
        run.Run._seeds = lambda self, action: [torch.full((), 0.3)] if action.stage == 3 else []  # type: ignore[method-assign]
    elif how == "weight part left out":
        step.Step.weight_part = lambda self, stage, number: (  # type: ignore[method-assign]
            self._waiting.remove((stage, number)),
            None if number == 1 else self._store.finish(stage, number),
            self._ended(stage, number),
        )
    elif how == "averaged too early":
        run._last_backwards = lambda row: {a.stage: a.micro_batch for a in row if a.kind == "W" and not a.micro_batch}
    elif how == "tie not summed":
        places.Places._tie = lambda self, ranks, channel: self._mesh.group(  # type: ignore[method-assign]
            "alone", tuple((r,) for r in range(self._plan.world)), channel=channel
        )
    elif how == "skip dropped":
        original = step.Step.backward

        def backward(self: Any, stage: int, number: int, seeds: Any = ()) -> None:
            alive = self._alive[stage, number]
            if len(alive.edges) > 1:
                alive.edges[max(alive.edges)] = [None for _ in alive.edges[max(alive.edges)]]
            original(self, stage, number, seeds)

        step.Step.backward = backward  # type: ignore[method-assign]
    name = {"tie not summed": "tied", "skip dropped": "skips"}.get(how, "chain")
    options = {"num_micro_batches": 3} | ({"schedule": "zero_bubble"} if how in PARTS else {})
    options |= {"num_ranks": 2} if how == "averaged too early" else {}
    _, gradients, state, _ = _trained(rank, n, name, "uneven", 1, options)
    return max([*gradients, state])


PARTS = ("weight part left out", "averaged too early")


@pytest.mark.parametrize("how", ["mean of means", "tie not summed", "skip dropped", *PARTS])
def test_the_suite_catches(how: str) -> None:
    assert max(world(4, _mutated, how)) > 1e-3


def _random_table(seed: int, stages: int, batches: int, ranks: int, *, parts: bool = False) -> tuple[str, ...]:
    """A legal table: each rank takes, in turns at random, any action whose inputs were made.

    Stages lie on ranks at random, and every rank has one. parts: some backwards are in two parts.
    """
    chosen = random.Random(seed)
    edges, made = Edges.of(stages), set()
    places = [*range(ranks), *(chosen.randrange(ranks) for _ in range(stages - ranks))]
    chosen.shuffle(places)
    left: list[list[Action]] = [[] for _ in range(ranks)]
    for stage, place in enumerate(places):
        for batch in range(batches):
            kinds: tuple[Kind, ...] = ("F", "I", "W") if parts and chosen.random() < 0.7 else ("F", "B")
            left[place] += [Action(kind, stage, batch) for kind in kinds]
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    while any(left):
        rank = chosen.choice([r for r in range(ranks) if left[r]])
        ready = [action for action in left[rank] if made.issuperset(edges.needs(action))]
        if ready:
            action = chosen.choice(ready)
            left[rank].remove(action)
            rows[rank].append(action)
            made.add(action.result)
    return from_table([" ".join(map(str, row)) for row in rows]).rows


def _by_table(rank: int, n: int, name: str, rows: str, table: Any) -> float:
    losses, gradients, state, _ = _trained(rank, n, name, rows, 1, {"schedule": table})
    return max([*losses, *gradients, state])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("n", "name"),
    [(2, "skips"), (3, "nests"), (4, "twice"), (4, "tied"), (8, "skips"), (4, "outputs"), (2, "twice"), (6, "tied")],
)
@pytest.mark.matrix(keep=1)
def test_random_legal_tables_run_to_the_end(n: int, name: str, seed: int) -> None:
    batches = 3 if seed % 2 else 9  # which is more than there are rows
    table = _random_table(seed, 4, batches, 3 if n == 6 else min(n, 4), parts=seed % 3 == 0)
    assert max(world(n, _by_table, name, "uneven", table, timeout=30)) < BAR


@pytest.mark.parametrize("name", ["tied", "outputs"])
@pytest.mark.matrix(keep=1)
def test_stages_are_where_the_table_has_them(name: str) -> None:
    """The first and the last stage on one rank, the two between on the other; two pipelines, rows as tuples too."""
    inner = [("F", 1, 0), ("F", 2, 0), ("F", 1, 1), ["F", 2, 1], "B2.0", "B1.0", "B2.1", "B1.1"]
    table = ["F0.0 F0.1 F3.0 B3.0 F3.1 B3.1 B0.0 B0.1", inner]
    assert max(world(4, _by_table, name, "uneven", table)) < BAR


def _kept(rank: int, n: int, table: Any) -> tuple[list[str], int]:
    """(names of the parameters with memory here, forwards that waited for their backward at once)"""
    model: Any = annotated(CASES["chain"], schedule=table)
    wh.parallelize(model)
    model(**CASES["chain"].batch(4)).backward()
    own = [name for name, p in model.named_parameters() if p.untyped_storage().nbytes() > 4]
    assert own == [name for name, p in model.named_parameters() if p.grad is not None]
    return own, model._whale_runtime.peak


def test_a_rank_holds_the_stages_of_its_row() -> None:
    schedule = from_table(["F0.0 F3.0 B3.0 F0.1 F3.1 B3.1 B0.1 B0.0", "F1.0 F2.0 B2.0 B1.0 F1.1 F2.1 B2.1 B1.1"])
    (first, first_peak), (second, second_peak) = world(2, _kept, schedule)
    assert first == ["a.weight", "a.bias", "d.weight", "d.bias"]
    assert second == ["b.0.weight", "b.0.bias", "c.weight", "c.bias"]
    assert (first_peak, second_peak) == schedule.peak_in_flight == (3, 2)
