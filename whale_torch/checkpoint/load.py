"""wh.load: each rank reads the boxes that it holds, from whatever pieces have them; checked before anything changes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from whale_torch.checkpoint.background.pending import finish
from whale_torch.checkpoint.choice import Choice
from whale_torch.checkpoint.contents import Optimizers, mesh_among, names_of, parts_of, unwrapped
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.folders import is_empty, none_at, read_index
from whale_torch.checkpoint.garbage import collection_paused
from whale_torch.checkpoint.goal import Goal
from whale_torch.checkpoint.progress import check_progress, shown
from whale_torch.checkpoint.ranks import Ranks
from whale_torch.checkpoint.reader import Reader, Wanted
from whale_torch.checkpoint.retention import reading
from whale_torch.errors import CheckpointError

__all__ = ["Loaded", "load"]


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds beside models, optimizers and states.

    path: the folder it was read from. missing: names of the model that it does not have, which keep their values.
    unexpected: names that the model does not have. Of an empty run_dir (empty_ok=True) step is 0, extra {}.
    rng: whether random states go on as they were saved ("restored"), follow from those, as other ranks were saved than
    load ("derived"), or were left alone ("kept").
    """

    step: int
    extra: dict[str, Any]
    path: Path
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    rng: str = "kept"


def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizers | None = None,
    step: int | None = None,
    tag: str | None = None,
    only: str | Sequence[str] | None = None,
    assign: Mapping[str, str] | None = None,
    missing_ok: bool = False,
    unexpected_ok: bool = False,
    empty_ok: bool = False,
    dtype: Literal["same", "cast"] = "same",
    rng: bool | None = None,
    progress: bool | None = None,
    files: Files | None = None,
    **states: Any,
) -> Loaded:
    """Loads a checkpoint of wh.save into a model, an optimizer and whatever has a load_state_dict, of any plan.

    Every rank calls it with the same arguments and reads what it holds. All that is read is checked before anything
    changes. What is not given is not read.

    path: a run_dir, or one step's folder.
    model, optimizer, states: as in wh.save. Options of an optimizer that say how it computes (foreach, fused,
        capturable) stay its own.
    step, tag: which checkpoint of a run_dir; by default the latest.
    only: regular expressions for the names (of parameters, buffers, and modules with all that is in them) that are
        loaded, with their optimizer's state; the rest stays as it is.
    assign: {pattern: source}: what a pattern matches is loaded from another name of the checkpoint, in which \\1 is the
        pattern's first group; many may come from one. A slice may follow it ("qkv[0:64]", "experts[3]"), of the
        first dims of each tensor.
    missing_ok: whether names that the checkpoint lacks keep their values; by default they are an error.
    unexpected_ok: whether names that the model lacks are left out; by default they are an error.
    empty_ok: whether a run_dir without a checkpoint, as at a run's first start, is no error and nothing is loaded.
    dtype: "cast" takes the model's floating-point dtypes where the checkpoint's are others.
    rng: whether random states are restored; by default where an optimizer is loaded.
    progress: whether the first rank shows a bar, where checking and reading take long; by default on a terminal.
    files: another way to the file system, as tests have it.

    Returns the step, extra, and what was missing or unexpected (Loaded); of an empty run_dir step 0 and no extra.
    Raises CheckpointError, on all ranks, for what is damaged, and where names, shapes or dtypes are not the model's. It
    says whether nothing was changed or values were partly replaced, as where a disk breaks after the check.
    """
    finish()
    files = Files() if files is None else files
    model, states = unwrapped(model), {name: unwrapped(state) for name, state in states.items()}
    ranks = Ranks(mesh_among(model, states))
    with collection_paused(), contextlib.ExitStack() as at_end:
        if torch.is_inference_mode_enabled():
            at_end.enter_context(torch.inference_mode(False))  # an optimizer's state that is made here is trained

        def choose() -> str:
            check_progress(progress)
            if step is None and tag is None and is_empty(Path(path), files):
                if empty_ok:
                    return ""
                none = none_at(Path(path), files)
                raise CheckpointError(none.what, fix=f"{none.fix}; where it is a run's first start, empty_ok=True")
            return str(at_end.enter_context(reading(files, Path(path), step=step, tag=tag)))

        def make() -> Goal:
            choice = Choice(only, assign or {}, missing_ok, unexpected_ok, dtype)
            return Goal(read_index(folder, files), parts_of(model, optimizer, states), choice, ranks, rng=rng)

        def check() -> None:
            reader.check(goal.wanted)
            reader.read(goal.fresh, check=True)
            goal.decode()

        with _saying("Nothing was changed."):
            asked = {"path": os.fspath(path), "step": step, "tag": tag, "only": only, "assign": assign, "rng": rng}
            asked |= {"missing_ok": missing_ok, "unexpected_ok": unexpected_ok, "empty_ok": empty_ok, "dtype": dtype}
            ranks.agree("wh.load", asked | names_of(model, optimizer, states))
            found = ranks.first(f"loading {path}", choose)
            if not found:
                return Loaded(0, {}, Path(path))
            folder = Path(found)
            what = f"loading {folder}"
            goal = ranks.run(what, make)
            total = _num_bytes(goal.fresh) + 2 * _num_bytes(goal.wanted)
            seen = at_end.enter_context(shown(files, what, total, progress if ranks.index == 0 else False))
            reader = Reader(seen, folder, goal.index)
            ranks.run(what, check)
        with _saying("Values have been partly replaced.", fix="load again, or end"):
            ranks.run(what, lambda: reader.read(goal.wanted))
            extra = ranks.run(what, goal.apply)
        missing, unexpected = tuple(sorted(goal.missing)), tuple(sorted(goal.unexpected))
        return Loaded(goal.index.step, extra, folder, missing, unexpected, goal.rng)


@contextlib.contextmanager
def _saying(left: str, fix: str | None = None) -> Iterator[None]:
    """An error says what it has left of the model, and of what else was to be loaded."""
    try:
        yield
    except CheckpointError as error:
        fixes = "; ".join(one for one in (fix, error.fix) if one)
        raise CheckpointError(f"{error.what.removesuffix('.')}. {left}", fix=fixes or None) from error.__cause__


def _num_bytes(wanted: Sequence[Wanted]) -> int:
    held = (one.held.values for one in wanted)
    return sum(values.numel() * values.element_size() for values in held if values is not None)
