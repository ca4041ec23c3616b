"""The true mean of cross entropies that a model takes inside its forward (docs/design.md 5.3)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from whale_torch.comm.call import Anchor, Call
from whale_torch.comm.columns import user_lines
from whale_torch.comm.loss import divided
from whale_torch.comm.loss_counts import LossCounts
from whale_torch.comm.loss_watch import Loss, watch
from whale_torch.errors import LossError
from whale_torch.mesh import Group

__all__ = ["TrueMeanLoss"]

_latest: WeakKeyDictionary[Anchor, LossCounts] = WeakKeyDictionary()
"""Of each model, by its anchor: the losses of its last forward."""


class TrueMeanLoss:
    """While the model's forward runs: a mean over ignored or weighted labels gets the gradient of the global mean.

    The value stays the rank's own mean. Loss functions on Columns do this themselves. Every rank enters it, also one
    that calls no loss: the ranks' counts of labels are exchanged at its end.
    """

    def __init__(self, call: Call, copies: Group):
        self._call = call
        self._counts = LossCounts(copies, call.anchor.zero.device, _latest.get(call.anchor))
        self._watch = watch(self._true_mean)
        self._caller: FrameType | None = None

    def __enter__(self) -> None:
        self._caller = sys._getframe(1)
        self._watch.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self._caller = None
        self._watch.__exit__(kind, *rest)
        if kind is None:
            self.finish()

    def finish(self) -> None:
        """Starts the exchange of counts, of which this rank may have none."""
        self._counts.start(self._call.send)
        _latest[self._call.anchor] = self._counts
        self._call.before_backward = self._counts.settle

    def _true_mean(self, out: Tensor, loss: Loss) -> Tensor:
        target = loss.target.long()  # torch takes bytes too
        keep = target != loss.ignore_index
        if loss.weight is None:
            mine = keep.sum()
        else:
            mine = (loss.weight.to(torch.float64)[target.masked_fill(~keep, 0)] * keep).sum()
        number, call, counts = self._counts.add(mine, user_lines(self._caller)), self._call, self._counts

        def factor() -> Tensor | None:
            if not counts.started:
                _check_inside(call)
                return None
            return divided(mine.to(torch.float64), counts.mean(number) * call.weight())

        scaled: Tensor = _TrueMean.apply(out, factor)  # type: ignore[no-untyped-call]
        return scaled


def _check_inside(call: Call) -> None:
    """Raises LossError where a backward() inside the model's forward gives gradients to the model itself."""
    if call.accumulates():
        raise LossError(
            "backward() inside the model's own forward: its gradients would be weighed by no rows.",
            fix="return the loss and call backward() on it outside, or take torch.autograd.grad(loss, ...) inside",
        )


class _TrueMean(torch.autograd.Function):
    """Identity on a loss; backward multiplies by a factor, None while the forward runs: there the mean is the rank's
    own, for the inner steps of a model that learns to learn."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: Callable[[], Tensor | None]) -> Tensor:
        ctx.factor = factor
        return loss.detach()  # no view to autograd, so that the model may add to it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        factor = ctx.factor()
        if factor is None:
            return grad, None
        if torch.is_grad_enabled():
            raise LossError(
                "a second derivative (create_graph=True) of a mean over labels that a model takes inside its forward.",
                fix="take the gradient inside the forward too, where the mean is the rank's own, or give the model "
                'F.cross_entropy(..., reduction="sum") divided by a number of your own',
            )
        return grad * factor.to(grad.dtype), None
