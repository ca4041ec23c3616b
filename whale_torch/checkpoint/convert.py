"""convert: weights and whole checkpoints from one form into another, a chunk at a time."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from whale_torch.checkpoint.boxes import Box
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.formats.dcp import write_dcp
from whale_torch.checkpoint.formats.opened import open_source
from whale_torch.checkpoint.formats.safetensors import SAFETENSORS, write_safetensors
from whale_torch.checkpoint.formats.source import Source
from whale_torch.checkpoint.formats.torch_files import EXTRA, MODEL, OPTIMIZER, write_torch
from whale_torch.checkpoint.formats.unread import Unread
from whale_torch.checkpoint.inventory import Held, Inventory
from whale_torch.checkpoint.save import save_inventory
from whale_torch.checkpoint.values import decode
from whale_torch.errors import CheckpointError

__all__ = ["Converted", "Form", "convert"]

Form = Literal["whale", "safetensors", "hf", "torch", "dcp"]
_SHARD_BYTES = 5 * 10**9
_BESIDE = re.compile(r".*\.(json|txt|model|jinja)")  # what lies beside weights in a Hugging Face folder


@dataclass
class Converted:
    """path: what was written. left_out: what the form has no place for."""

    path: Path
    num_tensors: int
    num_bytes: int
    left_out: list[str] = field(default_factory=list)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: Form,
    *,
    shard_bytes: int = _SHARD_BYTES,
    config: str | os.PathLike[str] | None = None,
    rename: Mapping[str, str] | None = None,
    step: int | None = None,
) -> Converted:
    """Writes what `source` holds in another form, never with more than a chunk of a tensor in memory.

    source: a run_dir or step of wh.save, files or folders of safetensors, Hugging Face, torch.save, DCP, Megatron-LM
    or DeepSpeed (ZeRO 1 and 2). to: "whale" (target is a run_dir), "safetensors" (a file, or a folder), "hf" (a folder
    for from_pretrained; config: a file or folder whose config and tokenizer go along, by default those beside the
    source), "torch" (a file with the model's state_dict, or a folder with model.pt, optimizer.pt and extra.pt), "dcp"
    (a folder, with names as torch's get_state_dict gives them). shard_bytes: of a file of safetensors. rename: regular
    expressions that match whole names of the model's tensors, and what they are called in the target (\\1 is a group).
    step: of the checkpoint, where the source does not say it.
    Returns what was written, and what the form has no place for. Raises CheckpointError for what cannot be read, is
    damaged, or is there already.
    """
    if to not in get_args(Form):
        raise CheckpointError(f"to={to!r} is no form.", fix=f"one of {', '.join(get_args(Form))}")
    files, opened = Files(), open_source(source)
    if not opened.tensors:
        raise CheckpointError(f"{source} holds no tensors.", fix="give another source")
    opened.check({key: [Box.whole(one.shape)] for key, one in opened.tensors.items()})
    if rename:
        _rename(opened, rename)
    target = Path(target)
    opened.step = opened.step if step is None else step
    left_out: list[str] = []
    if to == "whale":
        path = _to_whale(files, opened, target)
    else:
        write = {"safetensors": _to_safetensors, "hf": _to_hf, "torch": _to_torch, "dcp": _to_dcp}[to]
        _new(target)
        temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
        files.make_folder(temporary)
        try:
            job = _Job(files, opened, temporary, target, shard_bytes, None if config is None else Path(config))
            path = write(job)
            left_out = job.left_out
        finally:
            if temporary.exists():
                shutil.rmtree(temporary)
    written = [one for key, one in opened.tensors.items() if key.partition("/")[0] not in left_out]
    return Converted(path, len(written), sum(one.num_bytes for one in written), left_out)


def _new(target: Path) -> None:
    if target.exists():
        raise CheckpointError(f"{target} exists.", fix="give a new path: nothing is overwritten")


def _rename(source: Source, rename: Mapping[str, str]) -> None:
    """Gives tensors of the model, and of an optimizer, other names. Raises CheckpointError for an unused pattern."""
    patterns = [(re.compile(pattern), to) for pattern, to in rename.items()]
    unused = {pattern.pattern for pattern, _ in patterns}

    def named(name: str) -> str:
        for pattern, to in patterns:
            if pattern.fullmatch(name):
                unused.discard(pattern.pattern)
                return pattern.sub(to, name)
        return name

    def key_of(key: str) -> str:
        kind, _, rest = key.partition("/")
        if kind == "model":
            return f"model/{named(rest)}"
        if kind == "optimizer" and key != "optimizer/groups":
            name, _, state = rest.rpartition("/")
            return f"optimizer/{named(name)}/{state}"
        return key

    for table in (source.tensors, source.values, source.ties):
        renamed = {key_of(key): one for key, one in table.items()}
        if len(renamed) != len(table):
            raise CheckpointError("rename gives two tensors one name.", fix="patterns that keep names apart")
        table.clear()
        table.update(renamed)  # type: ignore[arg-type]
    source.ties = {key: key_of(first) for key, first in source.ties.items()}
    for group in source.values.get("optimizer/groups", []):
        group["params"] = [named(name) for name in group["params"]]
    if unused:
        raise CheckpointError(f"rename: {sorted(unused)} match no tensor.", fix="patterns match whole names")


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
        for key in (*self.source.tensors, *self.source.values):
            kind = key.partition("/")[0]
            if kind != "model" and kind not in self.left_out:
                self.left_out.append(kind)
            if key.startswith("model/") and key in self.source.values:
                self.left_out.append(key.removeprefix("model/"))
        found = self.source.tensors.items()
        return {key.removeprefix("model/"): one for key, one in found if key.startswith("model/")}

    def ties(self) -> dict[str, str]:
        return {key.removeprefix("model/"): first.removeprefix("model/") for key, first in self.source.ties.items()}

    def finish(self, made: Path) -> Path:
        """Makes what was written the target."""
        if made.is_dir():
            self.files.sync_folder(made)
        self.files.rename(made, self.target)
        self.files.sync_folder(self.target.parent)
        return self.target


def _to_whale(files: Files, source: Source, run_dir: Path) -> Path:
    if source.step is None:
        raise CheckpointError("the source does not say of which step it is.", fix="give step=")
    held = {}
    for key, one in source.tensors.items():
        whole = Box.whole(one.shape)
        held[key] = Held(key, one.dtype, one.shape, Unread.of(one), ((whole, whole),))
    values = {"extra": {}} | source.values
    return save_inventory(run_dir, source.step, Inventory(held, dict(source.ties), values), files)


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
        job.left_out.append("config.json, which from_pretrained needs (config=)")
    return job.finish(job.folder)


def _to_torch(job: _Job) -> Path:
    source = job.source
    tree = {**job.model()}
    tree |= {name: tree[first] for name, first in job.ties().items()}
    for key, value in source.values.items():
        if key.startswith("model/"):
            tree[key.removeprefix("model/")] = _tree(value, source)
    if job.target.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        job.left_out = [one for one in job.left_out if one not in tree]
        write_torch(job.files, job.folder / job.target.name, tree)
        return job.finish(job.folder / job.target.name)
    write_torch(job.files, job.folder / MODEL, tree)
    if "optimizer/groups" in source.values:
        write_torch(job.files, job.folder / OPTIMIZER, _optimizer(source))
    states = {key.removeprefix("states/"): one for key, one in source.values.items() if key.startswith("states/")}
    rest = {"step": source.step, "extra": _tree(source.values.get("extra", {}), source)}
    rest["states"] = {name: _tree(one, source) for name, one in states.items()}
    write_torch(job.files, job.folder / EXTRA, rest)
    job.left_out.clear()
    return job.finish(job.folder)


def _optimizer(source: Source) -> dict[str, Any]:
    """An optimizer's state_dict as torch has it, with entries for tensors."""
    groups: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    for group in decode(source.values["optimizer/groups"], {}):
        for name in group["params"]:
            numbers[name] = len(numbers)
        params = {"params": [numbers[name] for name in group["params"]], "param_names": group["params"]}
        groups.append({**group["options"], **params})
    state: dict[int, dict[str, Any]] = {}
    for key in (*source.tensors, *source.values):
        kind, _, rest = key.partition("/")
        name, _, what = rest.rpartition("/")
        if kind == "optimizer" and name in numbers:
            one = source.tensors[key] if key in source.tensors else _tree(source.values[key], source)
            state.setdefault(numbers[name], {})[what] = one
    return {"state": {number: state[number] for number in sorted(state)}, "param_groups": groups}


def _tree(value: Any, source: Source) -> Any:
    """A value of an index with entries for its tensors."""
    return decode(value, source.tensors)  # type: ignore[arg-type]


def _to_dcp(job: _Job) -> Path:
    write_dcp(job.files, job.folder, job.source)
    return job.finish(job.folder)
