"""What functions make of tensors that another rank of the pipeline holds: shapes are right, nothing is written, and
whatever would know a value raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from whale_torch.comm.registry import ParameterPlace, refuse_to_read, refuse_to_write

__all__ = ["Placed", "compute_absent", "places_in", "without_memory"]

Mark = Callable[[Any, ParameterPlace], Any]
"""From a result to one that knows where it lies."""


class Placed:
    """A tensor that knows where it lies; it is not written to a file."""

    _place: ParameterPlace

    @property
    def place(self) -> ParameterPlace:
        return self._place

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refuse_to_write(self._place)


def without_memory(like: Tensor, device: torch.device | None = None) -> Tensor:
    """A tensor's shape and dtype, all in one element: NaN where a dtype has it, lest it be taken for a value."""
    value = math.nan if like.is_floating_point() or like.is_complex() else 0
    return torch.full((), value, dtype=like.dtype, device=device or like.device).expand(like.shape)


def places_in(value: Any) -> Iterator[ParameterPlace]:
    """Those of all such tensors in a nest."""
    if isinstance(value, Placed):
        yield value._place
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from places_in(item)
    elif isinstance(value, dict):
        yield from places_in(list(value.values()))


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


def compute_absent(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], absent: ParameterPlace, mark: Mark
) -> Any:
    """What a function gives where one of its tensors has no values: shapes are right, nothing is written.

    absent: that tensor's place. Raises LayoutError where a value would be known.
    """
    name = getattr(func, "__name__", "")
    if func is torch.autograd.grad:
        return _gradients(*args, absent=absent, mark=mark, **kwargs)
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
        return mark(out, absent)


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that a function writes into."""
    if name == "__set__":  # of an attribute: data, grad
        return [args[0]] if any(places_in(args[1])) else []
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


def _gradients(
    outputs: Any, inputs: Sequence[Any], *, absent: ParameterPlace, mark: Mark, **options: Any
) -> tuple[Any, ...]:
    """torch.autograd.grad: the gradients of what other ranks hold are there."""
    here = [x for x in inputs if not _is_absent(x)]
    if not here:
        raise refuse_to_read(absent)
    found = iter(torch.autograd.grad(outputs, here, **options))
    return tuple(mark(without_memory(x), x._place) if _is_absent(x) else next(found) for x in inputs)


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
    return isinstance(value, Placed) and not value._place.held


def _have_dims(args: Any) -> Iterator[bool]:
    for value in args:
        if isinstance(value, (tuple, list)):
            yield from _have_dims(value)
        elif _is_absent(value):
            yield value.dim() > 0
