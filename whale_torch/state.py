"""The state of a parallelized model as a user reads it: whole tensors, values over all replicas, synchronisation."""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whale_torch.comm.collectives import all_to_all_rows, broadcast_copy
from whale_torch.comm.registry import place_of
from whale_torch.errors import PlanError
from whale_torch.strategies.runtime import runtime_of

__all__ = ["full_state_dict", "full_tensor", "no_sync", "reduce"]

Value = TypeVar("Value", float, Tensor)


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within it, gradients accumulate on each rank without being averaged; the next backward outside averages the sum.

    Raises PlanError for a model that is not parallelized.
    """
    return runtime_of(model, "wh.no_sync").no_sync()


def full_tensor(parameter: Tensor, value: Tensor | None = None) -> Tensor:
    """The whole of a cut parameter (or of a value of its shape, such as its gradient): a collective over its parts."""
    place = place_of(parameter)
    value = parameter.detach() if value is None else value
    if place is None or place.shard is None or place.parts is None:
        return value.clone()
    parts, shard = place.parts, place.shard
    if parts.size == 1:
        return value.clone()
    sizes = [torch.Size(shard.local_shape(i)).numel() for i in range(parts.size)]
    flat = value.contiguous().view(-1)
    spread = flat.repeat(parts.size)
    gathered = all_to_all_rows(spread, [flat.numel()] * parts.size, sizes, parts, name=f"whole of {place.name}")
    return shard.join([part.view(shard.local_shape(i)) for i, part in enumerate(gathered.split(sizes))])


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state_dict of the model as one process would have it, with whole tensors: a collective, on every rank.

    Buffers that differ between ranks (running statistics of a local BatchNorm) are rank 0's on every rank.
    Raises PlanError for a model that is not parallelized.
    """
    mesh = runtime_of(model, "wh.full_state_dict").mesh
    by_name = dict(model.named_parameters(remove_duplicate=False))

    def whole(key: str, value: Any) -> Any:
        if key in by_name:
            return full_tensor(by_name[key])
        return broadcast_copy(value, mesh.everyone(), name=f"buffer {key}") if isinstance(value, Tensor) else value

    return {key: whole(key, value) for key, value in model.state_dict().items()}


def reduce(value: Value, how: str = "mean", *, weight: float = 1.0) -> Value:
    """A metric over all replicas, equal on every rank.

    how: "mean" of the ranks' values, weighed by `weight` (the number of samples behind this rank's value; with 0 the
    value, even NaN, has no part), or "sum". Raises PlanError for any other `how`.
    """
    if how not in ("mean", "sum"):
        raise PlanError(f'wh.reduce knows "mean" and "sum", got {how!r}.', fix='wh.reduce(value, "mean")')
    x = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
    both = torch.stack([x.to(torch.float64) * weight if weight else torch.zeros_like(x, dtype=torch.float64), torch.full_like(x, weight, dtype=torch.float64)])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(both)
    total = both[0] if how == "sum" else both[0] / both[1]
    return total.to(x.dtype) if isinstance(value, Tensor) else float(total)
