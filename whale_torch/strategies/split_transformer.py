"""nn.TransformerEncoder and its layers around split members: no eval fast path reads a shard past its module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from whale_torch.strategies.copies import Replacement
from whale_torch.strategies.split_rules import SplitModule, joined_class

__all__ = ["switch_off_fast_paths"]


def switch_off_fast_paths(model: nn.Module) -> None:
    """In eval mode these modules would read their members' weights, which are shards where the members are split."""
    for module in list(model.modules()):
        if not isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerEncoder)):
            continue
        if any(isinstance(member, SplitModule) for member in module.modules()):
            if isinstance(module, nn.TransformerEncoderLayer):
                module.__dict__["activation_relu_or_gelu"] = 0
            elif getattr(module, "use_nested_tensor", False):
                module.__dict__["use_nested_tensor"] = False
                module.__class__ = joined_class(_PaddedEncoder, type(module))


class _PaddedEncoder(Replacement, nn.TransformerEncoder):
    """An encoder that gives, where torch's would have used nested tensors, what they give: no values at padding."""

    def _get_name(self) -> str:
        return self._base().__name__

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        make, arguments, state = super().__reduce_ex__(protocol)
        return make, arguments, {**state, "use_nested_tensor": True}

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        out = super().forward(src, mask, src_key_padding_mask, is_causal)
        if src_key_padding_mask is None or not self._would_nest(src, mask):
            return out
        keep = src_key_padding_mask.logical_not()
        if bool((keep[:, 1:] & ~keep[:, :-1]).any()):  # padding on the left or between: torch pads as we do
            return out
        nothing = out.new_zeros(out.shape[-1])
        return torch.where(keep.unsqueeze(-1), out, nothing if self.norm is None else self.norm(nothing))

    def _would_nest(self, src: Tensor, mask: Tensor | None) -> bool:
        first = self.layers[0]
        wants_gradient = torch.is_grad_enabled() and (
            src.requires_grad or any(p.requires_grad for p in first.parameters())
        )
        fast = torch.backends.mha.get_fastpath_enabled() and not torch.is_autocast_enabled()
        return fast and mask is None and not first.training and not wants_gradient
