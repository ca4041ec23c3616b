"""What a plan moves and holds: bytes that one rank sends in a training step, and bytes of parameters and gradients.

This is the estimate for a model that nobody has run: rows reach each split module once. With sample inputs the
model's own forward and backward are counted instead (rehearsal.py), and only the gradients come from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from whale_torch.planning.gradients import local_numel
from whale_torch.planning.layout import Shard
from whale_torch.planning.links import Sent, send_stages
from whale_torch.planning.pipelines import PipelinePlan
from whale_torch.planning.placement import VirtualDevice
from whale_torch.planning.plan import Plan, Reduce, Traffic
from whale_torch.planning.rules import Cut

__all__ = [
    "DEFAULT_ROWS",
    "all_reduce_bytes",
    "estimate",
    "gradient_traffic",
    "may_call_losses",
    "places_of",
    "price",
    "reduce_bytes",
    "shards_among",
    "shards_of",
    "split_bytes",
]

DEFAULT_ROWS = 32
_HEADER_BYTES = 192
_LABELS_IN_A_HEADER = 44
_COUNT_BYTES = 48
_LOSS_BYTES = 72
_ID_BYTES = 8
# A pipeline: what it is fed, the counts of a loss with one mean in it, its value.
_FED_BYTES, _LOSS_COUNT_BYTES, _LOSS_VALUE_BYTES = 64, 24, 8


def price(plan: Plan, model: nn.Module) -> Plan:
    """The plan with its byte counts: of what each rank holds, and of a step by `estimate`."""
    parameters = dict(model.named_parameters())
    shards = shards_of(plan, model)
    held = {name: local_numel(p, shards.get(name)) * p.element_size() for name, p in parameters.items()}
    trained = {name: size for name, size in held.items() if parameters[name].requires_grad}
    places = places_of(plan, model)
    priced = replace(
        plan,
        reduces=tuple(reduce_bytes(reduce, parameters, shards, places) for reduce in plan.reduces),
        parameter_bytes=max(sum(held[name] for name in names) for names in places),
        gradient_bytes=max(sum(size for name, size in trained.items() if name in names) for names in places),
        pipeline=None if plan.pipeline is None else _with_stages(plan.pipeline, model),
    )
    losses_inside = may_call_losses(model)
    if priced.pipeline is not None:
        traffic = _of_the_busiest(priced, parameters, shards, places)
        return replace(priced, traffic=traffic, assumption=_assumption(priced))
    step = estimate(priced, losses_inside=losses_inside)
    traffic = (*gradient_traffic(priced, parameters, shards), *step)
    return replace(priced, traffic=traffic, assumption=_assumption(priced))


def _assumption(plan: Plan) -> str:
    """What the byte counts assume, in words."""
    rows = plan.rows_per_rank
    estimated = (
        f"estimated at {rows} rows a rank, which reach each split module once, and a cross entropy behind a split"
    )
    estimated += " at the end of the model"
    hint = "wh.plan(model, sample_inputs=...) counts a step of yours"
    if plan.pipeline is None or plan.pipeline.num_ranks == 1:
        return f"{estimated}; {hint}" if plan.cuts else "whatever the batch"
    parts = [f"splits are {estimated}"] if plan.cuts else []
    if plan.pipeline.moved:
        parts.append(f"stages hand each other what they do in a step of {rows} rows")
    else:
        parts += ["without what stages hand each other, which depends on the batch", hint]
    return "; ".join(["by the rank that sends most", *parts])


def places_of(plan: Plan, model: nn.Module) -> list[frozenset[str]]:
    """Names of the parameters that ranks hold: of those at each place of a pipeline, of every rank without one."""
    names = [name for name, _ in model.named_parameters()]
    if plan.pipeline is None:
        return [frozenset(names)]
    users = plan.pipeline.users(model)
    return [
        frozenset(name for name in names if any(plan.pipeline.place_of(stage) == place for stage in users[name]))
        for place in range(plan.pipeline.num_ranks)
    ]


def _with_stages(pipeline: PipelinePlan, model: nn.Module) -> PipelinePlan:
    """The pipeline with the parameters and bytes of each stage; what several stages use counts in each."""
    numbers, sizes = [0] * pipeline.num_stages, [0] * pipeline.num_stages
    parameters = dict(model.named_parameters())
    for name, stages in pipeline.users(model).items():
        for stage in stages:
            numbers[stage] += parameters[name].numel()
            sizes[stage] += parameters[name].numel() * parameters[name].element_size()
    return replace(pipeline, stage_parameters=tuple(numbers), stage_bytes=tuple(sizes))


def _of_the_busiest(
    plan: Plan,
    parameters: Mapping[str, nn.Parameter],
    shards: Mapping[str, Shard],
    places: Sequence[frozenset[str]],
) -> tuple[Traffic, ...]:
    """What the rank of a pipeline sends that sends most in all."""
    assert plan.pipeline is not None
    ranks = plan.device("replica")
    sent = Sent(plan.cluster.nodes)
    send_stages(plan, sent)
    by_place = [
        [*gradient_traffic(plan, parameters, shards, places, place), *estimate(plan, place=place)]
        for place in range(plan.pipeline.num_ranks)
    ]
    common = [Traffic("outputs of a pipeline", f"{ranks.num_places} ranks", float(plan.pipeline.output_bytes))]
    if plan.world > 1:
        counts = _FED_BYTES * (plan.world - 1) + _LOSS_COUNT_BYTES * (ranks.num_copies - 1)
        values = _LOSS_VALUE_BYTES * (ranks.num_places + ranks.num_copies - 2)
        common.append(Traffic("row counts", f"{plan.world} ranks", float(counts + values)))
    found: list[list[Traffic]] = []
    for rank in range(plan.world):
        found.append(
            [
                *by_place[ranks.place_of(rank)],
                Traffic("stage outputs", "ranks of a node", sent.inside[rank]),
                Traffic("stage outputs", "nodes", sent.between[rank]),
                *(common if ranks.num_places > 1 else common[1:]),
            ]
        )
    busiest = max(found, key=lambda rows: sum(row.sent_bytes for row in rows))
    return tuple(row for row in busiest if row.sent_bytes)


def may_call_losses(model: nn.Module) -> bool:
    """Whether a loss function may run inside: torch's own modules call none, but for its loss modules."""
    ours = ("torch.nn.", "whale_torch.")
    losses = ("torch.nn.modules.loss", "torch.nn.modules.adaptive")
    kinds = {type(module).__module__ for module in model.modules()}
    return any(kind in losses or not kind.startswith(ours) for kind in kinds)


def shards_of(plan: Plan, model: nn.Module) -> dict[str, Shard]:
    """Shard of every cut parameter by its first name."""
    first = {id(p): name for name, p in model.named_parameters()}
    return shards_among(plan, dict(model.named_modules(remove_duplicate=False)), first)


def shards_among(plan: Plan, modules: Mapping[str, nn.Module], first: Mapping[int, str]) -> dict[str, Shard]:
    """The same of modules by name. first: of each parameter, by id, its first name."""
    found: dict[str, Shard] = {}
    for cut in plan.cuts:
        for key, shard in cut.shards:
            owner, _, attribute = cut.full_name(key).rpartition(".")
            parameter = modules[owner]._parameters[attribute]
            if parameter is not None:
                found.setdefault(first[id(parameter)], shard)
    return found


def reduce_bytes(
    reduce: Reduce,
    parameters: Mapping[str, nn.Parameter],
    shards: Mapping[str, Shard],
    places: Sequence[frozenset[str]],
) -> Reduce:
    """A group of gradients with its bytes, of the place that holds most."""
    trained = [name for name in reduce.parameters if parameters[name].requires_grad]
    sizes = {name: local_numel(parameters[name], shards.get(name)) for name in trained}
    elements = max(sum(size for name, size in sizes.items() if name in names) for names in places)
    dtype = parameters[reduce.parameters[0]].dtype
    wire_bytes = elements * reduce.wire_dtype(dtype).itemsize
    return replace(reduce, gradient_bytes=elements * dtype.itemsize, wire_bytes=wire_bytes)


def all_reduce_bytes(num_bytes: float, num_ranks: int) -> float:
    """Sent by one rank in a ring all-reduce."""
    return 2 * num_bytes * (num_ranks - 1) / num_ranks


def gradient_traffic(
    plan: Plan,
    parameters: Mapping[str, nn.Parameter],
    shards: Mapping[str, Shard],
    places: Sequence[frozenset[str]] | None = None,
    place: int = 0,
) -> list[Traffic]:
    """Sent by a rank, on average, to average the gradients: each with its "used" flag.

    places: what ranks hold at each place of a pipeline (`places_of`); place: that of the rank.
    """
    trained = [name for name, p in parameters.items() if p.requires_grad and (places is None or name in places[place])]
    ties = {name: sum(name in names for names in places or ()) for name in trained}
    reduced = {name for reduce in plan.reduces for name in reduce.parameters}
    total: dict[int, list[float]] = {}
    for reduce in plan.reduces:
        device = plan.device(reduce.device)
        dtype = reduce.wire_dtype(parameters[reduce.parameters[0]].dtype)
        cut = shards if device.size > 1 else {}
        own = set(reduce.parameters)
        mine = [name for name in trained if name in own]
        for times in dict.fromkeys(max(ties[name], 1) for name in mine):
            names = [name for name in mine if max(ties[name], 1) == times]
            elements = sum(parameters[n].numel() / (device.size if n in cut else 1) + 1 for n in names)
            ranks = device.num_copies * times
            total.setdefault(ranks, []).append(all_reduce_bytes(elements * dtype.itemsize, ranks))
    for name in trained:
        if name not in reduced and ties[name] > 1:  # one pipeline: what its stages share
            size = (parameters[name].numel() + 1) * parameters[name].element_size()
            total.setdefault(ties[name], []).append(all_reduce_bytes(size, ties[name]))
    return [Traffic("gradients", f"{ranks} ranks", sum(sent)) for ranks, sent in total.items() if sum(sent)]


def estimate(plan: Plan, *, losses_inside: bool = False, place: int | None = None) -> list[Traffic]:
    """Sent by a rank to bring rows into and out of split modules, forward and backward, in float32.

    losses_inside: the model may call loss functions, whose labels are counted over the ranks. place: only what runs at
    this place of a pipeline.
    """
    total: dict[tuple[str, str], float] = {}
    rows, ends = plan.rows_per_rank, _open_ends(plan.cuts)
    if plan.world > 1 and place is None:
        total["row counts", f"{plan.world} ranks"] = float(_COUNT_BYTES * (plan.world - 1))
    if losses_inside and plan.num_feeds > 1:
        total["row counts", f"{plan.world} ranks"] += float(_LOSS_BYTES * (plan.world - 1))
    before: Cut | None = None
    for cut in plan.cuts:
        if place is not None and _place_of(plan, cut) != place:
            continue
        device = plan.device(plan.taskgraph_of(cut.module).device)
        for what, sent in _moved(cut, device, rows, read_before=_reads_the_same(before, cut), ends=cut.module in ends):
            key = (what, f"{device.size} ranks")
            total[key] = total.get(key, 0.0) + sent
        before = cut
    if place is not None and plan.pipeline is not None and plan.pipeline.sliced_bytes:
        joined = sum(plan.pipeline.sliced_bytes[stage] for stage in plan.pipeline.stages_at(place))
        total["slices", f"{plan.feed_size} ranks"] = joined * (plan.feed_size - 1) / plan.feed_size
    return [Traffic(what, where, sent) for (what, where), sent in total.items() if sent]


def _place_of(plan: Plan, cut: Cut) -> int:
    assert plan.pipeline is not None
    return plan.pipeline.place_of(plan.pipeline.stage_of(cut.module) or 0)


def split_bytes(plan: Plan) -> dict[str, list[float]]:
    """Of each VirtualDevice of splits in a pipeline, what a rank of each place sends for them."""
    assert plan.pipeline is not None
    devices = [device for device in plan.devices if device.size > 1]
    found = {device.name: [0.0] * plan.pipeline.num_ranks for device in devices}
    for place in range(plan.pipeline.num_ranks):
        for traffic in estimate(plan, place=place):
            for device in devices:
                if traffic.where == f"{device.size} ranks":
                    found[device.name][place] += traffic.sent_bytes
    return found


def _open_ends(cuts: Sequence[Cut]) -> set[str]:
    """Column layers at the end of the model, whose output nothing of the plan consumes."""
    ends: list[str] = []
    for cut in reversed(cuts):
        if cut.role != "columns" or cut.rule == "Embedding":
            break
        ends.append(cut.module)
    return set(ends[:1])


def _reads_the_same(before: Cut | None, cut: Cut) -> bool:
    """Whether two neighbours (gate and up, or q, k and v) are taken to read one tensor, which is gathered once."""
    return (
        before is not None
        and before.role == cut.role == "columns"
        and before.rule == cut.rule
        and before.elements_in == cut.elements_in
        and before.module.rpartition(".")[0] == cut.module.rpartition(".")[0]
        and "." in cut.module
    )


def _moved(cut: Cut, device: VirtualDevice, rows: int, *, read_before: bool, ends: bool) -> list[tuple[str, float]]:
    """What one module moves: (purpose, bytes)."""
    size, feeds, twins = device.size, device.num_rows, device.num_twins

    def complete(elements: float) -> float:
        """Entering or leaving: gathered one way, summed the other."""
        return 2 * elements * (feeds - 1) + all_reduce_bytes(elements, twins)

    found: list[tuple[str, float]] = []
    header = float(_HEADER_BYTES * (size - 1))
    enters, leaves = 4.0 * rows * cut.elements_in, 4.0 * rows * cut.elements_out
    if cut.role == "experts":  # each row there and back, and so its gradient
        return [("tokens", 4 * enters * (size - 1) / size)]
    if cut.rule == "Embedding":
        found.append(("ids", _ID_BYTES * rows * (feeds - 1) + (header if feeds > 1 else 0)))
    elif cut.role == "rows" and enters:  # the columns of a plain tensor: elements_in are those of one rank
        all_columns = enters * size
        found.append(
            (
                "columns in",
                all_columns / twins * (feeds - 1) / feeds + (feeds - 1) * enters + all_columns / twins * (twins - 1),
            )
        )
    elif enters and not read_before:
        found.append(("rows in", complete(enters) + (header if feeds > 1 else 0)))
    if leaves:
        found.append(("rows out", complete(leaves)))
    if ends:
        statistics = 4 * 4.0 * rows * feeds * (size - 1)
        labels = _ID_BYTES * rows * (feeds - 1) if rows > _LABELS_IN_A_HEADER else 0
        found.append(("cross entropy", header + labels + statistics + 4 * (size - 1)))
    return found
