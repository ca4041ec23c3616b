"""What one checkpoint holds: models, optimizers and states of all kinds, as tensors and plain data under their keys.

A state that differs between ranks (a loader's position, say) is kept of each: `by_rank` names those.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from whale_torch.checkpoint.inventory import HOW, Inventory, held_of_place, of_model, of_optimizer, parameter_names
from whale_torch.checkpoint.payload import bytes_of
from whale_torch.checkpoint.random_states import feed_of, random_state
from whale_torch.checkpoint.ranks import Ranks, mesh_of
from whale_torch.checkpoint.values import encode
from whale_torch.errors import CheckpointError
from whale_torch.mesh import Mesh
from whale_torch.strategies.runtime import KEY, Runtime

__all__ = [
    "BY_RANK",
    "FEEDS",
    "OPTIONS",
    "RNG",
    "Contents",
    "Optimizers",
    "Parts",
    "key_of_rank",
    "mesh_among",
    "names_of",
    "parts_of",
    "settled",
    "unwrapped",
]

Optimizers = Optimizer | Mapping[str, Optimizer]

OPTIONS = (
    "step", "model", "optimizer", "extra", "rng", "tag", "keep_last", "wait", "staging_bytes", "if_busy", "progress",
    "only", "assign", "missing_ok", "unexpected_ok", "empty_ok", "dtype",
)  # fmt: skip
"""Of wh.save and wh.load: what is named otherwise is a state."""

_NO_OPTIONS = ("params", "param_names")

BY_RANK, FEEDS, RNG = "by_rank", "feeds", "rng"


def key_of_rank(key: str, rank: int) -> str:
    """The key of one rank's value, of those that are kept of each."""
    return f"ranks/{rank}/{key}"


@dataclass(frozen=True)
class Parts:
    """What a save or a load is given, each with the prefix of its keys."""

    modules: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    states: dict[str, Any]

    @property
    def model(self) -> nn.Module | None:
        return self.modules.get("model/")

    @property
    def names(self) -> dict[int, str]:
        """The names of all parameters, by id; those of further modules after their prefixes."""
        return parameter_names(*(("" if k == "model/" else k, module) for k, module in self.modules.items()))


def names_of(model: nn.Module | None, optimizer: Optimizers | None, states: Mapping[str, Any]) -> dict[str, Any]:
    """What is given to a save or a load, to be compared with what other ranks are given."""
    several = optimizer if isinstance(optimizer, Mapping) else {"": optimizer}
    kinds = ", ".join(sorted(f"{name} {type(one).__name__}".strip() for name, one in several.items()))
    return {"model": type(model).__name__, "optimizer": kinds, "the states' names": sorted(states)}


M = TypeVar("M")


def unwrapped(model: M) -> M:
    """What torch.compile or DistributedDataParallel was given, whose names are the model's own; any other as it is.

    Raises CheckpointError for a module around a parallelized model, whose ranks and names are that model's.
    """
    if not isinstance(model, nn.Module) or mesh_of(model) is not None:
        return model
    compiled = getattr(model, "_orig_mod", None)
    if compiled is not None:
        return unwrapped(compiled)  # type: ignore[no-any-return]
    if any(mesh_of(module) is not None for module in model.modules()):
        raise CheckpointError(
            f"{type(model).__name__} is around a parallelized model, and no part of it.",
            fix="give that model itself; parallelize the module around it to save all of it",
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return unwrapped(model.module)  # type: ignore[no-any-return]
    return model


def mesh_among(model: nn.Module | None, states: Mapping[str, Any]) -> Mesh | None:
    """The mesh of the first parallelized model, None without one."""
    modules = (one for one in (model, *states.values()) if isinstance(one, nn.Module))
    return next((mesh for module in modules if (mesh := mesh_of(module)) is not None), None)


def parts_of(model: nn.Module | None, optimizer: Optimizers | None, states: Mapping[str, Any]) -> Parts:
    """Raises CheckpointError for what is no optimizer, or has no state_dict."""
    if model is not None and not isinstance(model, nn.Module):
        raise CheckpointError(
            f"model is of {type(model).__name__}.",
            fix="the model itself, not its state_dict; plain data goes into extra={...}",
        )
    found = Parts({} if model is None else {"model/": model}, {}, {})
    if isinstance(optimizer, Mapping):
        found.optimizers.update({f"optimizer/@{name}/": one for name, one in optimizer.items()})
    elif optimizer is not None:
        found.optimizers["optimizer/"] = optimizer
    for key, one in found.optimizers.items():
        if not isinstance(one, Optimizer):
            raise CheckpointError(
                f"{key.strip('/')} is a {type(one).__name__}.", fix="an optimizer of torch.optim, or {name: optimizer}"
            )
    for name, one in states.items():
        key = f"states/{name}/"
        if isinstance(one, nn.Module):
            found.modules[key] = one
        elif isinstance(one, Optimizer):
            found.optimizers[key] = one
        elif callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None)):
            found.states[f"states/{name}"] = one
        else:
            close = [f"{option}=" for option in difflib.get_close_matches(name, OPTIONS, n=1)]
            raise CheckpointError(
                f"{name}= is a {type(one).__name__}, without state_dict and load_state_dict.",
                fix=" or ".join([*close, "plain data goes into extra={...}"]),
            )
    if found.optimizers and not found.modules:
        raise CheckpointError("an optimizer without its model.", fix="give the model too: names are its")
    return found


class Contents:
    """What this rank has for a checkpoint, before it is known what the others have. first: whether it is rank 0."""

    def __init__(self, parts: Parts, extra: Mapping[str, Any], *, rng: bool, first: bool = True):
        if not isinstance(extra, Mapping):
            raise CheckpointError(f"extra is a {type(extra).__name__}.", fix="a dict")
        self.inventory = Inventory()
        for key, module in parts.modules.items():
            _check_no_step_has_begun(module)
            self.inventory.add(of_model(module, key))
        names = parts.names if parts.optimizers else {}
        for key, optimizer in parts.optimizers.items():
            self.inventory.add(of_optimizer(optimizer, names, key))
        counting = {k: v for k, v in self.inventory.values.items() if k not in self.inventory.elsewhere}
        self.inventory.values = {}
        self.of_all = {BY_RANK, FEEDS, *(f"{key}groups" for key in parts.optimizers)}  # values that rank 0 has too
        self._of_rank: dict[str, Any] = {key: state.state_dict() for key, state in parts.states.items()}
        if rng:
            self._of_rank[RNG] = random_state(mesh_among(parts.model, parts.modules), parts.model)
        self.feed = feed_of(parts.model)
        for key, value in (counting | ({"extra": dict(extra)} if first else {})).items():
            self._add(key, value)
        self.digests = {key: _digest(key, value) for key, value in self._of_rank.items()}
        alike = (key for key, state in parts.states.items() if getattr(state, "alike_on_all_ranks", False))
        self.alike = {key: json.dumps(self._of_rank[key]) for key in alike}
        for key, optimizer in parts.optimizers.items():
            self.alike[f"{key}options of {len(optimizer.param_groups)} groups"] = _options(optimizer)

    def _add(self, key: str, value: Any) -> None:
        tensors: dict[str, Tensor] = {}
        self.inventory.values[key] = encode(value, key, tensors)
        for name, tensor in tensors.items():
            self.inventory.tensors[name] = replace(held_of_place(name, tensor, None), alike=False)

    def add_states(self, differ: set[str], ranks: Ranks) -> None:
        """States, of which those in `differ` are kept of each rank."""
        for key, value in self._of_rank.items():
            if key in differ or ranks.index == 0:
                self._add(key_of_rank(key, ranks.index) if key in differ else key, value)


def _options(optimizer: Optimizer) -> str:
    """Those of its groups, of which a checkpoint has rank 0's."""
    groups = [{k: v for k, v in g.items() if k not in (*HOW, *_NO_OPTIONS)} for g in optimizer.param_groups]
    return json.dumps([{k: _compared(v) for k, v in group.items()} for group in groups], sort_keys=True)


def _compared(value: Any) -> Any:
    """What says whether two options are the same, numbers as they are."""
    if isinstance(value, list | tuple):
        return [_compared(one) for one in value]
    if getattr(value, "shape", None) == ():  # a tensor, or a number of numpy
        value = value.item()
    return value if value is None or isinstance(value, str | int | float) else _digest("an option", value)


def _check_no_step_has_begun(module: nn.Module) -> None:
    """Raises CheckpointError where gradients are being accumulated, of which no checkpoint has any."""
    runtime = module.__dict__.get(KEY)
    if (
        isinstance(runtime, Runtime)
        and runtime.keeps_gradients
        and any(p.grad is not None for p in module.parameters())
    ):
        raise CheckpointError(
            "gradients of a step that has begun (backwards inside wh.no_sync) are no part of a checkpoint and would be "
            "lost.",
            fix="save after optimizer.step(), or give them up: optimizer.zero_grad()",
        )


def settled(contents: Contents, ranks: Ranks, what: str) -> Inventory:
    """What this rank holds of all that is saved, after ranks told each other: a collective.

    On the first rank the values of all are in it. Raises CheckpointError, alike on all ranks, where they save different
    things.
    """
    mine = contents.inventory
    told = ranks.gather([list(contents.feed), contents.digests, mine.ties, contents.alike])
    differ = {key for key in contents.digests if any(one[1].get(key) != contents.digests[key] for one in told)}

    def check() -> None:
        for rank, (_, _, _, alike) in enumerate(told):
            for key, text in told[0][3].items():
                if alike.get(key, text) != text:
                    raise CheckpointError(
                        f"'{key.rpartition('/')[2]}' differs between ranks: on rank 0 it is {text}, on rank {rank} "
                        f"{alike[key]}.",
                        fix="build it alike on all ranks and save after the same step; a position is that of all",
                    )
        contents.add_states(differ, ranks)

    ranks.run(what, check)
    for _, _, ties, _ in told:
        for key, first in ties.items():
            mine.ties.setdefault(key, first)
    for key in mine.ties:
        mine.tensors.pop(key, None)
    if differ:
        mine.values[BY_RANK] = sorted(differ)
    mine.values[FEEDS] = [feed for feed, *_ in told]
    further = {key: value for key, value in mine.values.items() if ranks.index and key not in contents.of_all}
    for others in ranks.gather(further):
        for key, value in others.items():
            mine.values.setdefault(key, value)
    return mine


def _digest(key: str, value: Any) -> str:
    """Of all that a state says."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, key, tensors))
    found = hashlib.blake2b(text.encode(), digest_size=16)
    for name, tensor in tensors.items():
        found.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode(errors="surrogatepass"))
        found.update(bytes_of(tensor.cpu().contiguous()))
    return found.hexdigest()
