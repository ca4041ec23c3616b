"""One step of a pipeline on one rank: the rank's row of the schedule, action by action."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from whale_torch.comm.columns import Columns
from whale_torch.comm.loss_part import LossPart
from whale_torch.comm.messages import Form, Message, Messages
from whale_torch.errors import LayoutError
from whale_torch.strategies.pipeline.bridges import Enter
from whale_torch.strategies.pipeline.weight_store import WeightStore
from whale_torch.trace.graph import Node
from whale_torch.trace.program import StageProgram

__all__ = ["MicroBatch", "Step", "edges_of", "forms_of"]

Slot = tuple[list[Tensor | None], list[Tensor]]


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch: the model's tensor inputs, the stages' programs for them, and its counts of the loss."""

    inputs: Sequence[Tensor]
    programs: Sequence[StageProgram]
    counts: Mapping[Any, Any]


@dataclass
class _Alive:
    """A forward whose backward is to come.

    slots: where gradients of received tensors land, by producing stage. edges: of what was sent, by reading stage.
    results: gradient edges of what the last stage gave.
    """

    slots: dict[int, Slot] = field(default_factory=dict)
    edges: dict[int, list[GradientEdge | None]] = field(default_factory=dict)
    results: list[GradientEdge | None] = field(default_factory=list)


class Step:
    """Runs forwards and backwards of the stages of one rank.

    grad: whether backwards follow. find: the live module, parameter or buffer that a Node of a stage names.
    seed: of this step; every stage and micro-batch draws from a stream of its own. roots: of what the last stage
    returns, places of the tensors that backward starts at. store: keeps what weight parts need. parts: of the loss, by
    micro-batch. ended: called with
    stage and micro-batch after each backward, of one in two parts after its weight part. peak: the most forwards whose
    backward was not through.
    """

    def __init__(
        self,
        micro_batches: Sequence[MicroBatch],
        messages: Messages,
        *,
        grad: bool,
        find: Callable[[Node], Any],
        seed: int,
        anchor: Tensor,
        roots: Sequence[int],
        store: WeightStore,
        parts: Sequence[LossPart],
        ended: Callable[[int, int], None] = lambda stage, micro_batch: None,
    ):
        self.micro_batches, self.messages, self.grad = micro_batches, messages, grad
        self.results: dict[int, tuple[Tensor, ...]] = {}
        self.peak = 0
        self._find, self._seed, self._anchor, self._roots, self._ended = find, seed, anchor, roots, ended
        self._store, self._parts = store, parts
        self._alive: dict[tuple[int, int], _Alive] = {}
        self._waiting: set[tuple[int, int]] = set()  # for their weight part

    def forward(self, stage: int, number: int) -> None:
        """Runs a stage on a micro-batch and sends on what later stages read."""
        batch = self.micro_batches[number]
        program, alive = batch.programs[stage], _Alive()
        self._store.begin(stage, number)
        received = self._receive(program, number, alive)
        with self._stream(program, stage, number), torch.set_grad_enabled(self.grad), self._parts[number].entered():
            values, results = program.run(batch.inputs, batch.counts, received, self._find)
        for goal, nodes in program.sends.items():
            tensors = [_rows_of(values[node]) for node in nodes]
            _check_forms(stage, nodes, tensors, grad=self.grad)
            message = Message("activation", stage, goal, number)
            self.messages.send(message, [x.detach() for x in tensors])
            if self.grad:
                flows = [x for node, x in zip(nodes, tensors, strict=True) if node.value.requires_grad]
                alive.edges[goal] = [get_gradient_edge(x) if x.requires_grad else None for x in flows]
        if stage == len(batch.programs) - 1:
            results = tuple(map(_rows_of, results))
            _check_forms(stage, program.results, results, grad=self.grad)
            if self.grad:
                found = (results[place] for place in self._roots)
                alive.results = [get_gradient_edge(x) if x.requires_grad else None for x in found]
            self.results[number] = tuple(x.detach() for x in results)
        if self.grad:
            self._alive[stage, number] = alive
            self.peak = max(self.peak, len(self._alive) + len(self._waiting))

    def backward(self, stage: int, number: int, seeds: Sequence[Tensor | None] = ()) -> None:
        """Runs a stage's backward and sends gradients to the stages whose values it read.

        seeds: gradients of the last stage's roots.
        """
        self._back(stage, number, seeds)
        self._ended(stage, number)

    def input_part(self, stage: int, number: int, seeds: Sequence[Tensor | None] = ()) -> None:
        """As `backward`, but for the gradients that `weight_part` makes."""
        self._waiting.add((stage, number))
        self._back(stage, number, seeds)

    def weight_part(self, stage: int, number: int) -> None:
        """Adds the weight gradients of a stage that its input part left."""
        self._store.finish(stage, number)
        self._waiting.remove((stage, number))
        self._ended(stage, number)

    def _back(self, stage: int, number: int, seeds: Sequence[Tensor | None]) -> None:
        self._store.begin(stage, number)
        alive = self._alive.pop((stage, number))
        roots: list[GradientEdge] = []
        grads: list[Tensor] = []
        for goal, edges in alive.edges.items():
            if edges:
                arrived = self.messages.receive(Message("gradient", goal, stage, number))
                _pair(edges, arrived, roots, grads)
        _pair(alive.results, seeds, roots, grads)
        if roots:
            autocast = torch.autocast(self._anchor.device.type, enabled=False)  # as a user's backward would run
            with autocast, self._parts[number].in_backward():
                torch.autograd.backward(roots, grads)
        for source, (slot, tensors) in alive.slots.items():
            sent = [torch.zeros_like(x) if g is None else g for g, x in zip(slot, tensors, strict=True)]
            self.messages.send(Message("gradient", stage, source, number), sent)

    def _receive(self, program: StageProgram, number: int, alive: _Alive) -> dict[Node, Tensor]:
        received: dict[Node, Tensor] = {}
        for source, nodes in program.receives.items():
            tensors = self.messages.receive(Message("activation", source, program.index, number))
            arrived = dict(zip(nodes, tensors, strict=True))
            for node in program.changed.intersection(nodes):  # the sender, on this rank, may hold the same memory
                arrived[node] = arrived[node].clone()
            flows = [node for node in nodes if node.value.requires_grad]
            if flows and self.grad:
                slot: list[Tensor | None] = [None] * len(flows)
                before = [arrived[node] for node in flows]
                entered = Enter.apply(self._anchor, slot, *before)  # type: ignore[no-untyped-call]
                arrived.update(zip(flows, entered, strict=True))
                alive.slots[source] = (slot, [x.new_empty(()).expand(x.shape) for x in before])
            received |= arrived
        return received

    @contextlib.contextmanager
    def _stream(self, program: StageProgram, stage: int, number: int) -> Iterator[None]:
        """Random numbers that depend on step, stage and micro-batch only, whatever the schedule."""
        if not program.draws:
            yield
            return
        generators = _generators(self._anchor.device)
        states = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed(zlib.crc32(f"{self._seed} {stage} {number}".encode()) << 16 | self._seed & 0xFFFF)
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def _rows_of(x: Any) -> Any:
    """What leaves a stage, without the columns of a split."""
    return x.implicit_rows("what a stage gives") if isinstance(x, Columns) else x


def _generators(device: torch.device) -> list[torch.Generator]:
    """torch's global ones of the CPU and of a device; torch.manual_seed formats a stack trace for each device type."""
    if device.type == "cpu":
        return [torch.default_generator]
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    return [torch.default_generator, module.default_generators[index]]


def _check_forms(stage: int, nodes: Sequence[Any], tensors: Sequence[Any], *, grad: bool) -> None:
    """Raises LayoutError where a stage gives tensors of other forms than when it was recorded."""
    for node, x in zip(nodes, tensors, strict=True):
        if not isinstance(x, Tensor) or type(node) is not Node:
            continue
        seen = node.value
        if x.shape != seen.shape or x.dtype is not seen.dtype:
            what = f"{tuple(x.shape)} {x.dtype}, and {tuple(seen.shape)} {seen.dtype}"
        elif grad and x.requires_grad and not seen.requires_grad:
            what = f"{tuple(x.shape)} that wants a gradient, and one that wants none"
        else:
            continue
        raise LayoutError(
            f"stage {stage} gave a tensor of {what} when this kind of call was recorded.",
            where=node.where,
            fix="what a module of a stage gives may depend on the shapes of its inputs, on train() and eval(), and on "
            "which parameters are frozen, but on no other state",
        )


def forms_of(micro_batches: Sequence[MicroBatch]) -> Callable[[Message], list[Form]]:
    """What each message of a step holds."""

    def forms(message: Message) -> list[Form]:
        programs = micro_batches[message.micro_batch].programs
        if message.kind == "activation":
            nodes = programs[message.goal].receives[message.source]
        else:
            nodes = tuple(n for n in programs[message.source].receives[message.goal] if n.value.requires_grad)
        return [Form(tuple(node.value.shape), node.value.dtype) for node in nodes]

    return forms


def edges_of(programs: Sequence[StageProgram]) -> Mapping[tuple[int, int], bool]:
    """Between which stages values go, and whether gradients come back."""
    return {
        (source, program.index): any(node.value.requires_grad for node in nodes)
        for program in programs
        for source, nodes in program.receives.items()
    }


def _pair(
    edges: Sequence[GradientEdge | None], found: Sequence[Tensor | None], roots: list[GradientEdge], grads: list[Tensor]
) -> None:
    for edge, grad in zip(edges, found, strict=True):
        if edge is not None and grad is not None:
            roots.append(edge)
            grads.append(grad)
