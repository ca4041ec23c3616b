"""Positions of samplers: saved and loaded over changing numbers of feeds, each sample of an epoch is trained once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler as TorchBatchSampler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, default_collate

import whale_torch as wh
from tests.world import outcomes, world
from whale_torch.data import BatchSampler, PaddedSampler
from whale_torch.errors import CheckpointError, PlanError

FEEDS = (2, 4, 3, 1)
EPOCHS = 3


def _batches(total: int, count: int, index: int, **options: Any) -> BatchSampler:
    return BatchSampler(range(total), 2, index, count, collate_fn=default_collate, **options)


def _padded(total: int, count: int, index: int, **options: Any) -> PaddedSampler:
    return PaddedSampler(range(total), count, index, **options)


KINDS: dict[str, Any] = {"wh.batch_sampler": _batches, "wh.sampler": _padded}


def _loader(sampler: Any, total: int, workers: int) -> DataLoader[Any]:
    if isinstance(sampler, BatchSampler):
        given: dict[str, Any] = {"batch_sampler": sampler, "collate_fn": sampler.collate_fn}
    else:
        given = {"batch_size": 2, "sampler": sampler}
    return DataLoader(range(total), num_workers=workers, **given)  # type: ignore[arg-type]


def _life(
    kind: str, total: int, count: int, state: Any, steps: int, workers: int, counted: bool, **options: Any
) -> tuple[list[tuple[int, list[int]]], Any]:
    """What the feeds of one life of a job train on, in its epochs, and the state it leaves; as many steps as given, in
    the middle of an epoch or at its end."""
    samplers = [KINDS[kind](total, count, index, **options) for index in range(count)]
    seen: list[tuple[int, list[int]]] = []
    states = []
    for sampler in samplers:
        loader = sampler.counted(_loader(sampler, total, workers)) if counted else _loader(sampler, total, workers)
        saved = loader if counted else sampler
        if state is not None:
            saved.load_state_dict(state)
        states.append(_loop(sampler, loader, saved, steps, seen))
    assert all(one == states[0] for one in states), "the position is the same on every rank"
    return seen, states[0]


def _loop(sampler: Any, loader: Any, saved: Any, steps: int, seen: list[tuple[int, list[int]]]) -> Any:
    done = 0
    for epoch in range(sampler.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for rows in loader:
            seen.append((epoch, rows.tolist()))
            done += 1
            if done == steps:
                return saved.state_dict()
    return saved.state_dict()


def _seen(kind: str, total: int, stops: Iterator[int], workers: int, counted: bool, **options: Any) -> Any:
    """Per epoch the samples that four lives of a job trained on, the last one to the end."""
    state, seen = None, []
    for count in FEEDS:
        steps = next(stops) if count != FEEDS[-1] else -1
        found, state = _life(kind, total, count, state, steps, workers, counted, **options)
        seen += found
    return [Counter(one for at, rows in seen if at == epoch for one in rows) for epoch in range(EPOCHS)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("total", [37, 48])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("stops", [(3, 2, 5), (7, 6, 1), (20, 1, 1), (9, 9, 9)])
def test_none_is_lost_or_repeated(
    kind: str, drop_last: bool, shuffle: bool, total: int, counted: bool, stops: tuple[int, ...]
) -> None:
    seen = _seen(kind, total, iter(stops), 0, counted, drop_last=drop_last, shuffle=shuffle, seed=3)
    for samples in seen:
        lost, repeated = total - len(samples), samples.total() - len(samples)
        most = 2 * max(FEEDS) if kind == "wh.batch_sampler" else max(FEEDS)
        assert lost < (most if drop_last else 1)
        assert repeated < (1 if drop_last or kind == "wh.batch_sampler" else most)


@pytest.mark.parametrize("kind", KINDS)
def test_workers_do_not_count(kind: str) -> None:
    for samples in _seen(kind, 24, iter((3, 2, 2)), 2, True, drop_last=False, shuffle=True, seed=3):
        assert samples == Counter(range(24))


@pytest.mark.parametrize("total", [0, 1, 3, 24, 37])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_whole_epoch_is_that_of_torch(total: int, drop_last: bool, shuffle: bool) -> None:
    data: Any = range(total)
    for index in range(4):
        mine = _padded(total, 4, index, drop_last=drop_last, shuffle=shuffle, seed=2)
        theirs = DistributedSampler(data, 4, index, drop_last=drop_last, shuffle=shuffle, seed=2)
        for epoch in (0, 2):
            mine.set_epoch(epoch), theirs.set_epoch(epoch)
            if total or drop_last:
                assert list(mine) == list(mine) == list(theirs) and len(mine) == len(theirs)
        assert isinstance(mine, DistributedSampler)


def test_what_is_read_goes_on_as_if_nothing_had_been() -> None:
    """The same feeds: padding and all."""
    whole = [list(_padded(37, 4, index, shuffle=True, seed=1, drop_last=False)) for index in range(4)]
    for index in range(4):
        sampler = _padded(37, 4, index, shuffle=True, seed=1, drop_last=False)
        reading = iter(sampler)
        assert [next(reading) for _ in range(6)] == whole[index][:6]
        again = _padded(37, 4, index, shuffle=True, seed=1, drop_last=False)
        again.load_state_dict(sampler.state_dict())
        assert again.state_dict() == sampler.state_dict()
        assert list(again) == whole[index][6:]
        assert list(again) == whole[index], "as torch's it begins anew"
        other = _padded(37, 4, index, shuffle=True, seed=1, drop_last=False)
        other.load_state_dict(again.state_dict())
        assert other.epoch == 0, "nobody sets epochs"
        again.set_epoch(0)
        other.load_state_dict(again.state_dict())
        assert other.epoch == 1


def test_read_ahead_is_noticed() -> None:
    sampler = _padded(20, 1, 0, shuffle=False, seed=0, drop_last=False)
    for workers in (0, 1):
        reading = iter(DataLoader(range(20), batch_size=5, sampler=sampler, num_workers=workers))  # type: ignore[arg-type]
        next(reading)
        if workers:
            with pytest.raises(CheckpointError, match=r"15 samples were handed out: the workers of a DataLoader read"):
                sampler.state_dict()
            assert sampler.state_dict(num_samples=5)["consumed"] == 5
        else:
            assert sampler.state_dict()["consumed"] == 5
        list(reading)


def test_what_another_sampler_saved_is_refused() -> None:
    batches, padded = (make(20, 2, 0, shuffle=True, seed=0, drop_last=False) for make in KINDS.values())
    for one, other in ((batches, padded), (padded, batches)):
        with pytest.raises(CheckpointError, match="counts samples of an order with sampler 'wh"):
            one.load_state_dict(other.state_dict())
    old = {key: value for key, value in batches.state_dict().items() if key != "sampler"}
    batches.load_state_dict(old)
    with pytest.raises(CheckpointError, match="with seed 0, here it is 1"):
        _padded(20, 2, 0, shuffle=True, seed=1, drop_last=False).load_state_dict(padded.state_dict())


def test_a_batch_of_unknown_size_is_refused() -> None:
    sampler = _padded(20, 2, 0, shuffle=True, seed=0, drop_last=False)
    with pytest.raises(PlanError, match="how many samples a batch of this list has is not known"):
        sampler.counted([1, 2])
    with pytest.raises(PlanError, match="of this DataLoader"):
        sampler.counted(DataLoader(range(20), batch_sampler=[[1], [2]]))  # type: ignore[arg-type]
    made = TorchBatchSampler(sampler, 3, False)
    for number, _ in enumerate(sampler.counted(DataLoader(range(20), batch_sampler=made)), 1):  # type: ignore[arg-type]
        assert sampler.state_dict()["consumed"] == min(6 * number, 20)
    loader = sampler.counted(DataLoader(range(20), batch_size=None, sampler=sampler))  # type: ignore[arg-type]
    next(iter(loader))
    assert sampler.state_dict()["consumed"] == 2 and len(loader) == 10


@pytest.mark.parametrize("kind", ["wh.batch_sampler", "wh.batch_sampler, counted", "wh.sampler, counted"])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_next_draws_are_those_of_the_uninterrupted_run(kind: str, workers: int) -> None:
    """A DataLoader draws a seed at the beginning of an epoch, and not where an epoch goes on."""
    name, _, counted = kind.partition(", ")
    if workers and not counted:
        return

    def train(state: Any, rng: Any) -> list[tuple[list[int], float]]:
        torch.manual_seed(0)
        sampler = KINDS[name](24, 1, 0, shuffle=True, seed=0, drop_last=False)
        plain = _loader(sampler, 24, workers)
        loader: Any = sampler.counted(plain) if counted else plain
        if state is not None:
            sampler.load_state_dict(state)
            torch.set_rng_state(rng)
        seen = []
        for epoch in range(sampler.epoch, 2):
            sampler.set_epoch(epoch)
            for rows in loader:
                seen.append((rows.tolist(), float(torch.rand(()))))
                saved.append((sampler.state_dict(), torch.get_rng_state()))
        return seen

    saved: list[Any] = []
    expected = train(None, None)
    kept = list(saved)
    for step in range(0, 24, 5):
        assert train(*kept[step]) == expected[step + 1 :]


def _trained(rank: int, n: int, path: str, kind: str, step: int, steps: int) -> tuple[list[tuple[int, int]], int]:
    """Trains on, some steps, from what is there; the samples of this rank, by epochs."""
    model = wh.parallelize(nn.Linear(1, 2))
    data = TensorDataset(torch.arange(29.0)[:, None])
    if kind == "wh.sampler":
        sampler: Any = wh.sampler(model, data, seed=5, drop_last=True)
        loader: Any = DataLoader(data, batch_size=2, sampler=sampler)
    else:
        sampler = wh.batch_sampler(model, data, 2, shuffle=True, seed=5)
        loader = DataLoader(data, batch_sampler=sampler, collate_fn=sampler.collate_fn)
    state = {"loader": sampler.counted(loader)} if kind == "loader" else {"sampler": sampler}
    loader = state.get("loader", loader)
    if step:
        assert wh.load(path, **state).step == step
    seen, done = [], 0
    for epoch in range(sampler.epoch, 2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            seen += [(epoch, int(one)) for one in x.flatten()]
            done += 1
            if done == steps:
                wh.save(path, step=step + 1, model=model, **state)
                return seen, epoch
    return seen, EPOCHS


@pytest.mark.parametrize("kind", ["wh.batch_sampler", "wh.sampler", "loader"])
@pytest.mark.matrix(keep=1)
def test_replicas_change_from_two_to_four_to_three_to_one(kind: str, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    for step, (n, steps) in enumerate(zip(FEEDS, (3, 2, 4, -1), strict=True)):
        for mine, _ in world(n, _trained, str(tmp_path), kind, step, steps):
            seen += mine
    counts = Counter(seen)
    assert max(counts.values()) == 1, "none is repeated"
    assert len(counts) >= (2 * 29 if kind != "wh.sampler" else 2 * 29 - 2 * max(FEEDS)), "none is lost"


def _apart(rank: int, n: int, path: str) -> None:
    model = wh.parallelize(nn.Linear(1, 2))
    batches = wh.batch_sampler(model, range(20), 2)
    reading = iter(batches)
    for _ in range(2 + rank):
        next(reading)
    wh.save(path, step=0, model=model, batches=batches)


def test_ranks_that_stand_apart_are_refused(tmp_path: Path) -> None:
    """Which could be loaded on as many ranks alone, and would lose samples there."""
    for one in outcomes(2, _apart, str(tmp_path)):
        assert isinstance(one.error, CheckpointError)
        assert "'batches' differs between ranks: on rank 0" in str(one.error) and "on rank 1" in str(one.error)
    assert not list(tmp_path.glob("step-????????"))
