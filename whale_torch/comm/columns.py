"""Columns: a split's output. A thin tensor subclass over the plain local shard that carries its layout.

It looks like the rows of this rank's feed with all columns. Element-wise operations, views and dropout keep it,
cross entropy, argmax and top-k work across ranks (comm/loss.py, comm/ranking.py), a split layer that follows consumes
it, and anything else gathers the feed's rows once and runs on a plain tensor.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whale_torch.comm.bridge import ColumnsToRows
from whale_torch.comm.call import Call, deliver
from whale_torch.comm.region import Region
from whale_torch.errors import LayoutError

__all__ = ["Columns", "ColumnsPlace", "Deferred", "Hold", "dropout", "plain", "register_function", "registered_function"]


@dataclass(frozen=True, slots=True)
class ColumnsPlace:
    """Where a Columns lies.

    lead: shape of the feed's rows before the column dimension. widths: columns of each rank of the region.
    tail: shape behind the column dimension (a convolution's height and width). counts: flattened rows of each feed.
    call: the forward that gave it to the user; None inside the model.
    """

    region: Region
    counts: tuple[int, ...]
    widths: tuple[int, ...]
    lead: tuple[int, ...]
    tail: tuple[int, ...] = ()
    call: Call | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.lead, sum(self.widths), *self.tail))

    @property
    def first(self) -> int:
        """Number of this rank's first column."""
        return sum(self.widths[: self.region.columns.index])

    def same(self, other: ColumnsPlace) -> bool:
        mine = (self.region, self.counts, self.widths, self.lead, self.tail)
        return mine == (other.region, other.counts, other.widths, other.lead, other.tail)


class _Memory:
    """Who reads one piece of logits: `readers` losses, and `shared` once anything else did."""

    __slots__ = ("readers", "shared")

    def __init__(self, shared: bool):
        self.readers, self.shared = 0, shared


class Hold:
    """Lives as long as a Columns over one piece of memory; a loss whose logits nobody holds may overwrite them."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, *, shared: bool = True):
        self.memory = _Memory(shared)

    def release(self) -> Callable[[], bool]:
        """A loss reads the memory; the answer it gets in backward: may it be overwritten now?"""
        memory, alive = self.memory, weakref.ref(self)
        memory.readers += 1
        return lambda: not memory.shared and memory.readers == 1 and alive() is None


class Deferred:
    """A last linear layer whose output is made only if something other than the loss asks for it."""

    __slots__ = ("_out", "inputs")

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None):
        self.inputs = (x, weight, bias)
        self._out: Tensor | None = None

    @property
    def made(self) -> bool:
        return self._out is not None

    def make(self) -> Tensor:
        if self._out is None:
            self._out = F.linear(*self.inputs)
        return self._out


class Columns(Tensor):
    """A split's output: this rank's columns of all rows of the region, seen as its own rows with all columns.

    shape: the logical one (own rows, all columns). local: the shard, [rows of the region, own columns, *tail].
    rows(): own rows with all columns as a plain tensor (a collective; the same one on every rank of the group).
    """

    place: ColumnsPlace
    hold: Hold
    _rows: Tensor | None
    deferred: Deferred | None

    @staticmethod
    def of(local: Tensor, place: ColumnsPlace, hold: Hold | None = None) -> Columns:
        """Columns over a local shard of shape [sum(place.counts), own width, *place.tail]."""
        out = local.as_subclass(Columns)
        out.place, out.hold, out._rows, out.deferred = place, hold or Hold(), None, None
        return out

    @staticmethod
    def put_off(deferred: Deferred, place: ColumnsPlace) -> Columns:
        """Columns of a linear layer that has not run; a loss may do without its output."""
        x = deferred.inputs[0]
        out = Columns.of(x.new_zeros(1, 1).expand(x.shape[0], place.widths[place.region.columns.index]), place)
        out.deferred = deferred
        return out

    @property
    def local(self) -> Tensor:
        """The plain local shard: [rows of all feeds of the region, this rank's columns, *tail]."""
        self.hold.memory.shared = True
        return plain(self)

    def rows(self) -> Tensor:
        """This rank's rows with all columns, as a plain tensor: a collective over the split's ranks, done once."""
        if self._rows is None:
            self._rows = self._gather("rows")
        return self._rows

    def _gather(self, operation: str) -> Tensor:
        place, region = self.place, self.place.region
        counts = region.agree(operation, place.counts[region.rows.index])
        local = self.local
        tail = local[0:1, 0:1].numel() if local.numel() else int(torch.Size(place.tail).numel())
        widths = [width * tail for width in place.widths]
        flat = ColumnsToRows.apply(local.reshape(local.shape[0], -1), counts, widths, region)
        if place.call is not None:
            flat = deliver(flat, place.call)
        return flat.reshape(place.shape)

    def implicit_rows(self, operation: str) -> Tensor:
        """rows() on behalf of an operation that has no rule: counted, and refused under wh.split(gather="error")."""
        if self._rows is None:
            site = _user_site()
            region = self.place.region
            if region.strict:
                raise LayoutError(
                    f"{operation} would gather {tuple(self.shape)} of {region.label}, and wh.split(gather=\"error\") forbids it.",
                    where=site,
                    fix="use z.rows() where the gather is meant, or an operation that works on Columns (element-wise, cross_entropy, argmax, topk)",
                )
            here = self.place.counts[region.rows.index] * sum(self.place.widths) * self.element_size()
            region.note_gather(operation, site, here * int(torch.Size(self.place.tail).numel()))
            self._rows = self._gather(operation)
        return self._rows

    def __repr__(self, **_: Any) -> str:
        place = self.place
        here = place.widths[place.region.columns.index]
        return f"Columns(shape={tuple(place.shape)}, here {here} of {sum(place.widths)} columns from {place.first}, {place.region.label})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None:
            out = rule(func, args, kwargs)
            if out is not NotImplemented:
                return out
        name = getattr(func, "__name__", str(func))
        if _writes(name, kwargs):
            raise LayoutError(
                f"{name} would write into a split's output {next(_columns_in((*args, *kwargs.values())))!r}.",
                where=_user_site(),
                fix="use the form that returns a new tensor, or z = z.rows() first",
            )
        return func(*_gathered(args, name), **_gathered(kwargs, name))


def plain(x: Tensor) -> Tensor:
    """The local tensor of a Columns, made now where it was put off."""
    if isinstance(x, Columns) and x.deferred is not None:
        return x.deferred.make()
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def _gathered(value: Any, name: str) -> Any:
    if isinstance(value, Columns):
        return value.implicit_rows(name)
    if type(value) in (list, tuple):
        return type(value)(_gathered(v, name) for v in value)
    if type(value) is dict:
        return {k: _gathered(v, name) for k, v in value.items()}
    return value


def _columns_in(values: Any) -> Any:
    for value in values:
        if isinstance(value, Columns):
            yield value
        elif type(value) in (list, tuple):
            yield from _columns_in(value)


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name[3:-2] in _IN_PLACE) or isinstance(kwargs.get("out"), Columns)


_IN_PLACE = {"add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor"}


def _user_site() -> str:
    """file:line of the nearest caller outside torch and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", "whale_torch.", "einops")) and module not in ("torch", "whale_torch"):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


# --- rules: function -> (func, args, kwargs) -> result, or NotImplemented to gather

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_RULES: dict[Any, Rule] = {}


def register_function(*functions: Any) -> Callable[[Rule], Rule]:
    """Gives Columns a rule for torch functions: called with (func, args, kwargs), NotImplemented gathers."""

    def register(rule: Rule) -> Rule:
        for function in functions:
            _RULES[function] = rule
        return rule

    return register


def registered_function(function: Any) -> Rule:
    """The rule of a torch function, one that gathers where it has none."""
    return _RULES.get(function) or (lambda func, args, kwargs: NotImplemented)


def _no_other_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return not any(isinstance(a, Tensor) for a in args[1:]) and not any(isinstance(v, Tensor) for v in kwargs.values())


@register_function(
    *(F.relu, F.relu6, F.gelu, F.silu, F.tanh, F.sigmoid, F.leaky_relu, F.elu, F.celu, F.selu, F.softplus, F.mish, F.hardtanh),
    *(F.hardswish, F.hardsigmoid, F.softsign, F.logsigmoid, torch.relu, torch.tanh, torch.sigmoid, torch.exp, torch.sqrt, torch.square),
    *(torch.abs, torch.neg, torch.clamp, torch.erf, torch.rsqrt, torch.nan_to_num, torch.sin, torch.cos, torch.log),
    *(Tensor.relu, Tensor.tanh, Tensor.sigmoid, Tensor.exp, Tensor.sqrt, Tensor.square, Tensor.abs, Tensor.neg, Tensor.__neg__, Tensor.clamp),
    *(Tensor.erf, Tensor.rsqrt, Tensor.nan_to_num, Tensor.log, Tensor.sin, Tensor.cos),
)
def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    z = args[0] if args else None
    if not isinstance(z, Columns) or not _no_other_tensor(args, kwargs) or kwargs.get("inplace"):
        return _in_place_activation(func, args, kwargs)
    return Columns.of(func(z.local, *args[1:], **kwargs), z.place)


def _in_place_activation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    z = args[0] if args else None
    if not isinstance(z, Columns) or not _no_other_tensor(args, kwargs):
        return NotImplemented
    z._rows = None
    return Columns.of(func(z.local, *args[1:], **kwargs), z.place, z.hold)


@register_function(Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.type, Tensor.clone, Tensor.contiguous, Tensor.detach)
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    z = args[0]
    if not isinstance(z, Columns) or not _no_other_tensor(args, kwargs):
        return NotImplemented
    local = plain(z)
    out = func(local, *args[1:], **kwargs)
    same_memory = out.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return Columns.of(out, z.place, z.hold if same_memory else Hold(shared=False))


@register_function(
    *(Tensor.add, torch.add, Tensor.mul, torch.mul, Tensor.sub, torch.sub, Tensor.div, torch.div, torch.true_divide, Tensor.pow, torch.pow),
    *(Tensor.__add__, Tensor.__radd__, Tensor.__mul__, Tensor.__rmul__, Tensor.__sub__, Tensor.__rsub__, Tensor.__truediv__, Tensor.__pow__),
    *(Tensor.__rtruediv__, torch.maximum, torch.minimum),
)
def _binary(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or kwargs:
        return NotImplemented
    a, b = args
    if isinstance(a, Columns) and isinstance(b, Columns):
        return Columns.of(func(a.local, b.local), a.place) if a.place.same(b.place) else NotImplemented
    z, other = (a, b) if isinstance(a, Columns) else (b, a)
    if isinstance(other, Tensor) and (other.dim() > 0 or other.requires_grad):
        return NotImplemented
    return Columns.of(func(*(x.local if isinstance(x, Columns) else x for x in args)), z.place)


@register_function(Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten)
def _reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    z = args[0]
    if not isinstance(z, Columns) or z.place.tail or (func in (Tensor.view,) and isinstance(args[1], torch.dtype)):
        return NotImplemented
    # the last dimension must stay: a stand-in of the logical shape without memory tells what torch makes of the arguments
    shape = func(torch.empty(z.place.shape, device="meta"), *args[1:], **kwargs).shape
    kept = len(shape) >= 1 and shape[-1] == z.place.shape[-1] and shape[:-1].numel() == torch.Size(z.place.lead).numel()
    if not kept:
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        out = Columns.of(z.as_subclass(Tensor), replace(z.place, lead=tuple(shape[:-1])), z.hold)
    out.deferred = z.deferred
    return out


@register_function(F.dropout, torch.dropout, F.alpha_dropout)
def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    z = args[0] if args else None
    if not isinstance(z, Columns) or func is F.alpha_dropout:
        return NotImplemented
    names = ("p", "training") if func is F.dropout else ("p", "train")
    given = dict(zip(names, args[1:3], strict=False)) | kwargs
    p, training = float(given.get("p", 0.5)), bool(given.get("training", given.get("train", True)))
    return Columns.of(dropout(z.local, p, training, z.place.region), z.place)


def dropout(x: Tensor, p: float, training: bool, region: Region) -> Tensor:
    """Dropout on memory that differs between the ranks of a region: masks differ too, and a recomputation replays them.

    The seed comes from the global stream, which the region's ranks share only where they are fed the same rows; the
    rank's place is added, so that equal streams still give different masks.
    """
    if not training or p == 0.0:
        return x
    seed = int(torch.randint(1 << 62, ())) + region.columns.rank
    generator = torch.Generator(x.device)
    generator.manual_seed(seed)
    keep = torch.empty_like(x).bernoulli_(1 - p, generator=generator)
    return x * (keep.div_(1 - p) if p < 1.0 else keep)


@register_function(Tensor.shape.__get__)
def _shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].place.shape


@register_function(Tensor.size)
def _size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return args[0].place.shape if dim is None else args[0].place.shape[dim]


@register_function(Tensor.dim, Tensor.ndim.__get__, Tensor.ndimension)
def _dim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return len(args[0].place.shape)


@register_function(Tensor.numel, Tensor.nelement, torch.numel)
def _numel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].place.shape.numel()


@register_function(Tensor.__len__)
def _len(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].place.shape[0]


@register_function(
    *(Tensor.dtype.__get__, Tensor.device.__get__, Tensor.is_leaf.__get__, Tensor.layout.__get__, Tensor.grad_fn.__get__),
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex, Tensor.element_size),
    *(Tensor._version.__get__, Tensor._backward_hooks.__get__, Tensor.is_sparse.__get__, Tensor.is_cuda.__get__),
    *(Tensor.is_cpu.__get__, Tensor.is_meta.__get__, Tensor.is_quantized.__get__, Tensor.is_nested.__get__, Tensor.get_device),
)
def _metadata(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@register_function(Tensor.requires_grad.__get__)
def _requires_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].deferred is not None:
        return True
    return _metadata(func, args, kwargs)


@register_function(Tensor.register_hook, Tensor.retain_grad)
def _refuse_hook(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise LayoutError(
        f"{func.__name__} on a split's output {args[0]!r}: its gradient is a shard of all rows, not the gradient of the own rows.",
        where=_user_site(),
        fix="rows = z.rows(); use rows in the loss and put the hook on rows",
    )
