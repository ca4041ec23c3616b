"""What a forward has to know of its loss: which part of a step it is, and what the loss is multiplied by."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["WHOLE", "LossPart", "loss_part"]


@dataclass(frozen=True)
class LossPart:
    """share: the rows of this forward over the rows that a replica has in a step on average, so that the mean over the
    replicas is the part of all rows; 1 where a forward is a step. scale: asked in backward, what the loss was
    multiplied by for the sake of half precision; None: nobody said. delivered: gradients wait for the model's own
    backward, and are multiplied then by what flows into its loss.
    """

    share: float = 1.0
    scale: Callable[[], float] | None = None
    delivered: bool = False

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Forwards inside belong to this part."""
        token = _PART.set(self)
        try:
            yield
        finally:
            _PART.reset(token)

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Forwards that a backward inside runs again belong to this part, in whichever thread."""
        before, _backward.part = _backward.part, self
        try:
            yield
        finally:
            _backward.part = before


WHOLE = LossPart()
"""A step of its own, whose loss nobody scaled."""


class _Backward:
    """That runs now: autograd has threads of its own, which know nothing of its caller's context."""

    part = WHOLE


_PART: ContextVar[LossPart] = ContextVar("loss_part", default=WHOLE)
_backward = _Backward()


def loss_part() -> LossPart:
    """That of the forward that is running."""
    found = _PART.get()
    return _backward.part if found is WHOLE else found
