"""Random numbers during a recording: all generators stand afterwards where they stood, and glue draws torch's only."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from whale_torch.errors import TraceError

__all__ = ["foreign_random_kept", "random_state_kept"]

_States = tuple[Any, Any]


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Raises TraceError where code between stages drew random numbers that torch does not know of."""
    generator = torch.default_generator
    state, foreign = generator.get_state(), _foreign()
    try:
        yield
        if not _same(foreign, _foreign()):
            raise TraceError(
                "the forward draws random numbers of Python's or numpy's between stages, where code is recorded once "
                "and not run in every step.",
                fix="draw them with torch, or outside of the model and hand them over as tensors",
            )
    finally:
        generator.set_state(state)
        _set_foreign(foreign)


@contextlib.contextmanager
def foreign_random_kept() -> Iterator[None]:
    """What a module of a stage draws of Python's or numpy's is drawn when it runs, and not while it is recorded."""
    states = _foreign()
    try:
        yield
    finally:
        _set_foreign(states)


def _foreign() -> _States:
    """States of the global generators of Python and, where it is used, numpy."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_foreign(states: _States) -> None:
    random.setstate(states[0])
    numpy = sys.modules.get("numpy")
    if numpy is not None and states[1] is not None:
        numpy.random.set_state(states[1])


def _same(before: _States, after: _States) -> bool:
    if before[0] != after[0] or before[1] is None or after[1] is None:
        return bool(before[0] == after[0])
    pairs = zip(before[1], after[1], strict=True)
    return all(bool((a == b).all() if hasattr(a, "shape") else a == b) for a, b in pairs)
