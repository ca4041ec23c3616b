"""Folders of DeepSpeed: with ZeRO 1 or 2 weights and moments lie flat over the ranks, in the order of parameters."""

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
from whale_torch.checkpoint.formats.foreign import as_dict, attributes, load_foreign
from whale_torch.checkpoint.formats.numbered import LOCAL, add_numbered, add_numbers
from whale_torch.checkpoint.formats.source import Composed, Entry, InMemory, Part, Reshaped, Source
from whale_torch.checkpoint.formats.universal import read_universal
from whale_torch.checkpoint.formats.unpickling import Record
from whale_torch.checkpoint.values import encode
from whale_torch.errors import CheckpointError

__all__ = ["is_deepspeed", "read_deepspeed"]

_LATEST = ("latest", "latest_universal")
_MODEL = "mp_rank_00_model_states.pt"
_EXPERT = re.compile(r"layer_\d+_expert_\d+_mp_rank_00_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_WEIGHTS, _SLICES = "single_partition_of_fp32_groups", "param_slice_mappings"
_SLACK = 2  # elements a rank by which a flat group may be longer: DeepSpeed aligns partitions to that
_WAY = "let DeepSpeed's ds_to_universal.py make a universal checkpoint, which is read here, or zero_to_fp32.py weights"

Shape = tuple[int, ...]


def is_deepspeed(path: Path) -> bool:
    """Whether a folder is one of DeepSpeed, of one step or several."""
    return any(any(path.glob(one)) for one in (f"global_step*/{_MODEL}", "*_model_states.pt", "zero/*/fp32.pt")) or any(
        path.glob("*/zero/*/fp32.pt")
    )


def read_deepspeed(path: Path, files: Files) -> Source:
    """The float32 weights and the moments that the optimizer's partitions hold, else the model's own; experts by global
    numbers; buffers from the model's own file.

    Raises CheckpointError for ZeRO 3, for ranks of a tensor or pipeline parallel model, and where a partition is
    missing.
    """
    folder = _step(path)
    if (folder / "zero").is_dir():
        return read_universal(folder)
    names = sorted(one.name for one in folder.glob("*_model_states.pt"))
    others = [name for name in names if name != _MODEL and not _EXPERT.fullmatch(name)]
    if others or _MODEL not in names:
        raise CheckpointError(
            f"{folder} holds {', '.join(others[:3]) or 'no ' + _MODEL}, which is not read here.", fix=_WAY
        )
    model = as_dict(load_foreign(folder / _MODEL), folder / _MODEL)
    tensors = {name: one for name, one in attributes(model.get("module")).items() if isinstance(one, Tensor)}
    dense = [name for name in tensors if name not in (model.get("buffer_names") or ())]
    for name in names:
        if _EXPERT.fullmatch(name):
            tensors |= as_dict(load_foreign(folder / name), folder / name)
    partitions = _partitions(folder)
    source = Source(folder, {})
    source.step = model.get("global_steps") if isinstance(model.get("global_steps"), int) else None
    shapes = model.get("param_shapes") or []
    groups = [shapes] if isinstance(shapes, dict) else list(shapes)
    try:
        if partitions and groups:
            _add_partitions(source, folder, groups, partitions)
        elif partitions:
            _add_fragments(source, folder, tensors, partitions)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(
            f"the partitions of {folder} cannot be read: {type(error).__name__}: {error}.", fix=_WAY
        ) from error
    _add_rest(source, tensors, model.get("shared_params") or {})
    if not partitions:
        try:
            add_numbered(source, folder, model.get("optimizer"), [n for n in dense if f"model/{n}" in source.tensors])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the optimizer of {folder} cannot be read: {type(error).__name__}: {error}.", fix=_WAY
            ) from error
    return source


def _add_rest(source: Source, tensors: dict[str, Tensor], shared: dict[str, str]) -> None:
    """What no partition has: buffers, frozen weights, and further names, which a file may have as copies."""
    trained = [name for name in tensors if f"model/{name}" in source.tensors]
    of_memory: dict[Any, str] = {}
    for name, value in tensors.items():
        where = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride())
        same = of_memory.setdefault(where, name) if value.numel() else name
        first = shared.get(name, same if same != name else None)
        if first is None and name not in trained and value.dim() > 1:
            first = next((one for one in trained if _is_same(value, tensors[one])), None)
        if first is None:
            source.tensors.setdefault(f"model/{name}", InMemory(value))
        else:
            source.ties[f"model/{name}"] = f"model/{first}"


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _step(path: Path) -> Path:
    if any(path.glob("*_model_states.pt")) or (path / "zero").is_dir():
        return path
    for latest in _LATEST:
        tag = (path / latest).read_text().strip() if (path / latest).is_file() else ""
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
            found[int(match[1])] = as_dict(as_dict(load_foreign(one), one).get("optimizer_state_dict"), one)
    for rank, state in found.items():
        stage = state.get("zero_stage", 1)
        stage = stage.arguments[0] if isinstance(stage, Record) and stage.arguments else stage
        if stage not in (1, 2) or _WEIGHTS not in state:
            raise CheckpointError(
                f"rank {rank} of {folder} was saved by ZeRO {stage}; 1 and 2 are read here.", fix=_WAY
            )
        count = max(_counts(state, len(found)))
        if count != len(found) or set(found) != set(range(count)):
            raise CheckpointError(
                f"{folder} has partitions of ranks {sorted(found)}, of {count}.", fix="give all ranks' files"
            )
    return [found[rank] for rank in sorted(found)]


def _counts(state: dict[str, Any], ranks: int) -> list[int]:
    """Over how many ranks each group is cut."""
    count = state.get("partition_count", ranks)
    return list(count) if isinstance(count, list | tuple) else [count] * len(state[_WEIGHTS])


def _states(partitions: Sequence[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """What the optimizer keeps of a group on each rank; none where one has nothing."""
    found = []
    for one in partitions:
        base = one.get("base_optimizer_state") or one.get("optimizer_state_dict") or {}
        # of an elastic checkpoint a list without options of groups
        state = base[number] if isinstance(base, list) else base.get("state", {}).get(number)
        found.append({key: value for key, value in (state or {}).items() if isinstance(value, Tensor | int | float)})
    return found if all(found) else []


def _options(partitions: Sequence[dict[str, Any]], number: int) -> dict[str, Any]:
    base = partitions[0].get("base_optimizer_state") or {}
    group = base["param_groups"][number] if isinstance(base, dict) else {}
    step = partitions[0].get("base_optimizer_state_step")
    return ({} if step is None else {"step": step}) | {
        k: v for k, v in group.items() if k != "params" and not isinstance(v, Tensor | Record)
    }


def _add_partitions(
    source: Source, folder: Path, shapes: Sequence[dict[str, Any]], partitions: Sequence[dict[str, Any]]
) -> None:
    told = []
    for number, group in enumerate(shapes):
        names = {name: tuple(shape) for name, shape in group.items()}
        _add_flat(source, folder, names, [one[_WEIGHTS][number] for one in partitions], "model/{}")
        states = _states(partitions, number)
        if not states:
            continue
        for kind, value in states[0].items():
            if isinstance(value, Tensor) and value.dim():
                _add_flat(source, folder, names, [one[kind] for one in states], f"optimizer/{{}}/{kind}")
        options = _options(partitions, number)
        add_numbers(source, list(names), states[0], options)
        told.append({"params": list(names), "options": options})
    if told:
        source.values["optimizer/groups"] = encode(told, "optimizer/groups", {})


def _add_fragments(
    source: Source, folder: Path, tensors: dict[str, Tensor], partitions: Sequence[dict[str, Any]]
) -> None:
    """Of a model with experts, where each rank says which part of a parameter it has; experts lie on every n-th rank.

    A rank calls its experts by local numbers.
    """
    if any(_SLICES not in one for one in partitions):
        source.left_out.append("the optimizer, whose files do not say where parameters lie: save with DeepSpeed >= 0.7")
        return
    local: dict[str, int] = {}
    for group in partitions[0][_SLICES]:
        for match in filter(None, map(LOCAL.fullmatch, group)):
            local[match[1]] = max(local.get(match[1], 0), int(match[2]) + 1)
    told = []
    for number, count in enumerate(_counts(partitions[0], len(partitions))):
        if len(partitions) % count:
            raise ValueError(f"group {number} is cut over {count} of {len(partitions)} ranks")
        options = _options(partitions, number)
        names: list[str] = []
        for first in range(len(partitions) // count):
            ranks = partitions[first :: len(partitions) // count]
            states = _states(ranks, number)
            here = {name: _global(name, first, local) for one in ranks for name in one[_SLICES][number]}
            for name, known in here.items():
                slices = [one[_SLICES][number].get(name) for one in ranks]
                weights = [one[_WEIGHTS][number] for one in ranks]
                shape = tuple(tensors[known].shape)
                source.tensors[f"model/{known}"] = _joined(weights, slices, shape, f"'{known}' in {folder}")
                for kind in states[0] if states else ():
                    values = [one[kind] for one in states]
                    if isinstance(values[0], Tensor) and values[0].dim():
                        moment = _joined(values, slices, shape, f"{kind} of '{known}' in {folder}")
                        source.tensors[f"optimizer/{known}/{kind}"] = moment
            if states:
                add_numbers(source, list(here.values()), states[0], dict(options))
            _check_order(source, tensors, list(here.values()), folder)
            names += here.values()
        options.pop("step", None)
        told.append({"params": names, "options": options})
    source.values["optimizer/groups"] = encode(told, "optimizer/groups", {})


def _check_order(source: Source, tensors: dict[str, Tensor], names: Sequence[str], folder: Path) -> None:
    """Raises CheckpointError where an expert is not what its own file has: ranks then share experts out otherwise."""
    expert = next((name for name in names if LOCAL.fullmatch(name)), None)
    if expert is None:
        return
    found = source.tensors[f"model/{expert}"].read().to(tensors[expert].dtype)
    if not torch.equal(found, tensors[expert].detach()):
        raise CheckpointError(
            f"the partitions of {folder} have another '{expert}' than its file: ranks lie in another order "
            "(use_data_before_expert_parallelism).",
            fix="save with experts before data, or convert the weights alone: without *_optim_states.pt",
        )


def _global(name: str, rank: int, local: dict[str, int]) -> str:
    match = LOCAL.fullmatch(name)
    return name if match is None else f"{match[1]}{rank * local[match[1]] + int(match[2])}{match[3]}"


def _joined(flat: Sequence[Tensor], slices: Sequence[Any], shape: Shape, what: str) -> Entry:
    """A parameter from its part of each rank's flat tensor."""
    parts, at = [], 0
    for values, one in zip(flat, slices, strict=True):
        if one is not None and one.numel:
            if one.start < 0 or one.start + one.numel > values.numel():
                raise CheckpointError(f"a slice of {what} lies outside of its partition.", fix="give all files anew")
            parts.append(Part(Box((at,), (one.numel,)), InMemory(values.reshape(-1)), (one.start,)))
            at += one.numel
    if at != math.prod(shape):
        raise CheckpointError(f"{what} has {at} elements, not {list(shape)}.", fix="give all ranks' files of one step")
    return Reshaped(Composed(flat[0].dtype, (at,), parts), shape)


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
