"""GradScaler: torch's, with one answer on all ranks to the question whether a gradient overflowed."""

from __future__ import annotations

import torch
from torch import nn

from whale_torch.comm.collectives import all_reduce
from whale_torch.comm.scale import renew_samples
from whale_torch.strategies.runtime import runtime_of

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for a parallelized model: all ranks skip a step together, so their scales stay equal.

    A rank sees only the gradients of its own parts; unscale_ and step, which every rank must call, combine what they
    found in one small all-reduce. Use as torch's, with wh.clip_grad_norm_ between unscale_ and step.
    device: the type of the model's device by default. The other arguments are torch's.
    Raises PlanError for a model that is not parallelized.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ):
        runtime = runtime_of(model, "wh.GradScaler")
        mesh = runtime.mesh
        self._everyone, self._model_device = mesh.everyone(), mesh.device
        super().__init__(
            device or mesh.device.type, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        if enabled:
            runtime.scale_losses(self.get_scale)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Both ways to a step, unscale_ and that of fused optimizers, come through here once, as in FSDP's scaler."""
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        renew_samples(p for group in optimizer.param_groups for p in group["params"])
        # second number: whether any rank saw a gradient at all; where none did, torch says so
        seen = torch.zeros(2, device=self._model_device)
        for value in found.values():
            seen[0] += value.to(seen.device)
            seen[1] += 1
        all_reduce(seen, self._everyone, name="overflow of scaled gradients")
        if not bool(seen[1]):
            return found
        for value in found.values():
            value.copy_(seen[0])
        return found or {self._model_device: seen[0].clone()}
