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
    multiplied by for the sake of half precision.
    """

    share: float = 1.0
    scale: Callable[[], float] = lambda: 1.0

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Forwards inside belong to this part."""
        token = _PART.set(self)
        try:
            yield
        finally:
            _PART.reset(token)


WHOLE = LossPart()
"""A step of its own, whose loss is not scaled."""

_PART: ContextVar[LossPart] = ContextVar("loss_part", default=WHOLE)


def loss_part() -> LossPart:
    """That of the forward that is running."""
    return _PART.get()
