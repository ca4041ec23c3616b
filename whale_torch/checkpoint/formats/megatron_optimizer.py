"""The optimizer in Megatron's files: which of its numbers is which parameter, and what groups there are."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale_torch.checkpoint.formats.foreign import attributes
from whale_torch.checkpoint.formats.source import InMemory, Source
from whale_torch.checkpoint.formats.unpickling import Record
from whale_torch.checkpoint.values import encode
from whale_torch.errors import CheckpointError

__all__ = ["add_groups", "states_of"]


def states_of(
    path: Path, saved: Any, model: Mapping[str, Tensor], arguments: Mapping[str, Any]
) -> dict[str, dict[str, Tensor]]:
    """States of each optimizer by the names of parameters, none where it saved none here.

    Megatron numbers parameters group by group, each in the model's order; experts of several ranks have an
    optimizer of their own.
    """
    inner = [one for one in _optimizers(saved) if one.get("state")]
    every = [group for one in inner for group in one["param_groups"]]
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for one in inner:
        numbers: dict[int, str] = {}
        for group in one["param_groups"]:
            names = [name for name, value in model.items() if _is_in(group, every, name, value.shape, arguments)]
            if len(names) != len(group["params"]) and group["params"]:
                raise CheckpointError(
                    f"a group of the optimizer in {path} has {len(group['params'])} parameters, and {len(names)} "
                    "of the model's belong to it.",
                    fix="convert the weights alone: remove 'optimizer' from the files",
                )
            numbers |= dict(zip(group["params"], names, strict=False))
        for number, state in one["state"].items():
            for kind, value in attributes(state).items():
                if not isinstance(value, Tensor) or not value.dim():
                    continue
                name = numbers[number]
                if value.shape != model[name].shape:
                    raise CheckpointError(
                        f"'{kind}' of parameter {number} in {path} has shape {list(value.shape)}, and "
                        f"'{name.partition('|')[2]}' has {list(model[name].shape)}.",
                        fix="convert the weights alone: remove 'optimizer' from the files",
                    )
                found[kind][name] = value
    return dict(found)


def add_groups(source: Source, saved: Any, arguments: Mapping[str, Any]) -> None:
    """Adds groups and steps to a source that has the states. saved: the optimizer in one of the files."""
    named = sorted({key.split("/")[1] for key in source.tensors if key.startswith("optimizer/")})
    if not named:
        return
    inner = _optimizers(saved)
    groups = [group for one in inner for group in one["param_groups"]]
    told: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in groups:
        options = {k: v for k, v in group.items() if k != "params" and not isinstance(v, Tensor | Record)}
        names = [
            name for name in named if _is_in(group, groups, name, source.tensors[f"model/{name}"].shape, arguments)
        ]
        told.setdefault(tuple(names), {"params": names, "options": options})
    steps = [group["step"] for group in groups if isinstance(group.get("step"), int)]
    steps += [state["step"] for one in inner for state in one["state"].values() if "step" in state]
    step = float(steps[0] if steps else source.step or 0)
    for name in named:
        source.tensors.setdefault(f"optimizer/{name}/step", InMemory(torch.tensor(step, device="cpu")))
    source.values["optimizer/groups"] = encode(list(told.values()), "optimizer/groups", {})


def _is_in(
    group: Mapping[str, Any], groups: Sequence[Any], name: str, shape: Sequence[int], arguments: Mapping[str, Any]
) -> bool:
    """Whether a parameter is in a group: by whether it decays, is one rank's expert, or has its own learning rate.

    All but biases and what has one dim decay.
    """
    decays = len(shape) > 1 and not name.endswith("bias")
    if arguments.get("apply_wd_to_qk_layernorm") and re.search(r"[qk]_(layer)?norm\.", name):
        decays = True
    ranks = arguments.get("expert_model_parallel_size") or 1
    is_expert = ranks > 1 and ".experts." in name
    own_rate = any(one.get("is_decoupled_lr") for one in groups) and re.search(
        r"word_embeddings|position_embeddings|output_layer|embed_tokens|lm_head", name
    )
    return (
        decays is (group.get("wd_mult", 1.0) != 0.0)
        and is_expert is bool(group.get("is_expert_parallel", is_expert))
        and bool(own_rate) is bool(group.get("is_decoupled_lr", False))
    )


def _optimizers(saved: Any) -> list[dict[str, Any]]:
    """The state_dicts of torch's that Megatron's hold: one, one inside a scaler's, or one for experts too."""
    several = saved if isinstance(saved, list) else [saved]
    inner = [one.get("optimizer", one) if isinstance(one, dict) else None for one in several]
    return [one for one in inner if isinstance(one, dict) and "param_groups" in one and "state" in one]
