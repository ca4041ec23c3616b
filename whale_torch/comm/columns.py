"""Columns: a split's output. A thin tensor subclass over the plain local shard that carries its layout.

It looks like the rows of this rank's feed with all columns. Element-wise operations, views and dropout keep it
(comm/columnwise.py), cross entropy, argmax and top-k work across ranks (comm/loss.py, comm/ranking.py), a split layer
that follows consumes it, and anything else gathers the feed's rows once and runs on a plain tensor.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whale_torch.comm.bridge import ColumnsToRows
from whale_torch.comm.call import Call, deliver
from whale_torch.comm.region import Region
from whale_torch.errors import LayoutError
from whale_torch.ops.precision import cast_of

__all__ = [
    "Columns",
    "ColumnsPlace",
    "Deferred",
    "Hold",
    "dropout",
    "dtype_and_device",
    "plain",
    "register_function",
    "registered_function",
    "user_lines",
    "user_site",
]


@dataclass(frozen=True, slots=True)
class ColumnsPlace:
    """Where a Columns lies.

    lead: shape of the feed's rows before the column dimension. widths: columns of each rank of the region.
    tail: shape behind the column dimension (a convolution's height and width). counts: flattened rows of each feed.
    call: the forward that gave it to the user; None inside the model.
    applied: operations with numbers on this rank's shard, which must have been the same on every rank.
    """

    region: Region
    counts: tuple[int, ...]
    widths: tuple[int, ...]
    lead: tuple[int, ...]
    tail: tuple[int, ...] = ()
    call: Call | None = None
    applied: tuple[str, ...] = ()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.lead, sum(self.widths), *self.tail))

    @property
    def first(self) -> int:
        """Number of this rank's first column."""
        return sum(self.widths[: self.region.columns.index])

    @property
    def mine(self) -> int:
        """Flattened rows of the own feed."""
        return self.counts[self.region.rows.index]

    def same(self, other: ColumnsPlace) -> bool:
        """Whether the shards of two Columns lie alike, so that two-operand operations need no communication."""
        mine = (self.counts, self.widths, self.lead, self.tail)
        alike = mine == (other.counts, other.widths, other.lead, other.tail)
        return alike and self.region is other.region and self.call is other.call

    def given_by(self, call: Call) -> ColumnsPlace:
        """The place once a forward of the model gives the Columns to the user."""
        return ColumnsPlace(self.region, self.counts, self.widths, self.lead, self.tail, call, self.applied)

    def agree(self, operation: str, detail: str = "") -> None:
        """Raises on every rank of the region where ranks are in different operations, or came by different numbers."""
        self.region.agree(operation, self.mine, self._told(detail))

    def agree_with(self, operation: str, numbers: Sequence[int], detail: str) -> list[Sequence[int]]:
        """As agree, with some numbers of this rank's feed: those of all feeds of the region."""
        return self.region.agree_with(operation, numbers, self._told(detail))

    def _told(self, detail: str) -> str:
        return " ".join(filter(None, (*self.applied, detail)))


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
        dtype = cast_of(x)
        if dtype is not None:  # what F.linear would do here, wherever it runs later
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        self.inputs = (x, weight, bias)
        self._out: Tensor | None = None

    @property
    def made(self) -> bool:
        return self._out is not None

    @property
    def requires_grad(self) -> bool:
        return any(x is not None and x.requires_grad for x in self.inputs)

    def make(self) -> Tensor:
        """The layer's output, with its graph also where a metric under no_grad asks first."""
        if self._out is None:
            x, weight, bias = self.inputs
            with torch.autocast(x.device.type, enabled=False), torch.set_grad_enabled(self.requires_grad):
                self._out = F.linear(x, weight, bias)
        return self._out


class Columns(Tensor):
    """A split's output: this rank's columns of all rows of the region, seen as its own rows with all columns.

    shape: the logical one (own rows, all columns). local: the shard, [rows of the region, own columns, *tail].
    rows(): own rows with all columns as a plain tensor (a collective; the same one on every rank of the group).
    """

    place: ColumnsPlace
    hold: Hold
    deferred: Deferred | None
    _rows: tuple[Tensor, int, int] | None

    @staticmethod
    def of(local: Tensor, place: ColumnsPlace, hold: Hold | None = None) -> Columns:
        """Columns over a local shard of shape [sum(place.counts), own width, *place.tail]."""
        out = local.as_subclass(Columns)
        out.place, out.hold, out.deferred, out._rows = place, hold or Hold(), None, None
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

    def rows(self, operation: str = "rows") -> Tensor:
        """This rank's rows with all columns, as a plain tensor: a collective over the split's ranks, done once.

        operation: what messages call it.
        """
        known = self._known_rows()
        return self._gather(operation) if known is None else known

    def implicit_rows(self, operation: str) -> Tensor:
        """rows() on behalf of an operation that has no rule: counted, and refused under wh.split(gather="error")."""
        known = self._known_rows()
        if known is not None:
            return known
        site, place = user_site(), self.place
        if place.region.strict:
            raise LayoutError(
                f"{operation} would gather {tuple(place.shape)} of {place.region.label}, and "
                'wh.split(gather="error") forbids it.',
                where=site,
                fix="use z.rows() where the gather is meant, or an operation that works on Columns (element-wise, "
                "cross_entropy, argmax, topk)",
            )
        place.region.note_gather(operation, site, place.shape.numel() * self.element_size())
        return self._gather(operation)

    def _known_rows(self) -> Tensor | None:
        """What an earlier gather gave, if neither it nor the shard was written to since."""
        if self._rows is None:
            return None
        rows, *versions = self._rows
        if versions != [rows._version, plain(self)._version]:
            return None
        return rows if torch.is_grad_enabled() else rows.detach()

    def _gather(self, operation: str) -> Tensor:
        place, local = self.place, self.local
        place.agree(operation, f"{local.dtype}")
        tail = torch.Size(place.tail).numel()
        # with its graph also where a metric under no_grad asks first: a loss may read the same rows later
        with torch.set_grad_enabled(local.requires_grad):
            widths = [width * tail for width in place.widths]
            flat = ColumnsToRows.apply(local.flatten(1), place.counts, widths, place.region)  # type: ignore[no-untyped-call]
            if place.call is not None:
                flat = deliver(flat, place.call)
            rows: Tensor = flat.reshape(place.shape)
        if not (rows.is_inference() or local.is_inference()):  # those do not count their versions
            self._rows = (rows, rows._version, local._version)
        return rows if torch.is_grad_enabled() else rows.detach()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        place = self.place
        here = place.widths[place.region.columns.index]
        return (
            f"Columns(shape={tuple(place.shape)}, here {here} of {sum(place.widths)} columns from {place.first}, "
            f"{place.region.label})"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None:
            out = rule(func, args, kwargs)
            if out is not NotImplemented:
                return out
        name = _name_of(func)
        for written in _written(func, args, kwargs):
            raise LayoutError(
                f"{name} would write into a split's output {written!r}.",
                where=user_site(),
                fix="use the form that returns a new tensor, or z = z.rows() first",
            )
        return func(*_gathered(args, name), **_gathered(kwargs, name))


def plain(x: Tensor) -> Tensor:
    """The local tensor of a Columns, made now where it was put off."""
    if isinstance(x, Columns) and x.deferred is not None:
        return x.deferred.make()
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def dtype_and_device(z: Columns) -> tuple[torch.dtype, torch.device]:
    """Read without the detour over the subclass's rules; of the output to come where it was put off."""
    with torch._C.DisableTorchFunctionSubclass():
        return z.dtype, z.device


def _gathered(value: Any, name: str) -> Any:
    if isinstance(value, Columns):
        return value.implicit_rows(name)
    if type(value) in (list, tuple):
        return type(value)(_gathered(v, name) for v in value)
    if type(value) is dict:
        return {k: _gathered(v, name) for k, v in value.items()}
    return value


def _columns_in(value: Any) -> Iterator[Columns]:
    if isinstance(value, Columns):
        yield value
    elif type(value) in (list, tuple):
        for item in value:
            yield from _columns_in(item)


_ASSIGNMENTS = {f"__i{name}__" for name in "add sub mul truediv floordiv pow mod and or xor lshift rshift".split()}
_ASSIGNMENTS |= {"__setitem__", "__set__", "__delete__"}


def _name_of(func: Any) -> str:
    """What messages call a torch function; a property's getter and setter go by the property's name."""
    name: str = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name in ("__get__", "__set__", "__delete__") else name


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Columns]:
    """The Columns that an operation would write to: its first argument in in-place forms, and `out`."""
    name = getattr(func, "__name__", "")
    yield from _columns_in(kwargs.get("out"))
    if name in _ASSIGNMENTS or (name.endswith("_") and not name.endswith("__")):
        yield from _columns_in(args[0] if args else next(iter(kwargs.values()), None))


def user_site() -> str:
    """file:line of the nearest caller outside torch, this package and einops."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not _is_users(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def user_lines(until: FrameType | None) -> list[tuple[str, int]]:
    """(file, line) of all such callers from the nearest on, up to a frame."""
    found, frame = [], sys._getframe(1)
    while frame.f_back is not None and frame is not until:
        if _is_users(frame):
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found


def _is_users(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in ("torch", "whale_torch", "einops")


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


def dropout(x: Tensor, p: float, training: bool, region: Region, *, inplace: bool = False) -> Tensor:
    """Dropout on memory that differs between the ranks of a region: masks differ too, and a recomputation replays them.

    The seed comes from the global stream, which the region's ranks share only where they are fed the same rows; the
    rank's place is added, so that equal streams still give different masks.
    """
    if not training or p == 0.0:
        return x
    seed = int(torch.randint(1 << 62, (), device="cpu")) + region.columns.rank
    generator = None if x.is_meta else torch.Generator(x.device).manual_seed(seed)
    keep = torch.empty_like(x).bernoulli_(1 - p, generator=generator)
    if p < 1.0:
        keep.div_(1 - p)
    return x.mul_(keep) if inplace else x * keep
