"""Tensors that know where they lie: parts, which work in memory and refuse to be written, and what another rank holds,
which has no values and refuses to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whale_torch.comm.absent import Placed, compute_absent, places_in, without_memory
from whale_torch.comm.collectives import all_gather_rows, broadcast_copy
from whale_torch.comm.registry import ParameterPlace, refuse_to_write

__all__ = ["AbsentParameter", "CutTensor", "dtypes_of_trained", "join", "kinds_of"]


class _Marked(Placed):
    """Operations on it give tensors that know the same."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _PLAIN:  # asked of every parameter in every step
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        return _compute(func, args, kwargs or {})


class CutTensor(_Marked, Tensor):
    """This rank's part of a tensor, over the tensor's own memory, that knows it is a part.

    It can be copied, compared, computed with and loaded back; what is computed from parts is of parts, and numbers are
    plain. Pickling it (torch.save), or reaching its memory as numpy and safetensors do, raises CheckpointError: a file
    would hold one rank's part under the whole parameter's name. Of a tensor that another rank holds there are no
    values: writing into it does nothing, and numbers of it raise LayoutError.
    """

    @staticmethod
    def of(local: Tensor, place: ParameterPlace) -> CutTensor:
        """A view of `local`, the part that `place` speaks of."""
        part: CutTensor = local.detach().as_subclass(CutTensor)
        part._place = place
        return part

    def part(self) -> Tensor:
        """The same memory as a plain tensor. Raises CheckpointError for a tensor of another rank."""
        if not self._place.held:
            raise refuse_to_write(self._place)
        return self._plain()

    def _plain(self) -> Tensor:
        plain: Tensor = self.as_subclass(Tensor)
        return plain

    def whole(self) -> Tensor:
        """The parameter from the parts of all ranks: a collective over them."""
        return join(self._plain(), self._place)

    def __copy__(self) -> CutTensor:
        return CutTensor.of(self._plain(), self._place)

    def __deepcopy__(self, memo: dict[int, Any]) -> CutTensor:
        plain = self._plain()
        return CutTensor.of(plain.clone() if self._place.held else without_memory(plain), self._place)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shard, parts = self._place.shard, self._place.parts
        if not self._place.held:
            return _told_absent(self)
        assert shard is not None and parts is not None
        where = f"part {parts.index} of {parts.size} of '{self._place.name}' {shard.shape}"
        return f"CutTensor({where}, {self.part()!r})"


class AbsentParameter(_Marked, nn.Parameter):
    """A parameter that another rank of the pipeline holds: its name and shape, and no values.

    Optimizers pass it over, since it gets no gradient. Writing into it does nothing; numbers of it raise LayoutError.
    """

    @staticmethod
    def make(parameter: nn.Parameter, place: ParameterPlace, device: torch.device) -> None:
        """Turns a parameter into one, in place."""
        parameter.data = without_memory(parameter, device)
        parameter.__class__ = AbsentParameter
        assert isinstance(parameter, AbsentParameter)
        parameter._place = place

    def untyped_storage(self) -> torch.UntypedStorage:
        """Its one element: whoever counts a model's memory asks for it."""
        with torch._C.DisableTorchFunctionSubclass():
            return super().untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentParameter:
        with torch._C.DisableTorchFunctionSubclass():
            copied = nn.Parameter(without_memory(self), requires_grad=self.requires_grad)
        AbsentParameter.make(copied, self._place, copied.device)
        memo[id(self)] = copied
        return copied  # type: ignore[return-value]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return _told_absent(self)


def dtypes_of_trained(parameters: Iterable[Tensor]) -> list[torch.dtype | None]:
    """The dtype of each parameter that gets gradients, None for the others; fast for absent ones too."""
    with torch._C.DisableTorchFunctionSubclass():
        return [p.dtype if p.requires_grad else None for p in parameters]


def kinds_of(parameters: Iterable[Tensor]) -> list[tuple[bool, torch.dtype]]:
    """Whether each parameter gets gradients, and its dtype; fast for absent ones too."""
    with torch._C.DisableTorchFunctionSubclass():
        return [(p.requires_grad, p.dtype) for p in parameters]


def _told_absent(x: Any) -> str:
    return f"{type(x).__name__}('{x.place.name}' {tuple(x.shape)}, of another rank's stage)"


_GETTERS: tuple[Any, ...] = (
    Tensor.grad, Tensor.requires_grad, Tensor.dtype, Tensor.device, Tensor.shape, Tensor.is_leaf,
)  # fmt: skip
_PLAIN = {getter.__get__ for getter in _GETTERS}
# how numpy, safetensors and other writers come to a tensor's bytes
_REACH_MEMORY = {
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.data_ptr,
    Tensor.storage,
    Tensor.untyped_storage,
}


def _compute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    places = list(places_in((args, kwargs)))
    absent = next((place for place in places if not place.held), None)
    if func in _REACH_MEMORY:
        raise refuse_to_write(absent or places[0])
    if absent is not None:
        return compute_absent(func, args, kwargs, absent, _mark)
    with torch._C.DisableTorchFunctionSubclass():
        out = func(*args, **kwargs)
        return out if func is Tensor.as_subclass else _mark(out, places[0])


def _mark(value: Any, place: ParameterPlace) -> Any:
    if isinstance(value, Tensor) and (value.dim() or not place.held) and not isinstance(value, Placed):
        part = value.as_subclass(CutTensor)  # keeps the graph: a penalty on what parts have become has a gradient
        part._place = place
        return part
    if isinstance(value, (tuple, list)):  # torch.return_types, too, are made of one sequence
        return type(value)([_mark(item, place) for item in value])
    return value


@torch.no_grad()
def join(part: Tensor, place: ParameterPlace) -> Tensor:
    """The whole tensor from what the ranks of `place.parts`, or of the pipeline, hold: a collective over them."""
    part = part.as_subclass(Tensor) if isinstance(part, Placed) else part  # a sparse one has no storage
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
    flat = all_gather_rows(part.contiguous().view(-1), sizes, parts, name=_told(place))
    return shard.join([piece.view(shard.local_shape(i)) for i, piece in enumerate(torch.split(flat, sizes))])
