"""Boxes: what ranks hold of a tensor, and how it is copied from one cut to another, against brute force."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from whale_torch.checkpoint.boxes import Box, blocks, boxes_of, in_local, overlap, runs, split_rows
from whale_torch.checkpoint.share import share
from whale_torch.planning.layout import Shard

SHARDS = [
    Shard(0, (3, 2, 2), (7, 4)),
    Shard(1, (1, 0, 3), (2, 4, 3)),
    Shard(0, (2, 1, 1), (24, 2), blocks=3, unit=2),
    Shard(2, (0, 2, 0), (2, 1, 6), blocks=3),
    Shard(0, (1, 0), (1,)),
    Shard(0, (0, 0), (0, 3)),
    Shard(0, (1, 1), (2, 0)),
]


def _at(tensor: Tensor, box: Box) -> Tensor:
    for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def _numbers(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(Box.whole(shape).numel).reshape(shape)


@pytest.mark.parametrize("shard", SHARDS, ids=str)
def test_boxes_are_what_a_shard_cuts(shard: Shard) -> None:
    full = _numbers(shard.shape)
    covered = torch.zeros(shard.shape, dtype=torch.int64)
    for index in range(shard.num_ranks):
        local = shard.cut(full, index)
        whole, here = boxes_of(shard, index), in_local(shard, index)
        assert len(whole) == len(here) == shard.blocks
        for a, b in zip(whole, here, strict=True):
            assert torch.equal(_at(full, a), _at(local, b))
            _at(covered, a).add_(1)
    assert bool((covered == 1).all())


def _random_box(shape: tuple[int, ...], draw: random.Random) -> Box:
    start = tuple(draw.randint(0, n) for n in shape)
    return Box(start, tuple(draw.randint(0, n - s) for n, s in zip(shape, start, strict=True)))


@pytest.mark.parametrize("seed", range(20))
def test_overlaps_are_what_both_have(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 4) for _ in range(draw.randint(0, 3)))
    for _ in range(20):
        one, other = _random_box(shape, draw), _random_box(shape, draw)
        both = [set(_at(_numbers(shape), box).flatten().tolist()) for box in (one, other)]
        found = overlap(one, other)
        expected = both[0] & both[1]
        assert (set() if found is None else set(_at(_numbers(shape), found).flatten().tolist())) == expected


@pytest.mark.parametrize("seed", range(20))
def test_runs_copy_a_block(seed: int) -> None:
    """From a tensor of one shape into one of another, each side as one row of numbers."""
    draw = random.Random(seed)
    dims = draw.randint(0, 4)
    for _ in range(10):
        size = tuple(draw.randint(1, 3) for _ in range(dims))
        at, to = (tuple(draw.choice((0, 0, 1)) for _ in size) for _ in range(2))
        source, target = (
            tuple(n + s + draw.choice((0, 0, 2)) for n, s in zip(size, start, strict=True)) for start in (at, to)
        )
        given, found, expected = _numbers(source), -torch.ones(target).long(), -torch.ones(target).long()
        _at(expected, Box(to, size)).copy_(_at(given, Box(at, size)))
        listed = list(runs(size, at, source, to, target))
        for run in listed:
            found.view(-1)[run.target : run.target + run.length] = given.view(-1)[run.source : run.source + run.length]
        assert torch.equal(found, expected)
        assert len({run.length for run in listed}) == 1
        if size == source == target:
            assert len(listed) == 1, "what is whole on both sides is one run"


@pytest.mark.parametrize(("shape", "most"), [((), 1), ((0, 4), 3), ((5, 3), 7), ((5, 3), 1), ((4, 0), 2), ((6,), 4)])
def test_rows_are_split_without_a_rest(shape: tuple[int, ...], most: int) -> None:
    parts = split_rows(Box.whole(shape), most)
    numbers = [n for part in parts for n in _at(_numbers(shape), part).flatten().tolist()]
    assert numbers == _numbers(shape).flatten().tolist()
    row = Box.whole(shape).numel // shape[0] if shape and shape[0] else 0
    assert all(part.numel <= max(most, row) for part in parts) or not shape


def test_blocks_are_wide() -> None:
    assert [block.size for block in blocks(Box.whole((7, 4)), 10)] == [(2, 4), (2, 4), (2, 4), (1, 4)]
    assert [block.size for block in blocks(Box.whole((1, 2, 7)), 5)] == [(1, 1, 5), (1, 1, 2)] * 2


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_in_order_and_small(seed: int) -> None:
    draw = random.Random(seed)
    size = tuple(draw.randint(0, 5) for _ in range(draw.randint(0, 4)))
    box, most = Box(tuple(draw.randint(0, 3) for _ in size), size), draw.randint(1, 20)
    found = list(blocks(box, most))
    shape = tuple(a + n for a, n in zip(box.start, box.size, strict=True))
    numbers = [n for part in found for n in _at(_numbers(shape), part).flatten().tolist()]
    assert numbers == _at(_numbers(shape), box).flatten().tolist()
    assert all(part.numel <= most for part in found)


@pytest.mark.parametrize("seed", range(10))
def test_every_box_is_written_once_and_by_a_holder(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.randint(1, 5)
    shards = {f"cut{i}": draw.choice(SHARDS) for i in range(4)}
    shapes = {f"whole{i}": (draw.randint(1, 3), draw.randint(0, 5)) for i in range(4)}
    told = []
    for rank in range(ranks):
        mine = []
        for key, shard in shards.items():  # cut over the first ranks of a group, which repeats
            mine.append([key, 4, [b.to_json() for b in boxes_of(shard, rank % shard.num_ranks)], True])
        for key, shape in shapes.items():
            if draw.random() < 0.7 or rank == 0:
                mine.append([key, 8, [Box.whole(shape).to_json()], True])
        told.append(mine)
    found = share(told)
    assert share(told) == found
    written: dict[str, Tensor] = {}
    held = {key: torch.zeros(s.shape) for key, s in shards.items()} | {k: torch.zeros(s) for k, s in shapes.items()}
    for rank, boxes in enumerate(found):
        mine_boxes = {key: [Box.from_json(b) for b in listed] for key, _, listed, _ in told[rank]}
        for key, box in boxes:
            assert any(overlap(box, one) == box for one in mine_boxes[key]) or not box.numel
            _at(written.setdefault(key, torch.zeros_like(held[key])), box).add_(1)
    for rank, key in itertools.product(range(ranks), held):
        for name, _, listed, _ in told[rank]:
            if name == key:
                for box in listed:
                    _at(held[key], Box.from_json(box)).fill_(1)
    for key, expected in held.items():
        assert torch.equal(written.get(key, torch.zeros_like(expected)), expected), key


def test_large_boxes_that_several_hold_are_shared_out() -> None:
    shape = (64, 1 << 20)  # 256 MiB
    told = [[["w", 4, [Box.whole(shape).to_json()], True]] for _ in range(4)]
    rows = [sum(box.size[0] for _, box in boxes) for boxes in share(told)]
    assert rows == [16, 16, 16, 16]


def test_what_may_differ_is_written_by_one_rank() -> None:
    """A buffer of 256 MiB: parts of several ranks' would be no rank's."""
    told = [[["w", 4, [Box.whole((64, 1 << 20)).to_json()], False]] for _ in range(4)]
    assert [sum(box.size[0] for _, box in boxes) for boxes in share(told)] == [64, 0, 0, 0]
