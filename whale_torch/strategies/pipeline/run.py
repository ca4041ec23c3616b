"""One call of a pipelined model: the schedule for its micro-batches, and what the user gets of it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whale_torch.comm.collectives import broadcast, gather_equal
from whale_torch.comm.loss_part import LossPart
from whale_torch.comm.messages import Message, Messages
from whale_torch.planning.schedules import Action, Schedule, simulate
from whale_torch.strategies.pipeline.bridges import Deliver, DeliverLater
from whale_torch.strategies.pipeline.places import averaging, terms_of_means
from whale_torch.strategies.pipeline.programs import Mode, Program
from whale_torch.strategies.pipeline.step import MicroBatch, Step, edges_of, forms_of
from whale_torch.strategies.pipeline.weight_store import WeightStore
from whale_torch.trace.graph import Node, map_nodes

if TYPE_CHECKING:
    from whale_torch.strategies.pipeline.runtime import PipelineRuntime

__all__ = ["Run"]


class Run:
    """One call.

    rows: of each micro-batch; shares: the same as parts of all replicas' rows, times the number of replicas.
    """

    def __init__(
        self,
        runtime: PipelineRuntime,
        batches: list[MicroBatch],
        programs: list[Program],
        rows: list[int],
        shares: list[float],
        *,
        grad: bool,
    ):
        self.runtime, self.program, self.programs, self.rows, self.grad = runtime, programs[0], programs, rows, grad
        self._shares, self._batches = shares, batches
        plan = runtime.plan.pipeline
        assert plan is not None
        self._num_stages = plan.num_stages
        self._place_of = {stage: plan.place_of(stage) for stage in range(plan.num_stages)}
        edges = tuple(edges_of(batches[0].programs).items())
        self._schedule, self._order = _ordered(plan.order(len(batches)), edges, self.program.mode, grad)
        self._seeds_of_outputs: list[list[Tensor] | None] = []
        self._open = set(runtime.stages)
        self._scale = 1.0 if runtime.loss_scale is None else runtime.loss_scale()
        scale = None if runtime.loss_scale is None else functools.partial(float, self._scale)
        self._sync = runtime.sync
        self._row = self._schedule.table[runtime.pipeline.index]
        self._last_backward = _last_backwards(self._row)
        parts = {(action.stage, action.micro_batch) for action in self._row if action.kind == "I"}
        self._store = WeightStore(runtime.modules(), parts)
        self._step = Step(
            batches,
            self._posting("activation", "gradient") if self.program.mode == "train" else self._posting("activation"),
            grad=grad,
            find=runtime.find,
            seed=runtime.seed + 7919 * runtime.number + 104729 * runtime.replicas.index,
            anchor=runtime.anchor,
            roots=self._roots(),
            store=self._store,
            parts=[LossPart(share, scale, delivered=self.program.loss is not None) for share in shares],
            ended=self._ended,
        )

    def _posting(self, *kinds: str) -> Messages:
        """The messages of these kinds, in order, from here on."""
        runtime = self.runtime
        order = [message for message in self._order if message.kind in kinds]
        return Messages(runtime.wires, self._place_of, order, forms_of(self._batches), runtime.mesh.device)

    # ---- training with the loss inside

    def train(self) -> Any:
        """The loss and other scalars; the gradients wait for the user's backward."""
        held = self._run("FBIW")
        scalars = self._scalars()
        loss = self.program.loss
        assert loss is not None
        scalars[loss] = Deliver.apply(  # type: ignore[no-untyped-call]
            scalars[loss], held, self._scale, self._before_delivery, self.runtime.anchor, *self.runtime.trained()
        )
        return self._given(scalars)

    def _scalars(self) -> dict[Node, Tensor]:
        """Every scalar as the mean over replicas, on every rank."""
        nodes = self.program.returned
        total = torch.zeros(len(nodes), dtype=torch.float64)
        if self._step.results:  # on the last stage's rank
            numbers, results = zip(*self._step.results.items(), strict=True)
            columns = [
                self._whole_number(numbers, place, values) for place, values in enumerate(zip(*results, strict=True))
            ]
            total = torch.stack(columns).to("cpu")
        total = gather_equal(total, self.runtime.pipeline, name="the loss of a pipeline").sum(0)
        if self.runtime.replicas.size > 1:
            total = gather_equal(total, self.runtime.replicas, name="the loss of all pipelines").mean(0)
        device = self.runtime.mesh.device
        return {node: x.to(device, node.value.dtype) for node, x in zip(nodes, total.unbind(), strict=True)}

    def _whole_number(self, numbers: Sequence[int], place: int, values: Sequence[Tensor]) -> Tensor:
        """A number that the model returns, of all micro-batches together, float64; numbers: of those that gave it."""
        parts = torch.stack(list(values)).to(torch.float64)
        if self.program.combine[place] == "rows":
            parts *= parts.new_tensor([self._shares[number] for number in numbers])
        return parts.sum(0)

    # ---- everything the model returns

    def evaluate(self) -> Any:
        """All that the model returns, on every rank of the pipeline."""
        self._act("F")
        self._step.messages.finish()
        return self._given(self._outputs())

    def later(self) -> Any:
        """All that the model returns; its backward runs in the user's."""
        with self.runtime.stand_ins.in_place():
            self._act("F")
        self._step.messages.finish()
        outputs = self._outputs()
        flows = [self.program.returned[place] for place in self._roots()]
        given = DeliverLater.apply(  # type: ignore[no-untyped-call]
            self._backward, len(flows), *(outputs[node] for node in flows), *self.runtime.trained(), self.runtime.anchor
        )
        outputs.update(zip(flows, given, strict=True))
        return self._given(outputs)

    def _given(self, values: Mapping[Node, Tensor]) -> Any:
        """What the model returns."""
        rows = sum(self.rows)
        numbers = {node: type(node.value)(each * rows) for node, each in self.program.numbers.items()}
        return map_nodes(self.program.results, {**values, **numbers}.__getitem__)

    def _backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        self._before_backward()
        weight = sum(self._shares)
        self._seeds_of_outputs = [
            None if g is None else self._parts(g * weight, place) for g, place in zip(grads, self._roots(), strict=True)
        ]
        with self.runtime.in_step():
            self._step.messages = self._posting("gradient")
            return [*self._run("B"), None]

    def _outputs(self) -> dict[Node, Tensor]:
        """The last stage's values of all micro-batches together, on every rank of the pipeline."""
        runtime, found = self.runtime, {}
        for place, nodes in enumerate(zip(*(program.returned for program in self.programs), strict=True)):
            if runtime.pipeline.index == runtime.last:
                parts = [self._step.results[number][place] for number in range(len(nodes))]
            else:
                parts = [torch.zeros(n.value.shape, dtype=n.value.dtype, device=runtime.mesh.device) for n in nodes]
            whole = self._joined(parts, place)
            found[nodes[0]] = broadcast(whole, runtime.pipeline, runtime.last, name="outputs of a pipeline")
        return found

    def _joined(self, parts: list[Tensor], place: int) -> Tensor:
        """The whole batch's value: numbers add up, rows stand one after the other, and what has none is the same."""
        if place in self.program.combine:
            total = self._whole_number(range(len(parts)), place, parts)
            return total.round().to(parts[0].dtype) if not parts[0].is_floating_point() else total.to(parts[0].dtype)
        if place in self.program.dims:
            return torch.cat(parts, self.program.dims[place]).contiguous()
        return parts[0].clone(memory_format=torch.contiguous_format)

    def _parts(self, grad: Tensor, place: int) -> list[Tensor]:
        """What of an output's gradient each micro-batch gets: what has no rows, all of them gave."""
        if place in self.program.dims:
            return list(grad.split(self.rows, self.program.dims[place]))
        return [grad / len(self.rows)] * len(self.rows)

    # ---- the schedule

    def _run(self, kinds: str) -> list[Tensor | None]:
        """Runs actions with stand-ins in place; the averaged gradients of what is trained here."""
        runtime = self.runtime
        with runtime.stand_ins.in_place(), self._store.in_place(), self._averaging():
            self._act(kinds)
            self._step.messages.finish()
            if not self._sync:
                terms_of_means(runtime.reducers)
        runtime.peak = max(runtime.peak, self._step.peak)
        return runtime.stand_ins.take(runtime.trained())

    def _act(self, kinds: str) -> None:
        step = self._step
        for action in self._row:
            kind, stage, number = action
            if kind not in kinds:
                continue
            if kind == "F":
                step.forward(stage, number)
            elif kind == "W":
                step.weight_part(stage, number)
            else:
                (step.backward if kind == "B" else step.input_part)(stage, number, self._seeds(action))

    def _averaging(self) -> contextlib.AbstractContextManager[None]:
        return averaging(self.runtime.reducers) if self._sync else contextlib.nullcontext()

    def _before_delivery(self, grad: Tensor) -> None:
        if self.runtime.mesh.world > 1:
            self.runtime.factors.note(grad)
        self._before_backward()

    def _before_backward(self) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self.runtime.note_gradients)
        if self._sync:
            self.runtime.average_kept()
        else:
            self.runtime.keeps = True

    def _ended(self, stage: int, micro_batch: int) -> None:
        """Where it was its stage's last one, gradients of which no other stage here has a part may leave."""
        if self._last_backward[stage] != micro_batch:
            return
        self._open.discard(stage)
        whole = [alias for alias, stages in self.runtime.users if stage in stages and not stages & self._open]
        for one in self.runtime.reducers if self._sync else ():
            one.reducer.arrive(whole)

    def _roots(self) -> list[int]:
        """Which of the returned backward starts at: the loss, or every output that is no number."""
        program = self.program
        if program.loss is not None:
            return [program.returned.index(program.loss)]
        tensors = [place for place in range(len(program.returned)) if place not in program.combine]
        return [place for place in tensors if program.returned[place].value.requires_grad]

    def _seeds(self, action: Action) -> list[Tensor | None]:
        if action.stage != self._num_stages - 1:
            return []
        loss = self.program.loss
        if loss is not None:
            rows = self.program.combine[self.program.returned.index(loss)] == "rows"
            seed = self._scale * (self._shares[action.micro_batch] if rows else 1.0)
            return [torch.full((), seed, dtype=loss.value.dtype, device=self.runtime.mesh.device)]
        return [None if parts is None else parts[action.micro_batch] for parts in self._seeds_of_outputs]


def _last_backwards(row: Sequence[Action]) -> dict[int, int]:
    """Of each stage, the micro-batch whose backward, or its weight part, comes last."""
    return {action.stage: action.micro_batch for action in row if action.kind in ("B", "W")}


@functools.lru_cache(maxsize=256)
def _ordered(
    schedule: Schedule, edges: tuple[tuple[tuple[int, int], bool], ...], mode: Mode, grad: bool
) -> tuple[Schedule, tuple[Message, ...]]:
    """What is run of a schedule, and all its messages in the one order of all ranks."""
    if not grad:
        schedule = schedule.forward_only()
    elif mode == "outputs":
        schedule = schedule.forwards_first()
    flows = dict(edges)
    order = simulate(schedule, edges=flows).message_order
    kept = (m for m in order if m.kind == "activation" or flows[m.goal, m.source])
    return schedule, tuple(Message(*m) for m in kept)
