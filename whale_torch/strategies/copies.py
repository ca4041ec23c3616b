"""Pickles and copies of modules whose class a strategy replaced: a pickle is plain, a copy stays on the same ranks."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from whale_torch.comm.registry import refuse_to_write
from whale_torch.strategies.state_hooks import first_cut

__all__ = ["deep_copied", "pickled_as", "shallow_copied"]


def pickled_as(module: nn.Module, base: type[nn.Module], dropped: tuple[str, ...]) -> tuple[Any, ...]:
    """What __reduce_ex__ returns so that a file holds a plain module of class `base`, without the attributes `dropped`.

    A base that a strategy made names the class it replaced by `_base()`. Raises CheckpointError where something is cut.
    """
    while hasattr(base, "_base"):
        base = base._base()
    place = first_cut(module)
    if place is not None:
        raise refuse_to_write(place)
    # protocol 1's form: from 2 on, pickle insists that the object is of the class it names
    reduced: tuple[Any, ...] = tuple(object.__reduce_ex__(module, 1))
    make, (_, *arguments), state = reduced
    return make, (base, *arguments), {key: value for key, value in state.items() if key not in dropped}


def deep_copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy of the same class; what runs on ranks decides for itself how it is copied (Group, Region, Runtime)."""
    copied: nn.Module = type(module).__new__(type(module))
    memo[id(module)] = copied
    return _filled(copied, copy.deepcopy(_state(module), memo))


def shallow_copied(module: nn.Module) -> nn.Module:
    """As copy.copy of any module: the same parameters and members under a second object."""
    return _filled(type(module).__new__(type(module)), _state(module))


def _state(module: nn.Module) -> Any:
    return tuple(object.__reduce_ex__(module, 2))[2]


def _filled(module: nn.Module, state: Any) -> nn.Module:
    module.__setstate__(state)  # type: ignore[no-untyped-call]
    return module
