"""Tensors that know where they lie: parts, which work in memory and refuse to be written, and what another rank holds,
which has no values and refuses to be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whale_torch.comm.collectives import all_gather_rows, broadcast_copy
from whale_torch.comm.registry import ParameterPlace, refuse_to_read, refuse_to_write

__all__ = ["AbsentParameter", "CutTensor", "dtypes_of_trained", "join", "kinds_of", "without_memory"]


class _Placed:
    """Operations on it give tensors that know the same; it is not written."""

    _place: ParameterPlace

    @property
    def place(self) -> ParameterPlace:
        return self._place

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refuse_to_write(self._place)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _PLAIN:  # asked of every parameter in every step
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        return _compute(func, args, kwargs or {})


class CutTensor(_Placed, Tensor):
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


class AbsentParameter(_Placed, nn.Parameter):
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


def without_memory(like: Tensor, device: torch.device | None = None) -> Tensor:
    """A tensor's shape and dtype, all in one element: NaN where a dtype has it, lest it be taken for a value."""
    value = math.nan if like.is_floating_point() or like.is_complex() else 0
    return torch.full((), value, dtype=like.dtype, device=device or like.device).expand(like.shape)


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
# what gives values that are no tensors
_READ = {
    Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__,
    Tensor.__complex__, Tensor.__contains__, Tensor.equal, torch.equal, Tensor.allclose, torch.allclose,
    Tensor.is_nonzero, torch.is_nonzero, Tensor.__format__,
}  # fmt: skip
# by name: what gives a tensor whose shape is known by values only, and what fails on NaN
_NEEDS_VALUES = {
    *("nonzero", "argwhere", "masked_select", "bincount", "histc", "histogram", "histogramdd"),
    *("unique", "_unique_impl", "unique_consecutive", "_consecutive_return_output"),
    *("to_sparse", "to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc", "to_sparse_coo"),
}
_WRITES = {f"__i{operator}__" for operator in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}
_WRITES.add("__setitem__")
_DRAWS = {
    *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_"),
    *("kaiming_uniform_", "dropout_", "alpha_dropout_"),
}
_WRITES_NO_VALUES = {"requires_grad_", "detach_", "share_memory_", "rename_"}


def _compute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    places = list(_places((args, kwargs)))
    absent = next((place for place in places if not place.held), None)
    if func in _REACH_MEMORY:
        raise refuse_to_write(absent or places[0])
    if absent is not None:
        return _compute_absent(func, args, kwargs, absent)
    with torch._C.DisableTorchFunctionSubclass():
        out = func(*args, **kwargs)
        return out if func is Tensor.as_subclass else _mark(out, places[0])


def _compute_absent(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], absent: ParameterPlace
) -> Any:
    """Shapes are right and nothing is written; raises LayoutError where a value would be known."""
    name = getattr(func, "__name__", "")
    if func is torch.autograd.grad:
        return _gradients(*args, absent=absent, **kwargs)
    if func in _READ or name in _NEEDS_VALUES or _chooses_by_values(name, args):
        raise refuse_to_read(absent)
    if name.startswith("_foreach_"):
        return _for_each_present(func, name, args, kwargs, absent)
    written = _written(name, args, kwargs)
    if not all(map(_is_absent, written)) or any(map(_mixes, args)):
        raise refuse_to_read(absent)
    if written and name != "__set__":
        if name in _DRAWS:
            _draw_in_vain(func, args, kwargs)
        return written[0] if len(written) == 1 else tuple(written)
    with torch._C.DisableTorchFunctionSubclass():
        try:
            out = func(*args, **kwargs)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # of NaN
            raise refuse_to_read(absent) from error
        if func is Tensor.as_subclass:
            return out
        if isinstance(out, Tensor) and not out.dim() and any(_have_dims((args, list(kwargs.values())))):
            raise refuse_to_read(absent)
        return _mark(out, absent)


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that a function writes into."""
    if name == "__set__":  # of an attribute: data, grad
        return [args[0]] if any(_places(args[1])) else []
    if name in _WRITES or (name.endswith("_") and not name.startswith("__") and name not in _WRITES_NO_VALUES):
        return [args[0] if args else next(iter(kwargs.values()))]
    out = kwargs.get("out")
    return list(out) if isinstance(out, (tuple, list)) else [] if out is None else [out]


@torch.no_grad()
def _draw_in_vain(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Draws for what is not here, and drops it: the random state goes on as on the rank that holds it."""

    def here(x: Any) -> Any:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device) if _is_absent(x) else x

    func(*map(here, args), **{key: here(value) for key, value in kwargs.items()})


def _chooses_by_values(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a mask without values says which entries are meant, and so how many."""
    if name == "where":
        return len(args) == 1
    index = args[1] if name == "__getitem__" else ()
    return any(_is_absent(x) and x.dtype is torch.bool for x in (index if isinstance(index, tuple) else (index,)))


def _mixes(value: Any) -> bool:
    """Whether tensors are to be joined some of which have values: the whole would be neither."""
    tensors = [x for x in value if isinstance(x, Tensor)] if isinstance(value, (tuple, list)) else []
    return 0 < sum(map(_is_absent, tensors)) < len(tensors)


def _gradients(outputs: Any, inputs: Sequence[Any], *, absent: ParameterPlace, **options: Any) -> tuple[Any, ...]:
    """torch.autograd.grad: the gradients of what other ranks hold are there."""
    here = [x for x in inputs if not _is_absent(x)]
    if not here:
        raise refuse_to_read(absent)
    found = iter(torch.autograd.grad(outputs, here, **options))
    return tuple(CutTensor.of(without_memory(x), x._place) if _is_absent(x) else next(found) for x in inputs)


def _for_each_present(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], absent: ParameterPlace
) -> Any:
    """Of torch's functions over lists of tensors those that write run on what is here.

    Raises LayoutError for others, and where something here would be written that another rank knows.
    """
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (tuple, list))]
    number = len(lists[0])
    here = [i for i in range(number) if not _is_absent(lists[0][i])]
    if not name.endswith("_") or any(len(a) == number and _is_absent(a[i]) for a in lists for i in here):
        raise refuse_to_read(absent)

    def present(value: Any) -> Any:
        return [value[i] for i in here] if isinstance(value, (tuple, list)) and len(value) == number else value

    if here:
        func(*map(present, args), **{key: present(value) for key, value in kwargs.items()})
    return args[0]


def _is_absent(value: Any) -> bool:
    return isinstance(value, _Placed) and not value._place.held


def _have_dims(args: Any) -> Iterator[bool]:
    for value in args:
        if isinstance(value, (tuple, list)):
            yield from _have_dims(value)
        elif _is_absent(value):
            yield value.dim() > 0


def _places(value: Any) -> Iterator[ParameterPlace]:
    if isinstance(value, _Placed):
        yield value._place
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _places(item)
    elif isinstance(value, dict):
        yield from _places(list(value.values()))


def _mark(value: Any, place: ParameterPlace) -> Any:
    if isinstance(value, Tensor) and (value.dim() or not place.held) and not isinstance(value, _Placed):
        part = value.as_subclass(
            CutTensor
        )  # keeps the graph: a penalty on the distance from kept values has a gradient
        part._place = place
        return part
    if isinstance(value, (tuple, list)):  # torch.return_types, too, are made of one sequence
        return type(value)([_mark(item, place) for item in value])
    return value


@torch.no_grad()
def join(part: Tensor, place: ParameterPlace) -> Tensor:
    """The whole tensor from what the ranks of `place.parts`, or of the pipeline, hold: a collective over them."""
    part = part.as_subclass(Tensor) if isinstance(part, _Placed) else part  # a sparse one has no storage
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
