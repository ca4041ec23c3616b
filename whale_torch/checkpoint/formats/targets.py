"""Targets: a source written as safetensors, as Hugging Face has it, as torch.save or DCP do; there once it is whole."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from whale_torch.checkpoint.contents import BY_RANK
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.formats.dcp_writer import write_dcp
from whale_torch.checkpoint.formats.safetensors import SAFETENSORS, write_safetensors
from whale_torch.checkpoint.formats.source import Source
from whale_torch.checkpoint.formats.torch_files import EXTRA, MODEL, OPTIMIZER, rest_of, write_torch
from whale_torch.checkpoint.formats.trees import (
    module_tree,
    optimizer_tree,
    optimizers_in,
    plain,
    tensors_of_model,
    tensors_of_values,
)
from whale_torch.errors import CheckpointError

__all__ = ["TORCH_FILES", "write_target"]

TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")  # of torch.save, with a model alone
_BESIDE = re.compile(r".*\.(json|txt|model|jinja)")  # what lies beside weights in a Hugging Face folder


def write_target(
    files: Files,
    source: Source,
    target: Path,
    to: Literal["safetensors", "hf", "torch", "dcp"],
    shard_bytes: int,
    config: Path | None,
) -> tuple[Path, list[str]]:
    """Writes a source in a form: what was written, and what the form has no place for.

    Raises CheckpointError where the target is there already, or has no folder to lie in.
    """
    write = {"safetensors": _to_safetensors, "hf": _to_hf, "torch": _to_torch, "dcp": _to_dcp}[to]
    _new(target)
    temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    files.make_folder(temporary)
    try:
        job = _Job(files, source, temporary, target, shard_bytes, config)
        return write(job), job.left_out
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)


def _new(target: Path) -> None:
    if target.exists():
        raise CheckpointError(f"{target} exists.", fix="give a new path: nothing is overwritten")
    if not target.absolute().parent.is_dir():
        raise CheckpointError(f"{target.parent} is no folder.", fix="make it first, or give another path")


@dataclass
class _Job:
    files: Files
    source: Source
    folder: Path
    target: Path
    shard_bytes: int
    config: Path | None
    left_out: list[str] = field(default_factory=list)

    def model(self) -> dict[str, Any]:
        """The model's tensors by their names; notes what else there is as left out."""
        values, inside = self.source.values, tensors_of_values(self.source)
        keys = {*self.source.tensors, *values, *values.get(BY_RANK, ())}
        there = {key.partition("/")[0] for key in keys} - ({"extra"} if not values.get("extra") else set())
        self.left_out += [kind for kind in ("optimizer", "extra", "states", "rng") if kind in there]
        self.left_out += [
            key.removeprefix("model/")
            for key in values
            if key.startswith("model/") and key not in self.source.tensors and key not in inside
        ]
        return tensors_of_model(self.source)

    def ties(self) -> dict[str, str]:
        ties = self.source.ties.items()
        return {k.removeprefix("model/"): v.removeprefix("model/") for k, v in ties if k.startswith("model/")}

    def finish(self, made: Path) -> Path:
        """Makes what was written the target."""
        if made.is_dir():
            self.files.sync_folder(made)
        self.files.rename(made, self.target)
        self.files.sync_folder(self.target.parent)
        return self.target


def _to_safetensors(job: _Job) -> Path:
    alone = job.target.suffix == ".safetensors"
    name = job.target.name if alone else SAFETENSORS
    written = write_safetensors(
        job.files, job.folder, name, job.model(), job.ties(), 1 << 63 if alone else job.shard_bytes
    )
    return job.finish(job.folder / written[0] if alone else job.folder)


def _to_hf(job: _Job) -> Path:
    write_safetensors(job.files, job.folder, SAFETENSORS, job.model(), job.ties(), job.shard_bytes)
    beside = job.source.path if job.config is None else job.config
    if beside.is_file():
        found = [beside] if job.config is not None else sorted(beside.parent.iterdir())
    else:
        found = sorted(beside.iterdir())
    for one in found:
        if one.is_file() and _BESIDE.fullmatch(one.name) and not one.name.endswith("index.json"):
            shutil.copyfile(one, job.folder / ("config.json" if one == job.config else one.name))
    if not (job.folder / "config.json").exists():
        job.left_out.append("config.json, which from_pretrained needs (config=, --config)")
    return job.finish(job.folder)


def _to_torch(job: _Job) -> Path:
    source = job.source
    tree = job.model() | module_tree(source, "model/")
    if job.target.suffix in TORCH_FILES:
        job.left_out = [one for one in job.left_out if one not in tree]
        write_torch(job.files, job.folder / job.target.name, tree)
        return job.finish(job.folder / job.target.name)
    write_torch(job.files, job.folder / MODEL, tree)
    optimizers = {one: _optimizer(source, one) for one in optimizers_in(source)}
    several = {k.removeprefix("optimizer/@").strip("/"): v for k, v in optimizers.items() if k.startswith("optimizer/")}
    if several:
        write_torch(job.files, job.folder / OPTIMIZER, optimizers.get("optimizer/", several))
    write_torch(job.files, job.folder / EXTRA, rest_of(source, _states(source, optimizers)))
    job.left_out.clear()
    return job.finish(job.folder)


def _states(source: Source, optimizers: Mapping[str, Any]) -> dict[str, Any]:
    """States, averages of weights and their optimizers by their names, as their state_dicts."""
    found: dict[str, Any] = {}
    for key in (*source.values, *source.tensors, *source.ties):
        kind, _, rest = key.partition("/")
        name = rest.partition("/")[0]
        prefix = f"states/{name}/"
        if kind != "states" or name in found:
            continue
        if prefix in optimizers:
            found[name] = optimizers[prefix]
        elif f"states/{name}" in source.values:
            found[name] = plain(source.values[f"states/{name}"], source.tensors)
        else:
            found[name] = module_tree(source, prefix)
    return found


def _optimizer(source: Source, prefix: str) -> dict[str, Any]:
    """An optimizer's state_dict as torch has it, with entries for tensors."""
    state, groups = optimizer_tree(source, prefix)
    numbers: dict[str, int] = {}
    for group in groups:
        for name in group["params"]:
            numbers[name] = len(numbers)
        group["param_names"] = group["params"]
        group["params"] = [numbers[name] for name in group["params"]]
    return {"state": {numbers[name]: one for name, one in state.items()}, "param_groups": groups}


def _to_dcp(job: _Job) -> Path:
    write_dcp(job.files, job.folder, job.source)
    return job.finish(job.folder)
