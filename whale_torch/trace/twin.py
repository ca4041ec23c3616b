"""A copy of a model without memory: its parameters and buffers are fake tensors, its modules can be called."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from whale_torch.errors import TraceError
from whale_torch.trace.graph import OF_TORCH, leaves_in, map_leaves
from whale_torch.trace.sample_dims import Dims
from whale_torch.trace.settings import follow
from whale_torch.trace.tweaks import tweak

__all__ = ["Twin", "copy_of"]


def copy_of(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deepcopy. Raises TraceError for a model that cannot be copied."""
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, AttributeError, RuntimeError, pickle.PicklingError) as error:
        raise TraceError(
            f"a pipeline is planned on copies of its model, and this {type(model).__name__} cannot be copied: "
            f"{type(error).__name__}: {error}",
            fix="make what cannot be copied (a lock, a generator, a tensor with a graph) inside the forward, or give "
            "its owner a __deepcopy__",
        ) from error


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
        for x in _computed(model):
            memo[id(x)] = like(x)
        module = copy_of(model, memo)
        tweak(module)
        return Twin(module, fake, device)

    def follow(self, model: nn.Module) -> None:
        """Takes over what may change between forwards: which modules train, which parameters are frozen, dtypes, and
        plain attributes. The model has the modules and parameters that it was copied with."""
        exchanged: dict[int, Tensor] = {}
        memo: dict[int, Any] = {}
        for mine, theirs in zip(self.module.modules(), model.modules(), strict=True):
            memo[id(theirs)] = mine
            for held, given in ((mine._parameters, theirs._parameters), (mine._buffers, theirs._buffers)):
                memo |= {id(x): held[key] for key, x in given.items() if key in held and x is not None}
        for mine, theirs in zip(self.module.modules(), model.modules(), strict=True):
            mine.training = theirs.training
            follow(mine, theirs, memo)
            for held, given in ((mine._parameters, theirs._parameters), (mine._buffers, theirs._buffers)):
                for key, x in given.items():
                    self._convert(held, key, x, exchanged)
        tweak(self.module)
        for parameter, original in zip(self.module.parameters(), model.parameters(), strict=True):
            parameter.requires_grad_(original.requires_grad)

    def _convert(self, held: dict[str, Any], key: str, original: Tensor | None, exchanged: dict[int, Tensor]) -> None:
        """Exchanges a tensor of the copy whose original has another dtype now; tied ones stay tied."""
        x = held.get(key)
        if x is None or original is None or x.dtype is original.dtype:
            return
        if id(x) not in exchanged:
            with self.fake:
                new = torch.empty_strided(x.shape, x.stride(), dtype=original.dtype, device=x.device)
            exchanged[id(x)] = nn.Parameter(new, requires_grad=False) if isinstance(x, nn.Parameter) else new
        held[key] = exchanged[id(x)]

    def inputs(self, args: Any, dims: Dims | None = None, rows: int = 0) -> Any:
        """The nest with each tensor as the recording sees it; dims, rows: see `record`."""
        own = None if dims is None else iter(dims)

        def like(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            dim = None if own is None else next(own)
            if dim is not None:
                shape = (*x.shape[:dim], rows, *x.shape[dim + 1 :])
                with self.fake:
                    return torch.empty(shape, dtype=x.dtype, device=self.device)
            seen = x.clone() if x.is_inference() else x.detach()
            return self.fake.from_tensor(seen).to(self.device)

        return map_leaves(args, like)


def _computed(model: nn.Module) -> Iterator[Tensor]:
    """Tensors among the attributes of modules that are part of a graph, which torch refuses to copy."""
    for module in model.modules():
        for key, value in vars(module).items():
            if key not in OF_TORCH:
                yield from (x for x in leaves_in(value) if isinstance(x, Tensor) and x.grad_fn is not None)
