"""The state of a parallelized model as a user reads it: whole tensors, synchronisation."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from whale_torch.comm.collectives import broadcast_copy
from whale_torch.comm.cut_tensor import CutTensor, join
from whale_torch.comm.registry import place_of
from whale_torch.errors import CommError
from whale_torch.strategies.runtime import KEY, Runtime, is_parallelized, runtime_of
from whale_torch.strategies.state_hooks import pipeline_places

__all__ = ["full_state_dict", "full_tensor", "no_sync"]


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within it, gradients accumulate on each rank without being averaged; the next backward outside averages the sum.

    Raises PlanError for a model that is not parallelized.
    """
    return runtime_of(model, "wh.no_sync").no_sync()


def full_tensor(parameter: Tensor, value: Tensor | None = None) -> Tensor:
    """The whole of a cut parameter (or of a value of its shape, such as its gradient): a collective over its parts."""
    place = place_of(parameter)
    value = parameter.detach() if value is None else value
    return value.clone() if place is None else join(value, place)


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state_dict of the model as one process would have it, with whole tensors: a collective, on every rank.

    Tied parameters share memory, as in a plain state_dict. Takes a parallelized model, a member of one, a copy of one
    and what wraps a copy (torch.optim.swa_utils.AveragedModel); tensors lie on the parameters' device.
    Buffers that differ between ranks (running statistics of a local BatchNorm) are rank 0's on every rank.
    Raises PlanError for a model without a parallelized part; CommError where a rank does not call it.
    """
    if not is_parallelized(model) and not pipeline_places(model):
        runtime_of(model, "wh.full_state_dict")
    try:
        return _joined(model)
    except CommError as error:
        fix = "call wh.full_state_dict(model) on every rank, then write what it gives on one"
        raise error.inside("wh.full_state_dict(model)", fix) from error.__cause__


def _joined(model: nn.Module) -> dict[str, Any]:
    state = model.state_dict()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    places = {} if isinstance(model.__dict__.get(KEY), Runtime) else pipeline_places(model)
    first = {key: id(p) for key, p in parameters.items()}
    whole: dict[int | str, Tensor] = {}
    full: OrderedDict[str, Any] = OrderedDict()
    for key, value in state.items():
        if not isinstance(value, Tensor):
            full[key] = value
            continue
        parameter = first.get(key, key)
        if parameter not in whole:
            place = places.get(key)
            whole[parameter] = _whole(value, parameters.get(key), model, key) if place is None else join(value, place)
        full[key] = whole[parameter]
    if hasattr(state, "_metadata"):  # versions of modules, by which load_state_dict reads older files
        full._metadata = state._metadata  # type: ignore[attr-defined]
    return full


def _whole(value: Tensor, parameter: Tensor | None, model: nn.Module, key: str) -> Tensor:
    if parameter is not None and isinstance(value, CutTensor):
        return value.whole()
    place = None if parameter is None else place_of(parameter)
    if place is not None and place.pipeline is not None:  # this rank's stage: the others ask for it
        return join(value.detach(), place)
    runtime = model.__dict__.get(KEY)
    if parameter is not None or not isinstance(runtime, Runtime):
        return value.detach().clone()
    return broadcast_copy(
        value.as_subclass(Tensor),
        runtime.mesh.everyone(),
        runtime.source_of_buffer(key),
        name=f"buffer '{key}' (wh.full_state_dict is called on every rank)",
    )
