"""Biases that follow the load: gates are told once a step how many tokens chose each expert."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from whale_torch.moe.gate import Gate

__all__ = ["note_choices"]


def note_choices(gate: Gate, weights: Tensor, counts: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """The weights of a forward's routes, whose backward counts how many tokens chose each expert.

    The gate is told after a step of an optimizer that trains it, of all ranks together (total, which is held as long as
    the gate lives, and must not hold it). Counted where backward comes by, so that a forward which is run again counts
    once, and one without a backward not at all.
    """
    choices = _GATES.setdefault(gate, _Choices())
    choices.total = total
    out: Tensor = _Note.apply(weights, choices, counts)  # type: ignore[no-untyped-call]
    return out


class _Choices:
    """Since the last step."""

    def __init__(self) -> None:
        self.counts: Tensor | None = None
        self.total: Callable[[Tensor], Tensor] = lambda counts: counts

    def add(self, counts: Tensor) -> None:
        self.counts = counts.clone() if self.counts is None else self.counts + counts


class _Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, choices: _Choices, counts: Tensor) -> Tensor:
        ctx.choices, ctx.counts = choices, counts
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.choices.add(ctx.counts)
        return grads[0], None, None


_GATES: weakref.WeakKeyDictionary[Gate, _Choices] = weakref.WeakKeyDictionary()  # in the order of forwards


def _after(optimizer: Optimizer, *_: Any) -> None:
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for gate, choices in list(_GATES.items()):
        if choices.counts is not None and any(id(p) in trained for p in gate.parameters()):
            counts, choices.counts = choices.counts, None
            gate.update(choices.total(counts))


register_optimizer_step_post_hook(_after)
