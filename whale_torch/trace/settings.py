"""What glue reads of its modules' plain attributes: a recording holds as long as these do, and may not change them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from whale_torch.capture import call_site
from whale_torch.errors import TraceError
from whale_torch.trace.forms import frozen
from whale_torch.trace.graph import OF_TORCH, leaves_in

__all__ = ["LOCAL", "Settings", "Watch", "follow", "hooks_of"]

_REGISTERED = ("_parameters", "_buffers", "_modules")
_ABSENT = "absent"
LOCAL = "_whale_local"
"""Where a module has the names of those of its attributes that a split made a rank's."""

Read = tuple[str, str]
"""A module's name and an attribute's."""


class Settings:
    """The attributes that a recording read, of the live modules.

    Hooks of modules that were taken apart count as well. modules: by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module], reads: Iterable[Read], opened: Iterable[str]):
        places = [(modules[name], key) for name, key in reads]
        self._read = [(module, key, frozen(_now(module, key))) for module, key in places]
        self._hooks = [(module, hooks_of(module)) for module in (modules[name] for name in opened)]

    def hold(self) -> bool:
        """Whether nothing was changed since."""
        forms: dict[int, Any] = {}  # a configuration is often that of many modules
        for module, key, before in self._read:
            value = _now(module, key)
            if id(value) not in forms:
                forms[id(value)] = frozen(value)
            if forms[id(value)] != before:
                return False
        return all(hooks_of(module) == known for module, known in self._hooks)


def _now(module: nn.Module, key: str) -> Any:
    """What a module has under a name, itself or by its class: not what a property gives, but the property."""
    owners = (vars(module), *map(vars, type(module).__mro__))
    return next((held[key] for held in owners if key in held), _ABSENT)


def hooks_of(module: nn.Module) -> tuple[int, ...]:
    """Numbers of a module's forward hooks, without this package's own."""
    found = [*module._forward_pre_hooks.items(), *module._forward_hooks.items()]
    return tuple(number for number, hook in found if not getattr(hook, "__module__", "").startswith("whale_torch."))


class Watch:
    """Sees which attributes of modules glue reads, and refuses that it changes them.

    names: of the modules, by id. depth: of modules that are called whole, inside which no glue runs.
    """

    def __init__(self, names: Mapping[int, str]):
        self.reads: dict[Read, Any] = {}
        self.depth = 0
        self._names = names
        self._classes: set[type[nn.Module]] = set()
        self._stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def over(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Watches these modules, and what is added, until the end."""
        by_name = {name: module for module in modules if (name := self._names.get(id(module))) is not None}
        with self._stack:
            for module in by_name.values():
                self.add(module)
            yield
        for (name, key), before in self.reads.items():
            if name in by_name and frozen(_now(by_name[name], key), objects=False) != before:
                self._refuse(name, key)

    def add(self, module: nn.Module) -> None:
        """Watches modules of this one's class."""
        cls = type(module)
        if cls in self._classes:
            return
        self._classes.add(cls)
        get, put = cls.__getattribute__, cls.__setattr__

        def read(this: nn.Module, key: str) -> Any:
            if self.depth or key in OF_TORCH or key.startswith("__"):
                return get(this, key)
            try:
                value = get(this, key)
            except AttributeError:  # what is registered comes by __getattr__
                if not any(key in this.__dict__.get(own, ()) for own in _REGISTERED):
                    self._note(this, key, None)
                raise
            self._note(this, key, value)
            return value

        def write(this: nn.Module, key: str, value: Any) -> None:
            if not self.depth and id(this) in self._names:
                before = this.__dict__.get(key, _ABSENT)
                if isinstance(value, Tensor) or frozen(before) != frozen(value):
                    self._refuse(self._names[id(this)], key)
            put(this, key, value)

        for name, function in (("__getattribute__", read), ("__setattr__", write)):
            self._exchange(cls, name, function)

    def _exchange(self, cls: type[nn.Module], name: str, function: Any) -> None:
        if name in vars(cls):
            self._stack.callback(setattr, cls, name, vars(cls)[name])
        else:
            self._stack.callback(delattr, cls, name)
        setattr(cls, name, function)

    def _note(self, module: nn.Module, key: str, value: Any) -> None:
        name = self._names.get(id(module))
        if name is not None and (name, key) not in self.reads and not _is_method(value, module):
            self.reads[name, key] = frozen(_now(module, key), objects=False)

    def _refuse(self, name: str, key: str) -> None:
        raise TraceError(
            f"the forward changes the attribute '{key}' of {f'module {name!r}' if name else 'the model'} between "
            "stages, where code is recorded once and not run in every step.",
            where=call_site(),
            fix="do it inside a module of a stage, or outside of the model; what the user is to see is returned",
        )


def _is_method(value: Any, module: nn.Module) -> bool:
    return getattr(value, "__self__", None) is module


def follow(mine: nn.Module, theirs: nn.Module, memo: dict[int, Any]) -> None:
    """Gives a module's copy the plain attributes that the module has now, but for those that a split made a rank's.

    memo: copies of what was met before, by id, as copy.deepcopy has it.
    """
    held, given = mine.__dict__, vars(theirs)
    local = given.get(LOCAL, ())
    for key in [key for key in held if key not in given and _is_setting(key)]:
        del held[key]
    for key, value in given.items():
        if _is_setting(key) and key not in local and (key not in held or frozen(held[key]) != frozen(value)):
            held[key] = _copied(value, memo)


def _is_setting(key: str) -> bool:
    return key not in OF_TORCH and not key.startswith("_whale")


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    for x in leaves_in(value):
        if isinstance(x, Tensor) and id(x) not in memo:  # torch refuses to copy what is part of a graph
            memo[id(x)] = x.detach().clone()
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever its class raises: then it is seen as it is
        return value
