"""Floating-point operations of a forward, module by module, counted without memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from whale_torch.errors import WhaleError
from whale_torch.trace.twin import Twin

__all__ = ["Measured", "measure"]


@dataclass(frozen=True, slots=True)
class Measured:
    """Modules by name, of one forward: when each was first called, and its floating-point operations."""

    order: dict[str, int]
    flops: dict[str, int]


def measure(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Measured | None, str]:
    """One forward; None, and in words why, where it cannot run without values."""
    twin = Twin.of(model, torch.device("cpu"))
    twin.module.train()
    args, kwargs = twin.inputs((args, kwargs))
    counter = FlopCounterMode(display=False)
    found = Measured({}, {})
    begun: list[int] = []
    for name, module in twin.module.named_modules():

        def before(*_: Any, name: str = name) -> None:
            found.order.setdefault(name, len(found.order))
            begun.append(counter.get_total_flops())

        def after(*_: Any, name: str = name) -> None:
            found.flops[name] = found.flops.get(name, 0) + counter.get_total_flops() - begun.pop()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
    try:
        with torch.random.fork_rng(devices=[]), twin.fake, counter:
            twin.module(*args, **kwargs)
    except WhaleError:
        raise
    except Exception as error:  # the model is the user's: whatever it raises without values says so
        return None, f" (its forward does not run without values: {type(error).__name__})"
    return found, ""
