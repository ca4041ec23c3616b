"""When each action of a schedule begins and ends, given what it costs, and the one order of messages that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from whale_torch.errors import PlanError
from whale_torch.planning.schedules.actions import Action, Edges, Result, Schedule
from whale_torch.planning.schedules.text import draw_text

__all__ = ["Costs", "Message", "Span", "Timeline", "simulate"]

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Seconds an action takes: one number, or one a stage.

    input_part, weight_part: None is half of the backward each.
    """

    forward: PerStage = 1.0
    backward: PerStage = 2.0
    input_part: PerStage | None = None
    weight_part: PerStage | None = None

    def table(self, num_stages: int) -> dict[str, list[float]]:
        """Seconds of each kind at each stage.

        Raises: PlanError for another number of stages, and for a negative time.
        """
        forward, backward = _each("forward", self.forward, num_stages), _each("backward", self.backward, num_stages)
        half = [seconds / 2 for seconds in backward]
        return {
            "F": forward,
            "B": backward,
            "I": half if self.input_part is None else _each("input_part", self.input_part, num_stages),
            "W": half if self.weight_part is None else _each("weight_part", self.weight_part, num_stages),
        }


class Span(NamedTuple):
    """Seconds from the schedule's start."""

    start: float
    end: float


class Message(NamedTuple):
    """What one stage sends to another: an activation, or the gradient of one, back (comm/messages.py carries them)."""

    kind: Literal["activation", "gradient"]
    source: int
    goal: int
    micro_batch: int


@dataclass(frozen=True)
class Timeline:
    """A schedule with the time of each action.

    order: all actions as they end; of those that end together none comes before what it waited for. unit: of the
    times, "s" or "forwards". print(timeline) draws it.
    """

    schedule: Schedule
    edges: Edges
    spans: dict[Action, Span] = field(repr=False)
    order: tuple[Action, ...] = field(repr=False)
    unit: Literal["s", "forwards"] = "s"

    def __str__(self) -> str:
        return draw_text(self)

    @property
    def makespan(self) -> float:
        """Seconds until the last action ends."""
        return max(span.end for span in self.spans.values())

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The most micro-batches each rank keeps at once (Schedule.peak_in_flight)."""
        return self.schedule.peak_in_flight

    def busy(self, rank: int) -> float:
        """Seconds that a rank computes."""
        spans = (self.spans[action] for action in self.schedule.table[rank])
        return sum(span.end - span.start for span in spans)

    @property
    def bubble_share(self) -> float:
        """The idle part of all ranks' time, 0 to 1."""
        work = sum(map(self.busy, range(self.schedule.num_ranks)))
        return 1 - work / (self.makespan * self.schedule.num_ranks) if self.makespan else 0.0

    @property
    def message_order(self) -> tuple[Message, ...]:
        """All messages between ranks in one order for all: as their producers end, then by receiving stage.

        Where every rank posts its sends and receives in this order, each message waits only for earlier ones and for
        actions that need only earlier ones: nobody waits for ever, whatever the real times are.
        """
        rank_of = self.schedule.rank_of
        return tuple(
            Message(result.kind, action.stage, goal, action.micro_batch)
            for action in self.order
            if (result := action.result)
            for goal in self._receivers(result)
            if rank_of(goal) != rank_of(action.stage)
        )

    def _receivers(self, result: Result) -> tuple[int, ...]:
        return (self.edges.consumers if result.kind == "activation" else self.edges.producers)[result.stage]


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    transfer: Callable[[int, int], float] | float = 0.0,
    edges: Iterable[tuple[int, int]] | None = None,
) -> Timeline:
    """The time line of a valid schedule: each rank runs its row, each action as soon as what it needs is there.

    transfer: seconds of a message from stage to stage, where they are on different ranks; the sender does not wait.
    edges: (producer, consumer) stages, skips allowed; None is the chain of neighbours.

    Raises: PlanError for costs of another number of stages, negative times, and edges that do not go forward.
    """
    seconds, links = (costs or Costs()).table(schedule.num_stages), Edges.of(schedule.num_stages, edges)
    delay = _delays(schedule, links, transfer)
    spans: dict[Action, Span] = {}
    made: dict[Result, float] = {}
    position, free = [0] * schedule.num_ranks, [0.0] * schedule.num_ranks
    waiting: dict[Result, list[int]] = {}
    able = list(range(schedule.num_ranks))
    while able:
        rank = able.pop(0)
        while position[rank] < len(schedule.table[rank]):
            action = schedule.table[rank][position[rank]]
            needs = links.needs(action)
            lacking = next((need for need in needs if need not in made), None)
            if lacking:
                waiting.setdefault(lacking, []).append(rank)
                break
            start = max([free[rank], *(made[need] + delay.get((need.stage, action.stage), 0.0) for need in needs)])
            free[rank] = start + seconds[action.kind][action.stage]
            spans[action] = Span(start, free[rank])
            position[rank] += 1
            if action.result:
                made[action.result] = free[rank]
                able += waiting.pop(action.result, [])
    if waiting:
        raise AssertionError(f"{schedule} cannot run to its end: validate tells where it stops")
    # Sorting is stable: of actions that end together the one that was run first here, so that what waited comes later.
    return Timeline(schedule, links, spans, tuple(sorted(spans, key=lambda action: spans[action].end)))


def _delays(
    schedule: Schedule, edges: Edges, transfer: Callable[[int, int], float] | float
) -> dict[tuple[int, int], float]:
    """Seconds of a message from stage to stage, both ways along each edge between ranks."""
    pairs = [(p, c) for c, producers in enumerate(edges.producers) for p in producers]
    out = {}
    for start, end in [*pairs, *((c, p) for p, c in pairs)]:
        if schedule.rank_of(start) != schedule.rank_of(end):
            out[start, end] = transfer(start, end) if callable(transfer) else transfer
            if not 0 <= out[start, end] < float("inf"):
                raise PlanError(
                    f"a message from stage {start} to stage {end} takes {out[start, end]} s.",
                    fix="give 0 or more seconds",
                )
    return out


def _each(name: str, seconds: PerStage, num_stages: int) -> list[float]:
    each = [float(seconds)] * num_stages if isinstance(seconds, (int, float)) else [float(s) for s in seconds]
    if len(each) != num_stages:
        raise PlanError(
            f"Costs({name}=...) has {len(each)} times for {num_stages} stages.",
            fix="give one number, or one for each stage",
        )
    for stage, cost in enumerate(each):
        if not 0 <= cost < float("inf"):
            raise PlanError(f"Costs({name}=...): {cost} s at stage {stage}.", fix="give 0 or more seconds")
    return each
