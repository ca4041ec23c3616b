"""state_dict and load_state_dict of modules that hold parts: hooks that never communicate.

What is cut is noted on the modules, so that a copy of the model (an average of weights) knows it too. The hooks are
functions of this file: a copy takes them along and no process group with them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from whale_torch.comm.cut_tensor import CutTensor
from whale_torch.comm.registry import ParameterPlace, place_of
from whale_torch.errors import CheckpointError
from whale_torch.names import joined

__all__ = ["attach_state_hooks", "cut_places", "first_cut", "note_pipelined", "pipeline_places", "refuse_assign"]

_KEY = "_whale_cuts"
_PIPELINED = "_whale_pipelined"


def cut_places(module: nn.Module) -> dict[str, ParameterPlace]:
    """The places of a module's own cut parameters, by attribute; also in a copy of a parallelized model."""
    places: dict[str, ParameterPlace] = module.__dict__.get(_KEY, {})
    return places


def first_cut(model: nn.Module) -> ParameterPlace | None:
    """The place of some cut parameter of a model or a copy of one, None where nothing is cut."""
    return next((place for module in model.modules() for place in cut_places(module).values()), None)


def note_pipelined(module: nn.Module, key: str, place: ParameterPlace) -> None:
    """Notes which ranks of a pipeline have a module's own parameter or buffer; copies of the module know it too."""
    module.__dict__.setdefault(_PIPELINED, {})[key] = place


def pipeline_places(model: nn.Module) -> dict[str, ParameterPlace]:
    """Where the tensors of a pipelined model, of a member or of a copy of one lie, by name."""
    found: dict[str, ParameterPlace] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for key, place in module.__dict__.get(_PIPELINED, {}).items():
            if isinstance(place, ParameterPlace):  # what was read from a pickle knows no ranks
                found[joined(name, key)] = place
    return found


def attach_state_hooks(model: nn.Module) -> None:
    """Lets every module that owns a cut parameter, or another rank's, give CutTensors and take whole tensors."""
    for module in model.modules():
        found: dict[str, ParameterPlace] = {}
        for key, parameter in module._parameters.items():
            place = None if parameter is None else place_of(parameter)
            if place is not None and place.is_cut:
                found[key] = place
        known = _KEY in module.__dict__
        if found:
            module.__dict__[_KEY] = found
        if found and not known:
            module.register_state_dict_post_hook(_give_parts)
            module.register_load_state_dict_pre_hook(_take_parts)


def _give_parts(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    for key, place in cut_places(module).items():
        value = state.get(prefix + key)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):  # a Parameter: keep_vars=True
            state[prefix + key] = CutTensor.of(value, place)


def _take_parts(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Cuts whole values; `state` is load_state_dict's own copy of the caller's dict."""
    if local_metadata.get("assign_to_params_buffers"):
        refuse_assign(next(iter(cut_places(module).values())).name)
    for key, place in cut_places(module).items():
        name, parameter = prefix + key, module._parameters[key]
        value = state.get(name)
        if not isinstance(value, Tensor) or parameter is None:
            continue
        if not place.held:  # its values are those of another rank
            _check_shape(name, value, place, parameter, errors)
            state[name] = parameter.detach()
            continue
        assert place.shard is not None and place.parts is not None
        index = place.parts.index
        if isinstance(value, CutTensor):
            _check_part(value, place, name)
            state[name] = value.part()
        elif tuple(value.shape) == place.shard.shape:
            state[name] = place.shard.cut(value, index)
        else:  # torch would tell the part's shape
            errors.append(
                f"size mismatch for {name}: copying a param with shape {value.shape} from checkpoint, "
                f"the shape in current model is {torch.Size(place.shard.shape)} "
                f"(this rank holds {tuple(parameter.shape)})."
            )
            state[name] = parameter.detach()


def _check_shape(name: str, value: Tensor, place: ParameterPlace, parameter: nn.Parameter, errors: list[str]) -> None:
    expected = torch.Size(place.shard.shape) if place.shard else parameter.shape
    if not isinstance(value, CutTensor) and value.shape != expected:
        errors.append(
            f"size mismatch for {name}: copying a param with shape {value.shape} from checkpoint, "
            f"the shape in current model is {expected}."
        )


def _check_part(value: CutTensor, place: ParameterPlace, name: str) -> None:
    """Raises CheckpointError for a part of another cut, or a tensor computed from one that has another shape."""
    assert place.shard is not None and place.parts is not None
    theirs = value.place
    assert theirs.shard is not None and theirs.parts is not None
    shape = place.shard.local_shape(place.parts.index)
    if theirs.shard != place.shard or theirs.parts.index != place.parts.index or tuple(value.shape) != shape:
        raise CheckpointError(
            f"'{name}' is part {place.parts.index} of {place.parts.size} with shape {shape}, but the value given is "
            f"made of part {theirs.parts.index} of {theirs.parts.size} of '{theirs.name}' and has shape "
            f"{tuple(value.shape)}.",
            where=place.site,
            fix="load what state_dict() of this model gave, or whole tensors: wh.full_state_dict(model)",
        )


def refuse_assign(name: str) -> None:
    """Raises CheckpointError: load_state_dict(assign=True) would replace Parameters whose gradients are averaged."""
    raise CheckpointError(
        f"load_state_dict(assign=True) would replace '{name}' and the other parameters of a parallelized model; "
        "their gradients would no longer be averaged.",
        fix="load_state_dict(state) copies values in; with assign=True, load before wh.parallelize",
    )
