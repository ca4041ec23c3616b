"""The norm of all gradients of a parallelized model: one small all-reduce for every layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whale_torch.annotation import annotations_of
from whale_torch.comm.collectives import all_reduce
from whale_torch.comm.registry import ParameterPlace, by_name, place_of
from whale_torch.comm.scale import renew_samples
from whale_torch.errors import LossError, PlanError
from whale_torch.mesh import surroundings
from whale_torch.strategies.runtime import is_parallelized

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales gradients so that their norm, over all parameters as one process would have them, is at most `max_norm`.

    parameters: a model or parameters of one, the same on every rank. norm_type: p > 0, "inf" for the largest entry.
    foreach: as in torch. Returns the norm before scaling, equal on every rank. On parameters of no parallelized model
    it is torch.nn.utils.clip_grad_norm_.
    Raises LossError, on every rank, if asked to and the norm is not finite; PlanError for a norm_type that is not a
    norm, for parameters of which only some belong to a parallelized model, and where several ranks run and the model
    has scopes but was not parallelized.
    """
    if isinstance(parameters, nn.Module):
        _check_parallelized(parameters)
        parameters = parameters.parameters()
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    places = [place_of(p) for p in listed]
    if not any(places):
        return nn.utils.clip_grad_norm_(listed, max_norm, norm_type, error_if_nonfinite, foreach)
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise PlanError(f"wh.clip_grad_norm_: norm_type is {norm_type:g}.", fix='use a number above 0, or "inf"')
    _check_places(listed, places)
    total = _total_norm(by_name(listed), norm_type, foreach)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise LossError(
            f"the norm of order {norm_type:g} of the gradients of {len(listed)} parameters is {float(total)}.",
            fix="look for the first operation that overflows, or clip with error_if_nonfinite=False",
        )
    _scale(listed, max_norm, total, foreach)
    renew_samples(listed)
    return total


def _check_parallelized(model: nn.Module) -> None:
    """Raises PlanError where several ranks run and wh.parallelize was forgotten."""
    if is_parallelized(model) or (surroundings().world or 1) == 1:
        return
    found = next((annotation for m in model.modules() for annotation in annotations_of(m)), None)
    if found is not None:
        raise PlanError(
            f"wh.clip_grad_norm_ got a {type(model).__name__} with scopes that is not parallelized: each of "
            f"{surroundings().world} ranks would train a model of its own.",
            where=found.site,
            fix="model = wh.parallelize(model) first",
        )


def _check_places(parameters: list[Tensor], places: list[ParameterPlace | None]) -> None:
    """Raises PlanError where some parameters have no place."""
    outside = [i for i, place in enumerate(places) if place is None]
    if outside:
        raise PlanError(
            f"wh.clip_grad_norm_ got {len(parameters)} parameters, of which {len(outside)} belong to no parallelized "
            f"model (the first is number {outside[0]}, of shape {tuple(parameters[outside[0]].shape)}).",
            fix="clip those of each model apart",
        )


def _total_norm(parameters: list[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    """The ranks that hold copies of a part share the work: each gradient is counted once, by one of them.

    parameters: placed ones, in one order on all ranks.
    """
    places = [place for p in parameters if (place := place_of(p)) is not None]
    mine = []
    for number, (parameter, place) in enumerate(zip(parameters, places, strict=True)):
        if parameter.grad is not None and number % place.copies.size == place.copies.index:
            grad = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
            if grad.numel():
                mine.append(grad)
    like = next((p.grad for p in parameters if p.grad is not None), parameters[0])
    local = nn.utils.get_total_norm(mine, norm_type, foreach=foreach).to(like.device, torch.float64)
    if norm_type == float("inf"):
        pair = torch.stack([local.nan_to_num(0.0, float("inf")), local.isnan().to(local)])  # MAX may drop a NaN
        top, is_nan = all_reduce(pair, places[0].everyone, op=dist.ReduceOp.MAX, name="largest gradient")
        total = torch.where(is_nan > 0, torch.full_like(top, float("nan")), top)
    else:
        total = all_reduce((local**norm_type).reshape(1), places[0].everyone, name="gradient norm") ** (1.0 / norm_type)
    return total.reshape(()).to(like.real.dtype if like.is_complex() else like.dtype)


def _scale(parameters: list[Tensor], max_norm: float, total: Tensor, foreach: bool | None) -> None:
    dense = [p for p in parameters if p.grad is not None and not p.grad.is_sparse]
    nn.utils.clip_grads_with_norm_(dense, max_norm, total, foreach)
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad.mul_(torch.clamp(max_norm / (total + 1e-6), max=1.0))
