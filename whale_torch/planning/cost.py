"""What a plan moves and holds: bytes that one rank sends in a training step, and bytes of parameters and gradients.

This is the estimate for a model that nobody has run: rows reach each split module once. With sample inputs the
model's own forward and backward are counted instead (rehearsal.py), and only the gradients come from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from whale_torch.planning.gradients import local_numel
from whale_torch.planning.layout import Shard
from whale_torch.planning.placement import VirtualDevice
from whale_torch.planning.plan import Plan, Reduce, Traffic
from whale_torch.planning.rules import Cut

__all__ = ["DEFAULT_ROWS", "all_reduce_bytes", "estimate", "gradient_traffic", "may_call_losses", "price", "shards_of"]

DEFAULT_ROWS = 32
_HEADER_BYTES = 192
_LABELS_IN_A_HEADER = 44
_COUNT_BYTES = 48
_LOSS_BYTES = 72
_ID_BYTES = 8


def price(plan: Plan, model: nn.Module) -> Plan:
    """The plan with its byte counts: of what each rank holds, and of a step by `estimate`."""
    parameters = dict(model.named_parameters())
    shards = shards_of(plan, model)
    held = {name: local_numel(p, shards.get(name)) * p.element_size() for name, p in parameters.items()}
    reduces = tuple(_with_bytes(reduce, parameters, shards) for reduce in plan.reduces)
    priced = replace(
        plan,
        reduces=reduces,
        parameter_bytes=sum(held.values()),
        gradient_bytes=sum(size for name, size in held.items() if parameters[name].requires_grad),
    )
    rows = plan.rows_per_rank
    where = (
        f"estimated at {rows} rows a rank, which reach each split module once, and a cross entropy behind a split at "
        "the end of the model; wh.plan(model, sample_inputs=...) counts a step of yours"
    )
    return replace(
        priced,
        traffic=(
            *gradient_traffic(priced, parameters, shards),
            *estimate(priced, losses_inside=may_call_losses(model)),
        ),
        assumption=where if plan.cuts else "whatever the batch",
    )


def may_call_losses(model: nn.Module) -> bool:
    """Whether a loss function may run inside: torch's own modules call none, but for its loss modules."""
    ours = ("torch.nn.", "whale_torch.")
    losses = ("torch.nn.modules.loss", "torch.nn.modules.adaptive")
    kinds = {type(module).__module__ for module in model.modules()}
    return any(kind in losses or not kind.startswith(ours) for kind in kinds)


def shards_of(plan: Plan, model: nn.Module) -> dict[str, Shard]:
    """Shard of every cut parameter by its first name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    first = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, Shard] = {}
    for cut in plan.cuts:
        for key, shard in cut.shards:
            owner, _, attribute = cut.full_name(key).rpartition(".")
            parameter = modules[owner]._parameters[attribute]
            if parameter is not None:
                found.setdefault(first[id(parameter)], shard)
    return found


def _with_bytes(reduce: Reduce, parameters: Mapping[str, nn.Parameter], shards: Mapping[str, Shard]) -> Reduce:
    trained = [name for name in reduce.parameters if parameters[name].requires_grad]
    elements = sum(local_numel(parameters[name], shards.get(name)) for name in trained)
    dtype = parameters[reduce.parameters[0]].dtype
    wire: torch.dtype = getattr(torch, reduce.wire) if reduce.wire else dtype
    return replace(reduce, gradient_bytes=elements * dtype.itemsize, wire_bytes=elements * wire.itemsize)


def all_reduce_bytes(num_bytes: float, num_ranks: int) -> float:
    """Sent by one rank in a ring all-reduce."""
    return 2 * num_bytes * (num_ranks - 1) / num_ranks


def gradient_traffic(plan: Plan, parameters: Mapping[str, nn.Parameter], shards: Mapping[str, Shard]) -> list[Traffic]:
    """Sent by a rank, on average, to average the gradients: each with its "used" flag."""
    out = []
    for reduce in plan.reduces:
        device = plan.device(reduce.device)
        dtype = getattr(torch, reduce.wire) if reduce.wire else parameters[reduce.parameters[0]].dtype
        cut = shards if device.size > 1 else {}
        trained = [n for n in reduce.parameters if parameters[n].requires_grad]
        elements = sum(parameters[n].numel() / (device.size if n in cut else 1) + 1 for n in trained)
        out.append(
            Traffic(
                "gradients",
                f"{device.num_copies} ranks",
                all_reduce_bytes(elements * dtype.itemsize, device.num_copies),
            )
        )
    return [traffic for traffic in out if traffic.sent_bytes]


def estimate(plan: Plan, *, losses_inside: bool = False) -> list[Traffic]:
    """Sent by a rank to bring rows into and out of split modules, forward and backward, in float32.

    losses_inside: the model may call loss functions, whose labels are counted over the ranks.
    """
    total: dict[tuple[str, str], float] = {}
    rows, ends = plan.rows_per_rank, _open_ends(plan.cuts)
    if plan.world > 1:
        total["row counts", f"{plan.world} ranks"] = float(_COUNT_BYTES * (plan.world - 1))
    if losses_inside and plan.num_feeds > 1:
        total["row counts", f"{plan.world} ranks"] += float(_LOSS_BYTES * (plan.world - 1))
    before: Cut | None = None
    for cut in plan.cuts:
        device = plan.device(plan.taskgraph_of(cut.module).device)
        for what, sent in _moved(cut, device, rows, read_before=_reads_the_same(before, cut), ends=cut.module in ends):
            key = (what, f"{device.size} ranks")
            total[key] = total.get(key, 0.0) + sent
        before = cut
    return [Traffic(what, where, sent) for (what, where), sent in total.items() if sent]


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
