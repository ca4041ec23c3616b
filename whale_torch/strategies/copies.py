"""Pickles and copies of modules whose class a strategy replaced: a pickle is plain, a copy stays on the same ranks."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from torch import nn

from whale_torch.comm.registry import refuse_to_write
from whale_torch.strategies.state_hooks import first_cut

__all__ = ["Replacement"]


class Replacement:
    """Comes first among the bases of a class that a strategy gives to a module in place of its own.

    _added: attributes that a plain module of the same kind does not have; a pickle leaves them out.
    """

    _added: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def _base(cls) -> type:
        """The class that the module had before any strategy."""
        return next(base for base in cls.__mro__ if not issubclass(base, Replacement))

    @classmethod
    def _left_out(cls) -> set[str]:
        return {name for base in cls.__mro__ for name in vars(base).get("_added", ())}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A plain module of the class it had, which needs no process group.

        Raises CheckpointError where a parameter inside is cut.
        """
        assert isinstance(self, nn.Module)
        place = first_cut(self)
        if place is not None:
            raise refuse_to_write(place)
        make, (_, *arguments), state = self._parts()
        left_out = self._left_out()
        return make, (self._base(), *arguments), {key: v for key, v in state.items() if key not in left_out}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the same class; what lives on ranks says itself how it is copied (Group, Region, Runtime)."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        return copied._filled(copy.deepcopy(self._parts()[2], memo))

    def __copy__(self) -> Any:
        return type(self).__new__(type(self))._filled(self._parts()[2])

    def _parts(self) -> tuple[Any, Any, Any]:
        # protocol 1's form: from 2 on, pickle insists that the object is of the class it names
        reduced: tuple[Any, ...] = tuple(object.__reduce_ex__(self, 1))
        make, arguments, state = reduced
        return make, arguments, state

    def _filled(self, state: Any) -> Any:
        assert isinstance(self, nn.Module)
        self.__setstate__(state)  # type: ignore[no-untyped-call]
        return self
