"""Parameter -> where it lies and which ranks hold a copy: clip, scaler, checkpoint and MoE ask here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from whale_torch.mesh import Group
from whale_torch.planning.layout import Shard

__all__ = ["ParameterPlace", "place_of", "set_place"]

_KEY = "_whale_place"


@dataclass(frozen=True)
class ParameterPlace:
    """Where a parameter lies.

    name: its first name in the model. copies: ranks that hold the same values. shard, parts: how it is cut and the ranks
    that hold the parts, None for a whole parameter. site: the scope that cut it.
    """

    name: str
    copies: Group
    shard: Shard | None = None
    parts: Group | None = None
    site: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Places name live process groups; a pickled parameter is an ordinary one."""
        return _nothing, ()


def _nothing() -> None:
    return None


def place_of(parameter: torch.Tensor) -> ParameterPlace | None:
    """The place of a parameter of a parallelized model, None for any other tensor."""
    place: ParameterPlace | None = getattr(parameter, _KEY, None)
    return place


def set_place(parameter: torch.Tensor, place: ParameterPlace) -> None:
    """Notes where a parameter lies; it stays with the Parameter object, copies of it have none."""
    setattr(parameter, _KEY, place)
