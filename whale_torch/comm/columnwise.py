"""Torch functions that keep Columns: what acts on every element alone runs on the shard as it lies.

An operation with numbers (z * 0.5) is right only if every rank used the same ones; they are noted in the place and
compared when the ranks next meet.
"""

from __future__ import annotations

from dataclasses import replace
from numbers import Number
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whale_torch.comm.columns import Columns, ColumnsPlace, Hold, dropout, plain, register_function, user_site
from whale_torch.errors import LayoutError

__all__ = ()


def _applied(place: ColumnsPlace, func: Any, *values: Any) -> ColumnsPlace:
    """The place after an operation with numbers; unchanged where there are none."""
    numbers = [value for value in values if not isinstance(value, bool) and isinstance(value, Number)]
    return replace(place, applied=(*place.applied, f"{func.__name__} {numbers}")) if numbers else place


@register_function(
    *(F.relu, F.relu6, F.gelu, F.silu, F.tanh, F.sigmoid, F.leaky_relu, F.elu, F.celu, F.selu, F.softplus, F.mish),
    *(F.hardtanh, F.hardswish, F.hardsigmoid, F.softsign, F.logsigmoid, F.softshrink, F.hardshrink, F.tanhshrink),
    *(torch.relu, torch.tanh, torch.sigmoid, torch.exp, torch.expm1, torch.log, torch.log1p, torch.sqrt, torch.rsqrt),
    *(torch.square, torch.abs, torch.neg, torch.reciprocal, torch.clamp, torch.erf, torch.nan_to_num, torch.sin),
    *(torch.cos, Tensor.relu, Tensor.tanh, Tensor.sigmoid, Tensor.exp, Tensor.expm1, Tensor.log, Tensor.log1p),
    *(Tensor.sqrt, Tensor.rsqrt, Tensor.square, Tensor.abs, Tensor.__abs__, Tensor.neg, Tensor.__neg__),
    *(Tensor.reciprocal, Tensor.clamp, Tensor.erf, Tensor.nan_to_num, Tensor.sin, Tensor.cos),
)
def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    z = args[0] if args else None
    others = (*args[1:], *kwargs.values())
    if not isinstance(z, Columns) or any(isinstance(value, Tensor) for value in others):
        return NotImplemented
    # inplace=True of an activation writes into z.local, of which both z and the result are views
    clamps = func in (torch.clamp, Tensor.clamp)  # the numbers of other functions here are a module's constants
    return Columns.of(func(z.local, *args[1:], **kwargs), _applied(z.place, func, *others) if clamps else z.place)


@register_function(
    *(Tensor.add, torch.add, Tensor.mul, torch.mul, torch.multiply, Tensor.sub, torch.sub, torch.subtract, Tensor.div),
    *(torch.div, torch.divide, torch.true_divide, Tensor.pow, torch.pow, torch.maximum, torch.minimum),
    *(Tensor.__add__, Tensor.__radd__, Tensor.__mul__, Tensor.__rmul__, Tensor.__sub__, Tensor.__rsub__),
    *(Tensor.__truediv__, Tensor.__rtruediv__, Tensor.__pow__),
)
def _two_operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or kwargs:
        return NotImplemented
    a, b = args
    if isinstance(a, Columns) and isinstance(b, Columns):
        if not a.place.same(b.place):
            return NotImplemented
        applied = a.place.applied + tuple(text for text in b.place.applied if text not in a.place.applied)
        return Columns.of(func(a.local, b.local), replace(a.place, applied=applied))
    z, other = (a, b) if isinstance(a, Columns) else (b, a)
    number = other
    if isinstance(other, Tensor):
        if other.dim() or other.requires_grad or other.device.type != "cpu":
            return NotImplemented
        number = other.item()
    operands = (x.local if isinstance(x, Columns) else x for x in args)
    return Columns.of(func(*operands), _applied(z.place, func, number))


@register_function(
    *(Tensor.to, Tensor.type, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.contiguous),
    *(Tensor.clone, torch.clone, Tensor.detach, torch.detach),
)
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    z = args[0] if args else None
    if not isinstance(z, Columns) or any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())):
        return NotImplemented
    if z.deferred is not None and not z.deferred.made:
        nothing = torch.empty(0, dtype=z.dtype, device=z.device)
        if func(nothing, *args[1:], **kwargs) is nothing:  # logits.float() on float32 logits: no reason to make them
            return z
    local = plain(z)
    out = func(local, *args[1:], **kwargs)
    if not isinstance(out, Tensor):
        return out
    if out is local:
        return z
    same_memory = out.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return Columns.of(out, z.place, z.hold if same_memory else Hold(shared=False))


@register_function(
    *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, torch.unflatten),
    *(Tensor.squeeze, torch.squeeze, Tensor.unsqueeze, torch.unsqueeze),
)
def _reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    z = args[0] if args else None
    if not isinstance(z, Columns) or z.place.tail:
        return NotImplemented
    if any(isinstance(value, torch.dtype) for value in (*args[1:], *kwargs.values())):
        return NotImplemented
    # the last dimension must stay: a stand-in without memory tells what torch makes of the arguments
    shape = func(_stand_in(z), *args[1:], **kwargs).shape
    if not shape or shape[-1] != z.place.shape[-1] or shape[:-1].numel() != z.place.mine:
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        out = Columns.of(z.as_subclass(Tensor), replace(z.place, lead=tuple(shape[:-1])), z.hold)
    out.deferred = z.deferred
    return out


@register_function(F.dropout, torch.dropout)
def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    z = args[0] if args else None
    if not isinstance(z, Columns):
        return NotImplemented
    names = ("p", "training", "inplace") if func is F.dropout else ("p", "train")
    given: dict[str, Any] = dict(zip(names, args[1:], strict=False)) | kwargs
    p, training = float(given.get("p", 0.5)), bool(given.get("training", given.get("train", True)))
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    out = dropout(z.local, p, training, z.place.region, inplace=bool(given.get("inplace", False)))
    return Columns.of(out, z.place)


def _stand_in(z: Columns) -> Tensor:
    return torch.empty(z.place.shape, dtype=z.dtype, device="meta")


def _getters(*names: str) -> list[Any]:
    """The functions by which a subclass is asked for attributes of these names."""
    return [getattr(Tensor, name).__get__ for name in names]


@register_function(*_getters("shape"))
def _shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].place.shape


@register_function(
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, torch.numel, Tensor.__len__),
    *(Tensor.stride, Tensor.is_contiguous, *_getters("ndim", "nbytes")),
)
def _logical(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the whole own rows would say: asked of a stand-in of their shape without memory."""
    return func(_stand_in(args[0]), *args[1:], **kwargs) if args else NotImplemented


@register_function(
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex, Tensor.is_signed),
    *(Tensor.element_size, Tensor.get_device, Tensor.is_inference, Tensor.__dir__),
    *_getters("dtype", "device", "layout", "itemsize", "is_leaf", "retains_grad", "is_cuda", "is_cpu", "is_meta"),
    *_getters("is_sparse", "is_quantized", "is_nested", "is_mps", "is_xpu", "is_mkldnn", "_version", "_backward_hooks"),
)
def _physical(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@register_function(*_getters("requires_grad"))
def _requires_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    z = args[0]
    return z.deferred.requires_grad if z.deferred is not None else _physical(func, args, kwargs)


@register_function(*_getters("grad_fn"))
def _grad_fn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return plain(args[0]).grad_fn


@register_function(Tensor.__format__)
def _format(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return object.__format__(*args)


@register_function(Tensor.view_as)
def _view_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or args[0] is not args[1]:
        return NotImplemented
    # torch asks so for what an autograd.Function hands on as it came, and then reads gradients of shards
    raise LayoutError(
        f"a module's full backward hook, or an autograd.Function that hands on its input, met a split's output "
        f"{args[0]!r}: its gradient is a shard of all rows, not that of the own rows.",
        where=user_site(),
        fix="put the hook on a module that neither takes nor gives a split's output, or hand on z.rows()",
    )


@register_function(
    Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook, Tensor.requires_grad_
)
def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise LayoutError(
        f"{func.__name__} on a split's output {args[0]!r}: its gradient is a shard of all rows, not that of the own "
        "rows.",
        where=user_site(),
        fix="rows = z.rows(); use rows in the loss and put the hook on rows",
    )
