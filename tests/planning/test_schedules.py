"""Schedules: complete, deadlock-free, within their memory, as long as the papers say, and the same as torch's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as peer

from whale_torch.errors import PlanError
from whale_torch.planning.schedules import (
    NAMES,
    Action,
    Costs,
    Edges,
    Message,
    Schedule,
    bubble_formula,
    from_table,
    make,
    simulate,
    validate,
)

SIZES = [(s, m, r) for s in range(1, 9) for r in range(1, s + 1) for m in (1, 2, 3, 4, 5, 7, 8, 11)]


def written(row: Sequence[Action]) -> str:
    return " ".join(map(str, row))


def graph(schedule: Schedule, edges: Edges | None = None) -> dict[Action, set[Action]]:
    """What comes before each action: the one before it on its rank, and what it needs. A second way to say it."""
    links = edges or Edges.of(schedule.num_stages)
    backward = {(a.stage, a.micro_batch): a for a in schedule.actions if a.kind in "BI"}
    before: dict[Action, set[Action]] = {}
    for row in schedule.table:
        for last, action in zip([None, *row], row, strict=False):
            kind, stage, batch = action
            forwards = links.producers[stage] if kind == "F" else [stage]
            before[action] = {Action("F", s, batch) for s in forwards} | ({last} if last else set())
            if kind in "BI":
                before[action] |= {backward[s, batch] for s in links.consumers[stage] if (s, batch) in backward}
            elif kind == "W":
                before[action].add(Action("I", stage, batch))
    return before


def random_schedule(random: Random) -> Schedule:
    """A legal schedule without any system: stages anywhere, any order, backwards whole or in parts."""
    num_stages, num_batches = random.randint(1, 6), random.randint(1, 5)
    num_ranks = random.randint(1, num_stages)
    rank_of = [*range(num_ranks), *(random.randrange(num_ranks) for _ in range(num_stages - num_ranks))]
    random.shuffle(rank_of)
    edges, parts = Edges.of(num_stages), random.choice([0.0, 0.5, 1.0])
    todo = [Action("F", s, m) for s in range(num_stages) for m in range(num_batches)]
    for _, stage, batch in list(todo):
        kinds = ("I", "W") if random.random() < parts else ("B",)
        todo += [Action(kind, stage, batch) for kind in kinds]
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    made = set()
    while todo:
        action = random.choice([action for action in todo if made.issuperset(edges.needs(action))])
        todo.remove(action)
        made.add(action.result)
        rows[rank_of[action.stage]].append(action)
    return Schedule("random", num_stages, num_batches, num_ranks, tuple(map(tuple, rows)))


def random_edges(random: Random, num_stages: int) -> set[tuple[int, int]]:
    pairs = [(p, c) for c in range(num_stages) for p in range(c)]
    return {pair for pair in pairs if random.random() < 0.5}


# ---- generated ----


@pytest.mark.parametrize("name", NAMES)
def test_every_size_is_legal(name: str) -> None:
    for num_stages, num_batches, num_ranks in SIZES:
        schedule = make(name, num_stages, num_batches, num_ranks)
        validate(schedule)
        assert [schedule.rank_of(stage) for stage in range(num_stages)] == [s % num_ranks for s in range(num_stages)]
        assert schedule.splits_backward == (name == "zero_bubble")
        assert set(graph(schedule)) == set(schedule.actions)
        assert tuple(TopologicalSorter(graph(schedule)).static_order())  # no cycle


def test_every_interleaving_is_legal() -> None:
    for num_ranks in range(1, 7):
        for num_stages in range(num_ranks, 3 * num_ranks + 1):
            for num_batches in range(1, 3 * num_ranks + 3):
                validate(make("interleaved", num_stages, num_batches, num_ranks))


def test_one_f_one_b_as_drawn_in_the_paper() -> None:
    table = make("1f1b", 4, 4).table
    assert list(map(written, table)) == [
        "F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3",
        "F1.0 F1.1 F1.2 B1.0 F1.3 B1.1 B1.2 B1.3",
        "F2.0 F2.1 B2.0 F2.2 B2.1 F2.3 B2.2 B2.3",
        "F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3",
    ]


def test_interleaved_as_drawn_in_the_paper() -> None:
    table = make("interleaved", 4, 4, 2).table
    assert list(map(written, table)) == [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ]


def test_zero_bubble_fills_the_waits_of_1f1b() -> None:
    table = make("zero_bubble", 3, 3).table
    assert list(map(written, table)) == [
        "F0.0 F0.1 F0.2 I0.0 W0.0 I0.1 W0.1 I0.2 W0.2",
        "F1.0 F1.1 I1.0 F1.2 I1.1 W1.0 I1.2 W1.1 W1.2",
        "F2.0 I2.0 F2.1 I2.1 F2.2 I2.2 W2.0 W2.1 W2.2",
    ]


def torch_order(actions: Sequence[peer._Action | None]) -> list[Action]:
    kinds = {peer.FORWARD: "F", peer.FULL_BACKWARD: "B", peer.BACKWARD_INPUT: "I", peer.BACKWARD_WEIGHT: "W"}
    found = [a for a in actions if a is not None and a.computation_type in kinds]
    return [Action(kinds[a.computation_type], a.stage_index, a.microbatch_index) for a in found]


@pytest.mark.parametrize(("name", "kind"), [("gpipe", peer.ScheduleGPipe), ("1f1b", peer.Schedule1F1B)])
def test_the_tables_of_torch_one_stage_a_rank(name: str, kind: type) -> None:
    for ranks in range(1, 9):
        for batches in range(ranks, 14):
            rows = kind._get_pipeline_order(SimpleNamespace(_num_stages=ranks, _n_microbatches=batches))
            if name == "1f1b":  # torch's listing, which it does not run, counts the last rank's forwards from 1
                rows[ranks - 1] = [
                    a._replace(microbatch_index=a.microbatch_index - 1) if a.computation_type == peer.FORWARD else a
                    for a in rows[ranks - 1]
                    if a is not None
                ]
            assert [torch_order(rows[rank]) for rank in range(ranks)] == list(
                map(list, make(name, ranks, batches).table)
            )


@pytest.mark.parametrize(
    ("name", "kind", "most_chunks"),
    [("interleaved", peer.ScheduleInterleaved1F1B, 4), ("zero_bubble", peer.ScheduleInterleavedZeroBubble, 1)],
)
def test_the_tables_of_torch_several_stages_a_rank(name: str, kind: type, most_chunks: int) -> None:
    compared = 0
    for ranks in range(1, 7):
        for chunks in range(1 if name == "zero_bubble" else 2, most_chunks + 1):
            for batches in range(1 if name == "interleaved" else ranks, 15):
                rounds = max(1, batches // ranks)
                if batches % rounds:
                    continue  # torch refuses these
                asked = SimpleNamespace(
                    n_local_stages=chunks,
                    microbatches_per_round=batches // rounds,
                    pp_group_size=ranks,
                    _n_microbatches=batches,
                )
                theirs = [torch_order(kind._calculate_single_rank_operations(asked, rank)) for rank in range(ranks)]
                assert theirs == list(map(list, make(name, chunks * ranks, batches, ranks).table))
                compared += 1
    assert compared > 40


# ---- memory ----


def peak_of_stage(schedule: Schedule, stage: int) -> int:
    held = peak = 0
    for action in schedule.table[schedule.rank_of(stage)]:
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind] * (action.stage == stage)
        peak = max(peak, held)
    return peak


def test_micro_batches_in_flight() -> None:
    for num_stages, num_batches, num_ranks in SIZES:
        size = num_stages, num_batches, num_ranks
        own = [len(range(rank, num_stages, num_ranks)) for rank in range(num_ranks)]
        assert make("gpipe", *size).peak_in_flight == tuple(num_batches * chunks for chunks in own)
        plain = make("1f1b", *size)
        for stage in range(num_stages):
            assert peak_of_stage(plain, stage) <= min(num_batches, num_stages - stage, num_ranks)
        if num_stages == num_ranks:
            assert plain.peak_in_flight == tuple(min(num_batches, num_stages - stage) for stage in range(num_stages))
        assert max(make("zero_bubble", *size).peak_in_flight) <= plain.peak_in_flight[0]
        group = -(-num_batches // max(1, num_batches // num_ranks))
        for rank, peak in enumerate(make("interleaved", *size).peak_in_flight):
            if max(own) > 1:
                assert peak <= (max(own) - 1) * group + 2 * (num_ranks - 1 - rank) + 1


# ---- time ----


def test_the_simulated_bubble_is_that_of_the_papers() -> None:
    compared = dict.fromkeys(NAMES, 0)
    for name in NAMES:
        for num_stages, num_batches, num_ranks in [*SIZES, (8, 32, 8), (16, 32, 4), (24, 24, 8)]:
            share = bubble_formula(name, num_stages, num_batches, num_ranks)
            if share is not None:
                found = simulate(make(name, num_stages, num_batches, num_ranks), Costs(0.1, 0.2)).bubble_share
                assert found == pytest.approx(share, abs=1e-9), (name, num_stages, num_batches, num_ranks)
                compared[name] += 1
    assert min(compared.values()) > 30
    assert bubble_formula("gpipe", 4, 8, 4) == pytest.approx(3 / 11)
    assert bubble_formula("interleaved", 8, 8, 4) == pytest.approx(3 / 19)
    assert bubble_formula("zero_bubble", 4, 8) == pytest.approx(3 / 27)
    assert bubble_formula("1f1b", 8, 8, 4) is None and bubble_formula("interleaved", 7, 8, 4) is None


def test_what_each_schedule_is_for() -> None:
    for num_stages, num_batches, num_ranks in SIZES:
        lines = {name: simulate(make(name, num_stages, num_batches, num_ranks)) for name in NAMES}
        times = {name: line.makespan for name, line in lines.items()}
        assert times["zero_bubble"] <= times["1f1b"]
        assert times["interleaved"] <= min(times["gpipe"], times["1f1b"])
        assert max(lines["1f1b"].peak_in_flight) <= max(lines["interleaved"].peak_in_flight)


def test_times_are_the_longest_path() -> None:
    random = Random(3)
    for _ in range(60):
        schedule = random_schedule(random)
        stages = range(schedule.num_stages)
        pairs = random_edges(random, schedule.num_stages)
        costs = Costs(*([random.choice([0.0, random.random()]) for _ in stages] for _ in range(4)))
        delays = {(a, b): random.random() for a in stages for b in stages}
        found = simulate(schedule, costs, lambda a, b, delays=delays: delays[a, b], pairs)  # type: ignore[misc]
        seconds, ends = costs.table(schedule.num_stages), dict[Action, float]()
        before = graph(schedule, Edges.of(schedule.num_stages, pairs))
        for action in TopologicalSorter(before).static_order():
            remote = [schedule.rank_of(b.stage) != schedule.rank_of(action.stage) for b in before[action]]
            ready = [
                ends[b] + (delays[b.stage, action.stage] if away else 0.0)
                for b, away in zip(before[action], remote, strict=True)
            ]
            ends[action] = max(ready, default=0.0) + seconds[action.kind][action.stage]
            assert found.spans[action].end == pytest.approx(ends[action], abs=1e-12)
        assert found.makespan == pytest.approx(max(ends.values()))
        assert list(found.order) == sorted(found.order, key=lambda action: found.spans[action].end)


def test_costs_and_transfers() -> None:
    timeline = simulate(make("gpipe", 2, 1), Costs([1.0, 2.0], 4.0), transfer=0.5)
    assert [timeline.spans[Action.parse(name)] for name in ("F0.0", "F1.0", "B1.0", "B0.0")] == [  # type: ignore[index]
        (0.0, 1.0),
        (1.5, 3.5),
        (3.5, 7.5),
        (8.0, 12.0),
    ]
    assert timeline.makespan == 12.0 and timeline.bubble_share == pytest.approx(1 - 11 / 24)
    assert simulate(make("gpipe", 2, 1, 1), transfer=9.0).makespan == 6.0  # one rank sends nothing
    with pytest.raises(PlanError, match=r"Costs\(forward=...\) has 3 times for 2 stages"):
        simulate(make("gpipe", 2, 1), Costs([1.0, 2.0, 3.0]))
    with pytest.raises(PlanError, match=r"Costs\(weight_part=...\): -1.0 s at stage 1"):
        simulate(make("gpipe", 2, 1), Costs(weight_part=[1.0, -1.0]))
    with pytest.raises(PlanError, match=r"message from stage 0 to stage 1 takes -0.5 s"):
        simulate(make("gpipe", 2, 1), transfer=-0.5)
    with pytest.raises(PlanError, match=r"an edge from stage 1 to stage 0: there are 2 stages"):
        simulate(make("gpipe", 2, 1), edges={(1, 0)})


# ---- validation ----


def test_random_legal_schedules_pass() -> None:
    random = Random(0)
    for _ in range(200):
        schedule = random_schedule(random)
        validate(schedule)
        assert from_table([written(row) for row in schedule.table], name="random") == schedule
        assert set(simulate(schedule).spans) == set(schedule.actions)


def shuffled(random: Random) -> Iterator[Schedule]:
    """Legal schedules of which two entries of a row, or of two rows, have changed places."""
    for _ in range(600):
        schedule = random_schedule(random)
        rows = [list(row) for row in schedule.table]
        (a, i), (b, j) = ((rank, random.randrange(len(rows[rank]))) for rank in random.choices(range(len(rows)), k=2))
        rows[a][i], rows[b][j] = rows[b][j], rows[a][i]
        yield Schedule("swapped", schedule.num_stages, schedule.num_micro_batches, len(rows), tuple(map(tuple, rows)))


def test_swapped_entries_raise_where_the_order_has_a_cycle() -> None:
    legal = stuck = moved = 0
    for schedule in shuffled(Random(1)):
        ranks_of_stage = [
            {rank for rank, row in enumerate(schedule.table) for a in row if a.stage == stage}
            for stage in range(schedule.num_stages)
        ]
        if any(len(ranks) > 1 for ranks in ranks_of_stage):
            moved += 1
            with pytest.raises(PlanError, match=r"stage \d is on two ranks: .* position \d+, and .* position \d+"):
                validate(schedule)
            continue
        try:
            TopologicalSorter(graph(schedule)).prepare()
        except CycleError:
            stuck += 1
            with pytest.raises(PlanError, match=r"it cannot run to its end, \d+ of \d+ actions run") as error:
                validate(schedule)
            waits = re.findall(r"rank (\d+), position (\d+): (\S+) waits for", error.value.what)
            assert waits and all(str(schedule.table[int(r)][int(p)]) == action for r, p, action in waits)
            assert error.value.ranks == tuple(sorted({int(r) for r, _, _ in waits}))
        else:
            legal += 1
            validate(schedule)
    assert min(legal, stuck, moved) > 30


def test_following_the_fix_ends_in_a_legal_schedule() -> None:
    for schedule in shuffled(Random(2)):
        rows = [list(row) for row in schedule.table]
        for _ in range(200):
            try:
                from_table([written(row) for row in rows])
                break
            except PlanError as error:
                found = re.fullmatch(r"on rank (\d+) move (\S+) before (\S+)", error.fix or "")
                if not found:
                    assert "on two ranks" in error.what
                    break
                row = rows[int(found[1])]
                action, before = Action.parse(found[2]), Action.parse(found[3])
                assert action and before and row.index(action) > row.index(before)
                row.remove(action)
                row.insert(row.index(before), action)
        else:
            raise AssertionError("the fixes lead nowhere")


def test_deadlock_between_ranks_names_the_ring() -> None:
    with pytest.raises(PlanError) as error:
        from_table(["F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"], where="train.py:7")
    assert str(error.value).splitlines() == [
        "schedule 'table': it cannot run to its end, 2 of 8 actions run. rank 0, position 1: B0.0 waits for B1.0, "
        "which rank 1 runs at position 2; rank 1, position 1: F1.1 waits for F0.1, which rank 0 runs at position 2.",
        "  where:  train.py:7",
        "  fix:    on rank 0 move F0.1 before B0.0",
        "  ranks:  0, 1",
    ]


MISTAKES = [
    (["B0.0 F0.0"], r"0 of 2 actions run\. rank 0, position 0: B0\.0 waits for F0\.0, which stands at position 1"),
    (["F0.0 F0.0 B0.0"], r"F0\.0 stands twice: rank 0, position 0, and rank 0, position 1"),
    (["F0.0", "F1.0 B1.0"], r"rank 0 never runs B0\.0 \(backward of micro-batch 0 on stage 0\)"),
    (["F0.0 B0.0 F0.2 B0.2"], r"rank 0 never runs F0\.1 \(forward of micro-batch 1 on stage 0\)"),
    (["F0.0 B0.0", "F2.0 B2.0"], r"no rank runs F1\.0"),
    (["F0.0 I0.0"], r"rank 0 never runs W0\.0 \(weight part"),
    (["F0.0 W0.0"], r"rank 0 never runs I0\.0 \(input part"),
    (["F0.0 W0.0 I0.0"], r"rank 0, position 1: W0\.0 waits for I0\.0, which stands at position 2"),
    (["F0.0 B0.0 W0.0"], r"rank 0, position 2: W0\.0 is too much: B0\.0 is the whole backward"),
    (["F0.0 B0.0 F1.0", "B1.0"], r"on two ranks: F1\.0 on rank 0, position 2, and B1\.0 on rank 1, position 0"),
    (["F0.0 B0.0", ""], r"rank 1 has nothing to do"),
    ([], r"0 rows for 0 ranks"),
    (["F0.0 X0.0"], r"rank 0, position 1: 'X0\.0' is no action of a schedule"),
    ([[("F", 0, 0), ("B", 0, -1)]], r"rank 0, position 1: \('B', 0, -1\) is no action"),
    ([["F0.0", None]], r"rank 0, position 1: None is no action"),
    ([["F0.0", ("B", 0)]], r"rank 0, position 1: \('B', 0\) is no action"),
    (["F0.999999999 B0.0"], r"rank 0 never runs F0\.0"),
    ([7], r"rank 0: 7 is no row of actions"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "says"), MISTAKES, ids=[str(rows) for rows, _ in MISTAKES])
def test_mistakes_in_a_table(rows: list[str], says: str) -> None:
    with pytest.raises(PlanError, match=says) as error:
        from_table(rows, where="train.py:3")
    assert error.value.where == "train.py:3" and error.value.fix


def test_a_table_of_ones_own() -> None:
    pairs = from_table([[("F", 0, 0), "F0.1", ["B", 0, 1], ("B", 0, 0)], "F1.0 F1.1 I1.1 B1.0 W1.1"], name="mine")
    assert str(pairs) == "mine: 2 stages on 2 ranks, 2 micro-batches" and pairs.splits_backward
    assert pairs.table[0] == (("F", 0, 0), ("F", 0, 1), ("B", 0, 1), ("B", 0, 0))
    assert pairs.peak_in_flight == (2, 2)
    with pytest.raises(PlanError, match=r"rank 0, position 1: F0\.1 is outside stages 0 to 1 and micro-batches 0 to 0"):
        validate(Schedule("mine", 2, 1, 2, pairs.table))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_stages": None}, r"its num_stages is None"),
        ({"num_ranks": 1.0}, r"its num_ranks is 1\.0"),
        ({"table": ((("F", 0, 0), ("B", 0, 0)),)}, r"rank 0, position 0: \('F', 0, 0\) is no action"),
        ({"table": ((Action("F", 0, 0), Action("B", -1, 0)),)}, r"position 1: Action\(.* is no action"),
        ({"table": ((Action("F", 0, 0), Action("X", 0, 0)),)}, r"position 1: Action\(.* is no action"),
    ],
)
def test_mistakes_in_a_schedule_made_by_hand(change: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        validate(replace(from_table(["F0.0 B0.0"]), **change))


def test_counts_that_make_no_pipeline() -> None:
    with pytest.raises(PlanError, match=r"no schedule is called '2f2b'") as error:
        make("2f2b", 2, 2)
    assert error.value.fix == "one of gpipe, 1f1b, interleaved, zero_bubble, or a table of your own"
    for name in NAMES:
        with pytest.raises(PlanError, match=r"a pipeline of 2 stages on 3 ranks leaves 1 without a stage"):
            make(name, 2, 4, 3)
        with pytest.raises(PlanError, match=r"a pipeline of 0 micro-batches"):
            make(name, 2, 0)


# ---- evaluation, JSON ----


@pytest.mark.parametrize("name", NAMES)
def test_forwards_alone(name: str) -> None:
    forwards = make(name, 6, 5, 3).forward_only()
    assert sorted(forwards.actions) == [Action("F", stage, batch) for stage in range(6) for batch in range(5)]
    assert set(simulate(forwards).spans) == set(forwards.actions), "it runs to its end"
    assert forwards.peak_in_flight == (0, 0, 0) and not forwards.splits_backward
    assert {message.kind for message in simulate(forwards).message_order} == {"activation"}
    with pytest.raises(PlanError, match=r"rank 0 never runs B0\.0"):
        validate(forwards)


def test_json_round_trip() -> None:
    random = Random(5)
    for schedule in [*(random_schedule(random) for _ in range(20)), *(make(name, 5, 4, 2) for name in NAMES)]:
        told = json.dumps(schedule.to_dict())
        assert Schedule.from_dict(json.loads(told)) == schedule
    assert make("1f1b", 2, 2).to_dict()["table"] == ["F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1"]


# ---- messages ----


def ends_with_queues(schedule: Schedule, edges: Edges, orders: Sequence[Sequence[Message]]) -> bool:
    """Replay: a rank computes beside its queue of messages, each of which stops the queue until both ends are at it.

    orders: the messages of each rank, in the order in which it posts them.
    """
    position, heads = [0] * schedule.num_ranks, [0] * schedule.num_ranks
    made: list[set[object]] = [set() for _ in orders]  # results at each rank
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.table):
            while position[rank] < len(row) and made[rank].issuperset(edges.needs(row[position[rank]])):
                made[rank].add(row[position[rank]].result)
                position[rank] += 1
                moved = True
            if heads[rank] == len(orders[rank]):
                continue
            message = orders[rank][heads[rank]]
            to, result = schedule.rank_of(message.goal), (message.kind, message.source, message.micro_batch)
            is_sender = rank == schedule.rank_of(message.source)
            if is_sender and result in made[rank] and orders[to][heads[to] :][:1] == [message]:
                made[to].add(result)
                heads[rank] += 1
                heads[to] += 1
                moved = True
    return position == [len(row) for row in schedule.table] and heads == [len(order) for order in orders]


def ends_with_one_thread(schedule: Schedule, edges: Edges, orders: Sequence[Sequence[Message]]) -> bool:
    """Replay: a rank that lacks a result sends and receives up to it, and waits each time for the other end."""
    position, heads = [0] * schedule.num_ranks, [0] * schedule.num_ranks
    made: list[set[object]] = [set() for _ in orders]

    def runs(rank: int) -> bool:
        row = schedule.table[rank]
        return position[rank] < len(row) and made[rank].issuperset(edges.needs(row[position[rank]]))

    moved = True
    while moved:
        moved = False
        for rank in range(schedule.num_ranks):
            while runs(rank):
                made[rank].add(schedule.table[rank][position[rank]].result)
                position[rank] += 1
                moved = True
        for rank in range(schedule.num_ranks):
            if heads[rank] == len(orders[rank]):
                continue
            message = orders[rank][heads[rank]]
            start, to = schedule.rank_of(message.source), schedule.rank_of(message.goal)
            result = (message.kind, message.source, message.micro_batch)
            if (rank == start and not runs(start) and not runs(to) and result in made[start]
                    and orders[to][heads[to] :][:1] == [message]):  # fmt: skip
                made[to].add(result)
                heads[start] += 1
                heads[to] += 1
                moved = True
                break  # what can run now runs before anything else is posted
    return position == [len(row) for row in schedule.table] and heads == [len(order) for order in orders]


def by_rank(schedule: Schedule, order: Sequence[Message]) -> list[list[Message]]:
    return [
        [m for m in order if rank in (schedule.rank_of(m.source), schedule.rank_of(m.goal))]
        for rank in range(schedule.num_ranks)
    ]


def random_runs(random: Random, times: int) -> Iterator[tuple[Schedule, Edges, tuple[Message, ...]]]:
    """Schedules, edges with skips, and the order for costs of which many are zero: equal times are the hard case."""
    for _ in range(times):
        schedule = random.choice(
            [random_schedule(random), make(random.choice(NAMES), 6, random.randint(1, 6), random.randint(1, 6))]
        )
        stages = range(schedule.num_stages)
        pairs = random.choice([None, random_edges(random, schedule.num_stages)])
        costs = Costs(*([random.choice([0.0, 1.0, random.random()]) for _ in stages] for _ in range(4)))
        timeline = simulate(schedule, costs, random.choice([0.0, 0.3]), pairs)
        yield schedule, Edges.of(schedule.num_stages, pairs), timeline.message_order


def test_messages_in_the_order_never_deadlock() -> None:
    for schedule, edges, order in random_runs(Random(6), 250):
        expected = {
            message
            for consumer, producers in enumerate(edges.producers)
            for producer in producers
            if schedule.rank_of(producer) != schedule.rank_of(consumer)
            for batch in range(schedule.num_micro_batches)
            for message in [("activation", producer, consumer, batch), ("gradient", consumer, producer, batch)]
        }
        assert set(order) == expected and len(order) == len(expected)
        assert ends_with_queues(schedule, edges, by_rank(schedule, order))
        assert ends_with_one_thread(schedule, edges, by_rank(schedule, order))


def test_messages_in_another_order_deadlock() -> None:
    tried = 0
    for schedule, edges, order in random_runs(Random(7), 80):
        if not order:
            continue
        tried += 1
        assert not ends_with_queues(schedule, edges, by_rank(schedule, order[::-1]))
        orders = by_rank(schedule, order)  # one rank that posts differently from the others is enough
        rank = schedule.rank_of(order[0].source)
        kind, start, end, batch = order[0]
        assert kind == "activation"
        there, back = orders[rank].index(order[0]), orders[rank].index(Message("gradient", end, start, batch))
        orders[rank][there], orders[rank][back] = orders[rank][back], orders[rank][there]
        assert not ends_with_queues(schedule, edges, orders)
    assert tried > 40


def test_message_order_of_a_chain_with_a_skip() -> None:
    order = simulate(make("1f1b", 3, 1), edges={(0, 1), (1, 2), (0, 2)}).message_order
    assert order == (
        ("activation", 0, 1, 0),
        ("activation", 0, 2, 0),
        ("activation", 1, 2, 0),
        ("gradient", 2, 0, 0),
        ("gradient", 2, 1, 0),
        ("gradient", 1, 0, 0),
    )
