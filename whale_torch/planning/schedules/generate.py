"""The schedules of the field, made for any number of stages, micro-batches and ranks. Stage s is on rank s % ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

from whale_torch.errors import PlanError
from whale_torch.planning.schedules.actions import Action, Edges, Kind, Result, Schedule, Table

__all__ = ["NAMES", "gpipe", "interleaved", "make", "one_f_one_b", "zero_bubble"]

# How long list scheduling takes actions to be: a backward is two forwards, each of its parts one.
_TICKS: dict[Kind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}


def gpipe(num_stages: int, num_micro_batches: int, num_ranks: int | None = None) -> Schedule:
    """All forwards, then all backwards: every micro-batch is in flight at once.

    Raises: PlanError for counts that make no pipeline.
    Reference: GPipe (arXiv 1811.06965); Whale's PreferForward.
    """
    ranks = _checked(num_stages, num_micro_batches, num_ranks)
    table = []
    for rank in range(ranks):
        stages, batches = range(rank, num_stages, ranks), range(num_micro_batches)
        forwards = [Action("F", stage, batch) for stage in stages for batch in batches]
        backwards = [Action("B", stage, batch) for stage in reversed(stages) for batch in batches]
        table.append((*forwards, *backwards))
    return Schedule("gpipe", num_stages, num_micro_batches, ranks, tuple(table))


def one_f_one_b(num_stages: int, num_micro_batches: int, num_ranks: int | None = None) -> Schedule:
    """A backward as soon as there is one: stage s keeps at most min(micro-batches, stages - s, ranks) micro-batches.

    With several stages a rank it keeps less than `interleaved`, and waits more.

    Raises: PlanError for counts that make no pipeline.
    Reference: PipeDream-flush (arXiv 2006.09503); Whale's PreferBackward.
    """
    ranks = _checked(num_stages, num_micro_batches, num_ranks)
    edges, forwards, backwards = Edges.of(num_stages), [0] * num_stages, [0] * num_stages

    # The oldest micro-batch can always go on: a stage that it has not reached holds nothing, so no limit stops it.
    def choose(rank: int, made: set[Result]) -> Action | None:
        stages = range(rank, num_stages, ranks)
        for stage in reversed(stages):
            action = Action("B", stage, backwards[stage])
            if made.issuperset(edges.needs(action)):
                backwards[stage] += 1
                return action
        ready = [
            action
            for stage in stages
            if forwards[stage] - backwards[stage] < min(num_stages - stage, ranks)
            and (action := Action("F", stage, forwards[stage])).micro_batch < num_micro_batches
            and made.issuperset(edges.needs(action))
        ]
        if not ready:
            return None
        action = min(ready, key=lambda action: (action.micro_batch // ranks, action.stage))
        forwards[action.stage] += 1
        return action

    table = _list_schedule(ranks, 2 * num_stages * num_micro_batches, choose)
    return Schedule("1f1b", num_stages, num_micro_batches, ranks, table)


def interleaved(num_stages: int, num_micro_batches: int, num_ranks: int | None = None) -> Schedule:
    """1F1B in which the micro-batches take turns, group by group, on the several stages of a rank.

    Megatron's closed form, with groups as equal as can be of at least as many micro-batches as ranks. Where the ranks
    do not divide the stages it is made for the next number that they do, and what does not exist is left out: an order
    that can run still can without the last stages.

    Raises: PlanError for counts that make no pipeline.
    Reference: arXiv 2104.04473, section 2.2.
    """
    ranks = _checked(num_stages, num_micro_batches, num_ranks)
    chunks, num_groups = -(-num_stages // ranks), max(1, num_micro_batches // ranks)
    cuts = [num_micro_batches * index // num_groups for index in range(num_groups + 1)]
    groups = [range(start, stop) for start, stop in pairwise(cuts)]
    widest = max(map(len, groups))
    table = []
    for rank in range(ranks):
        turns = [(chunk, batch) for group in groups for chunk in range(chunks) for batch in group]
        forwards = [Action("F", chunk * ranks + rank, batch) for chunk, batch in turns]
        backwards = [Action("B", (chunks - 1 - chunk) * ranks + rank, batch) for chunk, batch in turns]
        behind = ranks - 1 - rank
        warm_up = min(2 * behind + (chunks - 1) * widest if chunks > 1 else behind, len(turns))
        pairs = zip(forwards[warm_up:], backwards, strict=False)
        row = [*forwards[:warm_up], *(a for pair in pairs for a in pair), *backwards[len(turns) - warm_up :]]
        table.append(tuple(a for a in row if a.stage < num_stages))
    return Schedule("interleaved", num_stages, num_micro_batches, ranks, tuple(table))


def zero_bubble(num_stages: int, num_micro_batches: int, num_ranks: int | None = None) -> Schedule:
    """1F1B with backwards in two parts: the weight parts wait, and fill the times in which 1F1B waits.

    Every rank may keep as many micro-batches as 1F1B's first. With one stage a rank it is the paper's ZB-H1.

    Raises: PlanError for counts that make no pipeline.
    Reference: arXiv 2401.10241, section 2.
    """
    base = one_f_one_b(num_stages, num_micro_batches, num_ranks)
    limit = max(base.peak_in_flight)
    edges, ranks = Edges.of(num_stages), range(base.num_ranks)
    rows = [[Action("I" if a.kind == "B" else "F", a.stage, a.micro_batch) for a in row] for row in base.table]
    position, held = [0 for _ in ranks], [0 for _ in ranks]
    waiting: list[list[Action]] = [[] for _ in ranks]

    # At the limit a weight part is waiting, since 1F1B itself keeps no more: so the order of its rows always goes on.
    def choose(rank: int, made: set[Result]) -> Action | None:
        action = rows[rank][position[rank]] if position[rank] < len(rows[rank]) else None
        fits = action is not None and (action.kind != "F" or held[rank] < limit)
        if action and fits and made.issuperset(edges.needs(action)):
            position[rank] += 1
            if action.kind == "I":
                waiting[rank].append(Action("W", action.stage, action.micro_batch))
        else:
            action = waiting[rank].pop(0) if waiting[rank] else None
        held[rank] += action.holds if action else 0
        return action

    table = _list_schedule(base.num_ranks, 3 * num_stages * num_micro_batches, choose)
    return Schedule("zero_bubble", num_stages, num_micro_batches, base.num_ranks, table)


class _Maker(Protocol):
    def __call__(self, num_stages: int, num_micro_batches: int, num_ranks: int | None = None) -> Schedule: ...


_MAKERS: dict[str, _Maker] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}
NAMES = tuple(_MAKERS)


def make(name: str, num_stages: int, num_micro_batches: int, num_ranks: int | None = None) -> Schedule:
    """The schedule of that name; num_ranks None is one rank a stage.

    Raises: PlanError for an unknown name, and for counts that make no pipeline.
    """
    if name not in _MAKERS:
        raise PlanError(f"no schedule is called {name!r}.", fix=f"one of {', '.join(NAMES)}, or a table of your own")
    return _MAKERS[name](num_stages, num_micro_batches, num_ranks)


def _checked(num_stages: int, num_micro_batches: int, num_ranks: int | None) -> int:
    """The number of ranks, after a look at all three."""
    ranks = num_stages if num_ranks is None else num_ranks
    for what, number in (("stages", num_stages), ("micro-batches", num_micro_batches), ("ranks", ranks)):
        if number < 1:
            raise PlanError(f"a pipeline of {number} {what}.", fix=f"give 1 or more {what}")
    if ranks > num_stages:
        raise PlanError(
            f"a pipeline of {num_stages} stages on {ranks} ranks leaves {ranks - num_stages} without a stage.",
            fix=f"at most {num_stages} ranks, or more stages",
        )
    return ranks


def _list_schedule(num_ranks: int, num_actions: int, choose: Callable[[int, set[Result]], Action | None]) -> Table:
    """Runs a clock: each rank that is free is asked for its next action, given what has been made by then."""
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    ends: list[int] = [0] * num_ranks
    made: set[Result] = set()
    now = 0
    while num_actions:
        free = [rank for rank in range(num_ranks) if ends[rank] <= now]
        made.update(result for rank in free if rows[rank] and (result := rows[rank][-1].result))
        for rank in free:
            if action := choose(rank, made):
                rows[rank].append(action)
                ends[rank] = now + _TICKS[action.kind]
                num_actions -= 1
        now += 1
        if max(ends) < now:
            raise AssertionError(f"list scheduling stops with {num_actions} actions to go")
    return tuple(map(tuple, rows))
