"""wh.load: each rank reads the boxes that it holds, from whatever pieces have them; checked before anything changes."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.folders import find, read_index
from whale_torch.checkpoint.index import Index, dtype_name
from whale_torch.checkpoint.inventory import Held, Inventory, held_of_place, of_model, parameter_names
from whale_torch.checkpoint.ranks import Ranks, mesh_of
from whale_torch.checkpoint.reader import Reader, Wanted
from whale_torch.checkpoint.values import decode
from whale_torch.comm.registry import place_of
from whale_torch.errors import CheckpointError

__all__ = ["Loaded", "load"]

_MOST = 5


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds beside the model and the optimizer. path: the folder it was read from."""

    step: int
    extra: dict[str, Any]
    path: Path


def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    files: Files | None = None,
    **states: Any,
) -> Loaded:
    """Loads a checkpoint of wh.save into a model, an optimizer and whatever has a load_state_dict, of any plan.

    path: a run_dir, of which the latest is taken, or one step's folder. Every rank calls it and reads what it holds.
    All that is read is checked before anything changes.
    Raises CheckpointError, on all ranks, for what is damaged, and where names or shapes are not the model's.
    """
    files = Files() if files is None else files
    ranks = Ranks(mesh_of(model))
    folder = Path(ranks.first(f"loading {path}", lambda: str(find(Path(path), files))))
    what = f"loading {folder}"
    index = ranks.run(what, lambda: read_index(folder, files))
    goal = ranks.run(what, lambda: _Goal(index, model, optimizer, states))
    reader = Reader(files, folder, index)
    ranks.run(what, lambda: reader.check(goal.wanted))
    ranks.run(what, lambda: reader.read(goal.wanted))
    return ranks.run(what, lambda: Loaded(index.step, goal.apply(), folder))


class _Goal:
    """Where everything that is read goes. wanted: the tensors."""

    def __init__(
        self, index: Index, model: nn.Module | None, optimizer: Optimizer | None, states: Mapping[str, Any]
    ) -> None:
        self._index, self._model, self._optimizer, self._states = index, model, optimizer, states
        self.wanted: list[Wanted] = []
        self._tensors: dict[str, Tensor] = {}  # of values
        self._of_parameters: dict[Tensor, dict[str, Any]] = {}
        self._inventory = Inventory({}, {}, {})
        if model is not None:
            self._inventory = of_model(model)
            self._add_model()
        if optimizer is not None:
            if model is None:
                raise CheckpointError("an optimizer is loaded without its model.", fix="give the model too")
            self._add_optimizer(optimizer, parameter_names(model))
        for name in states:
            if f"states/{name}" not in index.values:
                known = [key.removeprefix("states/") for key in index.values if key.startswith("states/")]
                raise CheckpointError(f"the checkpoint has no state '{name}'; it has {known}.", fix="leave it out")
        prefixes = tuple(f"{key}/" for key in ("extra", *(f"states/{name}" for name in states)))
        for key, stored in index.tensors.items():
            if key.startswith(prefixes):
                self._tensors[key] = torch.empty(stored.shape, dtype=stored.torch_dtype)
                self.wanted.append(Wanted(key, stored, held_of_place(key, self._tensors[key], None)))

    def _add_model(self) -> None:
        known = self._index.tensors
        mine = {**self._inventory.tensors, **dict.fromkeys(self._inventory.ties), **self._inventory.values}
        stored = {k for k in [*known, *self._index.ties, *self._index.values] if k.startswith("model/")}
        faults = [_listed("missing", [k for k in mine if k not in stored], stored)]
        faults.append(_listed("unexpected", [k for k in stored if k not in mine], mine))
        for key, held in self._inventory.tensors.items():
            found = known.get(self._index.ties.get(key, key))
            if found is None:
                continue
            faults.append(_misfit(key, held, found.dtype, found.shape))
            self.wanted.append(Wanted(key, found, held))
        faults = [fault for fault in faults if fault]
        if faults:
            more = f"; and {len(faults) - _MOST} more" if len(faults) > _MOST else ""
            raise CheckpointError(
                f"the checkpoint does not fit {type(self._model).__name__}: {'; '.join(faults[:_MOST])}{more}.",
                fix="build the model as it was saved",
            )

    def _add_optimizer(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        if "optimizer/groups" not in self._index.values:
            raise CheckpointError("the checkpoint has no optimizer.", fix="load it without optimizer=")
        of_name: dict[str, list[str]] = {}
        for key in [*self._index.tensors, *self._index.values]:
            if key.startswith("optimizer/") and key != "optimizer/groups":
                of_name.setdefault(key.removeprefix("optimizer/").rpartition("/")[0], []).append(key)
        for group in optimizer.param_groups:
            for p in group["params"]:
                self._add_parameter(p, names, of_name)

    def _add_parameter(self, p: Tensor, names: Mapping[int, str], of_name: Mapping[str, list[str]]) -> None:
        if id(p) not in names:
            raise CheckpointError(
                f"the optimizer has a parameter of shape {list(p.shape)} that is none of the model's.",
                fix="give the model whose parameters the optimizer was built of",
            )
        place = place_of(p)
        if place is not None and not place.held:
            return
        state: dict[str, Any] = {}
        shape = tuple(p.shape) if place is None or place.shard is None else place.shard.shape
        for key in of_name.get(names[id(p)], []):
            stored = self._index.tensors.get(key)
            name = key.rpartition("/")[2]
            if stored is None:
                state[name] = decode(self._index.values[key], {})
                continue
            cut = stored.shape == shape and bool(shape)
            made = p.shape if cut else stored.shape
            state[name] = torch.empty(made, dtype=stored.torch_dtype, device=p.device if cut else "cpu")
            self.wanted.append(Wanted(key, stored, held_of_place(key, state[name], place if cut else None)))
        self._of_parameters[p] = state

    def apply(self) -> dict[str, Any]:
        """Hands on what is no memory of the model's; gives what was saved as extra."""
        values = self._index.values
        if self._model is not None:
            modules = dict(self._model.named_modules(remove_duplicate=False))
            for key in self._inventory.values:
                owner, _, name = key.removeprefix("model/").rpartition(".")
                if name == "_extra_state":
                    modules[owner].set_extra_state(decode(values[key], self._tensors))
        if self._optimizer is not None:
            self._apply_optimizer(self._optimizer)
        for name, one in self._states.items():
            one.load_state_dict(decode(values[f"states/{name}"], self._tensors))
        return dict(decode(values.get("extra", {}), self._tensors))

    def _apply_optimizer(self, optimizer: Optimizer) -> None:
        for p, state in self._of_parameters.items():
            optimizer.state.pop(p, None)
            if state:
                optimizer.state[p] = state
        assert self._model is not None
        names = parameter_names(self._model)
        options: dict[str, dict[str, Any]] = {}
        for group in decode(self._index.values["optimizer/groups"], {}):
            options |= dict.fromkeys(group["params"], group["options"])
        for group in optimizer.param_groups:
            known = [options[names[id(p)]] for p in group["params"] if names[id(p)] in options]
            if known:
                group.update(known[0])


def _misfit(key: str, held: Held, dtype: str, shape: tuple[int, ...]) -> str:
    if held.shape != tuple(shape):
        return f"{key} has shape {tuple(shape)}, the model {held.shape}"
    if dtype_name(held.dtype) != dtype:
        return f"{key} is {dtype}, the model's {dtype_name(held.dtype)}"
    return ""


def _listed(what: str, keys: list[str], others: Iterable[str]) -> str:
    if not keys:
        return ""
    shown = []
    for key in sorted(keys)[:_MOST]:
        close = difflib.get_close_matches(key, list(others), n=1)
        hint = f" (close: '{close[0].removeprefix('model/')}')" if close else ""
        shown.append(f"'{key.removeprefix('model/')}'{hint}")
    more = f" and {len(keys) - _MOST} more" if len(keys) > _MOST else ""
    return f"{what} {', '.join(shown)}{more}"
