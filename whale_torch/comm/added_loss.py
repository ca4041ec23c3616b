"""Losses that a module adds by itself: how large their gradient has to be, whatever a loop does to its loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from whale_torch.comm.loss_part import WHOLE, LossPart, loss_part
from whale_torch.errors import LossError

__all__ = ["AddedLoss", "to_be_added"]


class AddedLoss:
    """Of one module. It is as large as that of a loss that is added to the model's: by what flows into the tensor that
    `to_be_added` made, where the loop did add it, else by what the module was told.

    by_itself: the factor of the loop by which gradients were multiplied since somebody last looked, without a scaler
    or a graph that tells more; None: there were none.
    """

    def __init__(self) -> None:
        self.by_itself: float | None = None
        self._part = WHOLE
        self._forwards = 0
        self._flows_in: Tensor | None = None
        self._alone: tuple[int, int] | None = None  # (backward, forward) that was not told by the graph

    def __deepcopy__(self, memo: dict[int, Any]) -> AddedLoss:
        return AddedLoss()

    def __reduce__(self) -> tuple[Any, ...]:
        return AddedLoss, ()

    def part(self) -> LossPart:
        """Of the forward that runs. One within a backward is a checkpoint's second, when the model's is long over."""
        found = loss_part()
        if torch._C._current_graph_task_id() == -1:
            self._part, self._flows_in = found, None
            self._forwards += 1
            return found
        return self._part if found is WHOLE else found

    def multiplier(self, part: LossPart, factor: float) -> Callable[[], Tensor | float]:
        """What gradients of the forward that runs are multiplied by, asked in backward. factor: the loop's, as told;
        gradients that are delivered later are multiplied by it then."""
        number = self._forwards
        factor = 1.0 if part.delivered else factor

        def now() -> Tensor | float:
            if self._flows_in is not None and not part.delivered:
                return self._flows_in
            backward = torch._C._current_graph_task_id()
            if self._alone is None or self._alone[0] != backward or number < self._alone[1]:
                self._alone = backward, number
            if part.scale is not None:
                return factor * part.scale()
            if not part.delivered:
                self.by_itself = factor
            return factor

        return now

    def _reached(self, grad: Tensor, forwards: int) -> None:
        if self._alone is not None and self._alone[0] == torch._C._current_graph_task_id():
            if self._alone[1] <= forwards:
                raise LossError(
                    "backward came to a layer before it came to the auxiliary loss that was added to the model's.",
                    fix="take aux_loss(model, added=True) behind the model's forward, and add it on the same device",
                )
        self._flows_in = grad
        torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def _ended(self) -> None:
        self._flows_in = None


def to_be_added(value: Tensor, losses: Sequence[AddedLoss], parameters: Sequence[Tensor]) -> Tensor:
    """`value`, a number, to be added to a loss: what flows into it says how large the gradients of losses are.

    parameters: with a gradient of these a backward comes by.
    """
    leaf = torch.zeros((), device=value.device, requires_grad=True)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    out: Tensor = _ToBeAdded.apply(value, losses, leaf, *trained)  # type: ignore[no-untyped-call]
    return out


class _ToBeAdded(torch.autograd.Function):
    """Made after all of a forward, so that a backward comes here first: autograd goes by the order of making."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, losses: Sequence[AddedLoss], *_: Tensor) -> Tensor:
        ctx.losses, ctx.forwards, ctx.number = losses, [loss._forwards for loss in losses], len(_)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        for loss, forwards in zip(ctx.losses, ctx.forwards, strict=True):
            loss._reached(grads[0].detach(), forwards)
        return (None, None, *[None] * ctx.number)
