"""Stages by count: a model cut where its stages take equally long.

Candidates are modules in the order in which a forward calls them. What takes more than an even share is opened into its
members first, so that repeated blocks stay whole and one large container does not; what ends up in one stage is whole
again. The cut is a linear partition by dynamic programming (S. Skiena, The Algorithm Design Manual, "The Partition
Problem"; for pipelines PipeDream, arXiv 1806.03377, section 3): the least time of the slowest stage, among such cuts
the most even one, and among those the one whose largest stage has the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from torch import nn

from whale_torch.annotation import Annotation
from whale_torch.cluster import Cluster
from whale_torch.errors import PlanError
from whale_torch.names import joined
from whale_torch.planning.flops import Measured
from whale_torch.planning.pipelines import PipelinePlan, topmost
from whale_torch.planning.taskgraph import TaskGraph

__all__ = ["balanced_stages", "partition"]

# Modules of torch that only call their members; others read their members' weights.
_CONTAINERS = (
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict),
    *(nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
)
_UNCALLED = (nn.ModuleList, nn.ModuleDict)


def balanced_stages(
    model: nn.Module,
    graphs: Sequence[TaskGraph],
    scope: Annotation,
    cluster: Cluster,
    asked: PipelinePlan,
    measured: Measured | None = None,
    seconds: Mapping[str, float] | None = None,
) -> tuple[list[list[str]], str]:
    """Module names of as many stages as are asked for, and in words how they were found.

    Where a forward was measured, modules are taken in the order in which it calls them, and weighed by its
    floating-point operations; else in the order of registration and by parameters. seconds: of modules by name, to
    weigh them by instead. Raises PlanError where there are fewer modules than stages, or where no cut keeps parameters
    and gradients within the memory of the cluster's ranks.
    """
    num_stages = asked.num_stages
    roots = topmost([name for graph in graphs if scope in graph.annotations for name in graph.modules])
    weights, what = _weights(measured, seconds)
    modules = dict(model.named_modules())

    def time(name: str) -> int:
        if weights is None:
            return sum(p.numel() for p in modules[name].parameters())
        return weights[name] if name in weights else sum(map(time, _members(name, modules[name])))

    names, opened = _units(roots, modules, time, num_stages)
    if measured is not None:
        names = _in_order([name for name in names if _is_called(name, measured.order)], measured.order)
    if len(names) < num_stages:
        called = "" if measured is None else " that a forward calls"
        raise PlanError(
            f"{scope.call} asks for {num_stages} stages, but the model has {len(names)} modules{called} "
            "to make them of.",
            where=scope.site,
            fix=f"ask for {len(names)} stages at most, or say where to cut by wh.stage() scopes"
            if names
            else "call the modules in the forward, rather than use their weights",
        )
    times = [time(name) for name in names]
    sizes = [sum(p.numel() * p.element_size() for p in modules[name].parameters()) for name in names]
    ends = _cut(times, sizes, num_stages, _most_bytes(cluster, asked), scope)
    starts = [0, *ends[:-1]]
    stages = [_whole(names[start:end], opened) for start, end in zip(starts, ends, strict=True)]
    largest = max(sum(times[start:end]) for start, end in zip(starts, ends, strict=True))
    over = largest * num_stages / sum(times) if sum(times) else 1.0
    return stages, f"balanced by {what}: the largest stage has {over:.2f} of an even share"


def _weights(measured: Measured | None, seconds: Mapping[str, float] | None) -> tuple[Mapping[str, int] | None, str]:
    """What modules that are called weigh, by name, and in words what that is; None where parameters count."""
    if seconds is not None:
        return {name: round(own * 1e9) for name, own in seconds.items()}, "measured seconds of forward and backward"
    if measured is not None and any(measured.flops.values()):
        return measured.flops, "floating-point operations of a forward"
    return None, "parameters"


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _members(name: str, module: nn.Module) -> list[str]:
    """Names of the members that hold something."""
    return [joined(name, key) for key, child in module.named_children() if _has_state(child)]


def _units(
    roots: Sequence[str], modules: dict[str, nn.Module], time: Callable[[str], int], num_stages: int
) -> tuple[list[str], dict[str, list[str]]]:
    """Modules to make stages of, in order of registration, and the members of those that were opened for it.

    Opened is what takes long, or is never called itself.
    """
    opened: dict[str, list[str]] = {}
    units = [name for name in roots if _has_state(modules[name])]
    total = sum(map(time, units))

    def opens(name: str) -> bool:
        module = modules[name]
        if type(module).__module__.startswith("torch.") and not isinstance(module, _CONTAINERS):
            return False
        members = _members(name, module)
        return bool(members) and all(member in modules for member in members)

    while True:
        able = [name for name in units if opens(name)]
        lists = [name for name in able if isinstance(modules[name], _UNCALLED)]
        large = [n for n in able if time(n) * num_stages > total or len(units) < num_stages]
        chosen = lists or sorted(large, key=time, reverse=True)
        if not chosen:
            return units, opened
        at = units.index(chosen[0])
        opened[chosen[0]] = _members(chosen[0], modules[chosen[0]])
        units[at : at + 1] = opened[chosen[0]]


def _whole(names: list[str], opened: dict[str, list[str]]) -> list[str]:
    """A stage's modules: where it has all members of one that was opened, that one; but never the model itself."""
    found = list(names)
    for name, members in reversed(opened.items()):  # what was opened last is innermost
        if name and all(member in found for member in members):
            found[found.index(members[0])] = name
            found = [other for other in found if other not in members]
    return found


def _is_called(name: str, order: Mapping[str, int]) -> bool:
    """Whether a module, or a member of it, runs in a forward."""
    return name in order or any(other.startswith(f"{name}.") for other in order)


def _in_order(names: list[str], order: Mapping[str, int]) -> list[str]:
    """By first call; what only has members called stays behind what was registered before it."""
    keys: list[int] = []
    for name in names:
        keys.append(order.get(name, keys[-1] if keys else -1))
    return [name for _, name in sorted(zip(keys, names, strict=True), key=lambda pair: pair[0])]


def _most_bytes(cluster: Cluster, asked: PipelinePlan) -> int | None:
    """Parameters of a stage such that those of a rank, and as many gradients, fit its memory."""
    if cluster.memory_bytes is None:
        return None
    return cluster.memory_bytes // (2 * max(len(asked.stages_at(place)) for place in range(asked.num_ranks)))


def _cut(times: list[int], sizes: list[int], num_stages: int, most: int | None, scope: Annotation) -> list[int]:
    """Ends of the stages."""
    size_of, time_of = _sums(sizes), _sums(times)

    def fits(start: int, end: int) -> bool:
        return most is None or size_of(start, end) <= most

    found = partition(times, num_stages, fits)
    if found is None:
        least = partition(sizes, num_stages)
        assert least is not None and most is not None
        raise PlanError(
            f"{scope.call}: whatever the cut, one stage has {least[0]:,} bytes of parameters, and with its gradients a "
            f"rank has room for {most:,} a stage.",
            where=scope.site,
            fix="ask for more stages, on more ranks",
        )
    slowest, _ = found
    return _even(times, sizes, num_stages, lambda start, end: fits(start, end) and time_of(start, end) <= slowest)


def _sums(values: Sequence[int]) -> Callable[[int, int], int]:
    until = [0, *accumulate(values)]
    return lambda start, end: until[end] - until[start]


def _anywhere(start: int, end: int) -> bool:
    return True


def partition(
    costs: Sequence[int], num_parts: int, allowed: Callable[[int, int], bool] = _anywhere
) -> tuple[int, list[int]] | None:
    """The largest sum of a part, made as small as it can be, and the parts' ends; None where no cut is allowed.

    No part is empty. allowed: of a part's start and end.
    """
    cost = _sums(costs)
    return _best(len(costs), num_parts, allowed, lambda before, start, end: max(before, cost(start, end)), 0)


def _even(times: Sequence[int], sizes: Sequence[int], num_parts: int, allowed: Callable[[int, int], bool]) -> list[int]:
    """Ends of the parts whose times' squares add up to least, and of those, whose largest size is smallest."""
    time, size = _sums(times), _sums(sizes)

    def joined(before: tuple[int, int], start: int, end: int) -> tuple[int, int]:
        return before[0] + time(start, end) ** 2, max(before[1], size(start, end))

    found = _best(len(times), num_parts, allowed, joined, (0, 0))
    assert found is not None, "a cut with the least time is one"
    return found[1]


V = TypeVar("V", int, tuple[int, int])


def _best(
    number: int, num_parts: int, allowed: Callable[[int, int], bool], joined: Callable[[V, int, int], V], nothing: V
) -> tuple[V, list[int]] | None:
    """The least value of a cut of so many things into parts, and the parts' ends.

    joined: the value of a cut that a part, from its start to its end, is added to; it grows with that cut's value.
    """
    best: dict[int, V] = {0: nothing}  # of what comes before an end
    starts: list[dict[int, int]] = []
    for part in range(1, num_parts + 1):
        row: dict[int, V] = {}
        chosen: dict[int, int] = {}
        for end in range(part, number - (num_parts - part) + 1):
            for start, before in best.items():
                if start < end and allowed(start, end):
                    value = joined(before, start, end)
                    if end not in row or value < row[end]:
                        row[end], chosen[end] = value, start
        best = row
        starts.append(chosen)
    if number not in best:
        return None
    ends = [number]
    for chosen in reversed(starts[1:]):
        ends.insert(0, chosen[ends[0]])
    return best[number], ends
