"""replica: equal first values on all ranks that hold a copy, and the reducers that keep them equal."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from whale_torch.comm.collectives import broadcast_copy
from whale_torch.comm.cut_tensor import CutTensor
from whale_torch.comm.gradients import GradientReducer
from whale_torch.comm.reducer import Reducer
from whale_torch.comm.reduction import Reduction
from whale_torch.comm.registry import ParameterPlace, place_of, set_place
from whale_torch.comm.sparse_reducer import SparseReducer
from whale_torch.errors import PlanError
from whale_torch.mesh import Group, Mesh
from whale_torch.planning.plan import Plan, Reduce

__all__ = ["equalize", "group_of_copies", "make_reducers", "place_whole_parameters", "sparse_parameters"]


def place_whole_parameters(model: nn.Module, mesh: Mesh) -> None:
    """Notes for every parameter that is not cut that all ranks hold a copy."""
    for name, parameter in model.named_parameters():
        if place_of(parameter) is None:
            set_place(parameter, ParameterPlace(name, mesh.everyone()))


@torch.no_grad()
def equalize(model: nn.Module, mesh: Mesh, buffers: Mapping[str, Group] | None = None) -> None:
    """Copies every parameter and buffer from the first rank that holds it.

    buffers: those that not all ranks hold, and the ranks that do.
    """
    for name, parameter in model.named_parameters():
        place = place_of(parameter)
        assert place is not None
        if place.copies.size > 1 and place.held:
            _broadcast(parameter.data, place.copies, name, mesh.device)
    if mesh.world > 1:
        everyone = mesh.everyone()
        for name, buffer in model.named_buffers():
            group = (buffers or {}).get(name, everyone)
            if group.size > 1 and not isinstance(buffer, CutTensor):  # else another rank's
                _broadcast(buffer, group, name, mesh.device)


def _broadcast(x: Tensor, group: Group, name: str, device: torch.device) -> None:
    first = broadcast_copy(x.to(device), group, name=f"first values of {name}")
    for dim, stride in enumerate(x.stride()):
        if stride == 0:  # expanded: one value stands for all
            x, first = x.narrow(dim, 0, min(1, x.shape[dim])), first.narrow(dim, 0, min(1, x.shape[dim]))
    x.copy_(first)


def make_reducers(model: nn.Module, plan: Plan, mesh: Mesh) -> list[GradientReducer]:
    """One reducer for every group of gradients that the plan averages together, of what is trained now."""
    # by the names of the plan: a module may be wrapped since, and be called otherwise
    parameters = {place.name: p for p in model.parameters() if (place := place_of(p)) is not None}
    sparse = sparse_parameters(model)
    reducers: list[GradientReducer] = []
    for number, reduce in enumerate(plan.reduces):
        device = plan.device(reduce.device)
        present = [parameters[name] for name in reduce.parameters if name in parameters]
        chosen = [parameter for parameter in present if parameter.requires_grad]
        dense = [parameter for parameter in chosen if id(parameter) not in sparse]
        if dense:
            _check_dtypes(dense)
            copies = group_of_copies(reduce, plan, mesh, f"gradients {number}")
            reduction = Reduction(copies, reduce.wire_dtype(dense[0].dtype.to_real()), levels=copies.levels)
            reducers.append(
                Reducer(dense, reduction, bucket_bytes=reduce.bucket_bytes, max_in_flight=reduce.max_in_flight)
            )
        if len(dense) < len(chosen):
            copies = mesh.group(f"copies of {reduce.device}", device.copies, channel="sparse gradients")
            reducers.append(SparseReducer([parameter for parameter in chosen if id(parameter) in sparse], copies))
    return reducers


def _check_dtypes(parameters: list[nn.Parameter]) -> None:
    """Raises PlanError where parameters that are averaged together no longer have one dtype."""
    for parameter in parameters:
        if parameter.dtype is not parameters[0].dtype:
            names = [place.name if (place := place_of(p)) else "?" for p in (parameters[0], parameter)]
            raise PlanError(
                f"since wh.parallelize a part of the model was converted: '{names[0]}' is {parameters[0].dtype}, "
                f"'{names[1]}' is {parameter.dtype}, and their gradients are averaged together.",
                fix="convert the whole model (model.double()), or a part of it before wh.parallelize",
            )


def sparse_parameters(model: nn.Module) -> set[int]:
    """The weights whose gradients their modules make sparse."""
    return {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse}


def group_of_copies(reduce: Reduce, plan: Plan, mesh: Mesh, channel: str) -> Group:
    """The ranks whose gradients are averaged, in two levels where the plan says so."""
    join = mesh.two_levels if reduce.algorithm == "hierarchical" else mesh.group
    return join(f"copies of {reduce.device}", plan.device(reduce.device).copies, channel=channel)
