"""A pipelined model at run time: each call is cut into micro-batches and runs the schedule."""

from __future__ import annotations

import contextlib
import functools
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from whale_torch.comm.call import Batch, Trained
from whale_torch.comm.collectives import gather_equal
from whale_torch.comm.region import Region
from whale_torch.comm.registry import place_of
from whale_torch.comm.scale import Witness
from whale_torch.errors import CommError, LayoutError, PlanError, first_line
from whale_torch.mesh import Group, Mesh
from whale_torch.planning.plan import Plan
from whale_torch.planning.recording import check_busy
from whale_torch.planning.slices import SlicedModules
from whale_torch.strategies.batch import BatchReader
from whale_torch.strategies.members import Members
from whale_torch.strategies.pipeline.factors import Factors
from whale_torch.strategies.pipeline.holders import Holders
from whale_torch.strategies.pipeline.places import Places, StageReducer, averaging
from whale_torch.strategies.pipeline.programs import Mode, Program, Programs
from whale_torch.strategies.pipeline.run import Run
from whale_torch.strategies.pipeline.sliced import OnSlices
from whale_torch.strategies.pipeline.stand_ins import StandIns
from whale_torch.strategies.pipeline.step import MicroBatch
from whale_torch.strategies.runtime import CopiedRuntime, Runtime
from whale_torch.strategies.state_hooks import attach_state_hooks
from whale_torch.trace.graph import Node

__all__ = ["PipelineRuntime"]


class _CopiedPipeline(CopiedRuntime):
    """What a deepcopy of a pipelined model has instead: it holds this rank's stages and runs nothing."""

    def run(self, forward: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise PlanError(
            "this model is a copy of a pipelined one: it has the values of this rank's stages only.",
            fix="call the model itself, or load wh.full_state_dict(model) into a model that was never parallelized",
        )


class PipelineRuntime(Runtime):
    """Plan in force, groups, programs and reducers of one pipelined model.

    programs: made before anything of the model was cut. pipeline: this rank's pipeline, in order of its places; wires:
    the same ranks, for messages between stages.
    replicas: the ranks that run the same stages on other batches; meets: whether modules of theirs exchange what they
    compute of each micro-batch. peak: the most forwards, of micro-batches at own
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
        *,
        meets: bool = False,
    ):
        assert plan.pipeline is not None
        device = plan.device("replica")
        self.plan, self.mesh, self.regions, self.sync = plan, mesh, regions, True
        self.keeps = False  # whether parameters hold gradients that were not averaged
        self.loss_scale: Callable[[], float] | None = None
        self.pipeline = mesh.group("a pipeline", device.pipelines)
        self.wires = mesh.group("a pipeline", device.pipelines, channel="stages")
        self.replicas = mesh.group("replicas of a pipeline", device.copies)
        self._fed_alike: Group | None = None  # where modules run on slices
        if SlicedModules(plan.taskgraphs):
            self._fed_alike = mesh.group("ranks of a split", device.fed_alike, channel="slices")
        self.programs = programs
        self._meets = meets and self.replicas.size > 1
        self.anchor = torch.zeros((), device=mesh.device, requires_grad=True)
        self.peak = 0
        self.seed, self.number = seed, 0
        self._reader = reader
        self.named = dict(model.named_modules(remove_duplicate=False))
        self._members = Members(model)
        self._trained = self._trained_dtypes()
        self._trained_code = Trained(self._trained)
        self._places: Places | None = None
        self._trains = False  # whether a step of training has begun
        self._checked: weakref.WeakSet[Program] = weakref.WeakSet()
        self.stand_ins: StandIns
        self.reducers: list[StageReducer] = []
        self.stages = set(plan.pipeline.stages_at(self.pipeline.index))
        self.users: list[tuple[nn.Parameter, set[int]]] = []
        self._whole_model: Callable[..., Any] = model
        self._witness: Witness | None = None
        self.factors = Factors()
        self.broken = ""  # the error that ended a step in the middle

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiedRuntime:
        return _CopiedPipeline(self.plan, self.regions)

    @property
    def last(self) -> int:
        """Place of the last stage."""
        assert self.plan.pipeline is not None
        return self.plan.pipeline.place_of(self.plan.pipeline.num_stages - 1)

    def run(self, forward: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of the model: all of the schedule, or all forwards where the loss is the user's."""
        self._whole_model = functools.partial(forward, model)  # where it is one stage
        batch = self._reader.read(args, kwargs, hashed=self.pipeline.size > 1)
        self.number += 1
        grad = torch.is_grad_enabled()
        if self.broken:
            raise CommError(
                f"an earlier step of this pipeline ended in the middle: {self.broken}; its messages are under way "
                "still, and the ranks are not in step.",
                fix="let an error inside a step end the program; check a batch before the model is called with it",
            )
        self._members.check(model, recorded=True)
        mode: Mode = "train" if grad and model.training else "outputs"
        cut, programs = self.programs.of_batch(args, kwargs, batch.rows, mode)
        self._follow()
        counts = self._counts(programs, cut.inputs)
        shares, totals = self._meet(
            batch, counts, cut.rows, _digest(programs), grad=grad, training=programs[0].mode == "train"
        )
        self._settle(model, programs, training=grad and model.training)
        batches = [MicroBatch(i, p.stages, totals) for i, p in zip(cut.inputs, programs, strict=True)]
        run = Run(self, batches, programs, cut.rows, shares, grad=grad)
        with self.in_step():
            if programs[0].mode == "train":
                return run.train()
            return run.later() if grad else run.evaluate()

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """While messages go from stage to stage: what ends it in between leaves them under way."""
        try:
            yield
        except BaseException as error:
            if self.pipeline.size > 1:
                self.broken = f"{type(error).__name__}: {first_line(error)}"
            raise

    def modules(self) -> Iterable[nn.Module]:
        """The model's modules; one that has several names comes as often."""
        return self.named.values()

    def find(self, node: Node) -> Any:
        """The live module, parameter or buffer that a Node names."""
        if node.kind == "module":
            module = self.named[node.target] if node.target else self._whole_model
            if node.slices is None or self._fed_alike is None or self._fed_alike.size == 1:
                return module
            return OnSlices(module, node.slices, self._fed_alike, self.mesh.device, random=node.draws)
        owner, _, name = node.target.rpartition(".")
        found = getattr(self.named[owner], name)
        for key in node.args:
            found = found[key]
        return found

    def scale_losses(self, scale: Callable[[], float]) -> None:
        """The backwards inside the call start from this number, so that half precision has the range it needs."""
        self.loss_scale = scale

    def source_of_buffer(self, key: str) -> int:
        """The first rank that runs a buffer's module."""
        place = 0 if self._places is None else self._places.holders.source_of(key)
        return self.plan.device("replica").pipelines[0][place]

    def current_plan(self) -> Plan:
        """The plan in force, with how many kinds of calls were recorded so far."""
        return replace(super().current_plan(), programs=len(self.programs))

    @property
    def keeps_gradients(self) -> bool:
        return self.keeps

    def average_kept(self) -> None:
        """Averages what backwards inside no_sync left in the parameters: every rank calls it."""
        if not self.keeps:
            return
        self.keeps = False
        pairs = [(p, self.stand_ins.of(p)) for p in self.trained()]
        for parameter, alias in pairs:
            alias.grad = parameter.grad
        with averaging(self.reducers, terms=True):
            pass
        for parameter, alias in pairs:
            parameter.grad, alias.grad = alias.grad, None

    def trained(self) -> list[nn.Parameter]:
        """This rank's parameters that get gradients."""
        return [p for p in self.stand_ins.parameters if p.requires_grad]

    def _settle(self, model: nn.Module, programs: list[Program], *, training: bool) -> None:
        """At the first call: which rank holds what. Raises LayoutError for a call that needs it elsewhere, PlanError
        where a step of training leaves a stage without work."""
        assert self.plan.pipeline is not None
        if training and not self._trains:
            if not self.plan.pipeline.chosen:  # stages that scopes say: the user's order
                check_busy(self.plan.pipeline, programs[0].stages)
            self._trains = True
        if self._places is None:
            holders = Holders(model, self.plan.pipeline, self.pipeline.size, programs[0].stages)
            self.hold(model, Places(model, self.plan, self.mesh, holders))
        elif self._places.holders.by_names and not self._checked:
            self._places.holders.confirm(programs[0].stages)
            self._take_up()
        assert self._places is not None
        for program in programs:
            if program not in self._checked:
                self._places.holders.check(program.stages, program.written)
                self._checked.add(program)

    def hold(self, model: nn.Module, places: Places) -> None:
        """Goes by what lies where from here on: other ranks' values are let go, and what stays moves to the device.

        What follows from where parameters lie waits for the first call where only names say it.
        """
        self._places = places
        places.note()
        places.refuse_calls()
        attach_state_hooks(model)
        model.to(self.mesh.device)
        if not places.holders.by_names:
            self._take_up()

    def _follow(self) -> None:
        """Before a call: what was frozen or converted is taken over."""
        trained = self._trained_dtypes()
        if trained != self._trained:
            self._trained, self._trained_code = trained, Trained(trained)
            if self._places is not None:
                self._take_up()

    def _take_up(self) -> None:
        assert self._places is not None
        self._places.note()  # what was converted has memory again
        held = self._places.held()
        for one in self.reducers:
            one.reducer.close()
        self.stand_ins = StandIns(list(self.named.values()), list(held.values()))
        self.reducers = self._places.reducers(self.stand_ins)
        self.users = [
            (self.stand_ins.of(p), self._places.holders.stages[name] & self.stages) for name, p in held.items()
        ]
        if self._witness is None:
            self._witness = self._make_witness()

    def _make_witness(self) -> Witness | None:
        """Of this rank's largest parameter: what its gradients are multiplied by between backward and a step."""
        trained = self.trained()
        if self.pipeline.size == 1 or not trained:
            return None
        largest = max(trained, key=Tensor.numel)
        place = place_of(largest)
        return None if place is None else Witness(largest, place, of_stage=True)

    def note_gradients(self) -> None:
        """At the end of a backward."""
        if self._witness is not None:
            self._witness.keep()

    def _counts(self, programs: list[Program], inputs: list[list[Tensor]]) -> Tensor:
        """The counts of the loss over this rank's micro-batches, and their number, float64."""
        numbers: list[list[float]] = []
        for program, values in zip(programs, inputs, strict=True):
            found = [count.run(values, {}, {}, self.find)[1] for count in program.counts]
            numbers.append([*map(float, found), 1.0])
        return torch.tensor(numbers, dtype=torch.float64).sum(0)

    def _meet(
        self, batch: Batch, counts: Tensor, rows: list[int], program: int, *, grad: bool, training: bool
    ) -> tuple[list[float], dict[Any, Any]]:
        """Each micro-batch's share of all rows, and the counts of the loss by number, in small exchanges.

        Both as means over replicas where gradients are, else of this pipeline alone; counts of numbers that no backward
        starts at are always this pipeline's. program: a hash of what the stages do. Raises LayoutError, on every rank,
        where the ranks of one pipeline were fed different batches or recorded different forwards, CommError where ranks
        train different parameters, or multiplied their losses or gradients by different numbers.
        """
        code = self._trained_code.code if grad else 0
        seen = self._witness.take() if grad and self._witness is not None else 0
        factors = self.factors.take() if grad else 0
        told = torch.tensor([batch.digest, batch.rows, len(counts), code, program, seen, factors, len(rows)])
        group = self.mesh.everyone() if grad or self._meets else self.pipeline
        if group.size > 1:
            self._check_fed(group, gather_equal(told, group, name="what a pipeline is fed").tolist())
        mine = torch.cat([counts, torch.tensor([float(batch.rows)], dtype=torch.float64)])
        of_all = mine
        if grad and self.replicas.size > 1:
            of_all = gather_equal(mine, self.replicas, name="counts of a pipeline's loss").mean(0)
        *found, number, _ = (of_all if training else mine).tolist()
        all_rows = float(of_all[-1])
        return [count / all_rows for count in rows], {**dict(enumerate(found)), "share": 1.0 / number}

    def _check_fed(self, group: Group, rows: list[list[int]]) -> None:
        table = dict(zip(group.ranks, rows, strict=True))
        for ranks in self.plan.device("replica").pipelines:
            if ranks[0] in table and any(table[rank][:2] != table[ranks[0]][:2] for rank in ranks):
                raise LayoutError(
                    f"ranks {list(ranks)} are one pipeline but were fed different batches (rows "
                    f"{[table[r][1] for r in ranks]}, input hashes {[table[r][0] & 0xFFFF for r in ranks]}).",
                    fix="feed all ranks of a pipeline the same batch: wh.sampler or wh.batch_sampler do",
                    ranks=ranks,
                )
            if ranks[0] in table and any(table[rank][2:5:2] != table[ranks[0]][2:5:2] for rank in ranks):
                raise LayoutError(
                    f"ranks {list(ranks)} are one pipeline, and recorded different forwards of the model (hashes "
                    f"{[table[r][4] & 0xFFFF for r in ranks]}).",
                    fix="let the forward do the same on every rank, whatever rank it runs on",
                    ranks=ranks,
                )
        if self._witness is not None:
            self._witness.check([row[5] for row in rows])
        Factors.check([row[6] for row in rows], group.ranks)
        if any(row[2] != rows[0][2] for row in rows):
            raise LayoutError(
                f"the pipelines count {sorted({row[2] - 1 for row in rows})} terms of the loss.",
                fix="call the model in one way on all replicas",
            )
        if self._meets and any(row[7] != rows[0][7] for row in rows):
            raise LayoutError(
                f"pipelines with layers of experts cut their batches of {[row[1] for row in rows]} samples into "
                f"{[row[7] for row in rows]} micro-batches: ranks exchange tokens micro-batch by micro-batch.",
                fix="feed every pipeline as many samples as there are micro-batches, or more, and call it as often",
            )
        odd = next((rank for rank in group.ranks if table[rank][3] != rows[0][3]), None)
        if odd is not None:
            raise CommError(
                f"ranks train different parameters, or in other dtypes: rank {group.ranks[0]} trains "
                f"{Trained.count(rows[0][3])}, rank {odd} trains {Trained.count(table[odd][3])}.",
                fix="change requires_grad and the dtype of parameters on all ranks alike",
                ranks=(group.ranks[0], odd),
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients accumulate on each rank and are not averaged; the next backward outside averages the sum."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before


def _digest(programs: list[Program]) -> int:
    return zlib.crc32(str([program.digest for program in programs]).encode())
