"""A rehearsal: one rank's training step on tensors without memory, among ranks that all do as it does.

The model's own forward, losses and backward run on a copy on the meta device; every collective is counted and none is
sent. So a plan names the bytes of a step, and the gathers that nobody asked for, before a rank is started.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from whale_torch.comm.columns import Columns
from whale_torch.comm.gradients import Gradients
from whale_torch.errors import first_line
from whale_torch.mesh import Group, Mesh
from whale_torch.planning.cost import gradient_traffic, price, shards_of
from whale_torch.planning.pipelines import PipelinePlan
from whale_torch.planning.plan import Plan, Traffic
from whale_torch.planning.recording import arguments, count_rows, record_step
from whale_torch.strategies.batch import BatchReader
from whale_torch.strategies.outputs import map_tensors, tensors_in
from whale_torch.strategies.root import make_root
from whale_torch.strategies.runtime import Runtime
from whale_torch.strategies.split import apply_split, cut_parameters

__all__ = ["rehearse"]


def rehearse(plan: Plan, model: nn.Module, sample_inputs: Any, *, rank: int = 0) -> Plan:
    """The plan with the bytes that `rank` sends in a step on these inputs, and the implicit gathers of that step.

    sample_inputs: a tensor, a tuple of positional or a dict of named inputs of the model. A model that returns no loss
    is taken to meet a cross entropy where a split's output leaves it. The model is left alone. Where it cannot run
    without values (its control flow reads them), the plan keeps its estimate and says why.
    """
    if plan.pipeline is not None:
        return _recorded(plan, plan.pipeline, model, sample_inputs)
    if not plan.cuts:
        return plan
    mesh = _RehearsalMesh(rank, plan)
    args, kwargs = arguments(sample_inputs)
    try:
        rows = BatchReader(model, plan.batch_dim).read(args, kwargs, hashed=False).rows
        runtime = _step(plan, model, args, kwargs, mesh)
    except Exception as error:  # the model is the user's: whatever it raises without values says so
        why = f"{type(error).__name__}: {first_line(error)}"
        return replace(plan, assumption=f"{plan.assumption}; it does not run without values: {why}")
    gradients = gradient_traffic(plan, dict(model.named_parameters()), shards_of(plan, model))
    return replace(
        plan,
        traffic=(*gradients, *mesh.traffic()),
        gathers=runtime.gathers(),
        rows_per_rank=rows,
        assumption=f"counted on a step of {rows} rows a rank",
    )


def _recorded(plan: Plan, pipeline: PipelinePlan, model: nn.Module, sample_inputs: Any) -> Plan:
    """A plan of a pipeline with the bytes of its messages, where those are not known yet: a saved one's."""
    if pipeline.recorded:
        return plan
    recorded = record_step(model, pipeline, sample_inputs, plan.batch_dim, plan.taskgraphs)
    rows = count_rows(model, sample_inputs, plan.batch_dim)
    return price(replace(plan, pipeline=recorded, rows_per_rank=rows), model)


def _step(plan: Plan, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: _RehearsalMesh) -> Runtime:
    twin = _without_memory(model)
    regions = apply_split(twin, plan, mesh, cut_parameters(twin, plan, mesh))
    runtime = Runtime(twin, plan, mesh, regions, BatchReader(twin, plan.batch_dim), lambda plan: [])
    runtime.gradients = Gradients([])  # nothing to average, and nothing that wants to read them
    make_root(twin, runtime)
    args, kwargs = map_tensors((args, kwargs), lambda t: t.detach().to("meta").requires_grad_(t.requires_grad))
    twin.train()
    with _quietly(), torch.device("meta"), torch.enable_grad():
        loss = _loss(twin(*args, **kwargs))
        if loss is not None:
            loss.backward()
    return runtime


def _loss(out: Any) -> Tensor | None:
    """The step's loss: the model's own scalar, else the likely use of each output."""
    outputs = [t for t in tensors_in(out) if t.requires_grad]
    scalars = [t for t in outputs if not isinstance(t, Columns) and t.dim() == 0]
    losses = scalars or [_use(t) for t in outputs]
    return sum(losses[1:], losses[0]) if losses else None


def _use(x: Tensor) -> Tensor:
    if not isinstance(x, Columns):
        return x.sum()
    if x.place.tail:
        return x.rows().sum()
    flat = x.reshape(-1, x.shape[-1])
    return F.cross_entropy(flat, torch.zeros(flat.shape[0], dtype=torch.int64, device="meta"))


def _without_memory(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters and buffers have no values; ties stay ties."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(model, memo)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """A rehearsal draws no random numbers from the caller's generators."""
    with torch.random.fork_rng(devices=[]):
        yield


class _RehearsalMesh(Mesh):
    """Groups of any size around one rank, without any process behind them."""

    def __init__(self, rank: int, plan: Plan):
        super().__init__(rank, plan.world, torch.device("meta"), plan.cluster, timedelta())

    def _shared(self) -> dict[tuple[Any, ...], Group]:
        return self._groups

    def _private(self, key: tuple[Any, ...], name: str, blocks: tuple[tuple[int, ...], ...]) -> Group:
        return self._make(name, blocks)

    def _join(self, block: tuple[int, ...]) -> dist.ProcessGroup | None:
        return _Mirror(block.index(self.rank), len(block)) if self.rank in block else None

    def groups(self) -> list[Group]:
        return list(self._groups.values())

    def traffic(self) -> list[Traffic]:
        """What was sent, by operation and by the ranks it was sent among."""
        total: dict[tuple[str, str], float] = {}
        for group in self.groups():
            for operation, sent in group.sent_by.items():
                key = (operation, f"{group.size} ranks")
                total[key] = total.get(key, 0.0) + sent
        return [Traffic(what, where, sent) for (what, where), sent in total.items() if sent]


class _Done(dist.Work):
    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class _Mirror(dist.ProcessGroup):
    """A process group of one real rank: every other one sends and receives what this one does."""

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)  # type: ignore[call-arg, unused-ignore]
        self._size = size

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        for x in tensors:
            if opts is not None and opts.reduceOp == dist.ReduceOp.SUM:
                x.mul_(self._size)
        return _Done()

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        mine = input.tensor_split(self._size) if not input_sizes else input.split(input_sizes)
        parts = output.tensor_split(self._size) if not output_sizes else output.split(output_sizes)
        for part in parts:
            if part.shape == mine[self.rank()].shape:
                part.copy_(mine[self.rank()])
        return _Done()

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        output.view(self._size, -1).copy_(input.reshape(1, -1).expand(self._size, -1))
        return _Done()

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        output.copy_(input.reshape(self._size, -1)[self.rank()].view_as(output) * self._size)
        return _Done()
