"""The auxiliary losses of a model's layers of experts, to be shown or to be added to its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from whale_torch.comm.added_loss import to_be_added
from whale_torch.errors import LossError
from whale_torch.moe.layer import MoELayer
from whale_torch.strategies.root import root_of
from whale_torch.strategies.runtime import runtime_of

__all__ = ["aux_loss"]


def aux_loss(model: nn.Module, *, added: bool = False) -> Tensor:
    """The sum of the auxiliary losses of all MoE layers of a model in their last calls, coefficients applied.

    Their gradient is added at the gates already: this is the number for the log. added: it is added to the loss by the
    loop, `loss + aux_loss(model, added=True)`, and all that the loop does to the sum (a scaler, 1 / k, other weights)
    does it to the gradient too; it is not added twice. In a pipeline it is of the last micro-batch, and of this rank's
    stages: wh.moe.load(model) tells of all.
    Raises: LossError for added=True inside the forward of a model that runs on several ranks.
    """
    layers = [m for m in model.modules() if isinstance(m, MoELayer) and m.load is not None]
    losses = [layer.load.loss for layer in layers if layer.load is not None]
    loss = torch.stack(losses).sum() if losses else torch.zeros(())
    if not added or not torch.is_grad_enabled():
        return loss
    root = root_of(layers)
    if root is not None and getattr(runtime_of(root, "aux_loss"), "call", None) is not None:
        raise LossError(
            f"aux_loss(added=True) inside the forward of {type(root).__name__}, whose outputs are weighed by rows.",
            fix="loss = loss + aux_loss(model, added=True) in the loop; or aux_loss(model), whose gradient is there",
        )
    gates = [parameter for layer in layers for parameter in layer.gate.parameters()]
    return to_be_added(loss, [layer._added_loss for layer in layers], gates)
