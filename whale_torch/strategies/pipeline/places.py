"""What a rank of a pipeline has of a model: its own stages' tensors, the groups of its ties, the reducers."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from whale_torch.comm.absent import without_memory
from whale_torch.comm.cut_tensor import AbsentParameter, CutTensor
from whale_torch.comm.reducer import Reducer
from whale_torch.comm.reduction import Reduction
from whale_torch.comm.registry import ParameterPlace, place_of, set_place
from whale_torch.comm.sparse_reducer import SparseReducer
from whale_torch.errors import CommError, LayoutError
from whale_torch.mesh import Group, Mesh
from whale_torch.planning.gradients import DEFAULT_BUCKET_BYTES, DEFAULT_MAX_IN_FLIGHT
from whale_torch.planning.plan import Plan, Reduce
from whale_torch.strategies.kept import Kept
from whale_torch.strategies.pipeline.holders import Holders
from whale_torch.strategies.pipeline.stand_ins import StandIns
from whale_torch.strategies.replica import group_of_copies, sparse_parameters
from whale_torch.strategies.state_hooks import note_pipelined

__all__ = ["Places", "StageReducer", "averaging", "terms_of_means"]


@dataclass(frozen=True)
class StageReducer:
    """Averages gradients of stand-ins over the replicas of their stages.

    times: how many places of the pipeline give a part of each gradient.
    """

    reducer: Reducer | SparseReducer
    parameters: tuple[nn.Parameter, ...]
    times: int


class _Kind(NamedTuple):
    """Of gradients that are averaged together: their dtype, and whether embeddings make them sparse."""

    dtype: torch.dtype
    sparse: bool

    def __str__(self) -> str:
        return f"{self.dtype}{' sparse' if self.sparse else ''}"


@contextlib.contextmanager
def averaging(reducers: Sequence[StageReducer], *, terms: bool = False) -> Iterator[None]:
    """At its end the stand-ins' gradients are the means over replicas, or void where an error ends it.

    terms: they are `terms_of_means` already.
    """
    for one in reducers:
        one.reducer.begin()
    try:
        yield
    except BaseException:
        # The others of this pipeline wait for messages, and come to no reduction: their sockets tell them.
        with contextlib.suppress(CommError):
            _end([one for one in reducers if one.times == 1], void=True)
        raise
    _end(reducers, void=False)
    if not terms:
        terms_of_means(reducers)


def terms_of_means(reducers: Sequence[StageReducer]) -> None:
    """Multiplies gradients of which several places give a part by their number: a mean over these is the sum then."""
    for one in reducers:
        for alias in one.parameters if one.times > 1 else ():
            if alias.grad is not None:
                alias.grad.mul_(one.times)


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


class Places:
    """What follows from where the tensors of a model lie: groups of ties, values that are let go, reducers.

    Its groups are made on all ranks in one order.
    """

    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh, holders: Holders):
        assert plan.pipeline is not None
        self._site = plan.pipeline.site
        self._plan, self._mesh, self.holders = plan, mesh, holders
        self._pipeline = mesh.group("a pipeline", plan.device("replica").pipelines)
        self._parameters = dict(model.named_parameters())
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
        for module in model.modules():
            for key, parameter in module._parameters.items():
                self._owners[id(parameter)].append((module, key))
        self._sparse = sparse_parameters(model)
        self.ties: dict[tuple[int, ...], Group] = {}
        for name in [*self._parameters, *(name for name, _, _ in holders.buffers())]:
            places = holders.places_of(name)
            if len(places) > 1 and places not in self.ties:
                self.ties[places] = self._tie(places, "tied parameters")

    def is_here(self, name: str) -> bool:
        """Whether this rank holds a parameter, by its first name, or a buffer."""
        return self._pipeline.index in self.holders.places_of(name)

    def held(self) -> dict[str, nn.Parameter]:
        """This rank's parameters, by name."""
        return {name: p for name, p in self._parameters.items() if self.is_here(name)}

    def copies_of(self, name: str) -> Group:
        """The ranks with the same values of a tensor, one of which is this one where it holds it."""
        places = self.holders.places_of(name)
        if len(places) == self._pipeline.size and name not in self.holders:
            return self._mesh.everyone()
        replicas = self._mesh.group("copies of a stage", self._plan.device("replica").copies)
        return self.ties.get(places, replicas)

    def copies_of_buffers(self, names: Collection[str]) -> dict[str, Group]:
        """For those of the buffers named that not every rank has, the ranks that have them."""
        return {name: self.copies_of(name) for name, _, _ in self.holders.buffers() if name in names}

    def kept(self) -> Kept:
        """What this rank keeps of a model that is to be made."""
        return Kept(self.holders.table(), self._pipeline.index, self._mesh.device)

    def note(self, names: Collection[str] | None = None) -> None:
        """Notes for every parameter and buffer (of `names`) where it lies; gives those of other ranks no memory."""
        for name, parameter in self._parameters.items():
            if names is None or name in names:
                self._note_parameter(name, parameter)
        for name, module, key in list(self.holders.buffers()):
            if names is None or name in names:
                self._note_buffer(name, module, key)

    def _note_parameter(self, name: str, parameter: nn.Parameter) -> None:
        before = place_of(parameter)
        cut = before if before is not None and before.shard is not None else None
        place = ParameterPlace(
            name,
            cut.copies if cut else self.copies_of(name),
            shard=cut.shard if cut else None,
            parts=cut.parts if cut else None,
            site=cut.site if cut else self._site,
            world=self._mesh.everyone(),
            pipeline=self._pipeline,
            holder=self.holders.source_of(name),
            held=self.is_here(name),
        )
        set_place(parameter, place)
        for module, key in self._owners[id(parameter)]:
            note_pipelined(module, key, place)
        if not place.held:
            AbsentParameter.make(parameter, place, self._mesh.device)

    def _note_buffer(self, name: str, module: nn.Module, key: str) -> None:
        place = ParameterPlace(
            name,
            self.copies_of(name),
            site=self._site,
            pipeline=self._pipeline,
            holder=self.holders.source_of(name),
            held=self.is_here(name),
        )
        note_pipelined(module, key, place)
        buffer = module._buffers[key]
        assert buffer is not None
        if not place.held:
            module._buffers[key] = CutTensor.of(without_memory(buffer.as_subclass(Tensor), self._mesh.device), place)

    def refuse_calls(self) -> None:
        """Lets modules of other ranks' stages say so where they are called."""
        ours = {id(parameter) for parameter in self.held().values()}
        for name, module in self._modules.items():
            # the model's own call runs the pipeline, which uses them where they are
            if name and any(p is not None and id(p) not in ours for p in module._parameters.values()):
                module.register_forward_pre_hook(_refusal(name, self._site))

    def reducers(self, stand_ins: StandIns) -> list[StageReducer]:
        """One reducer for every group of this rank's gradients that are averaged together, of one kind."""
        found: list[StageReducer] = []
        for number, reduce in enumerate(self._plan.reduces or (self._of_one_pipeline(),)):
            for places in ((), *self.ties):
                for kind, parameters in self._by_kind(reduce.parameters, places):
                    channel = f"gradients {number} {places} {kind}"
                    group = self._tie(places, channel) if places else self._copies(reduce, kind, channel)
                    aliases = [stand_ins.of(p) for p in parameters if p.requires_grad and self._is_ours(p)]
                    if aliases and group.size > 1:
                        reducer = _reducer(reduce, kind, aliases, group)
                        found.append(StageReducer(reducer, tuple(aliases), len(places) or 1))
        return found

    def _of_one_pipeline(self) -> Reduce:
        """What is averaged where nobody else runs the same stages: parameters of several places."""
        names = tuple(self._parameters)
        return Reduce("replica", None, "flat", DEFAULT_BUCKET_BYTES, DEFAULT_MAX_IN_FLIGHT, names)

    def _by_kind(self, names: Iterable[str], places: tuple[int, ...]) -> Iterator[tuple[_Kind, list[nn.Parameter]]]:
        """Parameters that these places hold, any one where there are none, by kind; in one order on all ranks."""
        found: dict[_Kind, list[nn.Parameter]] = {}
        for name in names:
            held_by, parameter = self.holders.places_of(name), self._parameters[name]
            if held_by == places or (not places and len(held_by) == 1):
                kind = _Kind(parameter.dtype, id(parameter) in self._sparse)
                found.setdefault(kind, []).append(parameter)
        yield from found.items()

    def _copies(self, reduce: Reduce, kind: _Kind, channel: str) -> Group:
        flat = replace(reduce, algorithm="flat") if kind.sparse else reduce
        return group_of_copies(flat, self._plan, self._mesh, channel)

    def _is_ours(self, parameter: nn.Parameter) -> bool:
        place = place_of(parameter)
        return place is not None and place.held

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


def _reducer(reduce: Reduce, kind: _Kind, aliases: list[nn.Parameter], group: Group) -> Reducer | SparseReducer:
    if kind.sparse:
        return SparseReducer(aliases, group, hooked=False)
    reduction = Reduction(group, reduce.wire_dtype(kind.dtype.to_real()), levels=group.levels)
    bucket_bytes, max_in_flight = reduce.bucket_bytes, reduce.max_in_flight
    return Reducer(aliases, reduction, bucket_bytes=bucket_bytes, max_in_flight=max_in_flight, hooked=False)
