"""Which samples each rank reads: global batches cut over the plan's feeds.

A feed is what one batch goes to: one rank, or the ranks of one replica where a split shares rows or a model is a
pipeline. `batch_size` is the rows of one feed, as in any DataLoader under torchrun; the global batch is that times the
number of feeds.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, MutableMapping, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, Sampler, default_collate

from whale_torch.errors import CheckpointError, LayoutError, PlanError
from whale_torch.planning.layout import balanced
from whale_torch.positions import Positioned
from whale_torch.strategies.runtime import runtime_of

__all__ = ["BatchSampler", "PaddedSampler", "batch_sampler", "data_rank", "sampler"]


def data_rank(model: nn.Module) -> tuple[int, int]:
    """(number of this rank's feed, number of feeds), for a loader of your own; ranks of one feed read the same rows.

    Raises PlanError for a model that is not parallelized.
    """
    return _feed_of(model, "wh.data_rank")


def _feed_of(model: nn.Module, what: str) -> tuple[int, int]:
    runtime = runtime_of(model, what)
    return runtime.plan.feed_of(runtime.mesh.rank), runtime.plan.num_feeds


def sampler(
    model: nn.Module, dataset: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> PaddedSampler:
    """torch's DistributedSampler with this plan's numbers; it pads (or, with drop_last, drops) to equal sizes.

    Its state_dict says where the epoch stands, for any number of feeds. Raises PlanError for a model that is not
    parallelized.
    """
    index, count = _feed_of(model, "wh.sampler")
    _check_sized(dataset, "wh.sampler")
    return PaddedSampler(dataset, count, index, shuffle=shuffle, seed=seed, drop_last=drop_last)


def batch_sampler(
    model: nn.Module,
    dataset: Sized,
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
) -> BatchSampler:
    """Index lists for DataLoader(batch_sampler=...): the global batches of one process that reads for all feeds.

    Every rank makes the same number of steps and no sample is repeated or left out (but for drop_last); the last global
    batch is cut evenly, so a rank may get 0 rows of it. To make an empty batch a DataLoader then needs
    `collate_fn=batches.collate_fn`:

        batches = wh.batch_sampler(model, dataset, 32, shuffle=True)
        loader = DataLoader(dataset, batch_sampler=batches, collate_fn=batches.collate_fn)

    batch_size: rows of one feed. collate_fn: the one to wrap. Raises PlanError for a model that is not parallelized, a
    dataset without a length and a batch_size below 1.
    """
    index, count = _feed_of(model, "wh.batch_sampler")
    _check_sized(dataset, "wh.batch_sampler")
    if batch_size < 1:
        raise PlanError(f"wh.batch_sampler: batch_size is {batch_size}.", fix="give the rows of one feed, 1 or more")
    return BatchSampler(
        dataset, batch_size, index, count, shuffle=shuffle, seed=seed, drop_last=drop_last, collate_fn=collate_fn
    )


def _check_sized(dataset: Any, what: str) -> None:
    if not hasattr(dataset, "__len__"):
        raise PlanError(
            f"{what} needs a dataset with a length, got {type(dataset).__name__}.",
            fix="index, count = wh.data_rank(model): let each feed read its share of a stream",
        )


class BatchSampler(Positioned, Sampler[list[int]]):
    """This feed's indices of each global batch of an epoch; wh.batch_sampler makes it.

    epoch: seeds the order. An iterator that is read to its end moves on to the next epoch; set_epoch goes to any.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        index: int,
        count: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        collate_fn: Callable[[list[Any]], Any],
    ):
        self.dataset, self.batch_size, self.index, self.count = dataset, batch_size, index, count
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self._collate = _Collate(dataset, collate_fn)
        self._collates = self._takes_empty = False
        self._stand_at(0)

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.count

    @property
    def _unit(self) -> int:
        return self.global_batch_size

    @property
    def collate_fn(self) -> Callable[[list[Any]], Any]:
        """Makes a batch of 0 rows too, with the structure, shapes and dtypes of any other."""
        self._collates = self._takes_empty = True
        return self._collate

    def __len__(self) -> int:
        """Steps of a whole epoch, equal on every rank."""
        whole, rest = divmod(len(self.dataset), self.global_batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iterator. An epoch in which a loaded state stands goes on where it stood."""
        self._ended = False
        if epoch != self.epoch:
            self._stand_at(epoch)

    def allow_empty(self) -> BatchSampler:
        """Says that the reader can take an index list of 0 entries, as `data[rows]` of a tensor can."""
        self._takes_empty = True
        return self

    def __iter__(self) -> Iterator[list[int]]:
        total = len(self.dataset)
        if self._ended:
            self.epoch += 1
        self._begin()
        self._collate.made = 0
        rest = (total - self._position) % self.global_batch_size
        if 0 < rest < self.count and not self.drop_last and not self._takes_empty:
            raise LayoutError(
                f"the last global batch of {total} samples has {rest} rows for {self.count} feeds, so "
                f"{self.count - rest} get none, and a DataLoader makes no empty batch by itself.",
                fix="DataLoader(dataset, batch_sampler=batches, collate_fn=batches.collate_fn); batches.allow_empty() "
                "where you read the indices yourself; or drop_last=True",
            )
        return self._batches(self._order(total), self._position)

    def _batches(self, order: Tensor, start: int) -> Iterator[list[int]]:
        size = self.global_batch_size
        stop = len(order) - ((len(order) - start) % size if self.drop_last else 0)
        for first in range(start, stop, size):
            rows = order[first : min(first + size, stop)]
            widths = balanced(len(rows), self.count)
            before = sum(widths[: self.index])
            self._hand()
            yield rows[before : before + widths[self.index]].tolist()
        self._end()

    def _order(self, total: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(total)
        text = f"{self.seed}/{self.epoch}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        return torch.randperm(total, generator=torch.Generator().manual_seed(seed))

    def _in_a_batch(self, loader: object) -> int:
        return 1

    def _read_ahead(self) -> bool:
        return self._ahead or (self._collates and self._collate.made != self._handed)

    def state_dict(self, *, num_batches: int | None = None) -> dict[str, Any]:
        """Where the epoch stands, in samples: equal on every rank, and good for another number of feeds or batch size.

        num_batches: batches of this iterator that were trained on; default: those that `counted` saw, or else those
        handed out. Raises CheckpointError where the workers of a DataLoader are seen to have read ahead.
        """
        consumed = self._consumed(num_batches)
        if consumed is None:
            made = f", of which {self._collate.made} were made in this process" if self._collates else ""
            raise CheckpointError(
                f"{self._handed} batches were handed out{made}: the workers of a DataLoader read ahead of the "
                "training loop.",
                fix="for batch in batches.counted(loader): counts what the loop takes; or "
                "batches.state_dict(num_batches=...)",
            )
        return {"epoch": self.epoch, "consumed": consumed, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next iterator go on after what was consumed.

        Raises CheckpointError where the order of samples is another: length, shuffle or seed differ.
        """
        self._check_order(state, self._identity())
        epoch, consumed = state["epoch"], state["consumed"]
        self._stand_at(*((epoch + 1, 0) if self._is_over(consumed) else (epoch, consumed)))

    def _identity(self) -> dict[str, Any]:
        of = {"num_samples": len(self.dataset), "shuffle": self.shuffle, "seed": self.seed}
        return {**of, "sampler": "wh.batch_sampler"}


class PaddedSampler(Positioned, DistributedSampler[Any]):
    """torch's DistributedSampler, of which an epoch can go on where it stood; wh.sampler makes it.

    epoch: seeds the order. As torch's it moves on by set_epoch alone.
    """

    def __init__(self, dataset: Any, count: int, index: int, *, shuffle: bool, seed: int, drop_last: bool):
        super().__init__(dataset, count, index, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self._set = False  # whether the loop sets epochs
        self._stand_at(0)

    @property
    def _unit(self) -> int:
        return self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iterator. An epoch in which a loaded state stands goes on where it stood."""
        self._set = True
        if epoch != self.epoch:
            self._stand_at(epoch)

    def __iter__(self) -> Iterator[int]:
        self._begin()
        return self._indices(self._order(), self._position)

    def _indices(self, order: list[int], start: int) -> Iterator[int]:
        rest = order[start:]
        over = len(rest) % self.num_replicas
        if over and self.drop_last:
            rest = rest[:-over]
        elif over:
            rest += itertools.islice(itertools.cycle(order), self.num_replicas - over)
        for index in rest[self.rank :: self.num_replicas]:
            self._hand()
            yield index
        self._end()

    def _order(self) -> list[int]:
        total = len(self.dataset)
        if not self.shuffle:
            return list(range(total))
        return torch.randperm(total, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()

    def _in_a_batch(self, loader: object) -> int:
        batches = getattr(loader, "batch_sampler", None)
        size = getattr(loader, "batch_size", None) or getattr(batches, "batch_size", None)
        if size is None and (batches is not None or not hasattr(loader, "batch_size")):
            raise PlanError(
                f"how many samples a batch of this {type(loader).__name__} has is not known.",
                fix="DataLoader(dataset, batch_size=..., sampler=sampler), or sampler.state_dict(num_samples=...)",
            )
        return size or 1

    def state_dict(self, *, num_samples: int | None = None) -> dict[str, Any]:
        """Where the epoch stands, in samples of all feeds: equal on every rank, and good for another number of feeds.

        num_samples: samples of this feed that this iterator handed out and that were trained on; default: those that
        `counted` saw, or else all handed out. Raises CheckpointError where the workers of a DataLoader are seen to
        have read ahead.
        """
        consumed = self._consumed(num_samples)
        if consumed is None:
            raise CheckpointError(
                f"{self._handed} samples were handed out: the workers of a DataLoader read ahead of the training loop.",
                fix="for batch in sampler.counted(loader): counts what the loop takes; or "
                "sampler.state_dict(num_samples=...)",
            )
        return {"epoch": self.epoch, "consumed": consumed, "set": self._set, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next iterator go on after what was consumed, at the beginning of the next epoch if that was all.

        Raises CheckpointError where the order of samples is another: length, shuffle or seed differ.
        """
        self._check_order(state, self._identity())
        epoch, consumed, self._set = state["epoch"], state["consumed"], state["set"]
        if self._is_over(consumed):
            epoch, consumed = epoch + self._set, 0
        self._stand_at(epoch, consumed)

    def _identity(self) -> dict[str, Any]:
        of = {"num_samples": len(self.dataset), "shuffle": self.shuffle, "seed": self.seed}
        return {**of, "sampler": "wh.sampler"}


class _Collate:
    """A collate function that makes an empty batch by cutting a batch of one; it travels to a DataLoader's workers."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]):
        self.dataset, self.collate_fn = dataset, collate_fn
        self.made = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.made += 1
        if samples:
            return self.collate_fn(samples)
        return _without_rows(self.collate_fn([self.dataset[0]]))


def _without_rows(batch: Any) -> Any:
    """A batch of one sample -> the same structure of no samples."""
    if isinstance(batch, Tensor):
        return batch[:0] if batch.dim() else batch
    if isinstance(batch, (list, tuple)) and batch and all(isinstance(item, (str, bytes)) for item in batch):
        return type(batch)()
    if isinstance(batch, (list, tuple)):
        rows = [_without_rows(item) for item in batch]
        return type(batch)(*rows) if hasattr(batch, "_fields") else type(batch)(rows)
    if isinstance(batch, MutableMapping):
        empty = copy.copy(batch)
        for key, value in batch.items():
            empty[key] = _without_rows(value)
        return empty
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: _without_rows(getattr(batch, f.name)) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **fields)
    raise LayoutError(
        f"a rank has 0 rows of the last global batch, and collate_fn gave a {type(batch).__name__}, "
        "of which an empty batch cannot be made.",
        fix="let collate_fn return tensors in lists, tuples, dicts or dataclasses; or drop_last=True",
    )
