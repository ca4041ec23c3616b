"""What a rank keeps of a model whose other tensors other ranks keep, and whether an initialiser can do with that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from whale_torch.trace.graph import leaves_in

__all__ = ["Kept", "NeedsAll", "NeedsNoAbsent"]


@dataclass(frozen=True)
class Kept:
    """Which tensors a rank of a pipeline keeps.

    places: of every tensor, parameters by their first names, that not all places hold; place: this rank's. device:
    where the others seem to lie.
    """

    places: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    place: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def is_here(self, name: str) -> bool:
        """Whether this rank keeps a tensor."""
        return name not in self.places or self.place in self.places[name]


class NeedsAll(BaseException):
    """Raised out of an initialiser, past whatever it catches, that draws or reads values which are not here."""


class NeedsNoAbsent(TorchDispatchMode):
    """Within it, what is not here is on the meta device: a draw for it, which would not move the random state, and a
    mixture with what is here raise NeedsAll. Shapes may be read, and constants written.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        tensors = [x for x in leaves_in((args, kwargs or {})) if isinstance(x, Tensor)]
        absent = sum(x.is_meta for x in tensors)
        if absent and (absent < len(tensors) or torch.Tag.nondeterministic_seeded in func.tags):
            raise NeedsAll
        return func(*args, **(kwargs or {}))
