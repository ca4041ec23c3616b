"""wh.save: every rank writes what it holds, nothing twice, and one rename makes all of it a checkpoint."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from whale_torch.checkpoint.boxes import Box
from whale_torch.checkpoint.contents import Contents, Optimizers, mesh_among, parts_of, settled
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.folders import LATEST, folder_of, make_run_dir, temporary
from whale_torch.checkpoint.index import INDEX, Index, Piece, StoredFile, StoredTensor, dtype_name
from whale_torch.checkpoint.inventory import Held, Inventory
from whale_torch.checkpoint.jobs import Claim
from whale_torch.checkpoint.payload import Item, write_payload
from whale_torch.checkpoint.ranks import Ranks
from whale_torch.checkpoint.seal import seal
from whale_torch.checkpoint.share import share
from whale_torch.errors import CheckpointError

__all__ = ["save"]


def save(
    run_dir: str | os.PathLike[str],
    *,
    step: int,
    model: nn.Module | None = None,
    optimizer: Optimizers | None = None,
    extra: Mapping[str, Any] | None = None,
    rng: bool = True,
    files: Files | None = None,
    **states: Any,
) -> Path:
    """Writes a checkpoint, run_dir/step-<step>, that any plan, world size or plain process can load.

    Every rank calls it; each writes a part of what it holds, and of what several hold one of them. optimizer: one, or
    several by names. extra: plain data and tensors, of which rank 0's are written. rng: whether the random states of
    the ranks are. states: by a name of yours, anything with state_dict and load_state_dict: schedulers, scalers,
    samplers; further modules (averages of weights) and their optimizers. One that differs between ranks is kept of each.
    A checkpoint is there once it is complete: what is interrupted leaves the ones before as they were.
    Returns the folder. Raises CheckpointError, on all ranks, where the step exists, a state cannot be written, or a
    rank fails to.
    """
    final = Path(run_dir) / folder_of(step)
    ranks = Ranks(mesh_among(model, states))
    saving = _Saving(final, step, Files() if files is None else files, ranks)

    def contents() -> Contents:
        return Contents(parts_of(model, optimizer, states), extra or {}, rng=rng, first=ranks.index == 0)

    try:
        saving.begin()
        inventory = settled(ranks.run(saving.what, contents), ranks, saving.what)
        saving.commit(inventory, saving.write(inventory))
    finally:
        saving.end()
    return final


class _Saving:
    """One checkpoint being written."""

    def __init__(self, final: Path, step: int, files: Files, ranks: Ranks):
        self._final, self._step, self._files, self.ranks = final, step, files, ranks
        self.what = f"saving {final}"
        self._identity, self._folder = "", Path()
        self._claim: Claim | None = None

    def begin(self) -> None:
        """Agrees on a name and makes the folder."""

        def make() -> str:
            identity = secrets.token_hex(8)
            make_run_dir(self._files, self._final.parent)
            self._claim = Claim(self._files, self._final, identity)
            return identity

        self._identity = self.ranks.first(self.what, make)
        self._folder = temporary(self._final, self._identity)

    def end(self) -> None:
        """Removes what has not become a checkpoint; no rank writes any longer, or some do not answer."""
        if self._claim is not None:
            self._claim.drop()

    def write(self, inventory: Inventory) -> tuple[list[Any], dict[str, StoredFile]]:
        """Writes this rank's share; gives the pieces of all ranks as plain data, and their files."""
        mine = share(self.ranks.gather([h.told() for h in inventory.tensors.values() if h.writes]))[self.ranks.index]
        name = f"rank-{self.ranks.index:05d}.safetensors"

        def run() -> list[Any]:
            items = [_item(inventory.tensors[key], box) for key, box in mine]
            if not items:
                return [[], {}]
            pieces, file = write_payload(self._files, self._folder / name, items, self._identity)
            stored = [inventory.tensors[i.key].stored(p) for i, p in zip(items, pieces, strict=True)]
            return [stored, {name: file.to_json()}]

        written = self.ranks.together(self.what, run)
        files = {name: StoredFile(*file) for _, of_rank in written for name, file in of_rank.items()}
        return [one for of_rank, _ in written for one in of_rank], files

    def commit(self, inventory: Inventory, written: tuple[list[Any], dict[str, StoredFile]]) -> None:
        """Writes the index, and makes the folder the checkpoint."""

        def run() -> None:
            pieces, files = written
            index = Index(self._identity, self._step, ties=inventory.ties, values=inventory.values, files=files)
            index.tensors = {k: StoredTensor(dtype_name(h.dtype), h.shape) for k, h in inventory.tensors.items()}
            for key, dtype, shape, piece in pieces:  # also of what only ranks of other stages have a state of
                index.tensors.setdefault(key, StoredTensor(dtype, tuple(shape))).pieces.append(Piece.from_json(piece))
            _check_complete(index)
            with self._files.create(self._folder / INDEX) as fd:
                self._files.write(fd, memoryview(seal(index.to_json())), 0)
            assert self._claim is not None
            self._claim.commit([LATEST])

        self.ranks.first(self.what, run)


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
    for whole, local in held.boxes:
        inside = zip(box.start, box.size, whole.start, whole.size, strict=True)
        if all(w <= b and b + n <= w + m for b, n, w, m in inside):
            values = held.values.resolve_conj().resolve_neg()
            for dim, (b, n, w, at) in enumerate(zip(box.start, box.size, whole.start, local.start, strict=True)):
                values = values.narrow(dim, at + b - w, n)
            return Item(held.key, box, values)
    raise AssertionError(f"{held.key}: {box} is not here")
