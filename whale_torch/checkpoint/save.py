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
from whale_torch.checkpoint.folders import LATEST, folder_of, point, temporary
from whale_torch.checkpoint.index import INDEX, Index, Piece, StoredTensor, dtype_name
from whale_torch.checkpoint.inventory import Held, Inventory
from whale_torch.checkpoint.payload import Item, write_payload
from whale_torch.checkpoint.ranks import Ranks
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
    samplers; further modules (averages of weights) and their optimizers. One that differs between ranks is kept of
    each. A checkpoint is there once it is complete: what is interrupted leaves the ones before as they were.
    Returns the folder. Raises CheckpointError, on all ranks, where the step exists, a state cannot be written, or a
    rank fails to.
    """
    final = Path(run_dir) / folder_of(step)
    ranks = Ranks(mesh_among(model, states))
    saving = _Saving(final, step, Files() if files is None else files, ranks)
    saving.begin()

    def contents() -> Contents:
        return Contents(parts_of(model, optimizer, states), extra or {}, rng=rng, first=ranks.index == 0)

    inventory = settled(ranks.run(saving.what, contents), ranks, saving.what)
    saving.commit(inventory, saving.write(inventory))
    return final


class _Saving:
    """One checkpoint being written."""

    def __init__(self, final: Path, step: int, files: Files, ranks: Ranks):
        self._final, self._step, self._files, self.ranks = final, step, files, ranks
        self.what = f"saving {final}"
        self._identity = ""

    @property
    def _folder(self) -> Path:
        return temporary(self._final, self._identity)

    def begin(self) -> None:
        """Agrees on a name and makes the folder."""

        def make() -> str:
            if self._final.exists():
                raise CheckpointError(
                    f"{self._final} exists.", fix="another step or run_dir: nothing committed is overwritten"
                )
            self._identity = secrets.token_hex(8)
            self._files.make_folder(self._final.parent, exist_ok=True)
            self._files.make_folder(self._folder)
            return self._identity

        self._identity = self.ranks.first(self.what, make)

    def write(self, inventory: Inventory) -> list[Any]:
        """Writes this rank's share; gives the pieces of all ranks as plain data."""
        mine = share(self.ranks.gather([h.told() for h in inventory.tensors.values() if h.writes]))[self.ranks.index]
        name = f"rank-{self.ranks.index:05d}.safetensors"

        def run() -> list[Any]:
            items = [_item(inventory.tensors[key], box) for key, box in mine]
            pieces = write_payload(self._files, self._folder / name, items, name, self._identity) if items else []
            return [inventory.tensors[i.key].stored(p) for i, p in zip(items, pieces, strict=True)]

        return [one for of_rank in self.ranks.together(self.what, run) for one in of_rank]

    def commit(self, inventory: Inventory, pieces: list[Any]) -> None:
        """Writes the index, and makes the folder the checkpoint."""

        def run() -> None:
            index = Index(self._identity, self._step, ties=inventory.ties, values=inventory.values)
            index.tensors = {k: StoredTensor(dtype_name(h.dtype), h.shape) for k, h in inventory.tensors.items()}
            for key, dtype, shape, piece in pieces:  # also of what only ranks of other stages have a state of
                index.tensors.setdefault(key, StoredTensor(dtype, tuple(shape))).pieces.append(Piece.from_json(piece))
            _check_complete(index)
            text = index.to_json().encode()
            with self._files.create(self._folder / INDEX) as fd:
                self._files.write(fd, memoryview(text), 0)
            self._files.sync_folder(self._folder)
            self._files.rename(self._folder, self._final)
            self._files.sync_folder(self._final.parent)
            point(self._files, self._final.parent / LATEST, self._final.name)

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
