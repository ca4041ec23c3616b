"""Which places of a pipeline hold which tensors of a model: as names say, or as a recording of a call saw it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from whale_torch.errors import LayoutError
from whale_torch.names import containers, joined
from whale_torch.planning.pipelines import PipelinePlan
from whale_torch.trace.program import StageProgram, stages_of_tensors

__all__ = ["Holders"]

Stages = dict[str, set[int]]


class Holders:
    """Of every parameter, by its first name, and of every buffer inside a stage, the stages that use it.

    programs: of a call, recorded; None where only names are known. What neither names nor a recording use lies with the
    stage around it, or the first. A buffer outside the stages is on every rank, for glue anywhere to read.
    """

    def __init__(
        self, model: nn.Module, plan: PipelinePlan, num_places: int, programs: Sequence[StageProgram] | None = None
    ):
        self._model, self._plan, self._num_places = model, plan, num_places
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._owners = {id(module): name for name, module in model.named_modules()}
        self._first = {id(p): name for name, p in model.named_parameters()}
        self._tensors = {name: id(x) for name, x in _other_tensors(self._modules)}
        self.by_names = programs is None
        self._runs: dict[str, int] = {}
        if programs is None:
            self.stages: Stages = {name: set(stages) for name, stages in plan.users(model).items()}
            self.stages |= self._buffers()
            self._runs = {name: stage for stage, names in enumerate(plan.stages) for name in names}
        else:
            self.stages = self._seen(programs)
            self._runs = {name: program.index for program in reversed(programs) for name in program.modules}

    def __contains__(self, name: str) -> bool:
        return name in self.stages

    def digest(self) -> str:
        """A hash of what lies where."""
        return hashlib.sha256(repr(sorted(self.table().items())).encode()).hexdigest()[:16]

    def places_of(self, name: str) -> tuple[int, ...]:
        """The places that hold a tensor, ascending; all of them for a buffer outside the stages."""
        stages = self.stages.get(name)
        return tuple(range(self._num_places)) if stages is None else self._places(stages)

    def _places(self, stages: set[int]) -> tuple[int, ...]:
        return tuple(sorted({self._plan.place_of(stage) for stage in stages}))

    def table(self) -> dict[str, tuple[int, ...]]:
        """The places of every tensor that not all of them hold."""
        found = {name: self._places(stages) for name, stages in self.stages.items()}
        return {name: places for name, places in found.items() if len(places) < self._num_places}

    def buffers(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Name, module and attribute of every buffer inside a stage."""
        for module_name, module in self._modules.items():
            if self._owners[id(module)] == module_name:
                for key, buffer in module._buffers.items():
                    name = joined(module_name, key)
                    if buffer is not None and name in self.stages:
                        yield name, module, key

    def source_of(self, name: str) -> int:
        """The place whose values of a tensor count: of a buffer the first that runs its module."""
        places = self.places_of(name)
        runs = self._plan.place_of(next((self._runs[outer] for outer in containers(name) if outer in self._runs), 0))
        return runs if runs in places and name not in self._first.values() else places[0]

    def check(self, programs: Sequence[StageProgram], written: Sequence[str]) -> None:
        """Raises LayoutError, alike on every rank, where a further kind of call uses a tensor on another stage, and
        where a buffer that a module changes is used on several ranks. written: those buffers.
        """
        self._check_written(programs, written)
        for name, stages in self._used(programs).items():
            if not stages <= self.stages[name]:
                raise self._misplaced(name, stages)

    def _check_written(self, programs: Sequence[StageProgram], written: Sequence[str]) -> None:
        """A buffer with two names is one."""
        users: dict[int, set[int]] = {}
        for program in programs if written else ():
            buffers = (each.node for each in program.instructions if each.node.kind == "buffer" and not each.node.args)
            names = [node.target for node in buffers]
            for name in program.modules:
                inside = self._modules[name].named_modules(prefix=name, remove_duplicate=False)
                names += [joined(member, key) for member, module in inside for key in module._buffers]
            for name in names:
                if name in self._tensors:
                    users.setdefault(self._tensors[name], set()).add(program.index)
        for name in written:
            stages = users.get(self._tensors.get(name, 0), set())
            if len(self._places(stages)) > 1:
                raise LayoutError(
                    f"the buffer '{name}' is changed by its module in the forward, and used on {_named(stages)}, which "
                    "are on several ranks: each would have values of its own.",
                    where=self._plan.site,
                    fix="put what uses it into one stage, or give each stage a buffer of its own",
                )

    def confirm(self, programs: Sequence[StageProgram]) -> None:
        """Takes over which stages of a rank the first call uses. Raises LayoutError where it needs another rank's."""
        for name, stages in self._used(programs).items():
            if not set(self._places(stages)) <= set(self.places_of(name)):
                raise self._misplaced(name, stages)
            self.stages[name] |= stages

    def _misplaced(self, name: str, stages: set[int]) -> LayoutError:
        lies = f"this call uses '{name}' on {_named(stages)}, and it lies with {_named(self.stages[name])}, where "
        if self.by_names:
            return LayoutError(
                f"{lies}its name puts it: the model was built on the meta device, and each rank made what is its own.",
                where=self._plan.site,
                fix="wh.parallelize(model, sample_inputs=...), with inputs like those of this call, says what is used "
                "where; or put its module into a wh.stage()",
            )
        return LayoutError(
            f"{lies}the first call used it or where it was put unused.",
            where=self._plan.site,
            fix="put its module into a wh.stage(), or make the first call (or sample_inputs) one that uses it",
        )

    def _seen(self, programs: Sequence[StageProgram]) -> Stages:
        found = self._used(programs)
        for name, stages in found.items():
            if not stages:
                stages.add(self._plan.stage_of(name.rpartition(".")[0]) or 0)
        return found

    def _used(self, programs: Sequence[StageProgram]) -> Stages:
        """The stages that use each parameter, and each buffer inside a stage."""
        used = stages_of_tensors(self._model, programs)
        return {name: used.get(name, set()) for name in (*self._first.values(), *self._buffers())}

    def _buffers(self) -> Stages:
        """Every buffer inside a stage and the stages that it belongs to, by the names of its module."""
        found: Stages = {}
        for name, module in self._modules.items():
            stage = self._plan.stage_of(name)
            for key, buffer in module._buffers.items():
                if buffer is not None and stage is not None:
                    found.setdefault(joined(self._owners[id(module)], key), set()).add(stage)
        return found


def _other_tensors(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Buffers and plain attributes, by all their names."""
    for name, module in modules.items():
        for key, x in {**vars(module), **module._buffers}.items():
            if isinstance(x, Tensor):
                yield joined(name, key), x


def _named(stages: set[int]) -> str:
    return f"stage{'' if len(stages) == 1 else 's'} {', '.join(map(str, sorted(stages)))}"
