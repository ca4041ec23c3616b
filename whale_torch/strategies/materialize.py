"""Initial values that do not depend on the layout: one module at a time, seeded by its name, cut, and dropped."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from whale_torch.comm.absent import without_memory
from whale_torch.errors import PlanError
from whale_torch.names import containers, joined
from whale_torch.planning.layout import Shard
from whale_torch.strategies.batch import digest
from whale_torch.strategies.kept import Kept, NeedsAll, NeedsNoAbsent

__all__ = ["InitFunction", "check_can_materialize", "materialize", "names_on_meta"]

InitFunction = Callable[[nn.Module], None]
Cuts = dict[str, tuple[Shard, int]]
Member = tuple[str, nn.Parameter]
_FIX = "initialise every parameter in the module that owns it, or build the model with memory"


def names_on_meta(model: nn.Module) -> set[str]:
    """Names of parameters and buffers that have no memory yet."""
    return {name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta}


def check_can_materialize(model: nn.Module, init_fn: InitFunction | None, given: Collection[str] = ()) -> None:
    """Raises PlanError for a meta module that nothing initialises; touches nothing.

    given: names of tensors whose values come from a state dict.
    """
    if init_fn is not None:
        return
    first = _first_names(model)
    own = "model._init_weights" if hasattr(model, "_init_weights") else "lambda module: ..."  # as transformers' have
    for name, module in model.named_modules():
        wanted = [key for key, t in _own(module) if _is_fresh(t, joined(name, key), first, given)]
        if wanted and _reset_of(module) is None:
            raise PlanError(
                f"module '{name}' ({type(module).__name__}) was built on the meta device with {', '.join(wanted)}, "
                "and has no reset_parameters().",
                fix=f"give wh.parallelize(init_fn={own}), or build the model with memory",
            )


def materialize(
    model: nn.Module,
    cuts: Cuts,
    *,
    seed: int,
    init_fn: InitFunction | None,
    given: Collection[str] = (),
    kept: Kept | None = None,
    any_rank: Callable[[bool], bool] = bool,
) -> None:
    """Gives every meta parameter and buffer its initial values; at most one module's tensors are whole at a time.

    cuts: by a parameter's first name, its shard and this rank's number among the parts. Members come first, since a
    container's reset may overwrite theirs (nn.MultiheadAttention); a tied parameter is drawn where it is named first.
    init_fn(module) replaces reset_parameters() where a model has an initialiser of its own; it is called on every
    module that holds meta tensors, containers included. A container that draws values of its members (GPT-2's blocks)
    is whole while it does. given: names whose memory is only made, since their values come from a state dict.
    kept: what a rank keeps where that is not all: only modules that give values to it are initialised, and a container
    whose initialiser draws or reads values of other ranks' members is whole while it does. Parameters that are not kept
    end without memory, buffers on the meta device.
    any_rank: whether a flag is set on some rank.
    Raises PlanError, with the model as it was, where an initialiser leaves a tensor unset, replaces a parameter, or
    changes values of a member that had memory before.
    """
    run = _Materialize(model, cuts, seed, init_fn, given, kept or Kept(), any_rank)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            for name, module in reversed(list(model.named_modules())):
                run.visit(name, module)
            run.leave_out()
            any_rank(False)  # the last question: where another rank failed, its answer raises, and this rank goes back
    except BaseException:
        run.undo()
        raise


class _Materialize:
    """One pass over a model, and what it takes to go back."""

    def __init__(
        self,
        model: nn.Module,
        cuts: Cuts,
        seed: int,
        init_fn: InitFunction | None,
        given: Collection[str],
        kept: Kept,
        any_rank: Callable[[bool], bool],
    ):
        self.cuts, self.seed, self.init_fn, self.given, self.any_rank = cuts, seed, init_fn, given, any_rank
        self.kept = kept
        self.first = _first_names(model)
        self.had_memory = {id(p) for p in model.parameters() if not p.is_meta}
        self._modules = dict(model.named_modules())
        self._around: set[str] = set()  # containers of modules that were initialised
        self._reached = {self.first[number] for number in self.had_memory}  # names that have values somewhere
        self._swapped: list[tuple[Tensor, Tensor]] = []
        self._held: list[tuple[nn.Module, dict[str, nn.Parameter | None], dict[str, Tensor | None]]] = []
        # names, and what is here of them, that are cut or given back later, while a container is whole
        self._whole: dict[str, nn.Parameter | None] | None = None
        self._needed = True  # whether a container that is whole is whole here

    def visit(self, name: str, module: nn.Module) -> None:
        self._held.append((module, dict(module._parameters), dict(module._buffers)))
        own = [(key, t, joined(name, key)) for key, t in _own(module)]
        fresh = [key for key, t, full in own if _is_fresh(t, full, self.first, self.given)]
        for key, t, full in own:
            if _is_fresh(t, full, self.first):
                self._reach(module, key, full)
        if not fresh and (self.init_fn is None or name not in self._around):
            return
        self._around.update(containers(name))
        asks = self._asks(name, module, fresh)
        again = self._gives_values(name, module, fresh) and self._initialise(name, module, fresh)
        if asks and self.any_rank(again):
            assert self._whole is None, "a container that is whole has all that its initialiser may draw"
            self._again(name, module)

    def _reach(self, module: nn.Module, key: str, full: str) -> None:
        """A tensor's turn has come: what a state dict gives needs memory only."""
        self._reached.add(full)
        if self._whole is not None:
            self._whole[full] = None
        if full not in self.given or not (self._needed if self._whole is not None else self.kept.is_here(full)):
            return
        self._make(module, key, full, whole=self._whole is not None)
        if self._whole is not None:
            self._whole[full] = module._parameters.get(key)

    def _gives_values(self, name: str, module: nn.Module, fresh: list[str]) -> bool:
        """Whether the module's initialiser may give values to something that this rank keeps."""
        if self._whole is not None:
            return self._needed
        if any(self.kept.is_here(joined(name, key)) for key in fresh):
            return True
        own = {id(p) for p in module._parameters.values()}
        inside = (self.first[id(p)] for p in module.parameters() if id(p) not in own)
        return any(self.kept.is_here(first) for first in inside)

    def _asks(self, name: str, module: nn.Module, fresh: list[str]) -> bool:
        """Whether the module's initialiser may meet members that are not whole on some rank; alike on all ranks."""
        members = self._members(name, module)
        if any(first in self.cuts for first in members):
            return True
        if not members:
            return False
        own = {self.first[id(p)] for p in module._parameters.values() if p is not None}
        names = {*members, *own, *(joined(name, key) for key in fresh)}
        return len({self.kept.places.get(first) for first in names}) > 1

    def _members(self, name: str, module: nn.Module) -> dict[str, tuple[str, nn.Parameter]]:
        """Members' parameters that have their values, but for those that are whole for now; alike on all ranks."""
        found: dict[str, tuple[str, nn.Parameter]] = {}
        for key, parameter in module.named_parameters(prefix=name):
            first = self.first.get(id(parameter))  # None: a throwaway
            if first is None or key.rpartition(".")[0] == name or first not in self._reached:
                continue
            if self._whole is None or first not in self._whole or id(parameter) in self.had_memory:
                found[first] = (key, parameter)
        return found

    def _again(self, name: str, container: nn.Module) -> None:
        """Initialises a container that needs values of members that are not whole here once more, with all of it."""
        inside = list(container.named_modules(prefix=name))
        self._give_back({id(p) for p in container.parameters()}, {id(module) for _, module in inside})
        self._whole = {}
        self._needed = any(self.kept.is_here(self.first[id(p)]) for p in container.parameters())
        for member, module in reversed(inside):
            self.visit(member, module)
        done, self._whole = self._whole, None
        for parameter in done.values():
            if parameter is not None:
                self._settle(parameter)

    def _settle(self, parameter: nn.Parameter) -> None:
        """What this rank keeps of a parameter that is whole: all, its part, or nothing."""
        name = self.first[id(parameter)]
        if self._whole is not None:
            self._whole[name] = parameter
        elif not self.kept.is_here(name):
            self._give_back({id(parameter)}, ())
        elif (cut := self.cuts.get(name)) is not None:
            parameter.data = cut[0].cut(parameter.data, cut[1])

    def _make(self, module: nn.Module, key: str, full: str, *, whole: bool) -> None:
        """Memory for one meta tensor, of its whole shape or of this rank's part."""
        parameter = module._parameters.get(key)
        if parameter is None:
            buffer = module._buffers[key]
            assert buffer is not None
            module._buffers[key] = torch.empty_like(buffer, device="cpu")
            return
        shape = torch.Size(parameter.shape) if whole else self._local_shape(parameter)
        self._swap(parameter, torch.empty(shape, dtype=parameter.dtype, device="cpu"), full)

    def _local_shape(self, parameter: nn.Parameter) -> torch.Size:
        cut = self.cuts.get(self.first[id(parameter)])
        return torch.Size(parameter.shape if cut is None else cut[0].local_shape(cut[1]))

    def _swap(self, parameter: nn.Parameter, data: Tensor, full: str) -> None:
        """Gives a parameter on the meta device memory."""
        real = nn.Parameter(data, requires_grad=parameter.requires_grad)
        real.__dict__.update(parameter.__dict__)  # swapping takes a user's marks along
        try:
            torch.utils.swap_tensors(parameter, real)
        except RuntimeError as error:
            raise PlanError(
                f"parameter '{full}' on the meta device cannot be given memory: {error}",
                fix="call wh.parallelize before anything keeps a weak reference to the parameters or a graph over them",
            ) from error
        self._swapped.append((parameter, real))

    def leave_out(self) -> None:
        """Parameters that this rank does not keep get their shape and no memory."""
        for name, module in self._modules.items():
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    like = torch.empty(self._local_shape(parameter), dtype=parameter.dtype, device="meta")
                    self._swap(parameter, without_memory(like, self.kept.device), joined(name, key))

    def _initialise(self, name: str, module: nn.Module, fresh: list[str]) -> bool:
        """Whether it has to be done again with the whole module, since it needs values that are not whole here."""
        throwaways = self._shield(module, fresh)
        for key in fresh:
            self._make(module, key, joined(name, key), whole=True)
        before = {key: t for key, t in _own(module) if key in fresh}
        versions = {key: _mark_unset(t) for key, t in before.items()}
        members = self._members(name, module)
        watched = [m for first, m in members.items() if self._must_stay(first, m[1])]
        hashes = [digest(t) for _, t in watched]
        how = self._how(name, module)
        incomplete = self._whole is None and not all(map(self.kept.is_here, members))
        if not self._run(name, module, incomplete=incomplete):
            return True
        changed = [member for member, value in zip(watched, hashes, strict=True) if digest(member[1]) != value]
        if self._draws_parts(how, changed):
            return True
        for key, made in before.items():
            self._check_set(name, module, key, made, versions[key])
        for key, t in throwaways.items():
            (module._parameters if key in module._parameters else module._buffers)[key] = t  # type: ignore[assignment]
        for key in fresh:
            parameter = module._parameters.get(key)
            if parameter is not None:
                self._settle(parameter)
        return False

    def _must_stay(self, first: str, parameter: nn.Parameter) -> bool:
        """Whether an initialiser must leave a member's values alone."""
        if parameter.is_meta or first in self.given:
            return False
        return id(parameter) in self.had_memory or first in self.cuts

    def _draws_parts(self, how: str, changed: list[Member]) -> bool:
        """Whether values that depend on the layout were written; constants do not.

        Raises PlanError where no second run can help.
        """
        for member, t in changed:
            if id(t) in self.had_memory:
                raise PlanError(f"{how} changes '{member}' of a member, which had values before.", fix=_FIX)
        return not all(_is_constant(t) for _, t in changed)

    def _check_set(self, name: str, module: nn.Module, key: str, made: Tensor, version: int) -> None:
        """Raises PlanError where an initialiser replaced a parameter or left a tensor unset."""
        how = self._what()
        if key in module._parameters and module._parameters[key] is not made:
            raise PlanError(f"{how} replaces parameter '{joined(name, key)}'.", fix="set its values in place")
        if (module._parameters.get(key) is made or module._buffers.get(key) is made) and _is_unset(made, version):
            raise PlanError(
                f"{how} leaves '{joined(name, key)}' of {type(module).__name__} unset.",
                fix="set it there, give wh.parallelize(init_fn=lambda module: ...), or build the model with memory",
            )

    def _what(self) -> str:
        return "init_fn" if self.init_fn is not None else "reset_parameters()"

    def _how(self, name: str, module: nn.Module) -> str:
        return f"{self._what()} of module '{name}' ({type(module).__name__})"

    def _run(self, name: str, module: nn.Module, *, incomplete: bool) -> bool:
        """Calls the module's initialiser; False where it needs members that are not here."""
        torch.default_generator.manual_seed(_seed(self.seed, name))
        if not incomplete:
            self._call(name, module)
            return True
        try:
            with NeedsNoAbsent():  # type: ignore[no-untyped-call]
                self._call(name, module)
        except (NeedsAll, Exception):  # an error of its own comes again where all of the container is there
            return False
        return True

    def _call(self, name: str, module: nn.Module) -> None:
        if self.init_fn is not None:
            self.init_fn(module)
            return
        reset = _reset_of(module)
        assert reset is not None, f"check_can_materialize lets '{name}' pass"
        reset()

    def _shield(self, module: nn.Module, fresh: list[str]) -> dict[str, Tensor]:
        """Puts throwaway tensors in the place of those that have values: tied, given or built with memory."""
        kept = {key: t for key, t in _own(module) if key not in fresh}
        for key, t in kept.items():
            if isinstance(t, nn.Parameter):
                cut = self.cuts.get(self.first[id(t)])
                shape = t.shape if cut is None else torch.Size(cut[0].shape)
                stand_in = nn.Parameter(torch.empty(shape, dtype=t.dtype, device="cpu"), requires_grad=t.requires_grad)
                module._parameters[key] = stand_in
            else:
                module._buffers[key] = t.clone()
        return kept

    def _give_back(self, parameters: Collection[int] | None = None, modules: Collection[int] | None = None) -> None:
        """Gives parameters and modules (all by default) back as they were."""
        for parameter, real in reversed(self._swapped):
            if parameters is None or id(parameter) in parameters:
                torch.utils.swap_tensors(parameter, real)
        self._swapped = [pair for pair in self._swapped if parameters is not None and id(pair[0]) not in parameters]
        for module, held, buffers in self._held:
            if modules is None or id(module) in modules:
                module._parameters.update(held)
                module._buffers.update(buffers)
        self._held = [entry for entry in self._held if modules is not None and id(entry[0]) not in modules]

    def undo(self) -> None:
        """Gives the model back as it was."""
        self._give_back()


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    """A module's own parameters and buffers."""
    return [(key, t) for key, t in [*module._parameters.items(), *module._buffers.items()] if t is not None]


def _first_names(model: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in model.named_parameters()}


def _is_fresh(t: Tensor, name: str, first: dict[int, str], given: Collection[str] = ()) -> bool:
    """Whether this module is where the tensor gets its values: on meta, not tied to one named earlier, not given."""
    return t.is_meta and name not in given and first.get(id(t), name) == name


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


def _marker(dtype: torch.dtype) -> float | int | None:
    """A value that no initialiser writes, None where a type has none to spare."""
    if (dtype.is_floating_point and dtype.itemsize > 1) or dtype.is_complex:
        return float("nan")
    if dtype in (torch.int16, torch.int32, torch.int64):
        return torch.iinfo(dtype).min + 7
    return None


def _mark_unset(t: Tensor) -> int:
    """Fills a new tensor with the marker; returns its version."""
    marker = _marker(t.dtype)
    if marker is not None:
        t.fill_(marker)
    return t._version


def _is_unset(t: Tensor, version: int) -> bool:
    """Whether some element was never written; where a type has no marker, whether nothing was written at all."""
    marker = _marker(t.dtype)
    if t.numel() == 0:
        return False
    if marker is None:
        return t._version == version
    return bool((t != t).any() if marker != marker else (t == marker).any())


def _is_constant(t: Tensor) -> bool:
    """A constant is the same on every part."""
    return not t.numel() or bool((t == t.reshape(-1)[0]).all())
