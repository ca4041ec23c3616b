"""Where everything that a load reads goes: the memory of models and optimizers, and values that are handed on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from whale_torch.checkpoint.choice import MOST, Choice, listed
from whale_torch.checkpoint.contents import BY_RANK, FEEDS, RNG, Parts, key_of_rank, mesh_among
from whale_torch.checkpoint.index import Index, StoredTensor, dtype_name
from whale_torch.checkpoint.inventory import Held, held_of_place, is_expanded, of_model
from whale_torch.checkpoint.moments import Moments
from whale_torch.checkpoint.random_states import check_random_state, feed_of, restore, state_for
from whale_torch.checkpoint.ranks import Ranks
from whale_torch.checkpoint.reader import Wanted
from whale_torch.checkpoint.slices import Slice
from whale_torch.checkpoint.values import decode, tensors_in
from whale_torch.errors import CheckpointError

__all__ = ["Goal"]


class Goal:
    """fresh: tensors whose memory is not in use yet, read first. wanted: the others. missing, unexpected: names."""

    def __init__(self, index: Index, parts: Parts, choice: Choice, ranks: Ranks, *, rng: bool | None):
        self._index, self._parts, self._choice, self._ranks = index, parts, choice, ranks
        self.fresh: list[Wanted] = []
        self.wanted: list[Wanted] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.rng = "kept"
        self._tensors: dict[str, Tensor] = {}
        self._values: dict[str, Any] = {}  # decoded
        self._taken: list[str] = []  # keys of values that are handed on
        self._moments = [
            Moments(self, prefix, optimizer, parts.names) for prefix, optimizer in parts.optimizers.items()
        ]
        self._of_module: dict[str, list[tuple[str, str]]] = {}
        for prefix, module in parts.modules.items():
            self._add_module(prefix, module, choice if prefix == "model/" else Choice(dtype=choice.dtype))
        for moments in self._moments:
            moments.add()
        self._states = {key: self._key_of_state(key) for key in parts.states}
        for key in self._states.values():
            self.take_value(key)
        self.take_value("extra")
        self._plan_rng(rng)

    # ---- what parts of a goal ask for ----

    @property
    def index(self) -> Index:
        return self._index

    @property
    def choice(self) -> Choice:
        return self._choice

    def stored(self, key: str) -> StoredTensor | None:
        """A stored tensor by any of its names."""
        return self._index.tensors.get(self._index.ties.get(key, key))

    def take_value(self, key: str) -> None:
        """Reads the tensors of a value too."""
        if key not in self._index.values:
            return
        self._taken.append(key)
        for name in tensors_in(self._index.values[key]):
            stored = self._index.tensors.get(name)
            if stored is not None and name not in self._tensors:
                self._tensors[name] = torch.empty(stored.shape, dtype=stored.torch_dtype, device="cpu")
                self.fresh.append(Wanted(name, stored, held_of_place(name, self._tensors[name], None)))

    def value(self, key: str) -> Any:
        return self._values[key]

    def decode(self) -> None:
        """Once the fresh tensors are read; before anything in use changes."""
        for key in self._taken:
            try:
                self._values[key] = decode(self._index.values[key], self._tensors)
            except CheckpointError as error:
                raise CheckpointError(f"'{key}': {error.what}", fix=error.fix) from error
        if not isinstance(self._values.get("extra", {}), dict):
            raise CheckpointError("'extra' is no dict.", fix="load another checkpoint")
        if self._rng is not None:
            check_random_state(self._values[self._rng[0]])

    # ---- models ----

    def _add_module(self, prefix: str, module: nn.Module, choice: Choice) -> None:
        inventory = of_model(module, prefix)
        names: dict[str, list[str]] = {key: [key] for key in (*inventory.tensors, *inventory.values)}
        for key, first in inventory.ties.items():
            names[first].append(key)
        choice.check(key.removeprefix(prefix) for keys in names.values() for key in keys)
        known = {*self._index.tensors, *self._index.ties, *self._index.values}
        stored = {key for key in known if key.startswith(prefix)}
        values = {key: value for key, value in self._index.values.items() if key.startswith(prefix)}
        stored.difference_update(key for value in values.values() for key in tensors_in(value))
        stored.update(values)
        used: set[str] = set()
        missing, faults = [], []
        for key, keys in names.items():
            if not any(choice.takes(one.removeprefix(prefix)) for one in keys):
                continue
            sources, part = self._sources(prefix, keys, stored, choice)
            used |= {*keys, *sources}
            if not sources:
                missing.append(key.removeprefix(prefix))
            elif key in inventory.values and sources[0] not in self._index.values:
                faults.append(f"{key.removeprefix(prefix)} is a tensor in the checkpoint, and the model makes its own")
            elif key in inventory.values:
                self.take_value(sources[0])
                self._of_module.setdefault(prefix, []).append((key, sources[0]))
            else:
                faults.append(self._add_tensor(prefix, inventory.tensors[key], sources, part, choice))
        unexpected = [] if choice.only is not None else [k.removeprefix(prefix) for k in stored - used]
        self.missing += missing
        self.unexpected += unexpected
        mine = [key.removeprefix(prefix) for keys in names.values() for key in keys]
        if not choice.missing_ok:
            faults.insert(0, listed("missing", missing, [key.removeprefix(prefix) for key in stored]))
        if not choice.unexpected_ok:
            faults.append(listed("unexpected", unexpected, mine))
        self._refuse(prefix, module, [fault for fault in faults if fault])

    def _sources(
        self, prefix: str, keys: list[str], stored: set[str], choice: Choice
    ) -> tuple[list[str], Slice | None]:
        """Stored keys of what one tensor of the model is loaded from, and the part of it."""
        for key in keys:
            assigned = choice.source(key.removeprefix(prefix))
            if assigned is not None:
                source, part = assigned
                if prefix + source not in stored:
                    found = listed("has no", [source], [one.removeprefix(prefix) for one in stored])
                    raise CheckpointError(
                        f"assign: '{key.removeprefix(prefix)}' is to be loaded from '{source}', and the checkpoint "
                        f"{found}.",
                        fix="give a name of the checkpoint: python -m whale_torch inspect lists them",
                    )
                return [prefix + source], part
        return [key for key in keys if key in stored], None

    def _add_tensor(self, prefix: str, held: Held, sources: list[str], part: Slice | None, choice: Choice) -> str:
        """What keeps it from being loaded, "" for nothing."""
        name = held.key.removeprefix(prefix)
        of = sorted({self._index.ties.get(key, key) for key in sources})
        if len({_contents(self._index.tensors[key]) for key in of if key in self._index.tensors}) > 1:
            names = " and ".join(one.removeprefix(prefix) for one in of)
            return f"{names} are one tensor in the model, and their values differ"
        found = self.stored(sources[0])
        if found is None:
            return f"{name} is no tensor in the checkpoint"
        shape = tuple(found.shape) if part is None else part.shape(found.shape)
        if held.shape != shape:
            return f"{name} has shape {shape}, the model {held.shape}"
        if dtype_name(held.dtype) != found.dtype and not (choice.dtype == "cast" and _can_cast(found, held.dtype)):
            return f"{name} is {found.dtype}, the model's {dtype_name(held.dtype)}"
        if held.values is not None and is_expanded(held.values):
            return f"elements of {name} share memory in the model, which was expanded: clone() it"
        self.wanted.append(Wanted(held.key, found, held if part is None else part.of_whole(held, found.shape)))
        return ""

    def _refuse(self, prefix: str, module: nn.Module, faults: list[str]) -> None:
        if not faults:
            return
        told = " ".join(faults)
        if prefix == "model/":
            what, fixes = "the checkpoint", ["build the model as it was saved"]
            if "missing " in told:
                fixes.append("missing_ok=True keeps the model's own values")
            if "unexpected " in told:
                fixes.append("unexpected_ok=True leaves the checkpoint's out")
        else:
            name = prefix.split("/")[1]
            what = f"the checkpoint's {name!r}"
            fixes = [f"give {name}= what was saved; only=, assign=, missing_ok= and unexpected_ok= are of model= alone"]
            if f"{prefix}n_averaged" in self._index.tensors:
                fixes.append("an AveragedModel takes this one, and has the weights in .module")
        if ", the model's " in told and " is " in told:
            fixes.append('dtype="cast" takes the dtypes of the model')
        more = f"; and {len(faults) - MOST} more" if len(faults) > MOST else ""
        raise CheckpointError(
            f"{what} does not fit {type(module).__name__}: {'; '.join(faults[:MOST])}{more}.", fix="; ".join(fixes)
        )

    # ---- states ----

    def _key_of_state(self, key: str) -> str:
        """Where a state is stored for this rank."""
        values, name = self._index.values, key.removeprefix("states/")
        if key in values:
            return key
        if key in values.get(BY_RANK, ()):
            saved = len(values.get(FEEDS, ()))
            if saved != self._ranks.size:
                raise CheckpointError(
                    f"state '{name}' differs between the {saved} ranks that saved it, and {self._ranks.size} load it.",
                    fix="leave it out, or load on as many ranks",
                )
            if key_of_rank(key, self._ranks.index) not in values:
                raise CheckpointError(f"the checkpoint has no state '{name}' of rank {self._ranks.index}.")
            return key_of_rank(key, self._ranks.index)
        all_keys = [*values, *values.get(BY_RANK, ()), *self._index.tensors]
        known = {one.removeprefix("states/").partition("/")[0] for one in all_keys if one.startswith("states/")}
        raise CheckpointError(
            f"the checkpoint has no {listed('state', [name], known)}; it has {sorted(known)}.", fix="leave it out"
        )

    def _plan_rng(self, wanted: bool | None) -> None:
        values = self._index.values
        self._rng: tuple[str, bool] | None = None
        if wanted is False or (wanted is None and not self._parts.optimizers):
            return
        feeds = [tuple(feed) for feed in values.get(FEEDS, ())]
        rank, as_it_is = state_for(feed_of(self._parts.model), self._ranks.index, feeds)
        key = key_of_rank(RNG, rank) if RNG in values.get(BY_RANK, ()) else RNG
        if key not in values:
            if wanted:
                raise CheckpointError("the checkpoint has no random states.", fix="leave rng=True out")
            return
        self.take_value(key)
        self._rng = key, as_it_is
        self.rng = "restored" if as_it_is else "derived"

    # ---- once all is read ----

    def apply(self) -> dict[str, Any]:
        """Hands on what is no memory of the model's; gives what was saved as extra."""
        for prefix, module in self._parts.modules.items():
            self._apply_module(prefix, module)
        for moments in self._moments:
            moments.apply()
        for key, state in self._parts.states.items():
            state.load_state_dict(self._values[self._states[key]])
        if self._rng is not None:
            key, as_it_is = self._rng
            mesh = mesh_among(self._parts.model, self._parts.modules)
            restore(self._values[key], mesh, self._parts.model, as_it_is=as_it_is)
        return dict(self._values.get("extra", {}))

    def _apply_module(self, prefix: str, module: nn.Module) -> None:
        """Modules that make something of what they load, or of what they give, get all of it by load_state_dict."""
        given = self._of_module.get(prefix, [])
        if not given and not any(_loads_by_itself(member) for member in module.modules()):
            return
        state = module.state_dict()
        for key, source in given:
            state[key.removeprefix(prefix)] = self._values[source]
        module.load_state_dict(state)


def _loads_by_itself(module: nn.Module) -> bool:
    own = type(module)._load_from_state_dict
    if not own.__module__.startswith("torch.nn.") and own is not nn.Module._load_from_state_dict:
        return True
    hooks = [
        *vars(module)["_load_state_dict_pre_hooks"].values(),
        *vars(module)["_load_state_dict_post_hooks"].values(),
    ]
    return any(not _is_ours(hook) for hook in hooks)


def _is_ours(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)
    return str(getattr(hook, "__module__", "")).startswith(("whale_torch.", "torch.nn."))


def _can_cast(found: StoredTensor, dtype: torch.dtype) -> bool:
    return found.torch_dtype.is_floating_point and dtype.is_floating_point


def _contents(stored: StoredTensor) -> tuple[Any, ...]:
    """What two tensors share that are one, as far as an index tells."""
    pieces = sorted((piece.box, piece.checksums) for piece in stored.pieces)
    return stored.dtype, tuple(stored.shape), tuple(pieces)
