"""A piece of work in which ranks ask one another questions, and of which any rank may fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from whale_torch.comm.collectives import all_reduce
from whale_torch.mesh import Group

__all__ = ["Meeting", "OtherRankFailed"]

T = TypeVar("T")
_NO, _YES, _FAILED = 0.0, 1.0, 2.0


class OtherRankFailed(Exception):
    """Raised in the work of a rank that asks, where another rank's work failed."""


class Meeting:
    """Small collectives that also say whether a rank failed, so that none waits for it.

    Ranks that do not fail ask equally many questions. _left: whether all ranks know of a failure.
    """

    def __init__(self, group: Group):
        self._group, self._left = group, False

    def run(self, work: Callable[[], T]) -> T:
        """Runs the work on every rank, whose last act is a question. Raises its error, or OtherRankFailed inside it."""
        try:
            return work()
        except BaseException:
            if not self._left:
                self._exchange(_FAILED)
            raise

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on some rank."""
        return self._ask(_YES if flag else _NO) == _YES

    def _ask(self, answer: float) -> float:
        found = self._exchange(answer)
        if found == _FAILED:
            raise OtherRankFailed
        return found

    def _exchange(self, answer: float) -> float:
        told = torch.tensor([answer], device="cpu")
        try:
            found = float(all_reduce(told, self._group, op=dist.ReduceOp.MAX, name="initial values"))
        except BaseException:
            self._left = True
            raise
        self._left = found == _FAILED
        return found
