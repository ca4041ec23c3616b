"""Parameter -> where it lies and which ranks hold a copy: clip, scaler, checkpoint and MoE ask here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whale_torch.errors import CheckpointError, LayoutError
from whale_torch.mesh import Group
from whale_torch.planning.layout import Shard

__all__ = ["ParameterPlace", "by_name", "place_of", "refuse_to_read", "refuse_to_write", "set_place"]

_KEY = "_whale_place"


@dataclass(frozen=True)
class ParameterPlace:
    """Where a parameter lies.

    name: its first name in the model. copies: ranks that hold the same values. shard, parts: how it is cut and the
    ranks that hold the parts, None for a whole parameter. site: the scope that cut it. world: all ranks of the model,
    None where it is `copies`. pipeline: the ranks of this rank's pipeline, where only some of them hold it; holder: the
    place among them of the first that does. held: whether this rank does.
    """

    name: str
    copies: Group
    shard: Shard | None = None
    parts: Group | None = None
    site: str | None = None
    world: Group | None = None
    pipeline: Group | None = None
    holder: int = 0
    held: bool = True

    @property
    def is_cut(self) -> bool:
        """Whether this rank holds a part only, or nothing."""
        if not self.held:
            return True
        return self.shard is not None and self.parts is not None and self.parts.size > 1

    @property
    def everyone(self) -> Group:
        """All ranks of the model."""
        return self.world or self.copies

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterPlace:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Places name live process groups: a pickled whole parameter is an ordinary one, readable without this package.

        Raises CheckpointError for a cut one.
        """
        if self.is_cut:
            raise refuse_to_write(self)
        return OrderedDict, ()


def refuse_to_write(place: ParameterPlace) -> CheckpointError:
    """The error of whoever writes a part as if it were the whole."""
    fix = (
        "state = wh.full_state_dict(model) on every rank, then write that on one "
        "(of an optimizer: each rank its own, with value.part())"
    )
    if not place.held:
        assert place.pipeline is not None
        return CheckpointError(
            f"'{place.name}' belongs to a stage of rank {place.pipeline.ranks[place.holder]}: this rank "
            f"({place.pipeline.rank}) has no values of it, so writing it would lose them.",
            where=place.site,
            fix=fix,
        )
    assert place.shard is not None and place.parts is not None
    index = place.parts.index
    return CheckpointError(
        f"'{place.name}' is cut over ranks {list(place.parts.ranks)}: this rank holds {place.shard.local_shape(index)} "
        f"of {place.shard.shape}, so writing it would lose the rest.",
        where=place.site,
        fix=fix,
    )


def refuse_to_read(place: ParameterPlace) -> LayoutError:
    """The error of whoever reads values of a tensor that another rank holds."""
    assert place.pipeline is not None
    return LayoutError(
        f"a number was asked for of '{place.name}', which belongs to a stage of rank "
        f"{place.pipeline.ranks[place.holder]}: this rank ({place.pipeline.rank}) has no values of it.",
        where=place.site,
        fix="read wh.full_state_dict(model), made on every rank; put a penalty on parameters into the model's forward; "
        "norms of gradients are wh.clip_grad_norm_'s",
    )


def place_of(parameter: torch.Tensor) -> ParameterPlace | None:
    """The place of a parameter of a parallelized model, None for any other tensor."""
    place = getattr(parameter, _KEY, None)
    return place if isinstance(place, ParameterPlace) else None


def by_name(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parameters in an order equal on all ranks, whatever order a set or a dict gave: by name, unplaced last."""
    places = [(parameter, place_of(parameter)) for parameter in parameters]
    return [p for p, _ in sorted(places, key=lambda pair: (pair[1] is None, pair[1].name if pair[1] else ""))]


def set_place(parameter: torch.Tensor, place: ParameterPlace) -> None:
    """Notes where a parameter lies; it stays with the Parameter object, copies of it have none."""
    setattr(parameter, _KEY, place)
