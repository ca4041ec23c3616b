"""The true mean of cross entropies that a model takes inside its forward (docs/design.md 5.3)."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from whale_torch.comm.bridge import ScaleBackward
from whale_torch.comm.call import Anchor, Call
from whale_torch.comm.columns import user_site
from whale_torch.comm.loss import divided
from whale_torch.comm.loss_counts import LossCounts
from whale_torch.comm.loss_watch import Loss, watch
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

    def __enter__(self) -> None:
        self._watch.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self._watch.__exit__(kind, *rest)
        if kind is None:
            self.finish()

    def finish(self) -> None:
        """Starts the exchange of counts, of which this rank may have none."""
        self._counts.start(self._call.send)
        _latest[self._call.anchor] = self._counts
        self._call.before_backward = self._counts.settle

    def _true_mean(self, out: Tensor, loss: Loss) -> Tensor:
        keep = loss.target != loss.ignore_index
        if loss.weight is None:
            mine = keep.sum()
        else:
            mine = (loss.weight.to(torch.float64)[loss.target.masked_fill(~keep, 0)] * keep).sum()
        number, call, counts = self._counts.add(mine, user_site()), self._call, self._counts

        def factor() -> Tensor:
            return divided(mine.to(torch.float64), counts.mean(number) * call.weight())

        scaled: Tensor = ScaleBackward.apply(out, factor)  # type: ignore[no-untyped-call]
        return scaled
