"""The optimizer guard: before an optimizer steps on cut parameters, is it one that works on parts as they are?

One global step pre-hook (public torch), installed by wh.parallelize. It looks at an optimizer once, and again when its
parameters grow; optimizers without cut parameters pay a dictionary look-up a step.

An optimizer is element-wise where each element's update depends on that element's gradient and state alone: then parts
step as the whole would. A class that nobody declared raises: LAMB, LARS, Shampoo and most Muons are such classes, and
there is no way to see from outside that an update read a norm of the part where the whole's was meant.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from whale_torch.comm.amp import stepping_scaler
from whale_torch.comm.cut_tensor import CutTensor
from whale_torch.comm.registry import ParameterPlace, place_of
from whale_torch.errors import CheckpointError, PlanError

__all__ = ["element_wise", "install"]

Kind = TypeVar("Kind", bound=type[Optimizer])

_ABSENT = "other stages"


def _step_of(kind: type[Optimizer]) -> Any:
    """The function a class steps with, under torch's wrappers; a subclass that changes it is another optimizer."""
    return inspect.unwrap(kind.step)


_ELEMENT_WISE = {
    _step_of(kind)
    for kind in (
        torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop,
        torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
        torch.optim.Adadelta, torch.optim.Rprop, torch.optim.ASGD,
    )
}  # fmt: skip
# each parameter's update depends on that parameter alone: they step on whole parameters, whatever other ranks hold
_TENSOR_WISE = {_step_of(kind) for name in ("Adafactor", "Muon") if (kind := getattr(torch.optim, name, None))}
# optimizer -> how many parameters it had when it was looked at, and whether some are cut
_seen: WeakKeyDictionary[Optimizer, tuple[int, bool]] = WeakKeyDictionary()
_hooked: WeakSet[Optimizer] = WeakSet()


def element_wise(kind: Kind) -> Kind:
    """Declares that each element's update depends on that element's gradient and state alone; also a class decorator.

    Such an optimizer runs on the parts of cut parameters as they are. Subclasses that do not override step follow.
    """
    _ELEMENT_WISE.add(_step_of(kind))
    return kind


def install() -> None:
    """Sets the guard, once a process; every optimizer is looked at anew, since its parameters may be cut now."""
    _register()
    _seen.clear()


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    known, has_cuts = _seen.get(optimizer, (-1, False))
    if known != count:
        has_cuts = _look_at(optimizer)
        _seen[optimizer] = (count, has_cuts)
    if has_cuts:
        _check_scaler(optimizer)


def _cut_parameters(optimizer: Optimizer) -> list[tuple[Tensor, ParameterPlace]]:
    found = ((p, place_of(p)) for group in optimizer.param_groups for p in group["params"])
    return [(p, place) for p, place in found if place is not None and place.is_cut]


def _look_at(optimizer: Optimizer) -> bool:
    """Whether some of its parameters are cut. Raises PlanError where it would step on them wrongly."""
    cut = _cut_parameters(optimizer)
    if not cut:
        return False
    step = _step_of(type(optimizer))
    parts = [(p, place) for p, place in cut if place.shard is not None]
    if step not in _ELEMENT_WISE and (parts or step not in _TENSOR_WISE):
        raise _reads_whole_tensors(type(optimizer), *(parts or cut)[0])
    _take_parts(optimizer)
    if optimizer not in _hooked:
        optimizer.register_state_dict_post_hook(_give_parts)
        optimizer.register_load_state_dict_post_hook(_take_parts)
        _hooked.add(optimizer)
    return True


def _reads_whole_tensors(kind: type[Optimizer], parameter: Tensor, place: ParameterPlace) -> PlanError:
    if place.shard is None or place.parts is None:
        where = "is on another rank of the pipeline"
    else:
        held = f"this rank holds {tuple(parameter.shape)} of {place.shard.shape}"
        where = f"is cut over {place.parts.size} ranks: {held}"
    own = kind.__module__.partition(".")[0] == "torch"
    known = "reads whole tensors" if own else "is not known to work element by element"
    declare = "" if own else (
        f", or declare it with whale_torch.optim.element_wise({kind.__name__}) if each element's update depends on "
        "that element's gradient and state alone"
    )  # fmt: skip
    return PlanError(
        f"{kind.__name__} {known}, but '{place.name}' {where}.",
        where=place.site,
        fix=f"give such parameters an element-wise optimizer (SGD, Adam, AdamW, Adagrad, RMSprop, ...){declare}",
    )


def _check_state(optimizer: Optimizer, parameter: Tensor, place: ParameterPlace) -> None:
    """Brings state of one cut parameter to its part's shape.

    Raises PlanError for state of the whole shape: the optimizer stepped, or loaded a whole state, before.
    """
    assert place.shard is not None and place.parts is not None
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    for key, value in state.items():
        if not isinstance(value, Tensor) or not value.dim():
            continue
        if isinstance(value, CutTensor):
            state[key] = value = value.part()
        whole = tuple(value.shape) == place.shard.shape
        if value.is_meta or (whole and value.shape != parameter.shape and float(state.get("step", 1)) > 0):
            what = "on the meta device" if value.is_meta else f"of the whole shape {tuple(value.shape)}"
            raise PlanError(
                f"{type(optimizer).__name__} has state '{key}' {what} for '{place.name}', which is cut over "
                f"{place.parts.size} ranks: this rank holds {tuple(parameter.shape)}.",
                where=place.site,
                fix="build the optimizer after wh.parallelize, or let it make its first step after it",
            )
        if whole and value.shape != parameter.shape:  # made at construction (Adagrad), not stepped yet
            state[key] = place.shard.cut(value, place.parts.index).to(parameter.device)


def _give_parts(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """state_dict() without communication: state of cut parameters works in memory and refuses to be pickled.

    So does all of it, by one more entry, where other ranks of a pipeline have state too.
    """
    absent: ParameterPlace | None = None
    states = dict(state_dict["state"])
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for parameter, index in zip(group["params"], saved["params"], strict=True):
            place = place_of(parameter)
            if place is not None and not place.held:
                absent = absent or place
                states.pop(index, None)
            elif place is not None and place.is_cut and index in states:
                states[index] = {key: _part(value, parameter, place) for key, value in states[index].items()}
    told = {} if absent is None else {_ABSENT: _Elsewhere(absent)}
    return {**state_dict, "state": states, **told}


def _part(value: Any, parameter: Tensor, place: ParameterPlace) -> Any:
    is_part = isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape
    return CutTensor.of(value, place) if is_part else value


class _Elsewhere:
    """Says that other ranks of a pipeline have state too: it can be handed around, and not written."""

    def __init__(self, place: ParameterPlace):
        self.place = place

    def __deepcopy__(self, memo: dict[int, Any]) -> _Elsewhere:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise CheckpointError(
            f"an optimizer's state on this rank is without that of '{self.place.name}' and of all else that other "
            "stages train, so writing it would lose them.",
            where=self.place.site,
            fix=f"on each rank: state.pop('{_ABSENT}'), value.part() for parts, and a file of its own",
        )


def _take_parts(optimizer: Optimizer) -> None:
    """Takes over state that was loaded or made for whole parameters."""
    for parameter, place in _cut_parameters(optimizer):
        if place.held:
            _check_state(optimizer, parameter, place)
        else:
            optimizer.state.pop(parameter, None)


def _check_scaler(optimizer: Optimizer) -> None:
    """Raises PlanError where torch's own GradScaler runs this step: it looks at this rank's gradients alone.

    Ranks that found no overflow would step and the others not.
    """
    scaler = stepping_scaler()
    if scaler is not None and type(scaler)._unscale_grads_ is torch.amp.GradScaler._unscale_grads_:
        place = _cut_parameters(optimizer)[0][1]
        where = f"is cut over {place.parts.size} ranks" if place.parts else "is one stage's of several ranks"
        raise PlanError(
            f"{type(scaler).__name__} looks for overflow in this rank's gradients alone, but '{place.name}' "
            f"{where}: some would step and others not.",
            where=place.site,
            fix="scaler = wh.GradScaler(model)",
        )
