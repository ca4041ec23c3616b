"""Seconds that modules take on this machine: each is run by itself, on a copy, with what a forward gave it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from whale_torch.errors import PlanError, WhaleError
from whale_torch.planning.recording import arguments
from whale_torch.trace.graph import map_leaves, tensors_in
from whale_torch.trace.twin import copy_of

__all__ = ["mean_seconds", "module_seconds"]

_REPEATS = 3

Call = tuple[tuple[Any, ...], dict[str, Any]]


def module_seconds(model: nn.Module, inputs: Any, device: torch.device, *, where: str) -> dict[str, float]:
    """Forward and backward of every module that a forward on these inputs calls, by name, in seconds.

    The model, its buffers and the random state are left alone; of the device's memory one module's is taken at a time.
    where: the user's line, for errors. Raises PlanError for a model without values, and for one that fails on the
    inputs.
    """
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise PlanError(
            "a model on the meta device was to be balanced by measured times, and has no values to run on.",
            where=where,
            fix="build it with memory, or leave balance out",
        )
    state = torch.random.get_rng_state()
    try:
        calls = _calls(model, inputs, where)
        return {name: _measured(name, model.get_submodule(name), own, device, where) for name, own in calls.items()}
    finally:
        torch.random.set_rng_state(state)


def mean_seconds(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over ranks of each module's seconds, of modules that all of them have."""
    names = [name for name in of_ranks[0] if all(name in own for own in of_ranks)]
    return {name: sum(own[name] for own in of_ranks) / len(of_ranks) for name in names}


def _calls(model: nn.Module, inputs: Any, where: str) -> dict[str, list[Call]]:
    """What each module but the model itself is called with in one forward, whose buffers are copies."""
    copied = copy_of(model, {id(p): p for p in model.parameters()})
    found: dict[str, list[Call]] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: found.setdefault(name, []).append((args, kwargs))

    for name, module in copied.named_modules():
        if name:
            module.register_forward_pre_hook(keep(name), with_kwargs=True)
    args, kwargs = arguments(inputs)
    try:
        with torch.no_grad(), _LeavesAlone(model, where):
            copied(*args, **kwargs)
    except WhaleError:
        raise
    except Exception as error:  # the model is the user's
        raise PlanError(
            f"a pipeline was to be balanced by measured times, and a forward fails on these sample_inputs: "
            f"{type(error).__name__}: {error}",
            where=where,
            fix="give what the model can be called with, or leave balance out",
        ) from error
    return found


class _LeavesAlone(TorchDispatchMode):
    """Within it nothing is written into a model's parameters, which the copy that runs has in common with it."""

    def __init__(self, model: nn.Module, where: str):
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters() if p.numel()}
        self._where = where

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        arguments = func._schema.arguments
        given = dict(zip([argument.name for argument in arguments], args, strict=False)) | (kwargs or {})
        for argument in arguments:
            if argument.is_write:
                self._check(given.get(argument.name))
        return func(*args, **(kwargs or {}))

    def _check(self, written: Any) -> None:
        for x in tensors_in(written):
            name = self._names.get(x.untyped_storage().data_ptr()) if x.layout is torch.strided else None
            if name is not None:
                raise PlanError(
                    f"a pipeline was to be balanced by measured times, and a forward writes into the parameter "
                    f"'{name}': measuring would change the model.",
                    where=self._where,
                    fix="make it a buffer, or leave balance out",
                )


def _measured(name: str, module: nn.Module, calls: Sequence[Call], device: torch.device, where: str) -> float:
    """The seconds of a module. Raises PlanError where it does not run by itself."""
    try:
        return _seconds_of(module, calls, device)
    except WhaleError:
        raise
    except Exception as error:  # the module is the user's
        raise PlanError(
            f"a pipeline was to be balanced by measured times, and the module '{name}' fails when it is run by itself, "
            f"forward and backward: {type(error).__name__}: {error}",
            where=where,
            fix="leave balance out",
        ) from error


def _seconds_of(module: nn.Module, calls: Sequence[Call], device: torch.device) -> float:
    """The least seconds that all calls of a module take one after the other."""
    copied = copy_of(module, {}).to(device)
    fewest = float("inf")
    for _ in range(_REPEATS):
        given = [map_leaves(call, lambda leaf: _fresh(leaf, device)) for call in calls]
        _wait(device)
        start = time.perf_counter()
        for args, kwargs in given:
            _run(copied, args, kwargs)
        _wait(device)
        fewest = min(fewest, time.perf_counter() - start)
    return fewest


def _fresh(leaf: Any, device: torch.device) -> Any:
    """A tensor as another module's output is: with a gradient, and no leaf, so that it may be written into."""
    if not isinstance(leaf, Tensor):
        return leaf
    x = (leaf.clone() if leaf.is_inference() else leaf).detach().to(device)
    return x.requires_grad_().clone() if x.is_floating_point() else x.clone()


def _run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    ends = [x for x in tensors_in(module(*args, **kwargs)) if x.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(x) for x in ends])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
