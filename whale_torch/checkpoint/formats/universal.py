"""DeepSpeed's universal checkpoints, as its ds_to_universal.py makes them of any of its layouts."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from whale_torch.checkpoint.formats.foreign import as_dict, attributes, load_foreign
from whale_torch.checkpoint.formats.source import InMemory, Source
from whale_torch.checkpoint.values import encode
from whale_torch.errors import CheckpointError

__all__ = ["read_universal"]


def read_universal(folder: Path) -> Source:
    """A folder for each parameter, with a file of its weights and one of each moment."""
    source = Source(folder, {})
    names = sorted(one.name for one in (folder / "zero").iterdir() if (one / "fp32.pt").is_file())
    for name in names:
        for one in sorted((folder / "zero" / name).glob("*.pt")):
            value = load_foreign(one)
            value = value.get("param") if isinstance(value, dict) else value
            if isinstance(value, int | float):
                value = torch.tensor(float(value), device="cpu")
            if not isinstance(value, Tensor):
                raise CheckpointError(f"{one} holds no tensor.", fix="make the universal checkpoint again")
            key = f"model/{name}" if one.stem == "fp32" else f"optimizer/{name}/{one.stem}"
            source.tensors[key] = InMemory(value)
    of_group: dict[int, list[str]] = {}
    for one in sorted(folder.glob("mp_rank_*_model_states.pt")):
        model = as_dict(load_foreign(one), one)
        source.step = model["global_steps"] if isinstance(model.get("global_steps"), int) else source.step
        shapes = model.get("param_shapes") or []
        for number, group in enumerate([shapes] if isinstance(shapes, dict) else shapes):
            known = of_group.setdefault(number, [])
            known += [name for name in group if name in names and name not in known]
        buffers = attributes(model.get("module"))
        for name in model.get("buffer_names") or ():
            if isinstance(buffers.get(name), Tensor):
                source.tensors.setdefault(f"model/{name}", InMemory(buffers[name]))
        for name, first in (model.get("shared_params") or {}).items():
            source.ties[f"model/{name}"] = f"model/{first}"
    if not any(key.startswith("optimizer/") for key in source.tensors):
        return source
    kept = folder / "zero/optimizer_state.pt"
    groups = as_dict(load_foreign(kept), kept).get("param_groups") if kept.is_file() else None
    if isinstance(groups, list) and len(groups) == 1 and not of_group:
        of_group[0] = names
    options = [
        {
            k: v
            for k, v in attributes(group).items()
            if k != "params" and isinstance(v, int | float | str | tuple | None)
        }
        for group in (groups or [{} for _ in of_group])
    ]
    for of in options:
        step = of.pop("step", None)
        if isinstance(step, int | float):
            for name in names:
                source.tensors.setdefault(f"optimizer/{name}/step", InMemory(torch.tensor(float(step), device="cpu")))
    told = [{"params": of_group.get(n, []), "options": of} for n, of in enumerate(options)]
    source.values["optimizer/groups"] = encode(told, "optimizer/groups", {})
    return source
