"""All gradient reducers of one model: they begin together when a backward is noticed, and end with it together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from whale_torch.errors import CommError
from whale_torch.mesh import Group

__all__ = ["GradientReducer", "Gradients"]


class GradientReducer(Protocol):
    """What Gradients asks of a reducer."""

    sync: bool
    """Whether gradients are averaged, or stay on their ranks for now."""

    @property
    def groups(self) -> Sequence[Group]:
        """What its messages travel on."""

    def listen(self, noticed: Callable[[], None]) -> None:
        """noticed: called at each gradient that arrives while no backward has begun."""

    def begin(self) -> None:
        """A backward begins."""

    def launch(self, *, void: bool) -> None:
        """Sends what has not been sent: backward is through, or has failed, and then it is marked as void."""

    def land(self, *, void: bool) -> bool:
        """Waits for what is under way; whether a rank has marked it as void."""

    def close(self) -> None:
        """Takes the hooks off the parameters."""


class _Round:
    """One backward. Autograd alone holds it, so a backward that an error ended has let go of it."""

    __slots__ = ("__weakref__",)


class Gradients:
    """Averages a model's gradients in every backward while `sync` is true.

    then: called at the end of such a backward, after the reducers.
    Raises CommError, at the end of backward, where it failed on another rank; on a GPU, whose flags nobody waits for,
    the gradients are NaN then.
    """

    def __init__(self, reducers: Sequence[GradientReducer], then: Callable[[], None] | None = None):
        self.reducers = reducers
        self._sync, self._then = True, then
        self.keeps = False
        """Whether parameters have gradients of this rank alone, of backwards that were not averaged."""
        self._round: weakref.ref[_Round] | None = None
        for reducer in reducers:
            reducer.listen(self.arm)

    @property
    def sync(self) -> bool:
        return self._sync

    @sync.setter
    def sync(self, value: bool) -> None:
        self._sync = value
        for reducer in self.reducers:
            reducer.sync = value

    def close(self) -> None:
        """Takes all hooks off the parameters."""
        for reducer in self.reducers:
            reducer.close()

    def arm(self) -> None:
        """Begins one backward: called when it reaches the model's output, also where no parameter gets a gradient."""
        if not self._sync:
            self.keeps = True
            return
        if self._round is not None and self._round() is not None:
            return
        self.abandon()
        this = _Round()

        def callback(held: _Round = this) -> None:
            self._end(void=False)

        torch.autograd.Variable._execution_engine.queue_callback(callback)
        self._round = weakref.ref(this)
        for reducer in self.reducers:
            reducer.begin()
            for group in reducer.groups:
                group.hold()

    def abandon(self) -> None:
        """Ends a backward that an error cut short: what is left of its messages travels marked as void.

        So ranks that failed together are in step again, and a rank that did not fail raises CommError.
        """
        if self._round is not None and self._round() is None:
            self._end(void=True)

    def _end(self, *, void: bool) -> None:
        for reducer in self.reducers:
            reducer.launch(void=void)
        failed = [reducer.land(void=void) for reducer in self.reducers]
        for reducer in self.reducers:
            for group in reducer.groups:
                group.release()
        self._round, self.keeps = None, self.keeps and void
        if any(failed) and not void:
            raise CommError(
                "a backward ended with an error on another rank and not on this one; the gradients are incomplete.",
                fix="read the other ranks' messages; where a step may fail, let all ranks skip it together",
            )
        if self._then is not None and not void:
            self._then()
