"""A pipelined model at run time: each call is cut into micro-batches and runs the schedule."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whale_torch.comm.collectives import broadcast_copy, gather_equal
from whale_torch.comm.messages import Message, Messages
from whale_torch.mesh import Group
from whale_torch.planning.schedules import Schedule, make, simulate
from whale_torch.strategies.outputs import map_tensors, tensors_in
from whale_torch.strategies.pipeline.batches import micro_batches
from whale_torch.strategies.pipeline.bridges import Deliver, DeliverLater
from whale_torch.strategies.pipeline.programs import Mode, Program, Programs
from whale_torch.strategies.pipeline.stand_ins import StandIns
from whale_torch.strategies.pipeline.step import MicroBatch, Step, edges_of, forms_of
from whale_torch.trace.graph import Node, map_nodes
from whale_torch.trace.graph import tensors_in as inputs_in

__all__ = ["Pipeline", "Shape"]


@dataclass(frozen=True)
class Shape:
    """A pipeline's form: stages, micro-batches, schedule, and how losses that are no sums over samples are taken."""

    num_stages: int
    num_micro_batches: int
    schedule: str = "1f1b"
    micro_batch_loss: str | None = None
    batch_dim: int = 0


class Pipeline:
    """Runs a model's calls over the ranks of a pipeline.

    ranks: of this pipeline, in order of their stages; stage s is on the (s % size)-th. replicas: the ranks that run
    the same stages on other batches. own: this rank's parameters. tied: groups of ranks that share a parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        programs: Programs,
        shape: Shape,
        ranks: Group,
        replicas: Group,
        own: list[nn.Parameter],
        tied: Sequence[tuple[nn.Parameter, Group]],
        modules: list[nn.Module],
        device: torch.device,
        seed: int = 0,
    ):
        self.model, self.programs, self.shape, self.ranks, self.replicas = model, programs, shape, ranks, replicas
        self.stand_ins = StandIns(modules, own)
        self.stages = tuple(s for s in range(shape.num_stages) if s % ranks.size == ranks.index)
        self.peak = 0
        self._tied, self._device, self._seed = tied, device, seed
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._number = 0
        self._modules = dict(model.named_modules(remove_duplicate=False))

    @property
    def _last(self) -> int:
        """Place of the last stage's rank in the pipeline."""
        return (self.shape.num_stages - 1) % self.ranks.size

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> Any:
        """One call of the model with a batch of `rows` samples."""
        self._number += 1
        grad = torch.is_grad_enabled()
        cut = micro_batches(args, kwargs, rows, self.shape.num_micro_batches, self.shape.batch_dim)
        mode: Mode = "train" if grad and self.model.training else "outputs"
        programs = [self.programs.of(*call, mode) for call in cut.calls]
        totals = self._totals(programs, cut.calls) if programs[0].mode == "train" else ()
        batches = [
            MicroBatch(list(inputs_in(call)), program.stages, totals)
            for call, program in zip(cut.calls, programs, strict=True)
        ]
        run = _Run(self, batches, programs, cut.rows, grad=grad)
        if programs[0].mode == "train":
            return run.train()
        return run.later() if grad else run.evaluate()

    def find(self, node: Node) -> Any:
        """The live module, parameter or buffer that a Node names."""
        if node.kind == "module":
            return self._modules[node.target]
        owner, _, name = node.target.rpartition(".")
        return getattr(self._modules[owner], name)

    def _totals(self, programs: Sequence[Program], calls: Sequence[Any]) -> list[Tensor]:
        """Counts of the loss over all micro-batches, as means over the replicas: the reducer takes means too."""
        found = []
        for program, call in zip(programs, calls, strict=True):
            assert program.reductions is not None
            counts = program.reductions.count(list(inputs_in(call)), self.find)
            found.append(torch.stack([torch.as_tensor(c, dtype=torch.float64) for c in (*counts, 1.0)]))
        total = torch.stack(found).sum(0)
        if self.replicas.size > 1:
            total = gather_equal(total, self.replicas, name="counts of a pipeline's loss").mean(0)
        return list(total.unbind())


class _Run:
    """One call: the schedule for its micro-batches, run once."""

    def __init__(
        self, pipe: Pipeline, batches: list[MicroBatch], programs: list[Program], rows: list[int], *, grad: bool
    ):
        self.pipe, self.batches, self.programs, self.rows, self.grad = pipe, batches, programs, rows, grad
        kind = pipe.shape.schedule if programs[0].mode == "train" else "gpipe"
        self.schedule, order = _order(
            kind, pipe.shape.num_stages, len(batches), pipe.ranks.size, tuple(edges_of(batches[0].programs).items()), grad
        )
        place = {stage: stage % pipe.ranks.size for stage in range(pipe.shape.num_stages)}
        self.messages = Messages(pipe.ranks, place, order, forms_of(batches), pipe._device)
        self.step = Step(
            batches,
            self.messages,
            grad=grad,
            find=pipe.find,
            seed=pipe._seed + 7919 * pipe._number,
            anchor=pipe._anchor,
            roots=self._roots,
        )

    def train(self) -> Any:
        """The loss and other scalars; gradients wait for the user's backward."""
        with self.pipe.stand_ins.in_place():
            for action in self.schedule.table[self.pipe.ranks.index]:
                if action.kind == "F":
                    self.step.forward(action.stage, action.micro_batch)
                else:
                    self.step.backward(action.stage, action.micro_batch, self._seeds(action.stage, action.micro_batch))
            self.messages.finish()
            self._average()
            held = self.pipe.stand_ins.gradients()
        self.pipe.peak = max(self.pipe.peak, self.step.peak)
        scalars = self._scalars()
        program = self.programs[0]
        parameters = [p for p in self.pipe.stand_ins.parameters if p.requires_grad]
        wanted = [g for p, g in zip(self.pipe.stand_ins.parameters, held, strict=True) if p.requires_grad]
        for node in program.scalars:
            if node is program.loss:
                scalars[node] = Deliver.apply(scalars[node], wanted, *parameters, self.pipe._anchor)  # type: ignore[no-untyped-call]
        return map_nodes(program.results, scalars.__getitem__)

    def evaluate(self) -> Any:
        """All that the model returns, on every rank of the pipeline."""
        for action in self.schedule.table[self.pipe.ranks.index]:
            if action.kind == "F":
                self.step.forward(action.stage, action.micro_batch)
        if not self.grad:
            self.messages.finish()
        return self._gather()

    def later(self) -> Any:
        """All that the model returns; its backward runs in the user's."""
        with self.pipe.stand_ins.in_place():
            out = self.evaluate()
        flows = [x for x in tensors_in(out) if x.is_floating_point()]
        parameters = [p for p in self.pipe.stand_ins.parameters if p.requires_grad]
        given = iter(DeliverLater.apply(self._backward, len(flows), *flows, *parameters, self.pipe._anchor))  # type: ignore[no-untyped-call]
        return map_tensors(out, lambda x: next(given) if x.is_floating_point() else x)

    def _backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        self._out_grads = [None if g is None else list(g.split(self.rows)) for g in grads]
        with self.pipe.stand_ins.in_place():
            for action in self.schedule.table[self.pipe.ranks.index]:
                if action.kind == "B":
                    self.step.backward(action.stage, action.micro_batch, self._seeds(action.stage, action.micro_batch))
            self.messages.finish()
            self._average()
            held = self.pipe.stand_ins.gradients()
        return [g for p, g in zip(self.pipe.stand_ins.parameters, held, strict=True) if p.requires_grad] + [None]

    def _roots(self, results: Any) -> list[Tensor]:
        """Where backward starts on the last stage: the loss, or every output."""
        if self.programs[0].mode == "train":
            return [results[self.programs[0].scalars.index(self._loss)]]
        return [x for x in tensors_in(results) if x.is_floating_point()]

    @property
    def _loss(self) -> Node:
        loss = self.programs[0].loss
        assert loss is not None
        return loss

    def _seeds(self, stage: int, number: int) -> list[Tensor | None]:
        if stage != self.pipe.shape.num_stages - 1:
            return []
        if self.programs[0].mode == "train":
            return [torch.ones((), dtype=self._loss.value.dtype, device=self.pipe._device)]
        return [None if parts is None else parts[number] for parts in self._out_grads]

    def _average(self) -> None:
        for parameter in self.pipe.stand_ins.parameters:
            if not parameter.requires_grad:
                continue
            alias = self.pipe.stand_ins.of(parameter)
            groups = [group for tied, group in self.pipe._tied if tied is parameter]
            if groups or self.pipe.replicas.size > 1:
                grad = torch.zeros_like(parameter) if alias.grad is None else alias.grad
                for group in groups:
                    grad = gather_equal(grad, group, name="gradients of a tied parameter").sum(0)
                if self.pipe.replicas.size > 1:
                    grad = gather_equal(grad, self.pipe.replicas, name="gradients of a stage").mean(0)
                alias.grad = grad

    def _scalars(self) -> dict[Node, Tensor]:
        """Every scalar as the mean over replicas, on every rank."""
        nodes = self.programs[0].scalars
        total = torch.zeros(len(nodes), dtype=torch.float64)
        for results in self.step.results.values():
            total += torch.stack([x.double().cpu() for x in results])
        total = gather_equal(total, self.pipe.ranks, name="a pipeline's loss").sum(0)
        if self.pipe.replicas.size > 1:
            total = gather_equal(total, self.pipe.replicas, name="a pipeline's loss").mean(0)
        return {node: x.to(node.value.dtype) for node, x in zip(nodes, total.to(self.pipe._device), strict=True)}

    def _gather(self) -> Any:
        """What the last stage gave for all micro-batches, on every rank."""
        output = self.programs[0].results
        nodes: dict[Node, Tensor] = {}
        program_nodes = [list(_nodes(p.results)) for p in self.programs]
        for place, node in enumerate(program_nodes[0]):
            if not isinstance(node.value, Tensor):
                continue
            values = [p[place].value for p in program_nodes]
            if self.pipe.ranks.index == self.pipe._last:
                parts = [list(tensors_in(self.step.results[m])) for m in range(len(self.batches))]
                joined = _join([p[len(nodes)] for p in parts], self.rows)
            else:
                joined = _join([torch.empty(v.shape, dtype=v.dtype, device=self.pipe._device) for v in values], self.rows)
            nodes[node] = joined
        for node, value in nodes.items():
            nodes[node] = _broadcast(value, self.pipe.ranks, self.pipe._last)
        return map_nodes(output, nodes.__getitem__)


def _nodes(value: Any) -> Iterator[Node]:
    from whale_torch.trace.graph import nodes_in

    return nodes_in(value)


def _join(parts: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    if parts[0].dim() and all(x.shape[0] == count for x, count in zip(parts, rows, strict=True)):
        return torch.cat(list(parts))
    return parts[0]


def _broadcast(x: Tensor, group: Group, place: int) -> Tensor:
    if group.size == 1:
        return x
    parts = gather_equal(x if group.index == place else torch.zeros_like(x), group, name="outputs of a pipeline")
    return parts[place]


@functools.lru_cache(maxsize=256)
def _order(
    name: str, stages: int, batches: int, ranks: int, edges: tuple[tuple[tuple[int, int], bool], ...], grad: bool
) -> tuple[Schedule, tuple[Message, ...]]:
    """The schedule and the one order of its messages."""
    schedule = make(name, stages, batches, ranks)
    if not grad:
        schedule = schedule.forward_only()
    flows = dict(edges)
    order = simulate(schedule, edges=flows).message_order
    kept = (m for m in order if m.kind == "activation" or flows[m.to_stage, m.from_stage])
    return schedule, tuple(Message(*m) for m in kept)


_ = (Callable, contextlib, broadcast_copy)
