"""The batch sampler: global batches cut over feeds, as one process would read them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler as TorchBatchSampler
from torch.utils.data import DataLoader, Dataset, SequentialSampler, TensorDataset, default_collate

import whale_torch as wh
from tests.parity.layouts import batch, build, gradients
from tests.parity.metric import relative_error
from tests.world import world
from whale_torch.data import BatchSampler
from whale_torch.errors import CheckpointError, LayoutError, PlanError

BAR = 2e-5


def feeds(total: int, size: int, count: int, **options: Any) -> list[BatchSampler]:
    given = {"shuffle": False, "seed": 0, "drop_last": False, "collate_fn": default_collate} | options
    return [BatchSampler(range(total), size, index, count, **given).allow_empty() for index in range(count)]


def steps(samplers: list[BatchSampler]) -> list[list[list[int]]]:
    """Per step the rows of each feed."""
    return [list(rows) for rows in zip(*samplers, strict=True)]


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def samples(samplers: list[BatchSampler]) -> list[int]:
    """Of an epoch, in the order of one process."""
    return joined(joined(rows) for rows in steps(samplers))


@pytest.mark.parametrize("total", [0, 1, 5, 23, 24, 25])
@pytest.mark.parametrize(("size", "count"), [(1, 1), (2, 3), (3, 4), (8, 3)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_global_batches_are_those_of_one_process(total: int, size: int, count: int, drop_last: bool) -> None:
    samplers = feeds(total, size, count, drop_last=drop_last)
    found = steps(samplers)
    expected = list(TorchBatchSampler(SequentialSampler(range(total)), size * count, drop_last))
    assert [joined(rows) for rows in found] == expected
    assert [len(s) for s in samplers] == [len(expected)] * count
    for rows in found:
        widths = [len(r) for r in rows]
        assert max(widths) - min(widths) <= 1
        assert max(widths) <= size


def test_shuffled_epochs_differ_and_are_equal_for_every_layout() -> None:
    one, three = feeds(25, 6, 1, shuffle=True, seed=4)[0], feeds(25, 2, 3, shuffle=True, seed=4)
    orders = []
    for epoch in range(3):
        assert one.epoch == max(epoch - 1, 0), "the epoch moves on when the next one begins"
        orders.append(joined(one))
        assert samples(three) == orders[-1]
        assert sorted(orders[-1]) == list(range(25))
    assert len({tuple(order) for order in orders}) == 3
    one.set_epoch(1)
    assert joined(one) == orders[1]
    one.set_epoch(1)
    assert joined(one) == orders[1]
    assert joined(feeds(25, 6, 1, shuffle=True, seed=5)[0]) not in orders


@pytest.mark.parametrize("taken", [0, 1, 3, 5])
@pytest.mark.parametrize(("size", "count"), [(2, 3), (1, 4), (7, 1)])
def test_an_epoch_goes_on_where_it_stood(taken: int, size: int, count: int) -> None:
    """Five global batches of 6 in 25 samples; the rest with any number of feeds."""
    before = feeds(25, 2, 3, shuffle=True, seed=1)
    whole, reading = joined(feeds(25, 25, 1, shuffle=True, seed=1)[0]), [iter(s) for s in before]
    read = joined(next(r) for _ in range(taken) for r in reading)
    states = [s.state_dict() for s in before]
    assert all(state == states[0] for state in states)
    assert states[0]["consumed"] == len(read)
    after = feeds(25, size, count, shuffle=True, seed=1)
    for s in after:
        s.load_state_dict(states[0])
        assert s.state_dict() == states[0] or taken == 5
        s.set_epoch(s.epoch)
    rest = samples(after)
    if taken < 5:
        assert read + rest == whole
        assert after[0].epoch == 0
        assert after[0].state_dict()["consumed"] == 25
    else:
        assert after[0].epoch == 1
        assert sorted(rest) == list(range(25))
        assert rest != whole
    assert samples(after) != whole, "the next epoch begins at its start"


def test_state_counts_what_was_trained_on() -> None:
    (s,) = feeds(20, 3, 1)
    reading = iter(s)
    for _ in range(4):
        next(reading)
    assert s.state_dict(num_batches=2)["consumed"] == 6
    s.load_state_dict(s.state_dict(num_batches=2))
    reading = iter(s)
    assert next(reading) == [6, 7, 8]
    assert s.state_dict()["consumed"] == 9
    list(reading)
    assert s.state_dict()["consumed"] == 20
    assert s.state_dict(num_batches=1)["consumed"] == 9, "workers may be at the end long before the loop"
    partly = feeds(20, 3, 1, drop_last=True)[0]
    partly.load_state_dict({**s.state_dict(), "consumed": 18})
    assert partly.epoch == 1
    for key, value in (("num_samples", 21), ("shuffle", True), ("seed", 3)):
        with pytest.raises(CheckpointError, match=f"{key} {value!r}, here it is"):
            s.load_state_dict({**s.state_dict(), key: value})


def test_workers_that_read_ahead_are_noticed() -> None:
    data = TensorDataset(torch.arange(20))
    (s,) = feeds(20, 3, 1)
    loader = DataLoader(data, batch_sampler=s, collate_fn=s.collate_fn)
    for number, _ in enumerate(loader):
        assert s.state_dict()["consumed"] == min(3 * (number + 1), 20)
    loader = DataLoader(data, batch_sampler=s, collate_fn=s.collate_fn, num_workers=1)
    reading = iter(loader)
    next(reading)
    with pytest.raises(CheckpointError, match=r"batches were handed out, of which 0 were made in this process"):
        s.state_dict()
    assert s.state_dict(num_batches=1)["consumed"] == 3
    list(reading)


def test_workers_that_read_ahead_are_noticed_without_a_collate_function() -> None:
    (s,) = feeds(20, 5, 1)
    for workers in (0, 1):
        reading = iter(DataLoader(TensorDataset(torch.arange(20)), batch_sampler=s, num_workers=workers))
        next(reading)
        if workers:
            with pytest.raises(CheckpointError, match=r"read ahead of the training loop"):
                s.state_dict()
        else:
            assert s.state_dict()["consumed"] == 5
        list(reading)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_what_a_loop_took_is_counted(workers: int, stop: int) -> None:
    """Saved in the middle of an epoch, by three feeds whose workers read ahead, and gone on with by two."""
    data: Any = range(50)
    before = feeds(50, 3, 3, shuffle=True, seed=2)
    seen, states = [], []
    for s in before:
        loader = DataLoader(data, batch_sampler=s, collate_fn=s.collate_fn, num_workers=workers)
        rows = []
        for number, x in enumerate(s.counted(loader), 1):
            rows.append(x.tolist())
            if number == stop:
                states.append(s.state_dict())
                break
        seen += joined(rows)
    assert states[0] == states[1] == states[2] and states[0]["consumed"] == len(seen) == 9 * stop
    rest = []
    for s in feeds(50, 4, 2, shuffle=True, seed=2):
        s.load_state_dict(states[0])
        for x in s.counted(DataLoader(data, batch_sampler=s, collate_fn=s.collate_fn, num_workers=workers)):
            rest += x.tolist()
        assert s.state_dict()["consumed"] == 50
        s.load_state_dict(s.state_dict())
        assert s.epoch == 1
    assert sorted(seen + rest) == list(range(50)), "none lost, none repeated"


Point = namedtuple("Point", ["x", "y"])


@dataclass
class Pair:
    x: Tensor
    tag: list[str]


class Items(Dataset[Any]):
    def __init__(self, make: Any, total: int = 5):
        self.make, self.total = make, total

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


def test_a_loader_makes_batches_of_no_rows() -> None:
    """5 samples in global batches of 4 x 1: of the last, one feed has a row and three have none."""
    for make, collate in (
        (lambda i: (torch.ones(3) * i, i), default_collate),
        (lambda i: {"x": torch.ones(2, 3), "y": {"z": 1.5}, "name": f"sample {i}"}, default_collate),
        (lambda i: Point(torch.ones(3), i), default_collate),
        (lambda i: i, lambda samples: Pair(torch.tensor(samples), [str(s) for s in samples])),
    ):
        data = Items(make)
        batches = BatchSampler(data, 1, 3, 4, shuffle=False, seed=0, drop_last=False, collate_fn=collate)
        full, empty = list(DataLoader(data, batch_sampler=batches, collate_fn=batches.collate_fn))
        assert structure(empty, 0) == structure(full, 0)
        assert structure(full, 1) != structure(empty, 1)
    odd = BatchSampler(Items(lambda i: i), 1, 3, 4, shuffle=False, seed=0, drop_last=False, collate_fn=set)
    with pytest.raises(LayoutError, match="collate_fn gave a set"):
        list(DataLoader(Items(lambda i: i), batch_sampler=odd, collate_fn=odd.collate_fn))


def structure(value: Any, rows: int) -> Any:
    """Types, dtypes and shapes; the number of rows too where asked."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape[0 if rows else 1 :])
    if isinstance(value, dict):
        return {k: structure(v, rows) for k, v in value.items()}
    if isinstance(value, Pair):
        return structure([value.x, value.tag], rows)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "texts", len(value) if rows else None
    return type(value), [structure(v, rows) for v in value]


def test_a_loader_that_cannot_is_refused_at_the_first_step() -> None:
    data = TensorDataset(torch.arange(9))
    for index in range(4):
        batches = BatchSampler(data, 2, index, 4, shuffle=False, seed=0, drop_last=False, collate_fn=default_collate)
        with pytest.raises(
            LayoutError, match=r"last global batch of 9 samples has 1 rows for 4 feeds, so 3 get none"
        ) as caught:
            iter(DataLoader(data, batch_sampler=batches))
        assert "collate_fn=batches.collate_fn" in str(caught.value)
    fits = BatchSampler(
        TensorDataset(torch.arange(12)), 2, 0, 4, shuffle=False, seed=0, drop_last=False, collate_fn=default_collate
    )
    assert len(list(DataLoader(TensorDataset(torch.arange(12)), batch_sampler=fits))) == 2


def numbers(rank: int, n: int, layout: str) -> tuple[Any, ...]:
    model = wh.parallelize(build(layout))
    data = TensorDataset(torch.arange(13))
    batches = wh.batch_sampler(model, data, 2).allow_empty()
    other = wh.sampler(model, data, shuffle=False)
    with pytest.raises(PlanError, match="batch_size is 0"):
        wh.batch_sampler(model, data, 0)
    with pytest.raises(PlanError, match="needs a dataset with a length, got generator"):
        wh.batch_sampler(model, (i for i in range(3)), 2)
    return wh.data_rank(model), list(batches), list(other)


def test_ranks_of_one_feed_read_the_same() -> None:
    found = world(4, numbers, "shared")
    assert [index for (index, _), _, _ in found] == [0, 0, 1, 1]
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert [b for _, b, _ in found[::2]] == [[[0, 1], [4, 5], [8, 9], [12]], [[2, 3], [6, 7], [10, 11], []]]
    assert found[0][2] == [0, 2, 4, 6, 8, 10, 12]
    assert [index for (index, _), _, _ in world(2, numbers, "own")] == [0, 1]


def test_data_rank_needs_a_parallelized_model() -> None:
    calls = {
        "wh.data_rank": wh.data_rank,
        "wh.sampler": lambda m: wh.sampler(m, [1]),
        "wh.batch_sampler": lambda m: wh.batch_sampler(m, [1], 1),
    }
    for name, call in calls.items():
        with pytest.raises(PlanError, match=f"^{name} needs a parallelized model, got Linear") as caught:
            call(nn.Linear(2, 2))
        assert caught.value.fix == "model = wh.parallelize(model) first"


def epoch(rank: int, n: int, layout: str, total: int, padded: bool) -> tuple[list[float], float, int]:
    """Worst gradient of every step of an epoch, and the worst parameter after it, against one process."""
    x, y = batch(total)
    plain, model = build(layout), wh.parallelize(build(layout))
    data = TensorDataset(x, y)
    batches = wh.batch_sampler(model, data, 2, shuffle=True, seed=3)
    if padded:  # the mutation
        batches = torch.utils.data.BatchSampler(wh.sampler(model, data, shuffle=False), 2, False)
        loader = DataLoader(data, batch_sampler=batches)
        order = [
            list(range(total))[i : i + 2 * wh.data_rank(model)[1]] for i in range(0, total, 2 * wh.data_rank(model)[1])
        ]
    else:
        loader = DataLoader(data, batch_sampler=batches, collate_fn=batches.collate_fn)
        order = list(feeds(total, batches.global_batch_size, 1, shuffle=True, seed=3)[0])
    mine = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
    errors, fewest = [], total
    for (xs, ys), rows in zip(loader, order, strict=True):
        mine.zero_grad(), theirs.zero_grad()
        fewest = min(fewest, len(xs))
        loss = F.cross_entropy(model(xs), ys)
        loss.backward()
        one = F.cross_entropy(plain(x[rows]), y[rows])
        one.backward()
        errors.append(relative_error(gradients(model), {name: p.grad for name, p in plain.named_parameters()}))
        mine.step(), theirs.step()
        if layout == "replica" and not padded:
            mean = wh.reduce(float(loss.detach()), weight=len(xs))
            errors.append(abs(mean - float(one.detach())))
    return errors, relative_error(wh.full_state_dict(model), plain.state_dict()), fewest


@pytest.mark.parametrize(
    ("layout", "n", "total"),
    [("replica", 3, 13), ("replica", 2, 11), ("own", 4, 17), ("own", 3, 20), ("mixed", 4, 13), ("shared", 4, 9)],
)
def test_a_whole_epoch_is_that_of_one_process(layout: str, n: int, total: int) -> None:
    found = world(n, epoch, layout, total, False)
    assert min(fewest for _, _, fewest in found) == 0 or (layout, total) in (("replica", 11), ("own", 20))
    for errors, state, _ in found:
        assert max(errors) < BAR
        assert state < BAR


def test_the_suite_catches_padded_batches() -> None:
    assert max(max(errors) for errors, _, _ in world(2, epoch, "replica", 11, True)) > 100 * BAR
