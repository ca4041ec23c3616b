"""Initial values that do not depend on the layout: one module at a time, seeded by its name, cut, and dropped."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import nn

from whale_torch.errors import PlanError
from whale_torch.planning.layout import Shard

__all__ = ["is_meta", "materialize"]

InitFunction = Callable[[nn.Module], None]


def is_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer has no memory yet."""
    return any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


def materialize(model: nn.Module, shards: dict[str, Shard], index_of: dict[str, int], *, seed: int, init_fn: InitFunction | None) -> None:
    """Gives every meta parameter its initial values; a rank keeps only its shards, and at most one module is whole at a time.

    Children come first, since a parent's reset may overwrite them (nn.MultiheadAttention). init_fn(module) replaces
    reset_parameters() where a model has an initialiser of its own. shards, index_of: by parameter name.
    Raises PlanError for a module with meta parameters and no way to initialise them.
    """
    with torch.random.fork_rng(devices=[]):
        for name, module in reversed(list(model.named_modules())):
            own = {key: p for key, p in module._parameters.items() if p is not None and p.is_meta}
            buffers = {key: b for key, b in module._buffers.items() if b is not None and b.is_meta}
            if not own and not buffers:
                continue
            _fill(module, name, seed, init_fn)
            for key in own:
                full = f"{name}.{key}" if name else key
                if full in shards:
                    parameter = module._parameters[key]
                    assert parameter is not None
                    parameter.data = shards[full].cut(parameter.data, index_of[full])


def _fill(module: nn.Module, name: str, seed: int, init_fn: InitFunction | None) -> None:
    for key, tensor in module._parameters.items():
        if tensor is not None and tensor.is_meta:
            real = nn.Parameter(torch.empty_like(tensor, device="cpu"), requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, real)
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = torch.empty_like(buffer, device="cpu")
    torch.manual_seed(_seed(seed, name))
    reset = init_fn and (lambda: init_fn(module)) or getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is None:
        raise PlanError(
            f"module '{name}' ({type(module).__name__}) was built on the meta device and has no reset_parameters().",
            fix="give wh.parallelize(init_fn=lambda module: ...), or build the model with memory",
        )
    with torch.no_grad():
        reset()
