"""convert: weights and whole checkpoints from one form into another, a chunk at a time."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from whale_torch.checkpoint.boxes import Box
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.folders import whole_step
from whale_torch.checkpoint.formats.opened import is_run_dir, open_source
from whale_torch.checkpoint.formats.renaming import rename_tensors
from whale_torch.checkpoint.formats.source import Composed, Part, Source
from whale_torch.checkpoint.formats.targets import TORCH_FILES, write_target
from whale_torch.checkpoint.formats.trees import tensors_of_model
from whale_torch.checkpoint.formats.unread import Unread
from whale_torch.checkpoint.index import INDEX
from whale_torch.checkpoint.inventory import Held, Inventory
from whale_torch.checkpoint.retention import reading
from whale_torch.checkpoint.save import save_inventory
from whale_torch.errors import CheckpointError

__all__ = ["Converted", "Form", "convert"]

Form = Literal["whale", "safetensors", "hf", "torch", "dcp"]
_WHOLE = ("whale", "torch", "dcp")  # forms that have a place for all of a checkpoint
_SHARD_BYTES = 5 * 10**9


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
    config: of to="hf", a file or folder whose config and tokenizer go along; by default those beside the source. Its
        vocabulary is what is kept of a padded one.
    rename: regular expressions that match whole names of the model's tensors, and what they are called in the target
        (\\1 is a group).
    step: of the checkpoint, where the source does not say it, or another one.
    vocabulary: rows to keep of what the source pads to more (Megatron-LM does); by default what config says, else all.

    Returns what was written, and what the form has no place for, or the source has in a way that is not read.
    Raises CheckpointError for what cannot be read, is damaged, or is there already, and for an option that the form
    does not follow.
    """
    files, target, config = Files(), Path(target), None if config is None else Path(config)
    takes_all = to in _WHOLE and not (to == "torch" and target.suffix in TORCH_FILES)
    _check_options(to, takes_all, shard_bytes, config, step)
    with _held(files, Path(source)) as place:
        opened = open_source(place)
        if not opened.tensors:
            raise CheckpointError(f"{source} holds no tensors.", fix="give another source")
        _check_padded(opened, to, vocabulary, config)
        opened.check({key: [Box.whole(one.shape)] for key, one in opened.tensors.items()})
        _unpad(opened, vocabulary, config)
        if rename:
            rename_tensors(opened, rename)
        opened.step = opened.step if step is None else step
        if to == "whale":
            path, left_out = _to_whale(files, opened, target), list[str]()
        else:
            path, left_out = write_target(files, opened, target, to, shard_bytes, config)
    written = opened.tensors if takes_all else tensors_of_model(opened)
    num_bytes = sum(one.num_bytes for one in written.values())
    return Converted(path, len(written), num_bytes, [*opened.left_out, *left_out])


def _check_options(to: Form, takes_all: bool, shard_bytes: int, config: Path | None, step: int | None) -> None:
    """Raises CheckpointError for a form that is none, and for an option that this one does not follow."""
    if to not in get_args(Form):
        raise CheckpointError(f"to={to!r} is no form.", fix=f"one of {', '.join(get_args(Form))}")
    if shard_bytes < 1:
        raise CheckpointError(f"shard_bytes is {shard_bytes}.", fix="1 or more, such as 5 * 10**9")
    if config is not None and not config.exists():
        raise CheckpointError(f"{config} is not there.", fix="config= (--config): a config.json, or a folder with one")
    if step is not None and not takes_all:
        form = "a file of torch" if to == "torch" else to
        raise CheckpointError(f"step={whole_step(step)}, and {form} has no place for it.", fix="leave it out")
    if step is not None:
        whole_step(step)


def _check_padded(source: Source, to: Form, vocabulary: int | None, config: Path | None) -> None:
    """Raises CheckpointError for what is given to cut off padding where there is none."""
    if vocabulary is not None and not source.padded:
        raise CheckpointError(
            f"vocabulary={vocabulary}, and {source.path} is of a form that pads no vocabulary.", fix="leave it out"
        )
    if config is not None and to != "hf" and not source.padded:
        raise CheckpointError(
            f"config= is of to='hf' (or of a vocabulary that is padded), and to={to!r}.", fix="leave it out"
        )


@contextlib.contextmanager
def _held(files: Files, source: Path) -> Iterator[Path]:
    """Where it lies; of a run_dir the latest checkpoint. One of wh.save no job removes meanwhile."""
    if not is_run_dir(source) and not (source / INDEX).is_file():
        yield source
        return
    with reading(files, source, step=None, tag=None) as folder:
        yield folder


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


def _to_whale(files: Files, source: Source, run_dir: Path) -> Path:
    if source.step is None:
        raise CheckpointError("the source does not say of which step it is.", fix="give step= (--step)")
    held = {}
    for key, one in source.tensors.items():
        whole = Box.whole(one.shape)
        held[key] = Held(key, one.dtype, one.shape, Unread.of(one), ((whole, whole),))
    values = {"extra": {}} | source.values
    return save_inventory(run_dir, source.step, Inventory(held, dict(source.ties), values), files)
