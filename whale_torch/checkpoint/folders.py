"""Where checkpoints lie: a run's folder, its steps, and the pointer to the latest."""

from __future__ import annotations

import contextlib
import json
import operator
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.index import INDEX, Index
from whale_torch.checkpoint.payload import ANOTHER
from whale_torch.checkpoint.seal import read_sealed, seal
from whale_torch.errors import CheckpointError

__all__ = [
    "LATEST", "TAGS", "find", "folder_of", "is_empty", "is_temporary_pointer", "make_run_dir", "named_by", "none_at",
    "point", "read_index", "settle", "steps_of", "tag_pointer", "tags_of", "temporary", "whole_step",
]  # fmt: skip

LATEST = "latest"
TAGS = "tags"
_TAG = re.compile(r"\w[\w.-]*")
_MOST_OF_TAG = 200  # a file's name, with what is_temporary_pointer tells
_STEP = re.compile(r"step-\d{8,}")
_TEMPORARY_POINTER = re.compile(r".+\.new-[0-9a-f]{8}")


def whole_step(step: object) -> int:
    """A step as a number, also of numpy or a tensor. Raises CheckpointError for what is none, or below 0."""
    try:
        found = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        found = -1
    if found < 0:
        raise CheckpointError(f"step is {step!r}.", fix="a whole number, 0 or more")
    return found


def folder_of(step: int) -> str:
    """The name of a step's folder. Raises CheckpointError for a step below 0."""
    return f"step-{whole_step(step):08d}"


def temporary(final: Path, identity: str) -> Path:
    """Where a checkpoint is written until it is complete."""
    return final.with_name(f"{final.name}.tmp-{identity}")


def make_run_dir(files: Files, path: Path) -> None:
    """Makes a folder and those above it, each of them on disk."""
    if files.exists(path):
        return
    make_run_dir(files, path.parent)
    with contextlib.suppress(FileExistsError):
        files.make_folder(path)
    files.sync_folder(path.parent)


def tag_pointer(tag: str) -> str:
    """Where in a run_dir a tag's pointer lies. Raises CheckpointError for what is no name of a file."""
    if not _is_tag(tag):
        raise CheckpointError(
            f"tag is {tag!r}.",
            fix=f"letters, digits, '_', and between them '-' and '.', of {_MOST_OF_TAG} bytes at most",
        )
    return f"{TAGS}/{tag}"


def _is_tag(name: object) -> bool:
    return (
        isinstance(name, str)
        and bool(_TAG.fullmatch(name))
        and not is_temporary_pointer(name)
        and len(name.encode()) <= _MOST_OF_TAG
    )


def tags_of(files: Files, run_dir: Path) -> list[str]:
    """The tags of a run_dir; other files there are somebody else's."""
    names = files.names(run_dir / TAGS) if files.exists(run_dir / TAGS) else []
    return [name for name in names if _is_tag(name)]


def point(files: Files, run_dir: Path, pointer: str, name: str, identity: str) -> None:
    """Makes a pointer name a checkpoint of its run_dir, or leaves it as it was.

    It also names the one before, which counts until the new one is there: so a pointer is written first, and the
    rename that makes a checkpoint complete makes it the latest in the same moment.
    """
    path = run_dir / pointer
    make_run_dir(files, path.parent)
    try:
        before = [one for one in named_by(files, path) if files.exists(run_dir / one[0])][:1]
    except CheckpointError:  # a damaged one is worth no failure, now that it is replaced
        before = []
    _write(files, path, [(name, identity), *before])


def settle(files: Files, run_dir: Path, pointer: str) -> None:
    """A pointer forgets a checkpoint that has not come to be: one of the same step may come now, and is another."""
    try:
        named = named_by(files, run_dir / pointer)
    except CheckpointError:  # whoever follows it is told
        return
    there = [one for one in named if files.exists(run_dir / one[0])]
    if there and there != named:
        _write(files, run_dir / pointer, there)
    elif named and not there:
        files.remove(run_dir / pointer)


def _write(files: Files, path: Path, named: Sequence[tuple[str, str]]) -> None:
    new = path.with_name(f"{path.name}.new-{secrets.token_hex(4)}")
    try:
        with files.create(new) as fd:
            files.write(fd, memoryview(seal(json.dumps({"checkpoints": named}))), 0)
        files.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            files.remove(new)
        raise
    files.sync_folder(path.parent)


def is_temporary_pointer(name: str) -> bool:
    """Whether a file's name is that of a pointer which is being written."""
    return _TEMPORARY_POINTER.fullmatch(name) is not None


def named_by(files: Files, pointer: Path) -> list[tuple[str, str]]:
    """Name and id of the checkpoints that a pointer names, the first that exists counts; none without a pointer.

    Raises CheckpointError for a damaged one.
    """
    if not files.exists(pointer):
        return []
    try:
        found = [(name, identity) for name, identity in json.loads(read_sealed(pointer, files))["checkpoints"]]
        if any(not _STEP.fullmatch(name) for name, _ in found):
            raise ValueError("a name of no checkpoint")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        text = f"{pointer} is no pointer that is written here: {type(error).__name__}: {error!s:.80}."
        raise CheckpointError(text, fix="load a checkpoint by its folder") from error
    return found


def steps_of(path: Path, files: Files) -> list[Path]:
    """The complete checkpoints of a run_dir, by step."""
    names = [name for name in files.names(path) if _STEP.fullmatch(name)]
    return [path / name for name in sorted(names, key=lambda name: (len(name), name))]


def is_empty(path: Path, files: Files) -> bool:
    """Whether it is a run_dir, there or not, in which nothing has been saved yet."""
    if _STEP.fullmatch(path.name) or files.exists(path / INDEX):
        return False
    return not files.exists(path) or (path.is_dir() and not steps_of(path, files))


def none_at(path: Path, files: Files) -> CheckpointError:
    """What is raised where a checkpoint was asked for and none is."""
    there = "" if files.exists(path) else ": it does not exist"
    fix = "give a run_dir of wh.save, or one of its step folders"
    return CheckpointError(f"{path} has no checkpoint{there}.", fix=fix if there else f"{fix}; {_OTHER_FORMS}")


_OTHER_FORMS = "weights of other forms: wh.parallelize(model, weights=...), or python -m whale_torch convert"


def find(path: Path, files: Files, *, step: int | None = None, tag: str | None = None) -> Path:
    """A step's folder: the path itself, or of a run_dir the step, what a tag names, or the latest.

    Raises CheckpointError where there is none, and where a pointer says another than is there.
    """
    if step is not None and tag is not None:
        raise CheckpointError(f"step={step} and tag={tag!r} are two checkpoints.", fix="give one of them")
    if files.exists(path / INDEX):
        if step is not None or tag is not None:
            raise CheckpointError(f"{path} is one checkpoint, with no steps and tags.", fix="give the folder above it")
        return path
    steps = steps_of(path, files) if path.is_dir() else []
    if not steps:
        raise none_at(path, files)
    if step is not None:
        found = path / folder_of(step)
        if found not in steps:
            shown = ", ".join(str(int(one.name.removeprefix("step-"))) for one in steps[-_MOST:])
            more = f"the last {_MOST} of {len(steps)} are" if len(steps) > _MOST else "there are"
            raise CheckpointError(f"{path} has no step {step}; {more} {shown}.", fix="give one of those")
        return found
    if tag is None:
        return _follow(path, LATEST, files) or steps[-1]
    tagged = _follow(path, tag_pointer(tag), files)
    if tagged is None:
        shown = ", ".join(tags_of(files, path)) or "none"
        raise CheckpointError(f"{path} has no checkpoint tagged {tag!r}; tags: {shown}.", fix="give one of those")
    return tagged


_MOST = 5  # steps that an error lists


def _follow(run_dir: Path, pointer: str, files: Files) -> Path | None:
    """The checkpoint that a pointer names, None where there is none."""
    for name, identity in named_by(files, run_dir / pointer):
        if files.exists(run_dir / name):  # complete, as it came by one rename
            found = _identity_of(run_dir / name, files)
            if found != identity:
                read_index(run_dir / name, files)  # says it where more is wrong
                raise CheckpointError(
                    f"{run_dir / name} is not the checkpoint that {run_dir / pointer} names: its id is {found}, not "
                    f"{identity}.",
                    fix="load a checkpoint by its folder",
                )
            return run_dir / name
    return None


def _identity_of(folder: Path, files: Files) -> str:
    """Without a look at the rest of the index, which who reads it takes."""
    try:
        return str(json.loads(read_sealed(folder / INDEX, files))["id"])
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return read_index(folder, files).id  # says what is wrong


def read_index(folder: Path, files: Files) -> Index:
    """Raises CheckpointError for what is no checkpoint, is damaged, or belongs to another folder."""
    path = folder / INDEX
    try:
        text = read_sealed(path, files)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path} is missing.", fix=ANOTHER) from error
    index = Index.from_json(text, path)
    if _STEP.fullmatch(folder.name) and folder.name != folder_of(index.step):
        raise CheckpointError(
            f"{path} is the index of step {index.step}, in the folder of another.",
            fix=f"name the folder {folder_of(index.step)}, or load another checkpoint",
        )
    return index
