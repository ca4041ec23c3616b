"""Memory that is used again: free when nothing holds it, and never before."""

from __future__ import annotations

import errno
import gc
import mmap
import threading

import pytest
import torch

from whale_torch import moe, ops
from whale_torch.ops import buffers
from whale_torch.ops.buffers import BufferPool

LARGE = 1 << 20


def test_memory_is_used_again_once_the_last_view_is_gone() -> None:
    pool = BufferPool()
    first = pool.empty(LARGE)
    place, view = first.data_ptr(), first[5:]
    del first
    second = pool.empty(LARGE)
    assert second.data_ptr() != place
    del view
    assert pool.empty(LARGE - 100).data_ptr() == place


def test_what_a_graph_saved_is_not_free() -> None:
    pool = BufferPool()
    weight = torch.randn(4, 3, requires_grad=True)
    x = pool.empty(LARGE).view(torch.float32).view(-1, 4).fill_(2.0)
    place = x.data_ptr()
    loss = (x @ weight).sum()
    del x
    assert pool.empty(LARGE).data_ptr() != place
    loss.backward()
    assert weight.grad is not None and (weight.grad == 2.0 * LARGE / 16).all()
    del loss
    gc.collect()
    assert place in {pool.empty(LARGE).data_ptr(), pool.empty(LARGE).data_ptr()}


def test_sizes_that_differ_a_little_share_memory() -> None:
    pool = BufferPool()
    for size in range(LARGE, LARGE + 1000, 100):
        pool.empty(size)
    pool.empty(LARGE)
    assert pool.idle + pool.in_use <= 2 * (LARGE + LARGE // 8)


def test_idle_memory_is_given_back() -> None:
    pool = BufferPool()
    for power in range(6):
        held = [pool.empty(LARGE << power) for _ in range(2)]
        del held
    small = pool.empty(LARGE * 3)
    assert pool.idle + pool.in_use <= 1.25 * 2 * (LARGE << 5)
    assert small.numel() == LARGE * 3


def test_memory_that_the_system_refuses_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BufferPool()
    pool.empty(LARGE)  # idle from now on
    real, asked = buffers.mmap.mmap, []

    def refuse(fd: int, size: int, **options: int) -> mmap.mmap:
        asked.append(size)
        if size > 2 * LARGE:
            raise OSError(errno.ENOMEM, "no memory")
        return real(fd, size, **options)

    monkeypatch.setattr(buffers.mmap, "mmap", refuse)
    with pytest.raises(OSError, match="no memory"):
        pool.empty(4 * LARGE)
    assert len(asked) == 2  # again once what was idle is given back
    assert (pool.in_use, pool.idle) == (0, 0)
    monkeypatch.setattr(buffers, "_POOL", pool)
    assert buffers.empty(LARGE, like=torch.zeros(1)).shape == (LARGE,)  # from torch
    assert pool.in_use == 0


def test_what_is_lent_is_changed_in_place_as_any_other() -> None:
    experts, grads = moe.FeedForward(2, 64, 64), []
    for rows in (8, 1024):  # of torch's memory, and of ours
        x = torch.ones(rows, 64, requires_grad=True)
        y = experts(x, [rows // 2] * 2)
        y.mul_(2.0)
        y.sum().backward()
        assert x.grad is not None
        grads.append(x.grad[[0, -1]])
    torch.testing.assert_close(grads[0], grads[1])
    positions = torch.arange(4096, dtype=torch.int32).view(-1, 1)
    permuted = ops.moe_permute(torch.ones(4096, 64, requires_grad=True), positions, 4096)
    permuted.add_(1.0).sum().backward()


def test_many_threads() -> None:
    pool = BufferPool()
    wrong = []

    def borrow(number: int) -> None:
        for _ in range(200):
            mine = pool.empty(LARGE // 8).fill_(number)
            if not (mine == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=borrow, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_empty_is_as_torch_makes_it(dtype: torch.dtype) -> None:
    like = torch.zeros(1, dtype=dtype)
    for shape in ((3, 5), (700, 400), (0, 7)):
        found = buffers.empty(*shape, like=like)
        assert found.shape == shape and found.dtype == dtype and found.is_contiguous()
        assert not found._is_view()
    assert buffers.empty(700, 400, like=torch.zeros(1, device="meta")).is_meta
