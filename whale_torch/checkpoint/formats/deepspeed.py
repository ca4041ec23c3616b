"""Folders of DeepSpeed with ZeRO 1 or 2: weights and moments lie flat over the ranks, in the order of parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale_torch.checkpoint.boxes import Box
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.formats.foreign import load_foreign
from whale_torch.checkpoint.formats.source import Composed, Entry, InMemory, Part, Reshaped, Source
from whale_torch.checkpoint.values import encode
from whale_torch.errors import CheckpointError

__all__ = ["is_deepspeed", "read_deepspeed"]

_LATEST = "latest"
_MODEL = "mp_rank_00_model_states.pt"
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_WEIGHTS = "single_partition_of_fp32_groups"
_SLACK = 2  # elements a rank by which a flat group may be longer: DeepSpeed aligns partitions to that


def is_deepspeed(path: Path) -> bool:
    return any(path.glob(f"global_step*/{_MODEL}")) or any(path.glob("*_model_states.pt"))


def read_deepspeed(path: Path, files: Files) -> Source:
    """The float32 weights and the moments that the optimizer's partitions hold; buffers from the model's own file.

    Raises CheckpointError for ZeRO 3, for ranks of a tensor or pipeline parallel model, and where a partition is
    missing.
    """
    folder = _step(path)
    others = [one.name for one in folder.glob("*_model_states.pt") if one.name != _MODEL]
    if others or not (folder / _MODEL).is_file():
        raise CheckpointError(
            f"{folder} holds {', '.join(sorted(others)[:3]) or 'no ' + _MODEL}, which is not read here.",
            fix="of ZeRO 3, or of several model ranks, let DeepSpeed's zero_to_fp32.py make one state dict first",
        )
    model = load_foreign(folder / _MODEL)
    partitions = _partitions(folder)
    source = Source(folder, {})
    source.step = model.get("global_steps") if isinstance(model.get("global_steps"), int) else None
    shapes = model.get("param_shapes") or []
    groups = [shapes] if isinstance(shapes, dict) else list(shapes)
    if partitions:
        _add_partitions(source, folder, groups, partitions)
    for name, value in (model.get("module") or {}).items():
        if isinstance(value, Tensor):
            source.tensors.setdefault(f"model/{name}", InMemory(value))
    for name, first in (model.get("shared_params") or {}).items():
        source.tensors.pop(f"model/{name}", None)
        source.ties[f"model/{name}"] = f"model/{first}"
    return source


def _step(path: Path) -> Path:
    if any(path.glob("*_model_states.pt")):
        return path
    tag = (path / _LATEST).read_text().strip() if (path / _LATEST).is_file() else ""
    if tag and Path(tag).name == tag and (path / tag).is_dir():
        return path / tag
    steps = sorted(path.glob("global_step*"), key=lambda one: int(re.sub(r"\D", "", one.name) or 0))
    if not steps:
        raise CheckpointError(f"{path} has no folder of a step.", fix="give the folder with mp_rank_00_model_states.pt")
    return steps[-1]


def _partitions(folder: Path) -> list[dict[str, Any]]:
    """What each rank's optimizer saved, in rank order."""
    found = {}
    for one in folder.iterdir():
        match = _OPTIMIZER.fullmatch(one.name)
        if match is not None:
            found[int(match[1])] = load_foreign(one)["optimizer_state_dict"]
    for rank, state in found.items():
        stage = int(state.get("zero_stage", 1))
        if stage not in (1, 2) or _WEIGHTS not in state:
            raise CheckpointError(
                f"rank {rank} of {folder} was saved by ZeRO {stage}; 1 and 2 are read here.",
                fix="let DeepSpeed's zero_to_fp32.py make one state dict first",
            )
        count = state.get("partition_count", len(found))
        count = max(count) if isinstance(count, list | tuple) else count
        if count != len(found) or set(found) != set(range(count)):
            raise CheckpointError(
                f"{folder} has partitions of ranks {sorted(found)}, of {count}.", fix="give all ranks' files"
            )
    return [found[rank] for rank in sorted(found)]


def _add_partitions(
    source: Source, folder: Path, shapes: Sequence[dict[str, Any]], partitions: Sequence[dict[str, Any]]
) -> None:
    base = [one.get("base_optimizer_state") or {} for one in partitions]
    told = []
    for number, group in enumerate(shapes):
        names = {name: tuple(shape) for name, shape in group.items()}
        _add_flat(source, folder, names, [one[_WEIGHTS][number] for one in partitions], "model/{}")
        states = [one["state"].get(number, {}) for one in base if isinstance(one, dict) and "state" in one]
        for kind, value in (states[0] if len(states) == len(partitions) else {}).items():
            if isinstance(value, Tensor) and value.dim():
                _add_flat(source, folder, names, [one[kind] for one in states], f"optimizer/{{}}/{kind}")
            else:
                alike = InMemory(torch.tensor(float(value)))
                source.tensors |= {f"optimizer/{name}/{kind}": alike for name in names}
        if len(states) == len(partitions):
            options = base[0]["param_groups"][number]
            options = {k: v for k, v in options.items() if k != "params" and not isinstance(v, Tensor)}
            step = options.pop("step", None)  # of DeepSpeed's own Adam
            if step is not None:
                for name in names:
                    source.tensors.setdefault(f"optimizer/{name}/step", InMemory(torch.tensor(float(step))))
            told.append({"params": list(names), "options": options})
    if told:
        source.values["optimizer/groups"] = encode(told, "optimizer/groups", {})


def _add_flat(
    source: Source, folder: Path, shapes: dict[str, tuple[int, ...]], parts: Sequence[Tensor], key: str
) -> None:
    """Parameters out of a flat tensor that ranks have one part after the other of, aligned at its end."""
    there = sum(one.numel() for one in parts)
    wanted = sum(math.prod(shape) for shape in shapes.values())
    if not wanted <= there <= wanted + _SLACK * len(parts) * len(parts):
        raise CheckpointError(
            f"the partitions of {folder} hold {there} elements of {key.format('...')}, and parameters have {wanted}.",
            fix="give all ranks' files of one step",
        )
    made, at = [], 0
    for part in parts:
        made.append(Part(Box((at,), (part.numel(),)), InMemory(part.reshape(-1)), (0,)))
        at += part.numel()
    flat: Entry = Composed(parts[0].dtype, (there,), made)
    at = 0
    for name, shape in shapes.items():
        source.tensors[key.format(name)] = Reshaped(flat, shape, at)
        at += math.prod(shape)
