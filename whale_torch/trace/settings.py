"""What glue reads of its modules' plain attributes: a recording holds as long as these do, and may not change them."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from whale_torch.capture import call_site
from whale_torch.errors import TraceError
from whale_torch.trace.graph import OF_TORCH, PLAIN, map_leaves

__all__ = ["Settings", "Watch", "follow", "frozen", "hooks_of"]

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_DEPTH = 4
_ABSENT = "absent"

Read = tuple[str, str]
"""A module's name and an attribute's."""


def frozen(value: Any, depth: int = 0, *, objects: bool = True) -> Any:
    """What of a value a recording may depend on, to compare: of tensors their form. objects: also inside others."""
    if isinstance(value, float):
        return float, repr(value)  # equal to itself where it is no number
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), value.dtype
    if isinstance(value, nn.Module) or depth > _DEPTH:
        return None
    if isinstance(value, (tuple, list)):
        return type(value), tuple(frozen(item, depth + 1, objects=objects) for item in value)
    if isinstance(value, dict):
        return type(value), tuple((key, frozen(item, depth + 1, objects=objects)) for key, item in value.items())
    if isinstance(value, _FUNCTIONS):
        return id(value)
    if callable(value) or not objects:
        return type(value)
    inside = getattr(value, "__dict__", None)
    if inside is None:
        return type(value), repr(value)
    return type(value), tuple((key, frozen(item, depth + 2)) for key, item in inside.items())


class Settings:
    """The attributes that a recording read, of the live modules.

    Hooks of modules that were taken apart count as well. modules: by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module], reads: Iterable[Read], opened: Iterable[str]):
        places = [(vars(modules[name]), key) for name, key in reads]
        self._read = [(held, key, frozen(held.get(key, _ABSENT))) for held, key in places]
        self._hooks = [(module, hooks_of(module)) for module in (modules[name] for name in opened)]

    def hold(self) -> bool:
        """Whether nothing was changed since."""
        return all(frozen(held.get(key, _ABSENT)) == value for held, key, value in self._read) and all(
            hooks_of(module) == known for module, known in self._hooks
        )


def hooks_of(module: nn.Module) -> tuple[int, ...]:
    """Numbers of a module's forward hooks, without this package's own."""
    found = [*module._forward_pre_hooks.items(), *module._forward_hooks.items()]
    return tuple(number for number, hook in found if not getattr(hook, "__module__", "").startswith("whale_torch."))


class Watch:
    """Sees which attributes of modules glue reads, and refuses that it changes them.

    names: of the modules, by id. in_glue: whether glue runs.
    """

    def __init__(self, names: Mapping[int, str], in_glue: Callable[[], bool]):
        self.reads: dict[Read, Any] = {}
        self._names, self._in_glue = names, in_glue
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
            if name in by_name and frozen(vars(by_name[name]).get(key, _ABSENT), objects=False) != before:
                self._refuse(name, key)

    def add(self, module: nn.Module) -> None:
        """Watches modules of this one's class."""
        cls = type(module)
        if cls in self._classes:
            return
        self._classes.add(cls)
        get, put = cls.__getattribute__, cls.__setattr__

        def read(this: nn.Module, key: str) -> Any:
            value = get(this, key)
            if key not in OF_TORCH and not key.startswith("__") and self._in_glue():
                self._note(this, key, value)
            return value

        def write(this: nn.Module, key: str, value: Any) -> None:
            if self._in_glue() and id(this) in self._names:
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
            self.reads[name, key] = frozen(value if key in vars(module) else _ABSENT, objects=False)

    def _refuse(self, name: str, key: str) -> None:
        raise TraceError(
            f"the forward changes the attribute '{key}' of {f'module {name!r}' if name else 'the model'} between "
            "stages, where code is recorded once and not run in every step.",
            where=call_site(),
            fix="do it inside a module of a stage, or outside of the model; what the user is to see is returned",
        )


def _is_method(value: Any, module: nn.Module) -> bool:
    return getattr(value, "__self__", None) is module


def follow(mine: nn.Module, theirs: nn.Module) -> None:
    """Gives a module's copy the plain attributes that the module has now."""
    held = mine.__dict__
    for key, value in vars(theirs).items():
        if key in OF_TORCH or key.startswith("_whale") or (key in held and frozen(held[key]) == frozen(value)):
            continue
        if isinstance(value, Tensor) or _is_plain(value):
            held[key] = _copied(value)
        elif key in held and hasattr(held[key], "__dict__") and not callable(value):  # a configuration
            inside = getattr(value, "__dict__", {})
            held[key].__dict__.update({name: _copied(item) for name, item in inside.items() if _is_plain(item)})


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(isinstance(item, Tensor) or _is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(item, Tensor) or _is_plain(item) for item in value.values())
    return isinstance(value, (*PLAIN, *_FUNCTIONS))


def _copied(value: Any) -> Any:
    return map_leaves(value, lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf)
