"""What a rank says when a collective fails: the operation, and what became of the other ranks."""

from __future__ import annotations

import time

from whale_torch.errors import CommError
from whale_torch.exits import Word, leave_word, words
from whale_torch.mesh import Group

__all__ = ["explain"]

_GRACE_S = 2.0
_LOOK_EVERY_S = 0.05


def explain(group: Group, operation: str, error: BaseException) -> CommError:
    """A CommError that names the operation, and of each other rank the error it ended with or where it gave up waiting.

    Ranks that say nothing within the grace time did not arrive: they are busy elsewhere, or were killed.
    """
    place = f"'{operation}' of {group.name} {list(group.ranks)}"
    leave_word(Word(group.rank, "waited", place))
    last = _last_words(group)
    ended = {rank: word.text for rank, word in last.items() if word.kind != "waited"}
    elsewhere = {rank: word.text for rank, word in last.items() if word.kind == "waited" and word.text != place}
    here = [rank for rank, word in last.items() if word.kind == "waited" and word.text == place]
    silent = [rank for rank in group.ranks if rank not in last and rank != group.rank]
    lines = [f"'{operation}' over {group.name} (ranks {list(group.ranks)}) failed on rank {group.rank}."]
    lines += [f"  rank {rank} ended: {text}" for rank, text in ended.items()]
    lines += [f"  rank {rank} waited in {text}" for rank, text in elsewhere.items() if rank in group.ranks]
    if here:
        lines.append(f"  ranks {sorted(here)} waited here in vain")
    if silent and not any(rank in group.ranks for rank in ended):
        lines.append(f"  ranks {silent} did not arrive")
    lines.append(f"  {type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
    blamed = [*ended, *(rank for rank in elsewhere if rank in group.ranks), *([] if ended else silent)]
    return CommError(
        "\n".join(lines),
        fix="every rank of the group must do the same operations in the same order; an operation on a split's output "
        "is one of them",
        ranks=blamed or group.ranks,
    )


def _last_words(group: Group) -> dict[int, Word]:
    """What other ranks said, once one of them named the cause, all of the group spoke, or the grace time is over.

    Of a rank that failed for want of another, where it waited says more than that it ended.
    """
    deadline = time.monotonic() + _GRACE_S
    while True:
        last: dict[int, Word] = {}
        for word in words():
            consequence = word.kind != "waited" and word.rank in last and word.text.startswith("CommError")
            if word.rank != group.rank and not consequence:
                last[word.rank] = word
        caused = any(word.kind != "waited" for word in last.values())
        if caused or set(group.ranks) <= {*last, group.rank} or time.monotonic() > deadline:
            return last
        time.sleep(_LOOK_EVERY_S)
