"""CutTensor: what state_dict() gives for a cut parameter. It works in memory and refuses to be written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from whale_torch.comm.collectives import all_gather_rows, broadcast_copy
from whale_torch.comm.registry import ParameterPlace, refuse_to_write

__all__ = ["CutTensor", "join"]


class CutTensor(Tensor):
    """This rank's part of a parameter, over the parameter's own memory, that knows it is a part.

    It can be copied, compared, computed with and loaded back; what is computed from parts is of parts, and numbers are
    plain. Pickling it (torch.save), or reaching its memory as numpy and safetensors do, raises CheckpointError: a file
    would hold one rank's part under the whole parameter's name.
    """

    _place: ParameterPlace

    @staticmethod
    def of(local: Tensor, place: ParameterPlace) -> CutTensor:
        """A view of `local`, the part that `place` speaks of."""
        part: CutTensor = _mark(local.detach(), place)
        return part

    @property
    def place(self) -> ParameterPlace:
        return self._place

    def part(self) -> Tensor:
        """The same memory as a plain tensor."""
        plain: Tensor = self.as_subclass(Tensor)
        return plain

    def whole(self) -> Tensor:
        """The parameter from the parts of all ranks: a collective over them."""
        return join(self.part(), self._place)

    def __copy__(self) -> CutTensor:
        return CutTensor.of(self.part(), self._place)

    def __deepcopy__(self, memo: dict[int, Any]) -> CutTensor:
        return CutTensor.of(self.part().clone(), self._place)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refuse_to_write(self._place)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shard, parts = self._place.shard, self._place.parts
        if not self._place.held:
            return f"CutTensor('{self._place.name}' {tuple(self.part().shape)}, of another rank's stage)"
        assert shard is not None and parts is not None
        where = f"part {parts.index} of {parts.size} of '{self._place.name}' {shard.shape}"
        return f"CutTensor({where}, {self.part()!r})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        place = next(_places((args, kwargs or {})))
        if func in _REACH_MEMORY:
            raise refuse_to_write(place)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            return out if func is Tensor.as_subclass else _mark(out, place)


# how numpy, safetensors and other writers come to a tensor's bytes
_REACH_MEMORY = {
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.data_ptr,
    Tensor.storage,
    Tensor.untyped_storage,
}


def _places(value: Any) -> Any:
    if isinstance(value, CutTensor):
        yield value._place
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _places(item)
    elif isinstance(value, dict):
        yield from _places(list(value.values()))


def _mark(value: Any, place: ParameterPlace) -> Any:
    if isinstance(value, Tensor) and value.dim() and not isinstance(value, CutTensor):
        part = value.as_subclass(
            CutTensor
        )  # keeps the graph: a penalty on the distance from kept values has a gradient
        part._place = place
        return part
    if type(value) in (tuple, list):
        return type(value)(_mark(item, place) for item in value)
    return value


@torch.no_grad()
def join(part: Tensor, place: ParameterPlace) -> Tensor:
    """The whole tensor from what the ranks of `place.parts`, or of the pipeline, hold: a collective over them."""
    whole = _of_parts(part, place)
    if place.pipeline is None:
        return whole
    return broadcast_copy(whole, place.pipeline, place.holder, name=_told(place))


def _told(place: ParameterPlace) -> str:
    return f"the whole of '{place.name}' (wh.full_state_dict is called on every rank)"


def _of_parts(part: Tensor, place: ParameterPlace) -> Tensor:
    shard, parts = place.shard, place.parts
    if not place.held:
        return part.new_empty(part.shape if shard is None else shard.shape)
    if shard is None or parts is None or parts.size == 1:
        return part.clone()
    sizes = [torch.Size(shard.local_shape(i)).numel() for i in range(parts.size)]
    flat = all_gather_rows(
        part.contiguous().view(-1),
        sizes,
        parts,
        name=_told(place),
    )
    return shard.join([piece.view(shard.local_shape(i)) for i, piece in enumerate(torch.split(flat, sizes))])
