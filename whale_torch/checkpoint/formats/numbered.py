"""Optimizers that DeepSpeed saves without ZeRO: they know parameters by numbers, whose order the model's file gives."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale_torch.checkpoint.formats.foreign import as_dict, attributes, load_foreign
from whale_torch.checkpoint.formats.source import InMemory, Source
from whale_torch.checkpoint.formats.unpickling import Record
from whale_torch.checkpoint.values import encode

__all__ = ["LOCAL", "add_numbered", "add_numbers"]

LOCAL = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")
"""Names of experts' parameters, whose number is a rank's own or one of all ranks."""


def add_numbered(source: Source, folder: Path, saved: Any, dense: Sequence[str]) -> None:
    """Numbers count the parameters of the model in its order, then a rank's experts.

    saved: what the model's file has of an optimizer. dense: names of parameters that are no experts.
    """
    files = sorted(folder.glob("expp_rank_*_mp_rank_00_optim_states.pt"))
    of_ranks = [as_dict(load_foreign(one), one).get("optimizer") for one in files] or [saved]
    if all(one is None for one in of_ranks):
        return
    experts = [key.removeprefix("model/") for key in source.tensors if LOCAL.fullmatch(key)]
    experts.sort(key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])
    order: dict[str, list[list[str]]] = {}  # by layer, of each expert its parameters
    for name in experts:
        match = LOCAL.fullmatch(name)
        assert match is not None
        layer = order.setdefault(match[1], [])
        if len(layer) <= int(match[2]):
            layer.append([])
        layer[-1].append(name)
    told: list[dict[str, Any]] = []
    for rank, one in enumerate(of_ranks):
        names = list(dense)
        for layer in order.values():
            each = len(layer) // len(of_ranks)
            names += [name for expert in layer[rank * each : (rank + 1) * each] for name in expert]
        found = _by_names(source, one, names)
        if found is None:
            for key in [key for key in source.tensors if key.startswith("optimizer/")]:
                del source.tensors[key]
            source.left_out.append("the optimizer of a run without ZeRO, which keeps no names: save with ZeRO 1 or 2")
            return
        for number, group in enumerate(found):
            if len(told) <= number:
                told.append({**group, "params": []})
            told[number]["params"] += [name for name in group["params"] if name not in told[number]["params"]]
    source.values["optimizer/groups"] = encode(told, "optimizer/groups", {})


def _by_names(source: Source, saved: Any, names: Sequence[str]) -> list[dict[str, Any]] | None:
    """Adds an optimizer's state; gives its groups, None where numbers do not tell which parameters they are."""
    if not isinstance(saved, dict) or not {"state", "param_groups"} <= saved.keys():
        return None
    groups = [attributes(group) for group in saved["param_groups"]]
    numbers = [number for group in groups for number in group["params"]]
    if len(numbers) != len(names) or sum("moe" not in group for group in groups) > 1:
        return None
    known = dict(zip(numbers, names, strict=True))
    states = {known[number]: attributes(state) for number, state in saved["state"].items()}
    for name, state in states.items():
        shape = source.tensors[f"model/{name}"].shape
        if any(isinstance(v, Tensor) and v.dim() and tuple(v.shape) != shape for v in state.values()):
            return None
    for name, state in states.items():
        for kind, value in state.items():
            if isinstance(value, Tensor):
                source.tensors[f"optimizer/{name}/{kind}"] = InMemory(value)
        add_numbers(source, [name], {k: v for k, v in state.items() if isinstance(v, int | float)}, {})
    found = []
    for group in groups:
        options = {k: v for k, v in group.items() if k != "params" and not isinstance(v, Tensor | Record)}
        of = [known[number] for number in group["params"]]
        add_numbers(source, of, {}, options)
        found.append({"params": of, "options": options})
    return found


def add_numbers(source: Source, names: Sequence[str], state: dict[str, Any], options: dict[str, Any]) -> None:
    """What is one number for all parameters of a group; takes a step that is an option away."""
    numbers = {kind: value for kind, value in state.items() if not isinstance(value, Tensor) or not value.dim()}
    step = options.pop("step", None)  # of DeepSpeed's own Adam
    if step is not None:
        numbers.setdefault("step", step)
    for kind, value in numbers.items():
        alike = InMemory(torch.tensor(float(value), device="cpu"))
        source.tensors |= {f"optimizer/{name}/{kind}": alike for name in names}
