"""A recorded forward: calls of whole modules, and the operations of the glue between them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from whale_torch.trace.slices import Slices

__all__ = [
    "OF_TORCH",
    "PLAIN",
    "Context",
    "Graph",
    "Kind",
    "Made",
    "Node",
    "is_scalar",
    "item",
    "leaves_in",
    "like_dict",
    "map_leaves",
    "map_nodes",
    "memory",
    "nodes_in",
    "tensors_in",
]

OF_TORCH = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
"""Attributes that torch gives every module, or those that compile in place."""
PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types of values that hold no tensors."""

Kind = Literal["input", "parameter", "buffer", "constant", "count", "call", "module"]


@dataclass(frozen=True, slots=True)
class Context:
    """What is switched on around a call: gradients, and autocast's dtype by device type (None: off)."""

    grad: bool
    autocast: tuple[tuple[str, torch.dtype | None], ...]

    @staticmethod
    def now(device_types: Sequence[str] = ("cpu", "cuda")) -> Context:
        def dtype(kind: str) -> torch.dtype | None:
            return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

        return Context(torch.is_grad_enabled(), tuple((kind, dtype(kind)) for kind in device_types))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The context switched on, whatever is on now."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast:
                if dtype is not None or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
            yield


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """One value of a recorded forward.

    kind and target: "input" (number of the model's tensor input), "parameter", "buffer" (dotted name), "constant" (the
    object itself), "count" (number of a count known before the first micro-batch), "call" (a function), "module"
    (dotted name). args, kwargs: nests with Nodes where values go in. value: what the recording saw, without memory.
    where: the user's file:line. stage: asked for by an annotation. draws: random numbers. context: other than the
    whole forward's. writes: number of the argument leaf that a call changes and that is the node's value. changes: the
    `memory` of every argument that it changes in place. slices: of a module that runs on a part of the samples, which
    dims those are. args of a buffer: where in the attribute it lies.
    """

    kind: Kind
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    value: Any = None
    where: str = ""
    stage: int | None = None
    draws: bool = False
    context: Context | None = None
    writes: int | None = None
    changes: frozenset[int] = frozenset()
    slices: Slices | None = None

    @property
    def name(self) -> str:
        """How messages call it."""
        if self.kind == "call":
            return str(getattr(self.target, "__qualname__", None) or getattr(self.target, "__name__", self.target))
        return f"{self.kind} {self.target!r}" if self.kind != "constant" else "a constant"

    def __repr__(self) -> str:
        return f"<{self.name} at {self.where}>"

    def inputs(self) -> Iterator[Node]:
        """The Nodes that go in."""
        yield from nodes_in((self.args, self.kwargs))

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Callable[..., Any]) -> Any:
        """The value that `target`, the function or the live module, gives for arguments."""
        if self.context is None:
            out = target(*args, **kwargs)
        else:
            with self.context.entered():
                out = target(*args, **kwargs)
        return out if self.writes is None else list(leaves_in((args, kwargs)))[self.writes]


@dataclass
class Graph:
    """A recorded forward: its Nodes in order, and the nest of Nodes that the model returns.

    ambient: the context of the whole forward. value: the model's output as the recording saw it. reads: plain
    attributes, (module, name), that the glue read. opened: modules that were taken apart. written: buffers that modules
    changed.
    """

    nodes: list[Node] = field(default_factory=list)
    output: Any = None
    value: Any = None
    ambient: Context | None = None
    reads: tuple[tuple[str, str], ...] = ()
    opened: tuple[str, ...] = ()
    written: dict[str, None] = field(default_factory=dict)

    @property
    def returned(self) -> list[Node]:
        """What the model returns, each once, in order."""
        return list(dict.fromkeys(nodes_in(self.output)))

    @property
    def scalars(self) -> list[Node]:
        """The floating-point numbers among it, of which some may be losses."""
        return [node for node in self.returned if is_scalar(node.value)]

    def needed(self, results: Sequence[Node]) -> set[Node]:
        """What the results are made of, and the calls that write into it."""
        live: set[Node] = set()
        waiting = list(results)
        while waiting:
            node = waiting.pop()
            if node not in live:
                live.add(node)
                waiting += node.inputs()
        return live


@dataclass(frozen=True, slots=True)
class Made:
    """A dataclass object that the glue makes: its type and its fields, with Nodes inside."""

    cls: type
    fields: dict[str, Any]

    def make(self) -> Any:
        return self.cls(**self.fields)


def map_nodes(value: Any, change: Callable[[Node], Any], *, make: bool = True) -> Any:
    """The nest with each Node exchanged. make: whether objects that hold Nodes are made, or stay to be made."""

    def mapped(value: Any) -> Any:
        if isinstance(value, Node):
            return change(value)
        if isinstance(value, Made):
            made = Made(value.cls, {name: mapped(item) for name, item in value.fields.items()})
            return made.make() if make else made
        if isinstance(value, (tuple, list)):
            items = [mapped(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return like_dict(value, {key: mapped(item) for key, item in value.items()})
        if type(value) is slice:
            return slice(mapped(value.start), mapped(value.stop), mapped(value.step))
        return value

    return mapped(value)


def nodes_in(value: Any) -> Iterator[Node]:
    """The Nodes of a nest, in order."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, Made):
        yield from nodes_in(value.fields)
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from nodes_in(entry)
    elif isinstance(value, dict):
        yield from nodes_in(tuple(value.values()))
    elif type(value) is slice:
        yield from nodes_in((value.start, value.stop, value.step))


def is_scalar(value: Any) -> bool:
    """Whether a value is a number in floating point, as a loss is."""
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


def memory(x: Tensor) -> int:
    """A number that tensors which share memory have in common, as long as one of them lives."""
    return int(x.untyped_storage()._cdata) if x.layout is torch.strided else id(x)


def like_dict(original: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """The items in a dict of the same kind."""
    if type(original) is dict:
        return items
    out = copy.copy(original)
    out.update(items)
    return out


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a nest of tuples, lists, dicts and dataclasses, in order."""
    return (leaf for leaf in leaves_in(value) if isinstance(leaf, Tensor))


def leaves_in(value: Any) -> Iterator[Any]:
    """What a nest of tuples, lists, dicts and dataclasses holds, in order."""
    if isinstance(value, (tuple, list)):
        for entry in value:
            yield from leaves_in(entry)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from leaves_in(entry)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from leaves_in(getattr(value, part.name, None))
    else:
        yield value


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest with each leaf changed."""
    if isinstance(value, (tuple, list)):
        items = [map_leaves(entry, change) for entry in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, dict)):
        fields = {part.name: map_leaves(getattr(value, part.name), change) for part in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, dict):
        return like_dict(value, {key: map_leaves(entry, change) for key, entry in value.items()})
    return change(value)


def item(node: Node, key: Any, value: Any, *, attribute: bool = False) -> Node:
    """A part of what another Node gave."""
    return Node("call", getattr if attribute else operator.getitem, (node, key), value=value, where=node.where)
