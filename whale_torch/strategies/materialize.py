"""Initial values that do not depend on the layout: one module at a time, seeded by its name, cut, and dropped."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from whale_torch.errors import PlanError
from whale_torch.planning.layout import Shard
from whale_torch.strategies.batch import digest

__all__ = ["InitFunction", "check_can_materialize", "is_meta", "materialize"]

InitFunction = Callable[[nn.Module], None]
Cuts = dict[str, tuple[Shard, int]]
Member = tuple[str, Tensor]


def is_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer has no memory yet."""
    return any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def check_can_materialize(model: nn.Module, init_fn: InitFunction | None, given: Collection[str] = ()) -> None:
    """Raises PlanError for a meta module that nothing initialises; touches nothing.

    given: names of tensors whose values come from a state dict.
    """
    if init_fn is not None:
        return
    first = _first_names(model)
    for name, module in model.named_modules():
        wanted = [key for key, t in _own(module) if _is_fresh(t, _full(name, key), first, given)]
        if wanted and _reset_of(module) is None:
            raise PlanError(
                f"module '{name}' ({type(module).__name__}) was built on the meta device with {', '.join(wanted)}, "
                "and has no reset_parameters().",
                fix="give wh.parallelize(init_fn=lambda module: ...), or build the model with memory",
            )


def materialize(
    model: nn.Module,
    cuts: Cuts,
    *,
    seed: int,
    init_fn: InitFunction | None,
    given: Collection[str] = (),
    any_rank: Callable[[bool], bool] = bool,
) -> None:
    """Gives every meta parameter and buffer its initial values; at most one module's tensors are whole at a time.

    cuts: by a parameter's first name, its shard and this rank's number among the parts. Members come first, since a
    container's reset may overwrite theirs (nn.MultiheadAttention); a tied parameter is drawn where it is named first.
    init_fn(module) replaces reset_parameters() where a model has an initialiser of its own; it is called on every
    module that holds meta tensors, containers included. A container that draws values of its members (GPT-2's blocks)
    is whole while it does. given: names whose memory is only made, since their values come from a state dict.
    any_rank: whether a flag is set on some rank.
    Raises PlanError, with the model as it was, where an initialiser leaves a tensor unset, replaces a parameter, or
    changes values of a member that had memory before or is tied to what lies elsewhere.
    """
    run = _Materialize(model, cuts, seed, init_fn, given, any_rank)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            for name, module in reversed(list(model.named_modules())):
                run.visit(name, module)
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
        any_rank: Callable[[bool], bool],
    ):
        self.cuts, self.seed, self.init_fn, self.given, self.any_rank = cuts, seed, init_fn, given, any_rank
        self.first = _first_names(model)
        self.had_memory = {id(p) for p in model.parameters() if not p.is_meta}
        self._around: set[str] = set()  # containers of modules that were initialised
        self._swapped: list[tuple[Tensor, Tensor]] = []
        self._held: list[tuple[nn.Module, dict[str, nn.Parameter | None], dict[str, Tensor | None]]] = []
        self._whole: dict[int, nn.Parameter] | None = None  # what is cut later, while a container is whole

    def visit(self, name: str, module: nn.Module) -> None:
        self._held.append((module, dict(module._parameters), dict(module._buffers)))
        own = [(key, t, _full(name, key)) for key, t in _own(module)]
        fresh = [key for key, t, full in own if _is_fresh(t, full, self.first, self.given)]
        for key, t, full in own:
            if _is_fresh(t, full, self.first) and full in self.given:
                self._make(module, key, name, whole=False)
        if fresh or (self.init_fn is not None and name in self._around):
            self._around.update(_containers(name))
            if self._initialise(name, module, fresh):
                self._again(name, module)

    def _again(self, name: str, container: nn.Module) -> None:
        """Initialises a container that draws values of cut members once more, with all of it whole."""
        inside = list(container.named_modules(prefix=name))
        self._give_back({id(p) for p in container.parameters()}, {id(module) for _, module in inside})
        self._whole = {}
        for member, module in reversed(inside):
            self.visit(member, module)
        cut_now, self._whole = self._whole, None
        for parameter in cut_now.values():
            self._cut(parameter)

    def _cut(self, parameter: nn.Parameter) -> None:
        cut = self.cuts.get(self.first[id(parameter)])
        if cut is None:
            return
        if self._whole is not None:
            self._whole[id(parameter)] = parameter
        else:
            parameter.data = cut[0].cut(parameter.data, cut[1])

    def _make(self, module: nn.Module, key: str, name: str, *, whole: bool) -> None:
        """Memory for one meta tensor, of its whole shape or of this rank's part."""
        parameter = module._parameters.get(key)
        if parameter is None:
            buffer = module._buffers[key]
            assert buffer is not None
            module._buffers[key] = torch.empty_like(buffer, device="cpu")
            return
        shape = torch.Size(parameter.shape)
        if not whole and (cut := self.cuts.get(self.first[id(parameter)])) is not None:
            shape = torch.Size(cut[0].local_shape(cut[1]))
        data = torch.empty(shape, dtype=parameter.dtype, device="cpu")
        real = nn.Parameter(data, requires_grad=parameter.requires_grad)
        real.__dict__.update(parameter.__dict__)  # swapping takes a user's marks along
        try:
            torch.utils.swap_tensors(parameter, real)
        except RuntimeError as error:
            raise PlanError(
                f"parameter '{_full(name, key)}' on the meta device cannot be given memory: {error}",
                fix="call wh.parallelize before anything keeps a weak reference to the parameters or a graph over them",
            ) from error
        self._swapped.append((parameter, real))

    def _initialise(self, name: str, module: nn.Module, fresh: list[str]) -> bool:
        """Whether it has to be done again with the whole module, since it drew values of cut members."""
        kept = self._shield(module, fresh)
        for key in fresh:
            self._make(module, key, name, whole=True)
        before = {key: t for key, t in _own(module) if key in fresh}
        versions = {key: _mark_unset(t) for key, t in before.items()}
        members = list(self._members(name, module))
        hashes = [digest(t) for _, t in members]
        how = self._run(name, module)
        changed = [member for member, value in zip(members, hashes, strict=True) if digest(member[1]) != value]
        if self._draws_cut_members(f"{how} of module '{name}' ({type(module).__name__})", members, changed):
            return True
        for key, made in before.items():
            self._check_set(how, name, module, key, made, versions[key])
        for key, t in kept.items():
            (module._parameters if key in module._parameters else module._buffers)[key] = t  # type: ignore[assignment]
        for key in fresh:
            parameter = module._parameters.get(key)
            if parameter is not None:
                self._cut(parameter)
        return False

    def _draws_cut_members(self, how: str, members: list[Member], changed: list[Member]) -> bool:
        """Whether values that depend on the layout were written; constants do not. Parts may be empty: ask all ranks.

        Raises PlanError where no second run can help.
        """
        fix = "initialise every parameter in the module that owns it, or build the model with memory"
        for member, t in changed:
            if id(t) in self.had_memory:
                raise PlanError(f"{how} changes '{member}' of a member, which had values before.", fix=fix)
        is_cut = {id(t) for _, t in members if self.first[id(t)] in self.cuts}
        if not is_cut:
            return False
        drawn = [member for member, t in changed if id(t) in is_cut and not _is_constant(t)]
        if not self.any_rank(bool(drawn)):
            return False
        if self._whole is not None:
            raise PlanError(f"{how} changes {drawn or 'parameters'} of members, which lie elsewhere too.", fix=fix)
        return True

    def _check_set(self, how: str, name: str, module: nn.Module, key: str, made: Tensor, version: int) -> None:
        """Raises PlanError where an initialiser replaced a parameter or left a tensor unset."""
        if key in module._parameters and module._parameters[key] is not made:
            raise PlanError(f"{how} replaces parameter '{_full(name, key)}'.", fix="set its values in place")
        if (module._parameters.get(key) is made or module._buffers.get(key) is made) and _is_unset(made, version):
            raise PlanError(
                f"{how} leaves '{_full(name, key)}' of {type(module).__name__} unset.",
                fix="set it there, give wh.parallelize(init_fn=lambda module: ...), or build the model with memory",
            )

    def _run(self, name: str, module: nn.Module) -> str:
        """Calls the module's initialiser and says how it is called."""
        torch.default_generator.manual_seed(_seed(self.seed, name))
        if self.init_fn is not None:
            self.init_fn(module)
            return "init_fn"
        reset = _reset_of(module)
        assert reset is not None, f"check_can_materialize lets '{name}' pass"
        reset()
        return "reset_parameters()"

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

    def _members(self, name: str, module: nn.Module) -> list[Member]:
        """Parameters of members whose values an initialiser must leave alone."""
        found: list[Member] = []
        for key, parameter in module.named_parameters(prefix=name):
            known = self.first.get(id(parameter))  # None: a throwaway
            if known is None or key.rpartition(".")[0] == name or parameter.is_meta or known in self.given:
                continue
            whole_now = self._whole is not None and id(parameter) in self._whole
            if id(parameter) in self.had_memory or (known in self.cuts and not whole_now):
                found.append((key, parameter))
        return found

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


def _full(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _containers(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


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
