"""A user's own table of a schedule, beside what else its scope says, the stages and the ranks there are."""

from __future__ import annotations

from whale_torch.annotation import Annotation
from whale_torch.errors import PlanError
from whale_torch.planning.schedules import Schedule

__all__ = ["check_table", "num_stages_of", "table_of"]


def table_of(scope: Annotation) -> Schedule | None:
    """The table that a pipeline's scope has for its schedule, None where it names one or none."""
    schedule = scope.get("schedule")
    return schedule if isinstance(schedule, Schedule) else None


def num_stages_of(scope: Annotation) -> int | None:
    """How many stages a pipeline's scope asks for, by its number or by its table."""
    asked, table = scope.get("num_stages"), table_of(scope)
    return int(str(asked)) if asked is not None else None if table is None else table.num_stages


def check_table(table: Schedule, scope: Annotation, num_stages: int, world: int) -> None:
    """Raises PlanError where a table says otherwise than its scope, its stages, or the number of ranks."""
    sizes = {
        "num_stages": table.num_stages,
        "num_ranks": table.num_ranks,
        "num_micro_batches": table.num_micro_batches,
    }
    for name, number in sizes.items():
        asked = scope.get(name)
        if asked is not None and asked != number:
            raise PlanError(
                f"{scope.call}: {name} is {asked}, and the table has {number} {_WHAT[name]}.",
                where=scope.site,
                fix=f"leave {name} out: the table says it",
            )
    if num_stages != table.num_stages:
        raise PlanError(
            f"{scope.call}: the table has actions of {table.num_stages} stages, and {num_stages} of them are inside.",
            where=scope.site,
            fix=f"write actions of stages 0 to {num_stages - 1}, or open as many wh.stage() scopes as the table has",
        )
    if world % table.num_ranks:
        raise PlanError(
            f"{scope.call}: the table has {table.num_ranks} rows, one for each rank of a pipeline, and {world} "
            f"rank{' is' if world == 1 else 's are'} no multiple of it.",
            where=scope.site,
            fix=f"run on {table.num_ranks} ranks, or a multiple; "
            "wh.plan(model, cluster=wh.Cluster.of(...)) plans for ranks that are not here",
        )


_WHAT = {"num_stages": "stages", "num_ranks": "rows, one a rank", "num_micro_batches": "micro-batches"}
