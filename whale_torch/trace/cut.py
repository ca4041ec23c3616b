"""Cutting a recorded forward into stages.

What depends on inputs only is recomputed wherever it is read; everything else goes straight from the stage that makes
it to each stage that reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from whale_torch.errors import TraceError
from whale_torch.trace.graph import Graph, Node, memory, nodes_in
from whale_torch.trace.program import Instruction, StageProgram

__all__ = ["cut"]

_FREE = ("input", "buffer", "constant", "count")


def cut(graph: Graph, results: Any, num_stages: int) -> tuple[StageProgram, ...]:
    """One program a stage, for those Nodes that the results, a nest of Nodes, are made of, and for all modules: what
    they do to their buffers is wanted as well.

    A module runs on its stage, or on a later one where its inputs come from there. Raises TraceError where an object
    that holds no plain tensors would have to travel.
    """
    wanted = list(nodes_in(results))
    live = graph.needed([*wanted, *(node for node in graph.nodes if node.kind == "module")])
    nodes = [node for node in graph.nodes if node in live]
    free = _free(nodes)
    stages = _stages(nodes, free, wanted, num_stages)
    travels = _travels(nodes, stages, wanted, num_stages - 1)
    order = {node: number for number, node in enumerate(nodes)}
    return tuple(_program(index, nodes, order, stages, travels, results, num_stages) for index in range(num_stages))


def _free(nodes: Iterable[Node]) -> set[Node]:
    """What may be computed anywhere: made of inputs only, and of no random numbers."""
    free: set[Node] = set()
    for node in nodes:
        if node.kind in _FREE or (node.kind == "call" and not node.draws and all(i in free for i in node.inputs())):
            free.add(node)
    return free


def _stages(nodes: list[Node], free: set[Node], wanted: list[Node], num_stages: int) -> dict[Node, int]:
    """The stage of every Node that runs in one place: where its inputs are, or its first reader where it has none."""
    stages: dict[Node, int] = {}
    loose: set[Node] = set()
    for node in nodes:
        if node in free or node.kind == "parameter":
            continue
        known = [stages[source] for source in node.inputs() if source in stages]
        if node.stage is not None and (node.kind == "module" or known):
            known.append(node.stage)
        if known:
            stages[node] = max(known)
        else:
            loose.add(node)
    readers: dict[Node, list[Node]] = defaultdict(list)
    for node in nodes:
        for source in node.inputs():
            readers[source].append(node)
    for node in reversed(nodes):
        if node in loose:
            found = [stages[reader] for reader in readers[node] if reader in stages]
            stages[node] = min([*found, *([num_stages - 1] if node in wanted else [])], default=0)
    for node in nodes:  # what a loose one gives may be read from its stage on
        if node in stages:
            stages[node] = max([stages[node], *(stages[source] for source in node.inputs() if source in stages)])
    return stages


def _travels(
    nodes: list[Node], stages: dict[Node, int], wanted: list[Node], last: int
) -> dict[tuple[int, int], list[Node]]:
    """Which values go from one stage to another, in order."""
    goals: dict[Node, set[int]] = defaultdict(set)
    for node in nodes:
        if node in stages:
            for source in node.inputs():
                if source in stages and stages[source] < stages[node]:
                    goals[source].add(stages[node])
    for node in wanted:
        if node in stages and stages[node] < last:
            goals[node].add(last)
    travels: dict[tuple[int, int], list[Node]] = defaultdict(list)
    for node in nodes:
        for goal in sorted(goals.get(node, ())):
            if not isinstance(node.value, Tensor):
                raise TraceError(
                    f"a {type(node.value).__name__} would have to go from stage {stages[node]} to stage {goal}.",
                    where=node.where,
                    fix="hand on tensors, or tuples, lists, dicts or dataclasses of them; or put what makes and what "
                    "reads it into one stage",
                )
            travels[stages[node], goal].append(node)
    return travels


def _program(
    index: int,
    nodes: list[Node],
    order: dict[Node, int],
    stages: dict[Node, int],
    travels: dict[tuple[int, int], list[Node]],
    results: Any,
    num_stages: int,
) -> StageProgram:
    receives = {a: tuple(moved) for (a, b), moved in sorted(travels.items(), key=lambda t: t[0]) if b == index}
    sends = {b: tuple(moved) for (a, b), moved in sorted(travels.items(), key=lambda t: t[0]) if a == index}
    is_last = index == num_stages - 1
    kept = {node for moved in sends.values() for node in moved} | (set(nodes_in(results)) if is_last else set())
    arrived = {node for moved in receives.values() for node in moved}
    reached: set[Node] = set()
    waiting = [node for node in nodes if stages.get(node) == index]
    waiting += nodes_in(results) if is_last else ()
    while waiting:
        node = waiting.pop()
        if node not in reached and node not in arrived:
            reached.add(node)
            waiting += node.inputs()
    here = sorted(reached, key=order.__getitem__)
    last_reader = {source: node for node in here for source in node.inputs()}
    drops: dict[Node, list[Node]] = defaultdict(list)
    for source, reader in last_reader.items():
        if source not in kept:
            drops[reader].append(source)
    for node in here:  # what nobody reads
        if node not in last_reader and node not in kept:
            drops[node].append(node)
    own = [node for node in here if isinstance(node.value, Tensor)]
    rewritten = {node for node in [*arrived, *own] if node in kept and _changed_after(node, here, order)}
    return StageProgram(
        index=index,
        instructions=tuple(Instruction.of(node, tuple(drops[node])) for node in here),
        changed=frozenset(
            node
            for node in [*arrived, *own]
            if node in arrived or node.kind == "input"
            if _changed_after(node, here, order)
        ),
        rewritten=frozenset(rewritten),
        receives=receives,
        sends=sends,
        results=results if is_last else None,
        draws=any(node.draws for node in here),
        modules=tuple(dict.fromkeys(node.target for node in here if node.kind == "module")),
    )


def _changed_after(node: Node, steps: list[Node], order: dict[Node, int]) -> bool:
    """Whether a later step writes into the memory of a value."""
    if not isinstance(node.value, Tensor):
        return False
    return any(order[step] > order[node] and memory(node.value) in step.changes for step in steps if step.changes)
