"""A copy of a model without memory: its parameters and buffers are fake tensors, its modules can be called."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from whale_torch.trace.graph import map_leaves
from whale_torch.trace.tweaks import tweak

__all__ = ["Twin"]


@dataclass(frozen=True)
class Twin:
    """A model's copy: what is recorded runs on it, so that the model itself, its hooks' memory, buffers and random
    state stay as they are, whatever was cut, moved or freed of it.

    module: the copy. fake: the mode that its tensors live in. device: where its tensors seem to lie.
    """

    module: nn.Module
    fake: FakeTensorMode
    device: torch.device

    @staticmethod
    def of(model: nn.Module, device: torch.device) -> Twin:
        """The copy of a model as it would be on `device`; parameters on the meta device count as if they were there."""
        fake = FakeTensorMode(allow_non_fake_inputs=True)

        def like(x: Tensor) -> Tensor:
            with fake:
                return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            memo[id(parameter)] = nn.Parameter(like(parameter), requires_grad=parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = like(buffer)
        module = copy.deepcopy(model, memo)
        tweak(module)
        return Twin(module, fake, device)

    def follow(self, model: nn.Module) -> None:
        """Takes over what may change between forwards: which modules train and which parameters are frozen."""
        for mine, theirs in zip(self.module.modules(), model.modules(), strict=True):
            mine.training = theirs.training
        for parameter, original in zip(self.module.parameters(), model.parameters(), strict=True):
            parameter.requires_grad_(original.requires_grad)

    def inputs(self, args: Any, resize: tuple[int, int, int] | None = None) -> Any:
        """The nest with each tensor as the recording sees it; resize: see `record`."""
        dim, size, other = resize or (0, -1, -1)

        def like(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if x.dim() > dim and x.shape[dim] == size:
                shape = (*x.shape[:dim], other, *x.shape[dim + 1 :])
                with self.fake:
                    return torch.empty(shape, dtype=x.dtype, device=self.device)
            return self.fake.from_tensor(x.detach()).to(self.device)

        return map_leaves(args, like)
