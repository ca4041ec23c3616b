"""What a checkpoint has under its keys as the nested dicts that torch's own state_dicts are, tensors as entries."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from whale_torch.checkpoint.formats.source import Source
from whale_torch.checkpoint.structure import is_group
from whale_torch.checkpoint.values import decode, tensors_in
from whale_torch.errors import CheckpointError

__all__ = ["GROUPS", "module_tree", "optimizer_tree", "optimizers_in", "plain", "tensors_of_model", "tensors_of_values"]

GROUPS = "groups"
_OF_OPTIMIZER = re.compile(r"(optimizer/(?:@[^/]+/)?|states/[^/]+/)groups")


def optimizers_in(source: Source) -> list[str]:
    """The prefixes of the keys of its optimizers."""
    found = ((_OF_OPTIMIZER.fullmatch(key), value) for key, value in source.values.items())
    return [m[1] for m, value in found if m is not None and isinstance(value, list) and all(map(is_group, value))]


def tensors_of_values(source: Source) -> dict[str, str]:
    """The tensors that are in values: of each its key, and that of the value."""
    return {name: key for key, value in source.values.items() for name in tensors_in(value) if name != key}


def tensors_of_model(source: Source) -> dict[str, Any]:
    """The model's tensors by their names."""
    inside = tensors_of_values(source)
    return {
        k.removeprefix("model/"): v for k, v in source.tensors.items() if k.startswith("model/") and k not in inside
    }


def module_tree(source: Source, prefix: str) -> dict[str, Any]:
    """A module's state_dict: tensors, further names of those, and what is no tensor."""
    inside = tensors_of_values(source)
    found = {k: v for k, v in source.tensors.items() if k.startswith(prefix) and k not in inside}
    found |= {k: source.tensors[first] for k, first in source.ties.items() if k.startswith(prefix)}
    found |= {k: plain(v, source.tensors) for k, v in source.values.items() if k.startswith(prefix)}
    return {key.removeprefix(prefix): one for key, one in found.items()}


def optimizer_tree(source: Source, prefix: str) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """An optimizer's state by names of parameters, and its groups: options, and names under "params"."""
    groups = plain(source.values[prefix + GROUPS], source.tensors)
    state: dict[str, dict[str, Any]] = {name: {} for group in groups for name in group["params"]}
    for key in (*source.tensors, *source.values):
        if key.startswith(prefix):
            name, _, what = key.removeprefix(prefix).rpartition("/")
            if name in state:
                one = source.tensors[key] if key in source.tensors else plain(source.values[key], source.tensors)
                state[name][what] = one
    told = [{**group["options"], "params": group["params"]} for group in groups]
    return {name: one for name, one in state.items() if one}, told


def plain(value: Any, tensors: Mapping[str, Any]) -> Any:
    """A value of an index as what every reader of plain data knows: arrays are tensors, all maps dicts."""
    if isinstance(value, list):
        return [plain(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("__kind__")
    if kind is None:
        return {key: plain(one, tensors) for key, one in value.items()}
    if kind == "tensor":
        if value["key"] not in tensors:
            raise CheckpointError(f"the tensor '{value['key']}' of a value is missing.", fix="give another checkpoint")
        return tensors[value["key"]]
    if kind == "numpy":
        return plain(value["value"], tensors)
    if kind in ("tuple", "set", "frozenset"):
        return (tuple if kind == "tuple" else set)(plain(one, tensors) for one in value["value"])
    if kind in ("dict", "ordered", "counter", "defaultdict"):
        pairs = [(plain(k, tensors), plain(v, tensors)) for k, v in value["value"]]
        return OrderedDict(pairs) if kind == "ordered" else dict(pairs)
    return decode(value, {})
