"""What a rank says when a collective fails: the operation, and where the other ranks were."""

from __future__ import annotations

import json
import time

from whale_torch.errors import CommError
from whale_torch.mesh import Group, failure_of, note_place, place_of_rank

__all__ = ["explain"]

_GRACE_S = 2.0


def explain(group: Group, operation: str, error: BaseException) -> CommError:
    """A CommError that names the operation and what each other rank of the group did when it failed.

    Every rank notes in the store where its own collective failed; ranks that note nothing within the grace time did
    not arrive. The store may be gone with its rank: then only the operation is named.
    """
    note_place(group, json.dumps({"operation": operation, "number": group.sequence}))
    waiting: dict[int, str] = {}
    failed: dict[int, str] = {}
    others = [rank for rank in group.ranks if rank != group.rank]
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and len(waiting) + len(failed) < len(others):
        for rank in others:
            place, failure = place_of_rank(group, rank), failure_of(group, rank)
            if failure is not None:
                failed[rank] = failure
            elif place is not None:
                waiting[rank] = str(json.loads(place)["operation"])
        time.sleep(0.05)
    absent = [rank for rank in others if rank not in waiting and rank not in failed]
    lines = [f"'{operation}' over {group.name} (ranks {list(group.ranks)}) failed on rank {group.rank}."]
    lines += [f"  rank {rank} ended: {text}" for rank, text in failed.items()]
    elsewhere = {rank: name for rank, name in waiting.items() if name != operation}
    lines += [f"  rank {rank} was in '{name}'" for rank, name in elsewhere.items()]
    if absent:
        lines.append(f"  ranks {absent} did not arrive")
    lines.append(f"  {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    return CommError(
        "\n".join(lines),
        fix="every rank of the group must do the same operations in the same order; an operation on a split's output is one of them",
        ranks=[*failed, *elsewhere, *absent] or group.ranks,
    )
