"""autograd at the borders of a stage, and of the whole pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from whale_torch.errors import LossError

__all__ = ["Deliver", "DeliverLater", "Enter"]

Gradients = list[Tensor | None]


class Enter(torch.autograd.Function):
    """Received tensors as a stage may use them: no leaves, so that it may write into them; their gradients go into
    `slot`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, slot: Gradients, *received: Tensor) -> tuple[Tensor, ...]:
        ctx.slot = slot
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.slot[:] = grads
        return (None, None) + (None,) * len(grads)


class Deliver(torch.autograd.Function):
    """A loss whose gradients are known already: backward scales them by what flows in and gives them to parameters.

    scale: what they were multiplied by. before: called first in backward, with what flows in.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        held: Gradients,
        scale: float,
        before: Callable[[Tensor], None],
        anchor: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.held, ctx.scale, ctx.before = held, scale, before
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        held, ctx.held = ctx.held, None
        if held is None:
            raise LossError(
                "backward ran twice through the loss of a pipeline, whose gradients were delivered by the first run.",
                fix="add losses up and call backward once; retain_graph=True has no effect on a pipeline",
            )
        ctx.before(grad)
        if grad.device.type != "cpu" or float(grad) != ctx.scale:  # what another device has, nobody waits for
            factor = grad.float() / ctx.scale
            held = [None if h is None else h.mul_(factor.to(h.dtype)) for h in held]
        return (None,) * 5 + tuple(held)


class DeliverLater(torch.autograd.Function):
    """Outputs of a pipeline whose loss is the user's: backward runs the pipeline's backwards on their gradients."""

    @staticmethod
    def forward(ctx: Any, backward: Callable[[Sequence[Tensor | None]], Gradients], count: int, *rest: Tensor) -> Any:
        ctx.run = backward
        ctx.set_materialize_grads(False)
        return tuple(x.clone() for x in rest[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        run, ctx.run = ctx.run, None
        if run is None:
            raise LossError(
                "backward ran twice through the output of a pipeline.",
                fix="add losses up and call backward once; retain_graph=True has no effect on a pipeline",
            )
        return (None, None, *(None for _ in grads), *run(grads))


def _refuse_second_derivatives() -> None:
    """Raises LossError in a backward with create_graph=True: the stages' own backwards left no graph."""
    if torch.is_grad_enabled():
        raise LossError(
            "backward through a pipeline was called with create_graph=True, and what it gives cannot be differentiated "
            "again: a penalty on gradients would count for nothing.",
            fix="leave create_graph out, or compute the penalty in a module of a stage, with torch.autograd.grad there",
        )
