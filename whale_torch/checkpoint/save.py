"""wh.save: every rank writes what it holds, nothing twice, and one rename makes all of it a checkpoint."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from torch import Tensor, nn

from whale_torch.checkpoint.background.pending import IfBusy, Pending, before_save, start
from whale_torch.checkpoint.background.snapshot import Snapshot
from whale_torch.checkpoint.boxes import Box
from whale_torch.checkpoint.contents import Contents, Optimizers, mesh_among, names_of, parts_of, settled, unwrapped
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.folders import LATEST, folder_of, make_run_dir, tag_pointer, temporary, whole_step
from whale_torch.checkpoint.garbage import collection_paused
from whale_torch.checkpoint.index import INDEX, Index, Piece, StoredFile, StoredTensor, dtype_name
from whale_torch.checkpoint.inventory import Held, Inventory
from whale_torch.checkpoint.jobs import Claim
from whale_torch.checkpoint.payload import Item, blocks_of, in_pages, write_payload
from whale_torch.checkpoint.progress import check_progress, shown
from whale_torch.checkpoint.ranks import Ranks
from whale_torch.checkpoint.retention import check_keep_last, prune
from whale_torch.checkpoint.seal import seal
from whale_torch.checkpoint.share import share
from whale_torch.errors import CheckpointError

__all__ = ["save", "save_inventory"]


@overload
def save(
    run_dir: str | os.PathLike[str],
    *,
    step: int,
    model: nn.Module | None = ...,
    optimizer: Optimizers | None = ...,
    extra: Mapping[str, Any] | None = ...,
    rng: bool = ...,
    tag: str | None = ...,
    keep_last: int | None = ...,
    wait: Literal[True] = ...,
    if_busy: IfBusy = ...,
    progress: bool | None = ...,
    files: Files | None = ...,
    **states: Any,
) -> Path: ...


@overload
def save(
    run_dir: str | os.PathLike[str],
    *,
    step: int,
    model: nn.Module | None = ...,
    optimizer: Optimizers | None = ...,
    extra: Mapping[str, Any] | None = ...,
    rng: bool = ...,
    tag: str | None = ...,
    keep_last: int | None = ...,
    wait: bool,
    staging_bytes: int | None = ...,
    if_busy: IfBusy = ...,
    progress: bool | None = ...,
    files: Files | None = ...,
    **states: Any,
) -> Path | Pending: ...


def save(
    run_dir: str | os.PathLike[str],
    *,
    step: int,
    model: nn.Module | None = None,
    optimizer: Optimizers | None = None,
    extra: Mapping[str, Any] | None = None,
    rng: bool = True,
    tag: str | None = None,
    keep_last: int | None = None,
    wait: bool = True,
    staging_bytes: int | None = None,
    if_busy: IfBusy = "wait",
    progress: bool | None = None,
    files: Files | None = None,
    **states: Any,
) -> Path | Pending:
    """Writes a checkpoint, run_dir/step-<step>, that any plan, world size or plain process can load.

    Every rank calls it with the same arguments and writes a part of what it holds; of what several hold, one of them
    writes. A checkpoint is there once it is complete: a save that fails or is killed leaves those before as they were.
    Gradients are no part of it: save after optimizer.step().

    run_dir: the folder of a run, on a file system that all ranks share; made where it is not there.
    step: a whole number, 0 or more; a run_dir has one checkpoint of each.
    model: parallelized or not; parameters, buffers and extra states go by the names that they have in one process.
    optimizer: one, or several by names; its state goes by the names of the model's parameters.
    extra: plain data and tensors, of which rank 0's are written.
    rng: whether the random states of the ranks are written.
    tag: a name for the checkpoint ("best"), taken from the one that had it.
    keep_last: once this one is complete, checkpoints of earlier steps are removed, except for the last keep_last - 1,
        tagged ones and those that a job is reading.
    wait: False lets training go on while a thread writes the values of this call. What no optimizer changes (buffers,
        extra, states) is copied at once, and the rest, as far as it is not written yet, before an optimizer's step
        changes it. A change by anything else fails the save. A failure is raised by Pending.wait(), else by the next
        save, else it ends the process.
    staging_bytes: most of those copies at a time on this rank, by default all that it writes; a step waits for others.
    if_busy: whether this save waits for one in the background to end, or raises.
    progress: whether the first rank shows a bar, where writing takes long; by default on a terminal, unless in the
        background.
    files: another way to the file system, as tests have it.
    states: by names of yours, whatever has state_dict and load_state_dict: schedulers, scalers, samplers; further
        modules (averages of weights) and their optimizers. What differs between ranks is kept of each.

    Returns the checkpoint's folder; with wait=False a Pending, which has wait(), done() and path.
    Raises CheckpointError, on all ranks, where the step exists, a state cannot be written, or a rank fails.
    """
    model, states = unwrapped(model), {name: unwrapped(state) for name, state in states.items()}
    mesh = mesh_among(model, states)
    ranks = Ranks(mesh)
    asked = {"run_dir": os.fspath(run_dir), "step": step, "tag": tag, "keep_last": keep_last, "rng": rng, "wait": wait}
    ranks.agree(
        "wh.save",
        asked | {"if_busy": if_busy, "staging_bytes": staging_bytes is not None} | names_of(model, optimizer, states),
    )
    step = whole_step(step)
    final = Path(run_dir).absolute() / folder_of(step)  # whatever folder the process is in when it is written
    saving = _Saving(final, step, Files() if files is None else files, ranks, tag, keep_last)
    saving.progress = progress if wait else bool(progress)
    if wait and staging_bytes is not None:
        raise CheckpointError(
            "staging_bytes is for saves in the background.", fix="give wait=False too, or leave it out"
        )

    def contents() -> Contents:
        return Contents(parts_of(model, optimizer, states), extra or {}, rng=rng, first=ranks.index == 0)

    with collection_paused(), contextlib.ExitStack() as at_end:
        at_end.callback(saving.end)
        saving.begin(if_busy, staging_bytes)
        inventory = settled(ranks.run(saving.what, contents), ranks, saving.what)
        items = saving.share(inventory)
        if wait:
            saving.commit(inventory, saving.write(inventory, items))
            return final
        snapshot = ranks.run(saving.what, lambda: _snapshot(items, model, staging_bytes))
        saving.ranks = Ranks(mesh, "checkpoint in the background")

        def run() -> None:
            try:
                saving.commit(inventory, saving.write(inventory, items, snapshot.blocks))
            finally:
                saving.end()

        pending = start(final, run, snapshot)
        at_end.pop_all()  # the thread ends it
        return pending


_SMALL_BYTES = 4096  # copying costs less than watching; a learning rate that is a tensor changes between steps


def _snapshot(items: Sequence[Item], model: nn.Module | None, staging_bytes: int | None) -> Snapshot:
    """Parameters and optimizers' state change in steps alone; all else is copied at once."""
    parameters = set() if model is None else {f"model/{name}" for name, _ in model.named_parameters()}
    return Snapshot(
        items,
        waits=lambda item: (
            item.num_bytes > _SMALL_BYTES and (item.key in parameters or item.key.startswith("optimizer/"))
        ),
        staging_bytes=sum(item.num_bytes for item in items) if staging_bytes is None else staging_bytes,
    )


def save_inventory(run_dir: Path, step: int, inventory: Inventory, files: Files) -> Path:
    """Writes what one process holds as a checkpoint."""
    final = run_dir / folder_of(step)
    saving = _Saving(final, step, files, Ranks(None))
    try:
        saving.begin("wait")
        saving.commit(inventory, saving.write(inventory, saving.share(inventory)))
    finally:
        saving.end()
    return final


class _Saving:
    """One checkpoint being written."""

    def __init__(
        self, final: Path, step: int, files: Files, ranks: Ranks, tag: str | None = None, keep_last: int | None = None
    ):
        self._final, self._step, self._files, self.ranks = final, step, files, ranks
        self._tag, self._keep_last = tag, keep_last
        self.progress: bool | None = None
        self.what = f"saving {final}"
        self._identity, self._folder = "", Path()
        self._pointers = [LATEST]
        self._claim: Claim | None = None

    def begin(self, if_busy: IfBusy, staging_bytes: int | None = None) -> None:
        """Agrees on a name and makes the folder, once no other save is under way."""

        def make() -> str | None:
            before_save(if_busy)
            check_keep_last(self._keep_last)
            check_progress(self.progress)
            _check_staging(staging_bytes)
            self._pointers = [LATEST, *([] if self._tag is None else [tag_pointer(self._tag)])]
            if self.ranks.index:
                return None
            identity = secrets.token_hex(8)
            make_run_dir(self._files, self._final.parent)
            self._claim = Claim(self._files, self._final, identity)
            return identity

        self._identity = self.ranks.together(self.what, make)[0]
        self._folder = temporary(self._final, self._identity)

    def end(self) -> None:
        """Removes what has not become a checkpoint; no rank writes any longer, or some do not answer."""
        if self._claim is not None:
            self._claim.drop()

    def share(self, inventory: Inventory) -> list[Item]:
        """What this rank writes."""
        told = self.ranks.gather([h.told() for h in inventory.tensors.values() if h.writes])
        return in_pages(_item(inventory.tensors[key], box) for key, box in share(told)[self.ranks.index])

    def write(
        self, inventory: Inventory, items: Sequence[Item], blocks: Callable[[Item], Iterable[Tensor]] = blocks_of
    ) -> tuple[list[Any], dict[str, StoredFile]]:
        """Writes this rank's share; gives the pieces of all ranks as plain data, and their files."""
        name = f"rank-{self.ranks.index:05d}.safetensors"

        def run() -> list[Any]:
            if not items:
                return [[], {}]
            total, seen = sum(item.num_bytes for item in items), self.progress if self.ranks.index == 0 else False
            with shown(self._files, self.what, total, seen) as files, self._seen():
                pieces, file = write_payload(files, self._folder / name, items, self._identity, blocks)
            stored = [inventory.tensors[i.key].stored(p) for i, p in zip(items, pieces, strict=True)]
            return [stored, {name: file.to_json()}]

        written = self.ranks.together(self.what, run)
        files = {name: StoredFile(*file) for _, of_rank in written for name, file in of_rank.items()}
        return [one for of_rank, _ in written for one in of_rank], files

    @contextlib.contextmanager
    def _seen(self) -> Iterator[None]:
        """The folder is the first rank's work."""
        try:
            yield
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self._folder}, which rank 0 made, is not there.",
                fix="give a run_dir on a file system that all ranks share",
            ) from error

    def commit(self, inventory: Inventory, written: tuple[list[Any], dict[str, StoredFile]]) -> None:
        """Writes the index, and makes the folder the checkpoint."""

        def run() -> None:
            pieces, files = written
            index = Index(self._identity, self._step, ties=inventory.ties, values=inventory.values, files=files)
            index.tensors = {k: StoredTensor(dtype_name(h.dtype), h.shape) for k, h in inventory.tensors.items()}
            for key, dtype, shape, piece in pieces:  # also of what only ranks of other stages have a state of
                stored = index.tensors.setdefault(key, StoredTensor(dtype, tuple(shape)))
                _check_alike(key, stored, StoredTensor(dtype, tuple(shape)))
                stored.pieces.append(Piece.from_json(piece))
            _check_complete(index)
            with self._files.create(self._folder / INDEX) as fd:
                self._files.write(fd, memoryview(seal(index.to_json())), 0)
            assert self._claim is not None
            self._claim.commit(self._pointers)
            if self._keep_last is not None:
                self._prune(self._keep_last)

        self.ranks.first(self.what, run)

    def _prune(self, keep_last: int) -> None:
        try:
            prune(self._files, self._final, keep_last)
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"the checkpoint is complete, but earlier ones could not be removed: {error}",
                fix="remove them by hand, or let the next wh.save try again",
            ) from error


def _check_staging(staging_bytes: int | None) -> None:
    if staging_bytes is not None and (not isinstance(staging_bytes, int) or staging_bytes < 0):
        raise CheckpointError(f"staging_bytes is {staging_bytes!r}.", fix="bytes, 0 or more; None for all")


def _check_alike(key: str, one: StoredTensor, other: StoredTensor) -> None:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        raise CheckpointError(
            f"ranks hold '{key}' as {one.dtype} {list(one.shape)} and as {other.dtype} {list(other.shape)}.",
            fix="save a model that all ranks built alike",
        )


def _check_complete(index: Index) -> None:
    for key, stored in index.tensors.items():
        written, whole = sum(piece.box.numel for piece in stored.pieces), math.prod(stored.shape)
        if written != whole:
            raise CheckpointError(
                f"ranks hold {written} of the {whole} elements of '{key}'.",
                fix="save a model that all ranks built alike",
            )


def _item(held: Held, box: Box) -> Item:
    """A box of what is held, as values in memory."""
    assert held.values is not None
    if ((box, box),) == held.boxes:
        return Item(held.key, box, held.values.resolve_conj().resolve_neg())
    for whole, local in held.boxes:
        inside = zip(box.start, box.size, whole.start, whole.size, strict=True)
        if all(w <= b and b + n <= w + m for b, n, w, m in inside):
            values = held.values.resolve_conj().resolve_neg()
            for dim, (b, n, w, at) in enumerate(zip(box.start, box.size, whole.start, local.start, strict=True)):
                values = values.narrow(dim, at + b - w, n)
            return Item(held.key, box, values)
    raise AssertionError(f"{held.key}: {box} is not here")
