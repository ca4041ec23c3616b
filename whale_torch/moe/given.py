"""What a layer of experts is called with: tokens, which of them are padding, their ids."""

from __future__ import annotations

import torch
from torch import Tensor

from whale_torch.comm.columns import Columns
from whale_torch.errors import LayoutError, PlanError
from whale_torch.moe.gate import Gate
from whale_torch.moe.gates import Hash

__all__ = ["check_given", "rows_of_tokens"]


def rows_of_tokens(x: Tensor) -> Tensor:
    """Tokens with all their features, where a split gave each rank some of them."""
    return x.implicit_rows("a layer of experts") if isinstance(x, Columns) else x


def check_given(x: Tensor, mask: Tensor | None, token_ids: Tensor | None, dim: int, gate: Gate) -> None:
    """Raises LayoutError for tensors that do not fit a layer of that width, PlanError for ids that its gate ignores."""
    if x.dim() < 1 or x.shape[-1] != dim:
        raise LayoutError(
            f"x has shape {tuple(x.shape)}, and the layer is for [..., {dim}].",
            fix=f"tokens of {dim} numbers, or a layer of another dim",
        )
    if mask is not None and (mask.shape != x.shape[:-1] or mask.dtype != torch.bool):
        raise LayoutError(
            f"mask is {mask.dtype} of shape {tuple(mask.shape)} for x of shape {tuple(x.shape)}.",
            fix=f"bool, of shape {tuple(x.shape[:-1])}: True for tokens, False for padding",
        )
    if token_ids is None:
        return
    if not isinstance(gate, Hash):
        raise PlanError(
            f"token_ids are given, and a {type(gate).__name__} gate does not choose by them.",
            fix="gate=moe.Hash(num_tokens, num_experts), or leave token_ids out",
        )
    whole = not (token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool)
    if token_ids.shape != x.shape[:-1] or not whole:
        raise LayoutError(
            f"token_ids are {token_ids.dtype} of shape {tuple(token_ids.shape)} for x of shape {tuple(x.shape)}.",
            fix=f"whole numbers, of shape {tuple(x.shape[:-1])}",
        )
