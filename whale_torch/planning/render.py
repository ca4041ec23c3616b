"""A plan as text a person can read: repeated layers are one line, whatever their number."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from whale_torch.planning.schedules import bubble_formula, simulate

if TYPE_CHECKING:
    from whale_torch.planning.pipelines import Links, PipelinePlan
    from whale_torch.planning.placement import VirtualDevice
    from whale_torch.planning.plan import Plan
    from whale_torch.planning.taskgraph import TaskGraph

__all__ = ["amount", "fold_names", "render"]

_MOST_NAMES = 3
_MOST_ROWS = 30
_WIDEST_SCOPE = 50  # characters
T = TypeVar("T")


def amount(num_bytes: float) -> str:
    """Bytes in the largest unit that keeps a digit before the point, to three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB" if num_bytes < 999.5 else f"{num_bytes:,.0f} TB"


def render(plan: Plan) -> str:
    """The plan's text: what to feed, what runs where, how modules are cut, gradients averaged, and bytes of a step."""
    parts = [
        _opening(plan),
        _taskgraphs(plan),
        _pipeline(plan),
        _cuts(plan),
        _gradients(plan),
        _traffic(plan),
        _gathers(plan),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _opening(plan: Plan) -> list[str]:
    out = [f"Plan for {plan.cluster}", _parallelism(plan)]
    out += _fed_alike(plan)
    if plan.batch_dim or plan.world > 1:
        named = (
            f"dimension {plan.batch_dim} of the first tensor that the model is called with"
            if isinstance(plan.batch_dim, int)
            else _named_dims(plan.batch_dim)
        )
        out.append(f"Samples are counted along {named}.")
    if plan.loss == "sum":
        out.append("The loss is a sum over samples: gradients are added up over the batches, not averaged.")
    held = f"A rank holds at most {amount(plan.parameter_bytes)} of parameters"
    out.append(
        held + (f" and {amount(plan.gradient_bytes)} of gradients." if plan.gradient_bytes else "; none is trained.")
    )
    return out


def _fed_alike(plan: Plan) -> list[str]:
    """Which ranks are one replica."""
    if plan.num_feeds == plan.world:
        return []
    feeds = plan.feeds
    ranks = [[rank for rank, feed in enumerate(feeds) if feed == number] for number in range(min(plan.num_feeds, 2))]
    blocks = [_ranks_in_short(block) for block in ranks]
    piped = _is_piped(plan)
    between, what = "; " if any(", " in block for block in blocks) else ", ", "pipeline" if piped else "replica"
    named = between.join([*blocks, "..."] if plan.num_feeds > 2 else blocks)
    each = f"are one {what}: feed all of them" if plan.num_feeds == 1 else f"are one {what} each: feed its ranks"
    return [f"Ranks {named} {each} the same batch."]


def _is_piped(plan: Plan) -> bool:
    """Whether stages lie on several ranks."""
    return plan.pipeline is not None and plan.pipeline.num_ranks > 1


def _ranks_in_short(ranks: Sequence[int]) -> str:
    """0-3 for neighbours; 0, 4, 8 and 0, 4, ..., 60 for others."""
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = map(str, ranks) if len(ranks) < 5 else [str(ranks[0]), str(ranks[1]), "...", str(ranks[-1])]
    return ", ".join(shown)


def _parallelism(plan: Plan) -> str:
    """Data, tensor and expert parallelism in words, and how large the global batch is."""
    sizes, of_experts = (
        [f"x {size}" for size in sorted({plan.device(graph.device).size for graph in graphs}) if size > 1]
        for graphs in ([g for g in plan.taskgraphs if not g.experts], [g for g in plan.taskgraphs if g.experts])
    )
    ways = [f"Data parallel x {plan.num_feeds} (DP)"]
    piped = _is_piped(plan)
    ways += [f"pipeline x {plan.device('replica').num_places} (PP)"] if piped else []
    ways += [f"tensor-split {' and '.join(sizes)} (TP)"] if sizes else []
    ways += [f"experts {' and '.join(of_experts)} (EP)"] if of_experts else []
    fed = "a pipeline" if piped else "a rank" if plan.feed_size == 1 else "a replica"
    times = "the batch you feed" if plan.num_feeds == 1 else f"{plan.num_feeds} x the batch you feed {fed}"
    if plan.world == 1:
        return f"One rank: the global batch is {times}."
    return f"{', '.join(ways)}: the global batch is {times}."


def _named_dims(batch_dim: tuple[tuple[str, int | None], ...]) -> str:
    counted = ", ".join(f"dimension {dim} of '{name}'" for name, dim in batch_dim if dim is not None)
    none = ", ".join(f"'{name}'" for name, dim in batch_dim if dim is None)
    return f"{counted} (not in {none})" if none else counted


_BATCHES = {
    "own": "own: each rank brings a batch of its own",
    "shared": "shared: the ranks of a replica are fed the same batch",
    "pipeline's": "pipeline's: the ranks of a pipeline are fed the same batch",
    "mixed": "mixed: the batches of several replicas meet",
}


def _taskgraphs(plan: Plan) -> list[str]:
    def key(graph: TaskGraph) -> Hashable:
        return tuple(map(_pattern, graph.modules)), _scope(graph), graph.site, graph.device, graph.num_parameters

    rows, modes = [], []
    for group in _grouped(plan.taskgraphs, key):
        first = group[0]
        where = plan.device(first.device)
        times = "" if len(group) == 1 else f"{len(group)} x "
        own = "pipeline's" if _is_piped(plan) else "shared" if plan.feed_size > 1 else "own"
        modes.append(where.row_mode if first.kind == "split" and not _is_piped(plan) else own)
        index = str(first.index) if len(group) == 1 else f"{first.index}-{group[-1].index}"
        names = _shown(fold_names([name for graph in group for name in graph.modules]))
        rows.append(
            [
                index,
                _scope(first),
                first.site if first.annotations else "",
                names,
                _on(plan, first, where),
                modes[-1],
                f"{times}{first.num_parameters:,}",
            ]
        )
    title = "What runs where (the modules of one scope are a TaskGraph):"
    table = _table(title, ["TaskGraph", "scope", "at", "modules", "on", "batch", "parameters"], rows)
    notes = ["; ".join(text for mode, text in _BATCHES.items() if mode in modes)] if plan.world > 1 else []
    different = sum(math.prod(shape) for _, shape in plan.parameters)
    if different < sum(graph.num_parameters for graph in plan.taskgraphs):
        notes.append(f"parameters that modules share are counted with each; {different:,} are different ones")
    long = {f"  {a}": None for graph in plan.taskgraphs if _scope(graph) != _calls(graph) for a in graph.annotations}
    return [*table, *long, *(f"  ({note})" for note in notes)]


def _calls(graph: TaskGraph) -> str:
    return " > ".join(annotation.call for annotation in graph.annotations) or "none: replicated"


def _scope(graph: TaskGraph) -> str:
    """The scopes as they were written; without their options where those take much room."""
    calls = _calls(graph)
    if len(calls) <= _WIDEST_SCOPE:
        return calls
    return " > ".join(f"wh.{a.kind}({'...' if a.options else ''})" for a in graph.annotations)


def _on(plan: Plan, graph: TaskGraph, where: VirtualDevice) -> str:
    if plan.pipeline is None or not _is_piped(plan):
        return _ranks(where.size, where.world)
    if plan.pipeline.stage_of(graph.modules[0]) is None:
        inside = any(annotation.kind == "pipeline" for annotation in graph.annotations)
        return "its stages' ranks" if inside else "where its input is"
    groups = where.ranks_of_a_place // where.size
    of = f"{_counted(groups, 'group')} of " if where.size > 1 else ""
    return f"its stage's {of}{_counted(where.size if of else groups, 'rank')}"


def _ranks(size: int, world: int) -> str:
    if size == 1:
        return f"each of {world} ranks" if world > 1 else "1 rank"
    return f"all {world} ranks" if size == world else f"{world // size} groups of {size} ranks"


def _pipeline(plan: Plan) -> list[str]:
    """The stages, who runs them, in which order, and what that costs in idle time and memory."""
    pipeline = plan.pipeline
    if pipeline is None:
        return []
    stages, ranks, batches = pipeline.num_stages, pipeline.num_ranks, pipeline.num_micro_batches
    kept = pipeline.order().peak_in_flight
    device = plan.device("replica")
    rows = []
    for stage, names in enumerate(pipeline.stages):
        place = pipeline.place_of(stage)
        runs = [block[place] for block in device.pipelines]
        rows.append(
            [
                str(stage),
                _shown(fold_names(names)),
                f"{pipeline.stage_parameters[stage]:,}",
                amount(pipeline.stage_bytes[stage]),
                _ranks_in_short(runs),
                str(kept[place]),
            ]
        )
    of = f"{_counted(plan.num_feeds, 'pipeline')} of {_counted(ranks * plan.feed_size, 'rank')}"
    order = f"schedule {pipeline.schedule}, {_counted(batches, 'micro-batch')}"
    title = f"The pipeline, {_counted(stages, 'stage')} on {of} ({pipeline.site}): {order}:"
    table = _table(title, ["stage", "modules", "parameters", "bytes", "on ranks", "micro-batches kept"], rows)
    notes = [f"({_idle(plan, pipeline)})"]
    if plan.programs:
        notes.append(f"Recorded so far: {_counted(plan.programs, 'kind')} of calls.")
    if pipeline.chosen:
        notes.append(f"The stages are {pipeline.chosen}.")
    if pipeline.links:
        in_force_first = sorted(pipeline.links, key=lambda links: links.inner != pipeline.inner)
        notes += [_link(links, links.inner == pipeline.inner) for links in in_force_first]
    elif plan.cluster.num_nodes > 1 and ranks > 1:
        notes.append(f"{_PLACED[pipeline.inner]}.")
    return [*table, *(line for note in notes for line in _wrapped(note))]


def _idle(plan: Plan, pipeline: PipelinePlan) -> str:
    """The bubble, by the papers' formula, else by a simulation."""
    sizes = (pipeline.num_stages, pipeline.num_micro_batches, pipeline.num_ranks)
    share = None if pipeline.table else bubble_formula(pipeline.schedule, *sizes)
    how = "by formula"
    if share is None:
        share, how = simulate(pipeline.order()).bubble_share, "simulated"
    kept = "micro-batches kept: those that a rank keeps activations of at once, at most, counted once a stage"
    line = plan.timeline() if any(pipeline.stage_flops) else None
    here = f", and {line.bubble_share:.1%} with what these compute" if line else ""
    return f"a rank is idle {share:.1%} of a step, {how}, where stages take equally long{here}; {kept}"


_PLACED = {
    False: "The ranks of one stage are neighbours: outputs of stages travel between nodes, gradients inside",
    True: "The ranks of one pipeline are neighbours: gradients travel between nodes, outputs of stages inside",
}


def _link(links: Links, in_force: bool) -> str:
    between, inside = amount(links.between_bytes), amount(links.inside_bytes)
    told = f"at most {between} leave a node in a step, at most {inside} go from a rank to its node"
    if in_force:
        return f"{_PLACED[links.inner]}: {told}."
    return f"The other way, with the ranks of one {'pipeline' if links.inner else 'stage'} as neighbours: {told}."


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "es" if what.endswith("ch") else "s")


_SIDES = {"columns": "columns (outputs)", "rows": "rows (inputs)"}


def _cuts(plan: Plan) -> list[str]:
    rows = []
    for group in _grouped(plan.cuts, lambda cut: (_pattern(cut.module), cut.rule, cut.role, cut.widths)):
        first = group[0]
        names = _shown(fold_names([cut.module for cut in group]))
        rows.append([names, first.rule, _SIDES.get(first.role, first.role), _widths(first.widths)])
    return _table("How split modules are cut:", ["module", "kind", "by", "a rank holds"], rows)


def _gradients(plan: Plan) -> list[str]:
    rows = []
    for reduce in plan.reduces:
        device = plan.device(reduce.device)
        over = (
            f"all {device.num_copies} ranks{' of a stage' if _is_piped(plan) else ''}"
            if device.size == 1
            else f"the {device.num_copies} ranks that hold one part of a split over {device.size}"
        )
        rows.append(
            [
                over,
                str(len(reduce.parameters)),
                amount(reduce.gradient_bytes),
                f"{reduce.wire}, {amount(reduce.wire_bytes)}" if reduce.wire else "own dtype",
                reduce.algorithm,
                f"{reduce.max_in_flight} of {amount(reduce.bucket_bytes)}",
            ]
        )
    head = ["over", "tensors", "bytes of a rank", "sent as", "all-reduce", "buckets at a time"]
    return _table("How gradients are averaged, while backward runs:", head, rows)


_INPUTS, _OUTPUTS = "inputs of split modules, and their gradients", "outputs of split modules, and their gradients"
_BETWEEN_STAGES = "outputs of stages, and their gradients"
_LOSS, _COUNTS = "losses over split classes", "numbers of samples and labels"
# What an operation, estimated or counted, moves: several of them serve one purpose.
_PURPOSES = {
    "gradients": "gradients, to be averaged",
    "tokens": "tokens to experts and back, and their gradients",
    "slices": "outputs of modules on slices, and gradients of their inputs",
    "stage outputs": _BETWEEN_STAGES,
    "outputs of a pipeline": "outputs of the last stage, to every rank",
    **dict.fromkeys(["rows in", "columns in", "ids", "ids of a split embedding"], _INPUTS),
    **dict.fromkeys(["enter", "enter's backward", "rows to columns", "rows to columns' backward"], _INPUTS),
    **{f"{what} of a split's input": _INPUTS for what in ("rows", "columns", "samples", "channels")},
    **dict.fromkeys(["rows out", "leave", "leave's backward"], _OUTPUTS),
    **dict.fromkeys(["columns to rows", "columns to rows' backward"], "outputs of splits, gathered"),
    **dict.fromkeys(["cross entropy", "cross_entropy", "cross_entropy labels", "cross_entropy statistics"], _LOSS),
    **dict.fromkeys(["cross_entropy's backward", "seed of a loss"], _LOSS),
    **dict.fromkeys(["row counts", "row counts of the batch", "counts of labels", "count of labels"], _COUNTS),
}


def _traffic(plan: Plan) -> list[str]:
    if not plan.traffic:
        return [] if plan.world > 1 else ["One rank: nothing is sent."]
    total: dict[tuple[str, str], float] = {}
    for traffic in plan.traffic:
        purpose = _PURPOSES.get(traffic.what, traffic.what), traffic.where
        total[purpose] = total.get(purpose, 0.0) + traffic.sent_bytes
    rows = [[what, where, amount(sent)] for (what, where), sent in sorted(total.items(), key=lambda item: -item[1])]
    rows.append(["in all", "", amount(plan.sent_bytes)])
    table = _table("What a rank sends in a training step:", ["what", "among", "bytes"], rows)
    return [*table, *_wrapped(f"({plan.assumption})")]


def _gathers(plan: Plan) -> list[str]:
    rows = [[g.operation, g.site, str(g.count), amount(g.num_bytes)] for g in plan.gathers]
    title = "Outputs of a split that were gathered because an operation needs all columns (z.rows() says it outright):"
    return _table(title, ["operation", "at", "times", "bytes in all"], rows)


# ---- tables and names ----


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent="  ", subsequent_indent="   ")


def _table(title: str, head: list[str], rows: list[list[str]]) -> list[str]:
    """Columns without an entry are left out; nothing where there are no rows."""
    if not rows:
        return []
    dropped = len(rows) - _MOST_ROWS
    if dropped > 1:
        rows = [*rows[: _MOST_ROWS - 1], [f"... {dropped + 1} more", *[""] * (len(head) - 1)]]
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in kept]
    lines = [[row[i].ljust(width) for i, width in zip(kept, widths, strict=True)] for row in [head, *rows]]
    return [title, *("  " + "  ".join(line).rstrip() for line in lines)]


def _grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _pattern(name: str) -> str:
    """A name with its numbers left out: equal for the layers of one list."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "#", name)


def fold_names(names: Sequence[str]) -> list[str]:
    """Names that differ in one number become one: blocks.0.fc, blocks.1.fc -> blocks.0-1.fc; "" is the root."""
    out = []
    for group in _grouped(names, _pattern):
        numbers = [[int(piece) if piece.isdecimal() else piece for piece in name.split(".")] for name in group]
        differing = [i for i, values in enumerate(zip(*numbers, strict=True)) if len(set(values)) > 1]
        if len(differing) != 1:
            out += [name or "(root)" for name in group]
            continue
        place = differing[0]
        runs = _runs(sorted(int(pieces[place]) for pieces in numbers))
        pieces = group[0].split(".")
        out.append(".".join([*pieces[:place], runs, *pieces[place + 1 :]]))
    return out


def _runs(numbers: list[int]) -> str:
    """0 1 2 5 6 -> "0-2,5-6"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ",".join(texts if len(texts) < 6 else [*texts[:4], "...", texts[-1]])


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (
        f", and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    )


def _widths(widths: tuple[int, ...]) -> str:
    total = sum(widths)
    if len(set(widths)) == 1:
        return f"{widths[0]} of {total}"
    empty = sum(width == 0 for width in widths)
    spread = (
        f"{min(widths)} to {max(widths)} of {total}" if len(widths) > 4 else f"{', '.join(map(str, widths))} of {total}"
    )
    return spread + (f" (none on {empty} ranks)" if empty else "")
