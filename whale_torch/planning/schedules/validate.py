"""Is a schedule complete, and can it run to its end?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from whale_torch.errors import PlanError
from whale_torch.planning.schedules.actions import KIND_NAMES, Action, Edges, Result, Rows, Schedule, read_rows

__all__ = ["from_table", "validate"]


def from_table(rows: Rows, *, name: str = "table", where: str | None = None) -> Schedule:
    """A user's own schedule, checked: rows one a rank, of "F0.3" or ("F", 0, 3), or one string with spaces.

    The numbers of stages and micro-batches are read from the table. where: the user's "file:line", for errors.

    Raises: PlanError for what `validate` finds, and for an entry that is no action.
    """
    table = read_rows(rows, where=where)
    num_stages = 1 + max((action.stage for row in table for action in row), default=-1)
    num_micro_batches = 1 + max((action.micro_batch for row in table for action in row), default=-1)
    schedule = Schedule(name, num_stages, num_micro_batches, len(table), table)
    validate(schedule, where=where)
    return schedule


def validate(schedule: Schedule, *, where: str | None = None) -> None:
    """Checks that each action stands once and on its stage's rank, and that the ranks run to the end.

    Raises: PlanError with rank, position (from 0) and action.
    """
    _Check(schedule, where).run()


class _Check:
    """The checks of one schedule, each relying on those before it."""

    def __init__(self, schedule: Schedule, where: str | None):
        self.schedule, self.where = schedule, where
        self.places: dict[Action, tuple[int, int]] = {}

    def run(self) -> None:
        self._each_once()
        self._one_rank_a_stage()
        self._complete()
        self._ends()

    def _fail(self, what: str, fix: str, *ranks: int) -> NoReturn:
        name = self.schedule.name
        raise PlanError(f"schedule {name!r}: {what}", where=self.where, fix=fix, ranks=sorted(set(ranks)))

    def _entries(self) -> Iterator[tuple[int, int, Action]]:
        for rank, row in enumerate(self.schedule.table):
            for position, action in enumerate(row):
                yield rank, position, action

    def _each_once(self) -> None:
        schedule = self.schedule
        for what in ("num_stages", "num_micro_batches", "num_ranks"):
            if type(getattr(schedule, what)) is not int:
                self._fail(f"its {what} is {getattr(schedule, what)!r}.", "a whole number, or make it by from_table")
        if len(schedule.table) != schedule.num_ranks or not schedule.table:
            self._fail(f"{len(schedule.table)} rows for {schedule.num_ranks} ranks.", "one row a rank, at least one")
        for rank, row in enumerate(schedule.table):
            if not row:
                self._fail(f"rank {rank} has nothing to do.", "give it a stage, or leave its row out", rank)
        for rank, position, action in self._entries():
            if type(action) is not Action or Action.parse(str(action)) != action:
                self._fail(f"rank {rank}, position {position}: {action!r} is no action.", "make it by from_table", rank)
            if action.stage >= schedule.num_stages or action.micro_batch >= schedule.num_micro_batches:
                self._fail(
                    f"rank {rank}, position {position}: {action} is outside stages 0 to {schedule.num_stages - 1} and "
                    f"micro-batches 0 to {schedule.num_micro_batches - 1}.",
                    "take it out, or correct the schedule's numbers",
                    rank,
                )
            if action in self.places:
                other, before = self.places[action]
                self._fail(
                    f"{action} stands twice: rank {other}, position {before}, and rank {rank}, position {position}.",
                    "take one of the two out",
                    other,
                    rank,
                )
            self.places[action] = rank, position

    def _one_rank_a_stage(self) -> None:
        first: dict[int, tuple[int, int, Action]] = {}
        for rank, position, action in self._entries():
            other, before, found = first.setdefault(action.stage, (rank, position, action))
            if other != rank:
                self._fail(
                    f"stage {action.stage} is on two ranks: {found} on rank {other}, position {before}, and {action} "
                    f"on rank {rank}, position {position}.",
                    f"put all actions of stage {action.stage} in one row",
                    other,
                    rank,
                )

    def _complete(self) -> None:
        schedule = self.schedule
        for stage in range(schedule.num_stages):
            for batch in range(schedule.num_micro_batches):
                forward, whole, back, weight = (Action(kind, stage, batch) for kind in KIND_NAMES)
                found = [action for action in (whole, back, weight) if action in self.places]
                if forward not in self.places:
                    self._missing(forward, "add it")
                elif not found:
                    self._missing(whole, f"add it, or its parts {back} and {weight}")
                elif whole in found and len(found) > 1:
                    self._extra(found[1], f"{whole} is the whole backward", f"keep {whole}, or {back} and {weight}")
                elif len(found) == 1 and whole not in found:
                    self._missing(weight if back in found else back, f"add it, or put {whole} for {found[0]}")

    def _missing(self, action: Action, fix: str) -> NoReturn:
        on = [rank for (_, stage, _), (rank, _) in self.places.items() if stage == action.stage][:1]
        place = f"rank {on[0]} never runs {action}" if on else f"no rank runs {action}"
        self._fail(f"{place} ({_words(action)}).", fix, *on)

    def _extra(self, action: Action, why: str, fix: str) -> NoReturn:
        rank, position = self.places[action]
        self._fail(f"rank {rank}, position {position}: {action} is too much: {why}.", fix, rank)

    def _ends(self) -> None:
        """Runs the rows without a clock; where no rank can go on, tells which wait for one another."""
        schedule, edges = self.schedule, Edges.of(self.schedule.num_stages)
        position, made = [0] * schedule.num_ranks, set[Result]()
        waiting: dict[Result, list[int]] = {}
        able = list(range(schedule.num_ranks))
        while able:
            rank = able.pop()
            row = schedule.table[rank]
            while position[rank] < len(row):
                action = row[position[rank]]
                lacking = next((need for need in edges.needs(action) if need not in made), None)
                if lacking:
                    waiting.setdefault(lacking, []).append(rank)
                    break
                position[rank] += 1
                if action.result:
                    made.add(action.result)
                    able += waiting.pop(action.result, [])
        if waiting:
            self._stuck({rank: need for need, ranks in waiting.items() for rank in ranks}, position, made)

    def _stuck(self, lacking: dict[int, Result], position: list[int], made: set[Result]) -> NoReturn:
        makers = {action.result: action for action in self.places if action.result}
        chain = [min(lacking)]
        while (rank := self.places[makers[lacking[chain[-1]]]][0]) not in chain:
            chain.append(rank)
        cycle = chain[chain.index(rank) :]
        waits = []
        for rank in cycle:
            action, maker = self.schedule.table[rank][position[rank]], makers[lacking[rank]]
            there, later = self.places[maker]
            waits.append(
                f"rank {rank}, position {position[rank]}: {action} waits for {maker}, which "
                f"{'stands' if there == rank else f'rank {there} runs'} at position {later}"
            )
        later, able = self._able(made, position, cycle)
        stopped = self.schedule.table[later][position[later]]
        self._fail(
            f"it cannot run to its end, {sum(position)} of {len(self.places)} actions run. {'; '.join(waits)}.",
            f"on rank {later} move {able} before {stopped}",
            *cycle,
        )

    def _able(self, made: set[Result], position: list[int], cycle: list[int]) -> tuple[int, Action]:
        """An action that could run where all ranks are stuck, of a rank of the cycle if there is one, and its rank."""
        edges = Edges.of(self.schedule.num_stages)
        ranks = [*cycle, *(rank for rank in range(self.schedule.num_ranks) if rank not in cycle)]
        left = ((rank, action) for rank in ranks for action in self.schedule.table[rank][position[rank] :])
        return next((rank, action) for rank, action in left if made.issuperset(edges.needs(action)))


def _words(action: Action) -> str:
    return f"{KIND_NAMES[action.kind]} of micro-batch {action.micro_batch} on stage {action.stage}"
