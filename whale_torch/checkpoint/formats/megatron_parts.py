"""What Megatron's tensor ranks have of one tensor, put together; projections that are fused in it, taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from whale_torch.checkpoint.boxes import Box
from whale_torch.checkpoint.formats.megatron_rules import Rule
from whale_torch.checkpoint.formats.source import Composed, Entry, InMemory, Part
from whale_torch.errors import CheckpointError

__all__ = ["put_together"]


def put_together(rule: Rule, name: str, parts: Sequence[Tensor], arguments: Mapping[str, Any]) -> list[Entry]:
    """The tensors that a rule names, of the parts of all tensor ranks.

    name: Megatron's, for errors. arguments: what the model was built with. Raises CheckpointError for parts that it
    does not tell apart.
    """
    dim = rule.dim
    if dim is None:
        return [InMemory(parts[0])]
    if not rule.fused:
        return [_joined(dim, [(InMemory(one), [(0, one.shape[dim])]) for one in parts])]
    if rule.fused == "halves":
        halves = [(InMemory(one), one.shape[0] // 2) for one in parts]
        if not arguments.get("swiglu", True):
            raise CheckpointError(
                f"'{name}' is not gated, and the rules are for gated feed-forwards.",
                fix="whale_torch.checkpoint.formats.megatron.read_megatron(path, files, rules=...)",
            )
        return [_joined(0, [(one, [(at * n, n)]) for one, n in halves]) for at in (0, 1)]
    heads, groups = arguments.get("num_attention_heads"), arguments.get("num_query_groups")
    if not isinstance(heads, int):
        raise CheckpointError(
            f"the args of the checkpoint do not say num_attention_heads, which '{name}' needs.", fix="save them too"
        )
    groups = groups if isinstance(groups, int) and arguments.get("group_query_attention", True) else heads
    total = sum(one.shape[0] for one in parts)
    each, size = heads // groups, total // (heads + 2 * groups)
    if size * (heads + 2 * groups) != total or groups % len(parts):
        raise CheckpointError(
            f"'{name}' has {total} rows in all, and {heads} heads in {groups} groups do not share them out.",
            fix="the args that the model was built with",
        )
    local, step = groups // len(parts), (each + 2) * size
    cuts = ((0, each * size), (each * size, size), ((each + 1) * size, size))  # queries, keys, values of a group
    return [
        _joined(0, [(InMemory(one), [(g * step + at, n) for g in range(local)]) for one in parts]) for at, n in cuts
    ]


def _joined(dim: int, parts: Sequence[tuple[Entry, Sequence[tuple[int, int]]]]) -> Entry:
    """One tensor from runs of rows (start, number), or columns, of several."""
    made, at = [], 0
    for entry, cuts in parts:
        for start, count in cuts:
            size = [*entry.shape[:dim], count, *entry.shape[dim + 1 :]]
            goal, begin = [0] * len(size), [0] * len(size)
            goal[dim], begin[dim] = at, start
            made.append(Part(Box(tuple(goal), tuple(size)), entry, tuple(begin)))
            at += count
    first = parts[0][0]
    return Composed(first.dtype, (*first.shape[:dim], at, *first.shape[dim + 1 :]), made)
