"""What of a model and an optimizer this rank holds: tensors by the names of one process, and which boxes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from whale_torch.checkpoint.boxes import Box, boxes_of, in_local
from whale_torch.checkpoint.index import Piece, dtype_name
from whale_torch.checkpoint.values import not_dense
from whale_torch.comm.absent import Placed
from whale_torch.comm.cut_tensor import CutTensor
from whale_torch.comm.registry import ParameterPlace, place_of
from whale_torch.errors import CheckpointError
from whale_torch.strategies.runtime import KEY, Runtime
from whale_torch.strategies.state_hooks import pipeline_places

__all__ = [
    "HOW",
    "Held",
    "Inventory",
    "held_of_place",
    "is_expanded",
    "name_of",
    "of_model",
    "of_optimizer",
    "parameter_names",
]

HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options of an optimizer that say how it computes, not what: they may differ."""
_OF_STATE_DICTS = ("state", "param_groups", "other stages")  # the last says that other ranks of a pipeline have state


@dataclass(frozen=True)
class Held:
    """A tensor of which this rank holds a part, all, or nothing.

    shape: of the whole. values: what is here, None for nothing. boxes: of the whole, and where each lies in `values`.
    writes: whether these values count; of a buffer that differs between ranks one rank's do. alike: whether all that
    hold a box have the same values.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    values: Tensor | None
    boxes: tuple[tuple[Box, Box], ...]
    writes: bool = True
    alike: bool = True

    def told(self) -> list[Any]:
        """To the other ranks: its key, the bytes of an element, its boxes, whether holders are alike."""
        return [self.key, self.dtype.itemsize, [box.to_json() for box, _ in self.boxes], self.alike]

    def stored(self, piece: Piece) -> list[Any]:
        """A piece of it that was written: its key, dtype and shape, and where it lies."""
        return [self.key, dtype_name(self.dtype), list(self.shape), piece.to_json()]


@dataclass
class Inventory:
    """tensors: by key. ties: further keys of one tensor. values: what is no tensor, by key. elsewhere: keys of values
    of which another rank's count.
    """

    tensors: dict[str, Held] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)

    def add(self, other: Inventory) -> None:
        self.tensors |= other.tensors
        self.ties |= other.ties
        self.values |= other.values
        self.elsewhere |= other.elsewhere


def of_model(model: nn.Module, prefix: str = "model/") -> Inventory:
    """All of a model's state_dict, parallelized or not; never communicates.

    What is neither a parameter nor a buffer (an extra state, what a module's own hooks give) is among the values.
    Raises CheckpointError for a tensor without values.
    """
    state = model.state_dict()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    places = pipeline_places(model)
    runtime = model.__dict__.get(KEY)
    found = Inventory()
    first: dict[int, str] = {}
    for name, value in state.items():
        key = prefix + name
        owner = parameters.get(name, buffers.get(name))
        if owner is not None and is_lazy(owner):
            raise CheckpointError(f"'{name}' is not initialised yet.", fix="call the model once first")
        if owner is None or not _is_view_of(value, owner):
            found.values[key] = value
            if isinstance(runtime, Runtime) and not _is_source(runtime, name):
                found.elsewhere.add(key)
            continue
        if first.setdefault(id(owner), key) != key:
            found.ties[key] = first[id(owner)]
            continue
        held = held_of_place(key, value, _place(value, parameters.get(name), places.get(name)))
        if name not in parameters:
            counts = not isinstance(runtime, Runtime) or _is_source(runtime, name)
            held = replace(held, writes=counts, alike=False)
        found.tensors[key] = held
    return found


def _is_source(runtime: Runtime, name: str) -> bool:
    return runtime.mesh.everyone().index == runtime.source_of_buffer(name)


def _is_view_of(value: Any, owner: Tensor) -> bool:
    """Whether a state_dict's value is its owner's memory, and not something made of it."""
    if isinstance(value, Placed):
        return True
    if not isinstance(value, Tensor) or value.shape != owner.shape or value.dtype is not owner.dtype:
        return False
    if value.is_meta or isinstance(owner, Placed) or value.layout is not torch.strided:
        return True
    return value.data_ptr() == owner.data_ptr() and value.stride() == owner.stride()


def _place(value: Tensor, parameter: Tensor | None, of_pipeline: ParameterPlace | None) -> ParameterPlace | None:
    if of_pipeline is not None:
        return of_pipeline
    if isinstance(value, CutTensor):
        return value.place
    return None if parameter is None else place_of(parameter)


def held_of_place(key: str, value: Tensor, place: ParameterPlace | None, *, writes: bool = True) -> Held:
    """A tensor that lies as a parameter's place says; without one it is whole.

    Raises CheckpointError for one without values, or that is not dense.
    """
    if place is not None and not place.held:
        shape = place.shard.shape if place.shard is not None else tuple(value.shape)
        return Held(key, value.dtype, shape, None, ())
    what = not_dense(value)
    if what is not None:
        raise CheckpointError(f"'{key}' is {what}.", fix="give every tensor its values first, in dense memory")
    values = value.as_subclass(Tensor).detach()
    if place is None or place.shard is None or place.parts is None:
        whole = Box.whole(values.shape)
        return Held(key, values.dtype, tuple(values.shape), values, ((whole, whole),), writes)
    index = place.parts.index
    boxes = tuple(zip(boxes_of(place.shard, index), in_local(place.shard, index), strict=True))
    return Held(key, values.dtype, place.shard.shape, values, boxes, writes)


def is_expanded(values: Tensor) -> bool:
    """Whether elements share memory, which no load can fill with values of their own."""
    return any(size > 1 and not stride for size, stride in zip(values.shape, values.stride(), strict=True))


def parameter_names(*modules: tuple[str, nn.Module]) -> dict[int, str]:
    """First name of each parameter of modules, each after its module's prefix, by id."""
    found: dict[int, str] = {}
    for prefix, module in modules:
        for name, p in module.named_parameters():
            found.setdefault(id(p), prefix + name)
    return found


def of_optimizer(optimizer: Optimizer, names: Mapping[int, str], prefix: str = "optimizer/") -> Inventory:
    """Its state by the names of parameters, cut as they are, and its groups.

    Raises CheckpointError for a parameter that the model does not have, for a value of a cut parameter that is neither
    one number nor of the parameter's shape, and for what it holds beside.
    """
    _check_nothing_beside(optimizer)
    found = Inventory()
    groups = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            for key, value, held in _of_parameter(optimizer, p, prefix + name_of(p, names, optimizer)):
                if held is None:
                    found.values[key] = value
                else:
                    found.tensors[key] = held
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({"params": [names[id(p)] for p in group["params"]], "options": options})
    found.values[f"{prefix}groups"] = groups
    return found


def _check_nothing_beside(optimizer: Optimizer) -> None:
    """Raises CheckpointError for state that belongs to no parameter, which would be lost."""
    beside = [repr(key) for key in optimizer.state if not isinstance(key, Tensor)]
    beside += [repr(key) for key in optimizer.state_dict() if key not in _OF_STATE_DICTS]
    if beside:
        raise CheckpointError(
            f"{type(optimizer).__name__} holds {', '.join(sorted(beside))}, which belongs to no parameter.",
            fix="keep it in options of its groups, or save it as a state: wh.save(..., name=what has state_dict and "
            "load_state_dict)",
        )


def name_of(p: Tensor, names: Mapping[int, str], optimizer: Optimizer) -> str:
    """Raises CheckpointError for a parameter that is none of the models'."""
    if id(p) not in names:
        raise CheckpointError(
            f"{type(optimizer).__name__} has a parameter of shape {list(p.shape)} that is none of the model's.",
            fix="give the model whose parameters the optimizer was built of",
        )
    return names[id(p)]


def _of_parameter(optimizer: Optimizer, p: Tensor, prefix: str) -> Iterator[tuple[str, Any, Held | None]]:
    place = place_of(p)
    if place is not None and not place.held:
        return
    state = optimizer.state.get(p, {})
    if not isinstance(state, Mapping):
        raise CheckpointError(f"'{prefix}' is a {type(state).__name__}.", fix="a dict of its values by names")
    for name, value in state.items():
        key = f"{prefix}/{name}"
        if not isinstance(name, str) or "/" in name or name == "groups":
            raise CheckpointError(f"'{prefix}' holds {name!r}.", fix="names without '/', and another one than 'groups'")
        if not isinstance(value, Tensor):
            yield key, value, None
        elif value.shape == p.shape and value.dim():
            yield key, value, held_of_place(key, value, place)
        elif place is not None and place.is_cut and value.numel() > 1:
            raise CheckpointError(
                f"'{key}' has shape {list(value.shape)}, and of '{place.name}' this rank holds {list(p.shape)}: how "
                "the whole is cut cannot be told.",
                fix="an optimizer whose state has the shape of its parameters",
            )
        else:
            yield key, value, held_of_place(key, value, None)
