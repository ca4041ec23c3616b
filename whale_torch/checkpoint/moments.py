"""What is loaded into one optimizer: the state of each parameter, by its name, and the options of groups."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from whale_torch.checkpoint.choice import listed
from whale_torch.checkpoint.index import StoredTensor
from whale_torch.checkpoint.inventory import HOW, held_of_place, is_expanded, name_of
from whale_torch.checkpoint.reader import Wanted
from whale_torch.checkpoint.slices import Slice
from whale_torch.checkpoint.structure import is_group
from whale_torch.comm.registry import place_of
from whale_torch.errors import CheckpointError

if TYPE_CHECKING:
    from whale_torch.checkpoint.goal import Goal

__all__ = ["Moments"]

_OF_SCHEDULERS = {"initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}  # put into groups
_ON_CPU = ("step", "mu_product")  # numbers that torch keeps on the CPU unless a graph captures them


class Moments:
    """names: of all parameters, by id."""

    def __init__(self, goal: Goal, prefix: str, optimizer: Optimizer, names: Mapping[int, str]):
        self._goal, self._prefix, self._optimizer, self._names = goal, prefix, optimizer, names
        self._states: dict[Tensor, dict[str, Any]] = {}
        self._sources: dict[Tensor, str] = {}

    def add(self) -> None:
        """Asks for what is stored. Raises CheckpointError where parameters are not in the checkpoint's optimizer."""
        goal, groups = self._goal, f"{self._prefix}groups"
        if groups not in goal.index.values:
            known = sorted(k.removesuffix("/groups") for k in goal.index.values if k.endswith("/groups"))
            what = self._prefix.strip("/").replace("optimizer/@", "optimizer ").replace("states/", "state ")
            raise CheckpointError(f"the checkpoint has no {what}; it has {known}.", fix="load it without")
        self._check_kind(goal.index.values[groups])
        goal.take_value(groups)
        keys: dict[str, list[str]] = {}
        for key in (*goal.index.tensors, *goal.index.values):
            if key.startswith(self._prefix) and key != groups:
                keys.setdefault(key.removeprefix(self._prefix).rpartition("/")[0], []).append(key)
        trained = _parameters_of(goal.index.values[groups])
        missing = []
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                name = name_of(p, self._names, self._optimizer)
                if not goal.choice.takes(name):
                    continue
                source, part = goal.choice.source(name) or (name, None)
                if source in trained:
                    self._sources[p] = source
                    self._states[p] = self._state_of(group, p, keys.get(source, []), part)
                elif p.requires_grad:
                    missing.append(name)
            self._check_group(groups, [trained[self._sources[p]] for p in group["params"] if p in self._sources])
        if missing and not goal.choice.missing_ok:
            raise CheckpointError(
                f"the checkpoint's {type(self._optimizer).__name__} has no state of parameters: "
                f"{listed('missing', missing, trained)}.",
                fix="build the optimizer of what it was saved with; missing_ok=True begins those anew",
            )

    def _check_kind(self, groups: Any) -> None:
        """An optimizer of another kind would begin anew, and keep what it does not know."""
        stored = {name for group in groups for name in group["options"]} - _OF_SCHEDULERS
        known = {name for group in self._optimizer.param_groups for name in group} | set(self._optimizer.defaults)
        if (lost := stored - known) and (new := set(self._optimizer.defaults) - stored):
            raise CheckpointError(
                f"the checkpoint's optimizer has options {sorted(lost)}, and this {type(self._optimizer).__name__} has "
                f"{sorted(new)} instead.",
                fix="load into an optimizer of the kind that was saved, or leave optimizer= out and begin anew",
            )

    def _check_group(self, groups: str, numbers: list[int]) -> None:
        stored = self._goal.index.values[groups]
        options = {n: {k: v for k, v in stored[n]["options"].items() if k not in HOW} for n in numbers}
        others = [n for n in options if options[n] != options[numbers[0]]]
        if others:
            first, second = (stored[n]["params"][0] for n in (numbers[0], others[0]))
            raise CheckpointError(
                f"'{first}' and '{second}' are in one group of this {type(self._optimizer).__name__}, and were saved "
                "in groups with different options.",
                fix="build the optimizer's groups as they were saved",
            )

    def _state_of(self, group: Mapping[str, Any], p: Tensor, keys: list[str], part: Slice | None) -> dict[str, Any]:
        goal, place = self._goal, place_of(p)
        state: dict[str, Any] = {}
        if place is not None and not place.held:
            return state
        shape = tuple(p.shape) if place is None or place.shard is None else place.shard.shape
        if part is not None and (source := goal.stored(f"model/{self._sources[p]}")) is not None:
            shape = tuple(source.shape)
        for key in keys:
            name = key.rpartition("/")[2]
            stored = goal.index.tensors.get(key)
            if stored is None:
                goal.take_value(key)
                state[name] = _Later(key)
                continue
            like = tuple(stored.shape) == shape and bool(shape)
            state[name] = self._memory(group, p, name, stored, like=like)
            held = held_of_place(key, state[name], place if like else None)
            if like and part is not None:
                held = part.of_whole(held, shape)
            in_use = state[name] is self._optimizer.state.get(p, {}).get(name)
            (goal.wanted if in_use else goal.fresh).append(Wanted(key, stored, held))
        return state

    def _memory(self, group: Mapping[str, Any], p: Tensor, name: str, stored: StoredTensor, *, like: bool) -> Tensor:
        """That of the present state where it fits; else new, of the parameter's strides where it has its shape."""
        shape = tuple(p.shape) if like else tuple(stored.shape)
        dtype = self._dtype(p, stored) if like else stored.torch_dtype
        graph = group.get("capturable") or group.get("fused")
        device = torch.device("cpu") if name in _ON_CPU and not like and not graph else p.device
        present = self._optimizer.state.get(p, {}).get(name)
        if isinstance(present, Tensor) and not is_expanded(present):
            if (tuple(present.shape), present.dtype, present.device) == (shape, dtype, device):
                return present
        if like:
            return torch.empty_like(p.detach().as_subclass(Tensor), dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype, device=device)

    def _dtype(self, p: Tensor, stored: StoredTensor) -> torch.dtype:
        """As it was saved; cast as the parameter is, where it had the parameter's."""
        of = self._goal.stored(f"model/{self._sources[p]}")
        cast = self._goal.choice.dtype == "cast" and of is not None and of.dtype == stored.dtype
        return p.dtype if cast else stored.torch_dtype

    def apply(self) -> None:
        """Puts states and options in place."""
        for p, state in self._states.items():
            self._optimizer.state.pop(p, None)
            if state:
                made = {k: self._goal.value(v.key) if isinstance(v, _Later) else v for k, v in state.items()}
                self._optimizer.state[p] = made
        options: dict[str, dict[str, Any]] = {}
        for group in self._goal.value(f"{self._prefix}groups"):
            options |= dict.fromkeys(group["params"], group["options"])
        for group in self._optimizer.param_groups:
            of = next((options[self._sources[p]] for p in group["params"] if p in self._sources), None)
            for key, value in (of or {}).items():
                if key not in HOW:
                    before = group.get(key)
                    on = before.device if isinstance(before, Tensor) and isinstance(value, Tensor) else None
                    group[key] = value.clone() if on is None and isinstance(value, Tensor) else copy.deepcopy(value)
                    if on is not None:
                        group[key] = value.to(on, copy=True)


class _Later:
    """A value that is no tensor of a parameter's."""

    def __init__(self, key: str):
        self.key = key


def _parameters_of(groups: Any) -> dict[str, int]:
    """The number of the group of each parameter that an optimizer was saved with."""
    if not isinstance(groups, list) or not all(map(is_group, groups)):
        raise CheckpointError("the checkpoint's groups of parameters cannot be read.", fix="load it without")
    return {name: number for number, group in enumerate(groups) for name in group["params"]}
