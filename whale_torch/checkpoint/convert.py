"""convert: weights and whole checkpoints from one form into another, a chunk at a time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from whale_torch.checkpoint.boxes import Box
from whale_torch.checkpoint.contents import BY_RANK
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.formats.dcp_writer import write_dcp
from whale_torch.checkpoint.formats.opened import is_run_dir, open_source
from whale_torch.checkpoint.formats.safetensors import SAFETENSORS, write_safetensors
from whale_torch.checkpoint.formats.source import Composed, Part, Source
from whale_torch.checkpoint.formats.torch_files import EXTRA, MODEL, OPTIMIZER, rest_of, write_torch
from whale_torch.checkpoint.formats.trees import (
    GROUPS,
    module_tree,
    optimizer_tree,
    optimizers_in,
    plain,
    tensors_of_model,
    tensors_of_values,
)
from whale_torch.checkpoint.formats.unread import Unread
from whale_torch.checkpoint.index import INDEX
from whale_torch.checkpoint.inventory import Held, Inventory
from whale_torch.checkpoint.retention import reading
from whale_torch.checkpoint.save import save_inventory
from whale_torch.errors import CheckpointError

__all__ = ["Converted", "Form", "convert"]

Form = Literal["whale", "safetensors", "hf", "torch", "dcp"]
_WHOLE = ("whale", "torch", "dcp")  # forms that have a place for all of a checkpoint
_FILES = (".pt", ".pth", ".bin", ".ckpt")  # of torch.save, with a model alone
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
    vocabulary: int | None = None,
) -> Converted:
    """Writes what `source` holds in another form, never with more than a chunk of a tensor in memory.

    source: a run_dir or step of wh.save, files or folders of safetensors, Hugging Face, torch.save, DCP, Megatron-LM
        or DeepSpeed (ZeRO 1 and 2).
    target: a new file or folder; of to="whale" a run_dir.
    to: "whale", "safetensors" (a file, or a folder), "hf" (a folder for from_pretrained), "torch" (a file with the
        model's state_dict, or a folder with model.pt, optimizer.pt and extra.pt) or "dcp" (a folder, with names as
        torch's get_state_dict gives them).
    shard_bytes: most of a file of safetensors, in bytes.
    config: of to="hf", a file or folder whose config and tokenizer go along; by default those beside the source.
    rename: regular expressions that match whole names of the model's tensors, and what they are called in the target
        (\\1 is a group).
    step: of the checkpoint, where the source does not say it.
    vocabulary: rows to keep of what the source pads to more (Megatron-LM does); by default what config says, else all.

    Returns what was written, and what the form has no place for, or the source has in a way that is not read.
    Raises CheckpointError for what cannot be read, is damaged, or is there already.
    """
    if to not in get_args(Form):
        raise CheckpointError(f"to={to!r} is no form.", fix=f"one of {', '.join(get_args(Form))}")
    files, target, config = Files(), Path(target), None if config is None else Path(config)
    with _held(files, Path(source)) as place:
        opened = open_source(place)
        if not opened.tensors:
            raise CheckpointError(f"{source} holds no tensors.", fix="give another source")
        opened.check({key: [Box.whole(one.shape)] for key, one in opened.tensors.items()})
        _unpad(opened, vocabulary, config)
        if rename:
            _rename(opened, rename)
        opened.step = opened.step if step is None else step
        if to == "whale":
            path, left_out = _to_whale(files, opened, target), list[str]()
        else:
            path, left_out = _write(files, opened, target, to, shard_bytes, config)
    written = opened.tensors if to in _WHOLE and target.suffix not in _FILES else tensors_of_model(opened)
    num_bytes = sum(one.num_bytes for one in written.values())
    return Converted(path, len(written), num_bytes, [*opened.left_out, *left_out])


@contextlib.contextmanager
def _held(files: Files, source: Path) -> Iterator[Path]:
    """Where it lies; of a run_dir the latest checkpoint. One of wh.save no job removes meanwhile."""
    if not is_run_dir(source) and not (source / INDEX).is_file():
        yield source
        return
    with reading(files, source, step=None, tag=None) as folder:
        yield folder


def _write(
    files: Files, source: Source, target: Path, to: Form, shard_bytes: int, config: Path | None
) -> tuple[Path, list[str]]:
    """What was written, and what the form has no place for."""
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


def _unpad(source: Source, rows: int | None, config: Path | None) -> None:
    """Leaves out the rows that a vocabulary was padded with."""
    if rows is None and config is not None and source.padded:
        path = config / "config.json" if config.is_dir() else config
        try:
            told = json.loads(path.read_text()).get("vocab_size")
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read as a config: {error}.", fix="give another config=") from error
        rows = told if isinstance(told, int) else None
    for key in source.padded if rows is not None else ():
        entry = source.tensors.get(key)
        if entry is None or rows is None:
            continue
        if not 0 < rows <= entry.shape[0]:
            raise CheckpointError(
                f"'{key}' has {entry.shape[0]} rows, and the vocabulary would have {rows}.", fix="vocabulary="
            )
        shape = (rows, *entry.shape[1:])
        source.tensors[key] = Composed(entry.dtype, shape, [Part(Box.whole(shape), entry, (0,) * len(shape))])


def _rename(source: Source, rename: Mapping[str, str]) -> None:
    """Gives tensors of the model, of averages of it and of optimizers other names; raises CheckpointError for an
    unused pattern."""
    patterns = [(re.compile(pattern), to) for pattern, to in rename.items()]
    unused = {pattern.pattern for pattern, _ in patterns}

    def named(name: str) -> str:
        for pattern, to in patterns:
            if pattern.fullmatch(name):
                unused.discard(pattern.pattern)
                return pattern.sub(to, name)
        return name

    optimizers = optimizers_in(source)
    states = {key for key in (*source.values, *source.values.get(BY_RANK, ())) if key.startswith("states/")}

    def parameter(name: str) -> str:
        """As an optimizer calls it: those of further modules behind these."""
        kind, outer, rest = name.split("/", 2) if name.startswith("states/") and name.count("/") > 1 else ("", "", name)
        return f"{kind}/{outer}/{named(rest)}" if kind else named(name)

    def key_of(key: str) -> str:
        prefix = next((one for one in optimizers if key.startswith(one) and "/" in key.removeprefix(one)), None)
        if prefix is not None:
            name, _, state = key.removeprefix(prefix).rpartition("/")
            return f"{prefix}{parameter(name)}/{state}"
        kind, _, rest = key.partition("/")
        if kind == "model":
            return f"model/{named(rest)}"
        outer, _, inner = rest.partition("/")
        of_module = kind == "states" and inner and f"states/{outer}" not in states
        return f"states/{outer}/{named(inner)}" if of_module and f"states/{outer}/" not in optimizers else key

    inside = tensors_of_values(source)
    new = {key: key_of(key) for key in (*source.values, *source.ties, *source.tensors) if key not in inside}
    new |= {key: new[value] + key.removeprefix(value) for key, value in inside.items() if key in source.tensors}
    if len(set(new.values())) != len(new):
        raise CheckpointError("rename gives two tensors one name.", fix="patterns that keep names apart")
    source.tensors = {new[key]: one for key, one in source.tensors.items()}
    source.ties = {new[key]: new.get(first, first) for key, first in source.ties.items()}
    source.values = {new[key]: _with_keys(value, new) for key, value in source.values.items()}
    for prefix in optimizers:
        for group in source.values[prefix + GROUPS]:
            group["params"] = [parameter(name) for name in group["params"]]
    if unused:
        raise CheckpointError(f"rename: {sorted(unused)} match no tensor.", fix="patterns match whole names")


def _with_keys(value: Any, new: Mapping[str, str]) -> Any:
    """A value of an index whose tensors have other keys."""
    if isinstance(value, list):
        return [_with_keys(one, new) for one in value]
    if not isinstance(value, dict):
        return value
    if value.get("__kind__") == "tensor":
        return {**value, "key": new.get(value["key"], value["key"])}
    return {key: _with_keys(one, new) for key, one in value.items()}


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


def _to_whale(files: Files, source: Source, run_dir: Path) -> Path:
    if source.step is None:
        raise CheckpointError("the source does not say of which step it is.", fix="give step= (--step)")
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
        job.left_out.append("config.json, which from_pretrained needs (config=, --config)")
    return job.finish(job.folder)


def _to_torch(job: _Job) -> Path:
    source = job.source
    tree = job.model() | module_tree(source, "model/")
    if job.target.suffix in _FILES:
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
