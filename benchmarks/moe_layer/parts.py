"""Where the time of a layer of experts goes: seconds of its parts, by wrappers around the functions that do them."""

from __future__ import annotations

import functools
import importlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["PARTS", "Parts", "Seconds", "measure"]

PARTS = ("gate, routes", "counts", "permute", "exchange there", "experts", "exchange back", "combine")
PARTS += ("of any model", "the rest")
"""In a forward's order. Of any model: the exchange of row counts, the average of the gate's gradient. The rest of a
backward is mainly the gate's.
"""

_WRAPPED = {
    "whale_torch.moe.gate:Gate.forward": ("gate, routes", ""),
    "whale_torch.ops:moe_positions": ("gate, routes", ""),
    "whale_torch.comm.all2all:AllToAll.splits": ("counts", ""),
    "whale_torch.comm.all2all:AllToAll.in_memory": ("counts", ""),
    "whale_torch.ops:moe_permute": ("permute", "combine"),
    "whale_torch.ops:moe_scatter": ("permute", ""),
    "whale_torch.ops:moe_combine": ("combine", "permute"),
    "whale_torch.ops:moe_collect": ("combine", ""),
    "whale_torch.ops:moe_combine_backward": ("", "combine"),
    "whale_torch.ops:moe_scatter_backward": ("", "combine"),
    "whale_torch.comm.call:Call.send": ("of any model", "of any model"),
    "whale_torch.comm.call:Call.table": ("of any model", "of any model"),
    "whale_torch.comm.reducer:Reducer.launch": ("of any model", "of any model"),
    "whale_torch.comm.reducer:Reducer.land": ("of any model", "of any model"),
    "whale_torch.comm.shared_rows:Slot.meet": ("exchange", "exchange"),
    "whale_torch.moe.experts:FeedForward.on_blocks": ("experts", ""),
    "whale_torch.moe.feed_forward:_FeedForward.backward": ("", "experts"),
    "whale_torch.moe.through_memory:run_forward": ("experts", ""),
    "whale_torch.moe.through_memory:run_backward": ("", "experts"),
}
"""What runs in which part, forward and backward; of these there is what the way of the rows needs."""


Seconds = dict[tuple[str, bool], float]
"""By (part, is backward); of the whole by ("all", is backward)."""


def measure(layers: dict[str, Any], x: Tensor, upstream: Tensor, steps: int, warmup: int) -> dict[str, Seconds]:
    """The least seconds of every part of every layer on this rank; the layers alternate."""
    parts, found = Parts(), {}
    for number in range(warmup + steps):
        for name, layer in layers.items():
            for leaf in (x, *layer.parameters()):
                leaf.grad = None
            dist.barrier()
            seconds = parts.step(lambda layer=layer: layer(x), lambda out: out.backward(upstream))
            if number >= warmup:
                least = found.setdefault(name, seconds)
                found[name] = {key: min(seconds.get(key, 0.0), least.get(key, 0.0)) for key in seconds | least}
    return found


class Parts:
    """Times a step. What a part calls that is a part itself counts there alone.

    Made once in a process, whose functions it wraps.
    """

    def __init__(self) -> None:
        self.seconds: Seconds = defaultdict(float)
        self._open, self._since = ["the rest"], 0.0
        self._backward = self._after_experts = False
        for name, parts in _WRAPPED.items():
            _replace(name, functools.partial(self._wrapped, parts=parts))
        _replace("whale_torch.comm.all2all:AllToAll.start", self._exchange)

    def step(self, forward: Callable[[], Any], backward: Callable[[Any], None]) -> Seconds:
        """Runs both."""
        self.seconds.clear()
        self._backward = self._after_experts = False
        begin = self._since = time.perf_counter()
        out = forward()
        self._turn()
        middle = self._since
        self._backward, self._after_experts = True, False
        backward(out)
        self._turn()
        end, self._since = self._since, 0.0
        return {**self.seconds, ("all", False): middle - begin, ("all", True): end - middle}

    @contextmanager
    def _part(self, part: str) -> Iterator[None]:
        self._turn()
        self._open.append(part)
        yield
        self._turn()
        self._open.pop()
        self._after_experts |= part == "experts"

    def _turn(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1], self._backward] += now - self._since
        self._since = now

    def _name(self, parts: tuple[str, str]) -> str:
        part = parts[self._backward] or self._open[-1]
        if part != "exchange":
            return part
        return "exchange back" if self._after_experts != self._backward else "exchange there"

    def _wrapped(self, fn: Callable[..., Any], parts: tuple[str, str]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._since:
                return fn(*args, **kwargs)
            with self._part(self._name(parts)):
                return fn(*args, **kwargs)

        return timed

    def _exchange(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """An exchange's begin, and the wait for its rows."""
        begin = self._wrapped(start, ("exchange", "exchange"))

        @functools.wraps(start)
        def started(*args: Any, **kwargs: Any) -> Any:
            return self._wrapped(begin(*args, **kwargs), ("exchange", "exchange"))

        return started


def _replace(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps `module:name` or `module:Class.name`, where there is such a thing."""
    module, _, path = name.partition(":")
    try:
        owner: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return
    *outer, attribute = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    if attribute not in vars(owner):
        return
    found = vars(owner)[attribute]
    if isinstance(found, staticmethod):
        setattr(owner, attribute, staticmethod(wrap(found.__func__)))
    else:
        setattr(owner, attribute, wrap(found))
