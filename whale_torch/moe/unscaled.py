"""A step of torch's own GradScaler, which scales the loss and not the gradients that layers of experts add to it."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from whale_torch.comm.added_loss import AddedLoss
from whale_torch.comm.amp import stepping_scaler
from whale_torch.errors import PlanError

__all__ = ["watch_scale"]

_LAYERS: weakref.WeakKeyDictionary[nn.Module, AddedLoss] = weakref.WeakKeyDictionary()


def watch_scale(layer: nn.Module, loss: AddedLoss) -> None:
    """Has steps of an optimizer that trains the layer look whether its loss was scaled as the model's was."""
    _LAYERS[layer] = loss


def _before(optimizer: Optimizer, *_: Any) -> None:
    suspects = [(layer, loss) for layer, loss in list(_LAYERS.items()) if loss.by_itself is not None]
    if not suspects:
        return
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    scaler = stepping_scaler()
    for layer, loss in suspects:
        if any(id(p) in trained for p in layer.parameters()):
            factor, loss.by_itself = loss.by_itself, None
            scale = 1.0 if scaler is None else scaler.get_scale()
            if scale != 1.0 and factor is not None and factor <= 1.0:
                raise _unscaled(layer, scale, factor)


def _unscaled(layer: nn.Module, scale: float, factor: float) -> PlanError:
    return PlanError(
        f"a GradScaler multiplied the loss by {scale:g}, and the gradient of the auxiliary loss of a "
        f"{layer._get_name()} was multiplied by {factor:g}.",
        fix="scaler.scale(loss + aux_loss(model, added=True)), or wh.GradScaler(model)",
    )


register_optimizer_step_pre_hook(_before)
