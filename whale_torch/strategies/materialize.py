"""Initial values that do not depend on the layout: one module at a time, seeded by its name, cut, and dropped."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from whale_torch.errors import PlanError
from whale_torch.planning.layout import Shard

__all__ = ["InitFunction", "check_can_materialize", "is_meta", "materialize"]

InitFunction = Callable[[nn.Module], None]
Cuts = dict[str, tuple[Shard, int]]


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
    model: nn.Module, cuts: Cuts, *, seed: int, init_fn: InitFunction | None, given: Collection[str] = ()
) -> None:
    """Gives every meta parameter and buffer its initial values; at most one module's tensors are whole at a time.

    cuts: by a parameter's first name, its shard and this rank's number among the parts. Members come first, since a
    container's reset may overwrite theirs (nn.MultiheadAttention); a tied parameter is drawn where it is named first.
    init_fn(module) replaces reset_parameters() where a model has an initialiser of its own; it is called on every
    module that holds meta tensors, containers included. given: names whose memory is only made, since their values come
    from a state dict.
    Raises PlanError, with the model as it was, where an initialiser leaves a tensor unset, replaces a parameter, or
    changes what it must not: values of a member that is cut already, or that had memory before.
    """
    run = _Materialize(model, cuts, seed, init_fn, given)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            for name, module in reversed(list(model.named_modules())):
                run.visit(name, module)
    except BaseException:
        run.undo()
        raise


class _Materialize:
    """One pass over a model, and what it takes to go back."""

    def __init__(self, model: nn.Module, cuts: Cuts, seed: int, init_fn: InitFunction | None, given: Collection[str]):
        self.cuts, self.seed, self.init_fn, self.given = cuts, seed, init_fn, given
        self.first = _first_names(model)
        self.had_memory = {id(p) for p in model.parameters() if not p.is_meta}
        self._around: set[str] = set()  # containers of modules that were initialised
        self._swapped: list[tuple[Tensor, Tensor]] = []
        self._held: list[tuple[nn.Module, dict[str, nn.Parameter | None], dict[str, Tensor | None]]] = []

    def visit(self, name: str, module: nn.Module) -> None:
        self._held.append((module, dict(module._parameters), dict(module._buffers)))
        own = [(key, t, _full(name, key)) for key, t in _own(module)]
        fresh = [key for key, t, full in own if _is_fresh(t, full, self.first, self.given)]
        for key, t, full in own:
            if _is_fresh(t, full, self.first) and full in self.given:
                self._make(module, key, name, whole=False)
        if fresh or (self.init_fn is not None and name in self._around):
            self._initialise(name, module, fresh)
            self._around.update(_containers(name))

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

    def _initialise(self, name: str, module: nn.Module, fresh: list[str]) -> None:
        kept = self._shield(module, fresh)
        for key in fresh:
            self._make(module, key, name, whole=True)
        before = {key: t for key, t in _own(module) if key in fresh}
        versions = {key: _mark_unset(t) for key, t in before.items()}
        members = list(self._members(name, module))
        hashes = [_hash(t) for _, t in members]
        how = self._run(name, module)
        _check_members(f"{how} of module '{name}' ({type(module).__name__})", members, hashes)
        for key, made in before.items():
            self._check_set(how, name, module, key, made, versions[key])
        for key, t in kept.items():
            (module._parameters if key in module._parameters else module._buffers)[key] = t  # type: ignore[assignment]
        for key in fresh:
            parameter = module._parameters.get(key)
            cut = None if parameter is None else self.cuts.get(self.first[id(parameter)])
            if parameter is not None and cut is not None:
                parameter.data = cut[0].cut(parameter.data, cut[1])

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

    def _members(self, name: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Parameters of members that an initialiser must leave alone."""
        for key, parameter in module.named_parameters(prefix=name):
            known = self.first.get(id(parameter))
            if known is not None and key.rpartition(".")[0] != name:
                if not parameter.is_meta and (known in self.cuts or id(parameter) in self.had_memory):
                    yield key, parameter

    def undo(self) -> None:
        """Gives every parameter and buffer back as it was."""
        for parameter, real in reversed(self._swapped):
            torch.utils.swap_tensors(parameter, real)
        for module, parameters, buffers in self._held:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _check_members(how: str, members: list[tuple[str, Tensor]], hashes: list[int]) -> None:
    """Raises PlanError where an initialiser changed what belongs to a member, but to a constant."""
    for (member, t), value in zip(members, hashes, strict=True):
        if _hash(t) != value and not _is_constant(t):
            raise PlanError(
                f"{how} changes '{member}' of a member, which is cut or had memory already; "
                "its values would depend on the layout.",
                fix="initialise every parameter in the module that owns it, or build the model with memory",
            )


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


def _hash(t: Tensor) -> int:
    return int(torch.hash_tensor(t.detach()).item()) if t.numel() else 0


def _is_constant(t: Tensor) -> bool:
    """A constant is the same on every part."""
    return not t.numel() or bool((t == t.reshape(-1)[0]).all())
