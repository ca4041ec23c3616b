"""A pipelined model at run time: each call is cut into micro-batches and runs the schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from whale_torch.comm.collectives import gather_equal
from whale_torch.comm.region import Region
from whale_torch.mesh import Mesh
from whale_torch.planning.plan import Plan
from whale_torch.strategies.batch import BatchReader
from whale_torch.strategies.pipeline.batches import micro_batches
from whale_torch.strategies.pipeline.places import Places, StageReducer, averaging
from whale_torch.strategies.pipeline.programs import Mode, Program, Programs
from whale_torch.strategies.pipeline.run import Run
from whale_torch.strategies.pipeline.stand_ins import StandIns
from whale_torch.strategies.pipeline.step import MicroBatch
from whale_torch.strategies.runtime import Runtime
from whale_torch.strategies.state_hooks import attach_state_hooks
from whale_torch.trace.graph import Node, tensors_in

__all__ = ["PipelineRuntime"]


class PipelineRuntime(Runtime):
    """Plan in force, groups, programs and reducers of one pipelined model.

    programs: made before anything of the model was cut. pipeline: this rank's pipeline, in order of its places.
    replicas: the ranks that run the same stages on other batches. peak: the most forwards, of micro-batches at own
    stages, that ever waited for their backward.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh,
        regions: list[Region],
        reader: BatchReader,
        programs: Programs,
        seed: int,
    ):
        assert plan.pipeline is not None
        device = plan.device("replica")
        self.plan, self.mesh, self.regions, self.sync = plan, mesh, regions, True
        self.keeps = False  # whether parameters hold gradients that were not averaged
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self.pipeline = mesh.group("a pipeline", device.pipelines, channel="stages")
        self.replicas = mesh.group("replicas of a pipeline", device.copies)
        self.batch_dim = plan.batch_dim if isinstance(plan.batch_dim, int) else 0
        self.programs = programs
        self.anchor = torch.zeros((), device=mesh.device, requires_grad=True)
        self.peak = 0
        self.seed, self.number = seed, 0
        self._reader = reader
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._places: Places | None = None
        self.stand_ins: StandIns
        self.reducers: list[StageReducer] = []
        self.stages = set(range(self.pipeline.index, plan.pipeline.num_stages, self.pipeline.size))
        self.users: list[tuple[nn.Parameter, set[int]]] = []

    @property
    def last(self) -> int:
        """Place of the last stage."""
        assert self.plan.pipeline is not None
        return (self.plan.pipeline.num_stages - 1) % self.pipeline.size

    def run(self, forward: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of the model: all of the schedule, or all forwards where the loss is the user's."""
        assert self.plan.pipeline is not None
        rows = self._reader.read(args, kwargs, hashed=False).rows
        self.number += 1
        grad = torch.is_grad_enabled()
        mode: Mode = "train" if grad and model.training else "outputs"
        cut = micro_batches(args, kwargs, rows, self.plan.pipeline.num_micro_batches, self.batch_dim)
        programs = [self.programs.of(*call, count, mode) for call, count in zip(cut.calls, cut.rows, strict=True)]
        self._settle(model, programs[0])
        inputs = [list(tensors_in(call)) for call in cut.calls]
        shares, totals = self._totals(programs, inputs, cut.rows)
        batches = [MicroBatch(i, p.stages, totals) for i, p in zip(inputs, programs, strict=True)]
        run = Run(self, batches, programs, cut.rows, shares, grad=grad)
        if programs[0].mode == "train":
            return run.train()
        return run.later() if grad else run.evaluate()

    def find(self, node: Node) -> Any:
        """The live module, parameter or buffer that a Node names."""
        if node.kind == "module":
            return self._modules[node.target]
        owner, _, name = node.target.rpartition(".")
        return getattr(self._modules[owner], name)

    def scale_losses(self, scale: Callable[[], float]) -> None:
        """The backwards inside the call start from this number, so that half precision has the range it needs."""
        self.loss_scale = scale

    def source_of_buffer(self, key: str) -> int:
        """The first rank that runs a buffer's module."""
        place = 0 if self._places is None else self._places.place_of_module(key.rpartition(".")[0])
        return self.plan.device("replica").pipelines[0][place]

    def average_kept(self) -> None:
        """Averages what backwards inside no_sync left in the parameters: every rank calls it."""
        if not self.keeps:
            return
        self.keeps = False
        pairs = [(p, self.stand_ins.of(p)) for p in self.trained()]
        for parameter, alias in pairs:
            alias.grad = parameter.grad
        with averaging(self.reducers):
            pass
        for parameter, alias in pairs:
            parameter.grad, alias.grad = alias.grad, None

    def trained(self) -> list[nn.Parameter]:
        """This rank's parameters that get gradients."""
        return [p for p in self.stand_ins.parameters if p.requires_grad]

    def _settle(self, model: nn.Module, program: Program) -> None:
        """At the first call: which rank holds what. Later calls must not use a parameter elsewhere."""
        places = Places(model, self.plan, self.mesh, self.pipeline, program.stages) if self._places is None else None
        if places is None:
            return
        self._places = places
        places.note()
        attach_state_hooks(model)
        held = places.held()
        self.stand_ins = StandIns(list(self._modules.values()), list(held.values()))
        self.reducers = places.reducers(self.stand_ins)
        self.users = [(self.stand_ins.of(p), places.stages[name] & self.stages) for name, p in held.items()]

    def _totals(
        self, programs: list[Program], inputs: list[list[Tensor]], rows: list[int]
    ) -> tuple[list[float], dict[Any, Any]]:
        """Each micro-batch's share of all rows, and the counts of the loss by number.

        Both as means over replicas, because so are the gradients and the losses.
        """
        numbers: list[Tensor] = []
        for program, values in zip(programs, inputs, strict=True):
            found = [self._count(count.run(values, {}, {}, self.find)[1]) for count in program.counts]
            numbers.append(torch.stack([*found, torch.tensor(1.0, dtype=torch.float64)]))
        total = torch.stack(numbers).sum(0)
        total = torch.cat([total, torch.tensor([float(sum(rows))], dtype=torch.float64)])
        if self.replicas.size > 1:
            total = gather_equal(total, self.replicas, name="counts of a pipeline's loss").mean(0)
        *counts, number, all_rows = total.tolist()
        return [count / all_rows for count in rows], {**dict(enumerate(counts)), "share": 1.0 / number}

    @staticmethod
    def _count(value: Any) -> Tensor:
        return torch.as_tensor(value).detach().to("cpu", torch.float64)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients accumulate on each rank and are not averaged; the next backward outside averages the sum."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before
