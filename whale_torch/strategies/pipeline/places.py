"""Which ranks of a pipeline hold which parameters, once a recording says which stages use them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from whale_torch.comm.reducer import Reducer
from whale_torch.comm.reduction import Reduction
from whale_torch.comm.registry import ParameterPlace, place_of, set_place
from whale_torch.errors import CommError, LayoutError, LossError
from whale_torch.mesh import Group, Mesh
from whale_torch.planning.plan import Plan, Reduce
from whale_torch.strategies.pipeline.stand_ins import StandIns
from whale_torch.trace.program import StageProgram

__all__ = ["Places", "StageReducer", "averaging"]


@dataclass(frozen=True)
class StageReducer:
    """Averages gradients of stand-ins over the replicas of their stages.

    times: how many places of the pipeline give a part of each gradient.
    """

    reducer: Reducer
    parameters: tuple[nn.Parameter, ...]
    times: int


@contextlib.contextmanager
def averaging(reducers: Sequence[StageReducer]) -> Iterator[None]:
    """At its end the stand-ins' gradients are the means over replicas, or void where an error ends it."""
    for one in reducers:
        one.reducer.begin()
    try:
        yield
    except BaseException:
        _end(reducers, void=True)
        raise
    _end(reducers, void=False)


def _end(reducers: Sequence[StageReducer], *, void: bool) -> None:
    for one in reducers:
        one.reducer.launch(void=void)
    for one in reducers:
        failed = one.reducer.land(void=void)
        if failed and not void:
            raise CommError(
                "a step of a pipeline ended with an error on another rank and not on this one.",
                fix="read the other ranks' messages; where a step may fail, let all ranks skip it together",
            )
        for alias in one.parameters if one.times > 1 and not void else ():
            if alias.grad is not None:
                alias.grad.mul_(one.times)


class Places:
    """Of every parameter of a model: the stages that use it, and the places of the pipeline that hold it.

    Its groups are made on all ranks in one order.
    """

    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh, pipeline: Group, programs: Sequence[StageProgram]):
        assert plan.pipeline is not None
        self._site, self._place_of = plan.pipeline.site, plan.pipeline.place_of
        self._plan, self._mesh, self._pipeline = plan, mesh, pipeline
        self._parameters = dict(model.named_parameters())
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self.stages = self._stages(programs)
        self._runs = {name: program.index for program in reversed(programs) for name in program.modules}
        self.ties: dict[tuple[int, ...], Group] = {}
        for name in self._parameters:
            places = self.places_of(name)
            if len(places) > 1 and places not in self.ties:
                self.ties[places] = self._tie(places, "tied parameters")

    def _used(self, programs: Sequence[StageProgram]) -> dict[str, set[int]]:
        """The stages that use each parameter, by its first name."""
        first = {id(p): name for name, p in self._parameters.items()}
        found: dict[str, set[int]] = {name: set() for name in self._parameters}
        for program in programs:
            used = [p for name in program.modules for p in self._modules[name].parameters()]
            for name in program.parameters:
                owner, _, key = name.rpartition(".")
                used.append(getattr(self._modules[owner], key))
            for parameter in used:
                found[first[id(parameter)]].add(program.index)
        return found

    def _stages(self, programs: Sequence[StageProgram]) -> dict[str, set[int]]:
        """As `_used`; a parameter that no stage uses is on the stage around it, or the first."""
        assert self._plan.pipeline is not None
        found = self._used(programs)
        for name, stages in found.items():
            if not stages:
                stages.add(self._plan.pipeline.stage_of(name.rpartition(".")[0]) or 0)
        return found

    def places_of(self, name: str) -> tuple[int, ...]:
        """The places that hold a parameter, ascending."""
        return tuple(sorted({self._place_of(stage) for stage in self.stages[name]}))

    def place_of_module(self, name: str) -> int:
        """The place that runs a module, by its name or that of what contains it; that of stage 0 where none does."""
        while name not in self._runs and name:
            name = name.rpartition(".")[0]
        return self._place_of(self._runs.get(name, 0))

    def held(self) -> dict[str, nn.Parameter]:
        """This rank's parameters, by name."""
        here = self._pipeline.index
        return {name: p for name, p in self._parameters.items() if here in self.places_of(name)}

    def check(self, programs: Sequence[StageProgram], written: Sequence[str]) -> None:
        """Raises LayoutError, alike on every rank, where a further kind of call uses a parameter on another stage, and
        where a buffer that a module changes is used on several ranks. written: those buffers."""
        self._check_buffers(programs, written)
        for name, stages in self._used(programs).items():
            if not stages <= self.stages[name]:
                raise LayoutError(
                    f"this call uses '{name}' on {_named(stages)}, and it lies with {_named(self.stages[name])}, where "
                    "the first call used it or where it was put unused.",
                    where=self._site,
                    fix="put its module into a wh.stage(), or make the first call (or sample_inputs) one that uses it",
                )

    def _check_buffers(self, programs: Sequence[StageProgram], written: Sequence[str]) -> None:
        users: dict[int, set[int]] = {}
        for program in programs:
            used = [x for name in program.modules for x in self._modules[name].buffers()]
            named = [step.node for step in program.steps if step.node.kind == "buffer" and not step.node.args]
            used += [x for node in named if (x := self._attribute(node.target)) is not None]
            for x in used:
                users.setdefault(id(x), set()).add(program.index)
        for name in written:
            stages = users.get(id(self._attribute(name)), set())
            if len({stage % self._pipeline.size for stage in stages}) > 1:
                raise LayoutError(
                    f"the buffer '{name}' is changed by its module in the forward, and used on {_named(stages)}, which "
                    "are on several ranks: each would have values of its own.",
                    where=self._site,
                    fix="put what uses it into one stage, or give each stage a buffer of its own",
                )

    def _attribute(self, name: str) -> Any:
        owner, _, key = name.rpartition(".")
        return getattr(self._modules[owner], key, None)

    def note(self) -> None:
        """Notes for every parameter where it lies; gives those of other ranks no memory, but their shape."""
        held = self.held()
        replicas = self._mesh.group("copies of a stage", self._plan.device("replica").copies)
        for name, parameter in self._parameters.items():
            places, before = self.places_of(name), place_of(parameter)
            cut = before if before is not None and before.shard is not None else None
            place = ParameterPlace(
                name,
                cut.copies if cut else self.ties.get(places, replicas),
                shard=cut.shard if cut else None,
                parts=cut.parts if cut else None,
                site=cut.site if cut else self._site,
                world=self._mesh.everyone(),
                pipeline=self._pipeline,
                holder=places[0],
                held=name in held,
            )
            set_place(parameter, place)
            if name not in held:
                if parameter.requires_grad:
                    parameter.register_hook(_refuse_gradient(name, self._site))
                parameter.data = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        ours = {id(parameter) for parameter in held.values()}
        for name, module in self._modules.items():
            # the model's own call runs the pipeline, which uses them where they are
            if name and any(p is not None and id(p) not in ours for p in module._parameters.values()):
                module.register_forward_pre_hook(_refusal(name, self._site))

    def reducers(self, stand_ins: StandIns) -> list[StageReducer]:
        """One reducer for every group of this rank's gradients that are averaged together."""
        found = []
        held = self.held()
        for number, reduce in enumerate(self._plan.reduces):
            names = [name for name in reduce.parameters if name in held and held[name].requires_grad]
            for places, tie in [((), None), *self.ties.items()]:
                mine = [name for name in names if (self.places_of(name) if tie else ()) == places]
                if tie is None:
                    mine = [name for name in names if len(self.places_of(name)) == 1]
                group = self._group(reduce, number, places)
                if mine and group.size > 1:
                    found.append(
                        self._reducer(reduce, group, [held[name] for name in mine], stand_ins, len(places) or 1)
                    )
        if not self._plan.reduces:  # one pipeline: only what is tied
            for places in self.ties:
                tie = self._tie(places, f"gradients {places}")
                mine = [n for n, p in held.items() if self.places_of(n) == places and p.requires_grad]
                if mine:
                    found.append(self._tied_reducer(tie, [held[name] for name in mine], stand_ins, len(places)))
        return found

    def _group(self, reduce: Reduce, number: int, places: tuple[int, ...]) -> Group:
        channel = f"gradients {number} {places}"
        if places:
            return self._tie(places, channel)
        join = self._mesh.two_levels if reduce.algorithm == "hierarchical" else self._mesh.group
        return join(f"copies of {reduce.device}", self._plan.device(reduce.device).copies, channel=channel)

    def _reducer(
        self, reduce: Reduce, group: Group, parameters: list[nn.Parameter], stand_ins: StandIns, times: int
    ) -> StageReducer:
        wire = getattr(torch, reduce.wire) if reduce.wire else parameters[0].dtype.to_real()
        reduction = Reduction(group, wire, levels=group.levels)
        aliases = [stand_ins.of(p) for p in parameters]
        reducer = Reducer(
            aliases, reduction, bucket_bytes=reduce.bucket_bytes, max_in_flight=reduce.max_in_flight, hooked=False
        )
        return StageReducer(reducer, tuple(aliases), times)

    def _tied_reducer(
        self, group: Group, parameters: list[nn.Parameter], stand_ins: StandIns, times: int
    ) -> StageReducer:
        reduction = Reduction(group, parameters[0].dtype.to_real(), levels=group.levels)
        aliases = [stand_ins.of(p) for p in parameters]
        reducer = Reducer(aliases, reduction, bucket_bytes=4 << 20, max_in_flight=8, hooked=False)
        return StageReducer(reducer, tuple(aliases), times)

    def _tie(self, places: tuple[int, ...], channel: str) -> Group:
        """The ranks at these places of all pipelines; every other rank is alone."""
        ranks = sorted(block[place] for block in self._plan.device("replica").pipelines for place in places)
        others = [rank for rank in range(self._plan.world) if rank not in set(ranks)]
        return self._mesh.group("holders of tied parameters", (tuple(ranks), *((r,) for r in others)), channel=channel)


def _refusal(name: str, site: str) -> Callable[..., NoReturn]:
    """What a module does that is called where its parameters are not."""

    def refuse(*_: Any) -> NoReturn:
        raise LayoutError(
            f"module '{name}' of a pipelined model was called on a rank that does not hold its parameters.",
            where=site,
            fix="call the model itself, on all ranks of the pipeline; of a Hugging Face encoder-decoder, generate() "
            "calls the encoder alone: generate with the model before wh.parallelize",
        )

    return refuse


def _refuse_gradient(name: str, site: str) -> Callable[[Any], NoReturn]:
    """What happens where a gradient is asked of a parameter that another rank holds."""

    def refuse(_: Any) -> NoReturn:
        raise LossError(
            f"'{name}' lies on another rank of its pipeline and was used on this one, outside of the model's forward, "
            "where it is 0.",
            where=site,
            fix="put a penalty on parameters into the model's forward, or use the optimizer's weight_decay",
        )

    return refuse


def _named(stages: set[int]) -> str:
    return f"stage{'' if len(stages) == 1 else 's'} {', '.join(map(str, sorted(stages)))}"
