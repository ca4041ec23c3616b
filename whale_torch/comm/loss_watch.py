"""Losses that a model calls inside its forward, caught on their way from torch.nn.functional to C++.

A TorchFunctionMode would see them too, but it runs Python at every other operation of the model as well.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale_torch.comm.reentrant import refuse_reentrant
from whale_torch.errors import LossError, PlanError

__all__ = ["Loss", "watch"]

_MEAN = 1  # of the reductions, as torch.nn.functional numbers them for C++
_NAMES = ("cross_entropy_loss", "nll_loss_nd")
_CHUNKED = "_linear_cross_entropy_batch_chunked"  # what F.linear_cross_entropy(options=...) calls, since torch 2.13


class Loss(NamedTuple):
    """A mean over labels, as the model called it."""

    input: Tensor
    target: Tensor
    weight: Tensor | None
    ignore_index: int


Seen = Callable[[Tensor, Loss], Tensor]


class _Watcher(threading.local):
    seen: Seen | None = None


_watcher = _Watcher()


@contextlib.contextmanager
def watch(seen: Seen) -> Iterator[None]:
    """Hands the value of every mean cross entropy or NLL loss over class numbers to `seen`, and the model its answer.

    Raises PlanError where this torch's losses cannot be caught; LossError where torch.compile takes in a loss.
    """
    _check()
    before, _watcher.seen = _watcher.seen, seen
    try:
        with _in_place():
            yield
    finally:
        _watcher.seen = before


_Place = tuple[Any, str, Callable[..., Any]]


class _InPlace:
    """While somebody watches, in any thread, torch's losses are ours; then they are as torch.jit knows them."""

    def __init__(self) -> None:
        self._lock, self._watching = threading.Lock(), 0
        self._torchs: list[_Place] = [(torch._C._nn, name, getattr(torch._C._nn, name)) for name in _NAMES]
        self._ours: list[_Place] = [(owner, name, _caught(original)) for owner, name, original in self._torchs]
        if hasattr(F, "linear_cross_entropy"):
            module = importlib.import_module("torch.nn.modules.linear_cross_entropy")
            original = getattr(module, _CHUNKED)
            self._torchs.append((module, _CHUNKED, original))
            self._ours.append((module, _CHUNKED, _caught_in_chunks(original)))

    def __enter__(self) -> None:
        self._change(1, self._ours)

    def __exit__(self, *_: object) -> None:
        self._change(-1, self._torchs)

    def _change(self, step: int, losses: list[_Place]) -> None:
        with self._lock:
            self._watching += step
            if self._watching == max(step, 0):  # the first to come, or the last to go
                for owner, name, loss in losses:
                    setattr(owner, name, loss)


@functools.cache
def _in_place() -> _InPlace:
    return _InPlace()


@functools.cache
def _check() -> None:
    found: list[Loss] = []

    def note(out: Tensor, loss: Loss) -> Tensor:
        found.append(loss)
        return out

    y = torch.zeros(1, dtype=torch.int64, device="cpu")
    before, _watcher.seen = _watcher.seen, note
    with torch.enable_grad(), _in_place():
        x = torch.zeros(1, 2, device="cpu", requires_grad=True)
        F.cross_entropy(x, y)
        F.nll_loss(x, y)
        expected = 2
        if hasattr(F, "linear_cross_entropy"):
            F.linear_cross_entropy(x, torch.zeros(2, 2, device="cpu"), y, options=nn.LinearCrossEntropyOptions())
            expected = 3
    _watcher.seen = before
    if len(found) != expected:
        raise PlanError(
            f"torch {torch.__version__} calls its losses in another way than this package watches.",
            fix="use a torch that this package names in its requirements",
        )


def _caught(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def run(
        input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN, ignore_index: int = -100,
        *rest: Any,
    ) -> Tensor:  # fmt: skip
        out = original(input, target, weight, reduction, ignore_index, *rest)
        return _answer(out, Loss(input, target, weight, ignore_index)) if reduction == _MEAN else out

    return run


def _caught_in_chunks(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None,
        reduction: str, ignore_index: int, *rest: Any,
    ) -> Any:  # fmt: skip
        out, *gradients = original(input, linear_weight, target, linear_bias, weight, reduction, ignore_index, *rest)
        if reduction == "mean":
            out = _answer(out, Loss(input, target, weight, ignore_index))
        return out, *gradients

    return run


def _answer(out: Tensor, loss: Loss) -> Tensor:
    """What the model gets of a mean over labels."""
    seen = _watcher.seen
    if seen is None or loss.target.is_floating_point():
        return out
    if not out.requires_grad:
        if not torch.is_grad_enabled():
            refuse_reentrant()
        return out
    if torch.compiler.is_compiling():
        raise LossError(
            "a mean over labels inside a compiled part: its gradient could not become that of the global mean.",
            fix="compile the part that makes the logits, and call the loss outside of it",
        )
    return seen(out, loss)
