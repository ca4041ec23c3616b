"""What a recording knows of values: the Node that gave each, or the attribute of a module that it is."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Set, ValuesView
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from whale_torch.capture import call_site
from whale_torch.errors import TraceError
from whale_torch.names import joined
from whale_torch.trace.graph import OF_TORCH, PLAIN, Context, Graph, Made, Node, item, leaves_in, like_dict

__all__ = ["Values", "hides_tensors"]

_DEEPEST = 3


class Values:
    """The graph so far, and the Nodes of values.

    attributes: tensors that belong to modules, by id: themselves, kind, and dotted name or (name, *where in the
    attribute). stage: of Nodes that are added, where they say none.
    """

    def __init__(self, root: nn.Module):
        self.graph = Graph(ambient=Context.now())
        self.attributes = _tensors_of(root)
        self.stage: int | None = None
        self._nodes: dict[int, Node] = {}
        self._versions: dict[int, int] = {}
        self._kept: list[Any] = []  # values whose ids are keys

    def knows(self, x: Tensor) -> bool:
        """Whether a tensor has a Node, or belongs to a module."""
        return id(x) in self._nodes or id(x) in self.attributes

    def changed(self, x: Tensor) -> None:
        """A recorded call changed a tensor: what reads it from here on reads it as it is now."""
        if id(x) in self._versions:
            self._versions[id(x)] = x._version

    def spoil(self, x: Tensor) -> None:
        """A module wrote into a tensor: whoever reads it again is refused."""
        if id(x) in self._versions:
            self._versions[id(x)] = -1

    def add(self, node: Node) -> Node:
        """Appends a Node."""
        node.where = node.where or call_site()
        if node.stage is None:
            node.stage = self.stage
        context = Context.now()
        if node.kind in ("call", "module") and context != self.graph.ambient:
            node.context = context
        self.graph.nodes.append(node)
        return node

    def bind(self, value: Any, node: Node) -> None:
        """Says that a Node gave this value, and that parts of it are parts of the Node's."""
        self._kept.append(value)
        node.value = value
        if isinstance(value, Tensor):
            self._nodes[id(value)], self._versions[id(value)] = node, value._version
        elif isinstance(value, (tuple, list)):
            for number, part in enumerate(value):
                self._bind_part(part, node, number)
        elif isinstance(value, dict):
            for key, part in value.items():
                self._bind_part(part, node, key)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for part in dataclasses.fields(value):
                self._bind_part(getattr(value, part.name), node, part.name, attribute=True)
        elif not isinstance(value, PLAIN):
            self._nodes[id(value)] = node

    def _bind_part(self, value: Any, node: Node, key: Any, *, attribute: bool = False) -> None:
        if isinstance(value, Tensor) or not isinstance(value, PLAIN):
            part = item(node, key, value, attribute=attribute)
            part.stage = node.stage
            self.graph.nodes.append(part)
            self.bind(value, part)

    def nest(self, value: Any) -> Any:
        """The nest with Nodes for tensors and for objects that Nodes gave."""
        if isinstance(value, Tensor):
            return self.node(value)
        if isinstance(value, PLAIN):
            return value
        if id(value) in self._nodes:
            return self._nodes[id(value)]
        if isinstance(value, slice):
            return slice(self.nest(value.start), self.nest(value.stop), self.nest(value.step))
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, (tuple, list)):
            items = [self.nest(part) for part in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = value.items() if isinstance(value, dict) else _fields(value).items()
            return Made(type(value), {name: self.nest(part) for name, part in parts})
        if isinstance(value, dict):
            return like_dict(value, {key: self.nest(part) for key, part in value.items()})
        if hides_tensors(value):
            raise TraceError(
                f"a {type(value).__name__} that holds tensors is handed from module to module.",
                where=call_site(),
                fix="hand on the tensors themselves, in tuples, lists, dicts or dataclasses (of a Hugging Face model: "
                "use_cache=False)",
            )
        return value

    def node(self, x: Tensor) -> Node:
        """The Node of a tensor; of one that was never seen, a new one for an attribute or a constant."""
        known = self._nodes.get(id(x))
        if known is not None:
            if x._version != self._versions[id(x)]:
                raise TraceError(
                    f"a tensor of shape {tuple(x.shape)} was changed in place, through a view or inside a stage, after "
                    f"{known.name} gave it.",
                    where=call_site(),
                    fix="use the form that returns a new tensor",
                )
            return known
        if id(x) in self.attributes:
            _, kind, name = self.attributes[id(x)]
            owner, *path = name if isinstance(name, tuple) else (name,)
            node = Node(kind, owner, tuple(path))
        elif isinstance(x, FakeTensor):
            raise TraceError(
                f"a tensor of shape {tuple(x.shape)} reached the code between stages past its arguments: by an "
                "attribute, a closure or a cache.",
                where=call_site(),
                fix="hand it on as an argument or a result of the modules",
            )
        else:
            node = Node("constant", x)
        node.where = call_site()
        self.graph.nodes.append(node)
        self.bind(x, node)
        return node


def _tensors_of(root: nn.Module) -> dict[int, tuple[Tensor, Literal["parameter", "buffer"], Any]]:
    """Tensors that belong to modules, by id: themselves, kind, and dotted name or (name, *where in the attribute)."""
    found: dict[int, tuple[Tensor, Literal["parameter", "buffer"], Any]] = {}
    for name, module in root.named_modules():
        for key, value in vars(module).items():
            if key in OF_TORCH:
                continue
            for path, x in _inside_of(value, ()):
                found.setdefault(id(x), (x, "buffer", (joined(name, key), *path) if path else joined(name, key)))
    found |= {id(x): (x, "buffer", name) for name, x in root.named_buffers()}
    found |= {id(x): (x, "parameter", name) for name, x in root.named_parameters()}
    return found


def _inside_of(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """The tensors of a nest of lists, tuples and dicts, each with the keys that lead to it."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)) and len(path) < _DEEPEST:
        for number, part in enumerate(value):
            yield from _inside_of(part, (*path, number))
    elif isinstance(value, dict) and len(path) < _DEEPEST:
        for key, part in value.items():
            yield from _inside_of(part, (*path, key))


def hides_tensors(value: Any, depth: int = 0) -> bool:
    """Whether an object other than a nest has tensors among its attributes."""
    if isinstance(value, (*PLAIN, Tensor)) or depth > 5:
        return False
    if isinstance(value, (Set, deque, ValuesView)):
        return any(isinstance(part, Tensor) or hides_tensors(part, depth + 1) for part in value)
    if isinstance(value, (tuple, list)):
        return any(hides_tensors(part, depth + 1) for part in value)
    if isinstance(value, dict):
        return any(hides_tensors(part, depth + 1) for part in value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(hides_tensors(part, depth + 1) for part in _fields(value).values())
    if isinstance(value, nn.Module) or callable(value):
        return False
    own = getattr(value, "__dict__", {}).values()
    return any(isinstance(x, FakeTensor) for part in own for x in leaves_in(part)) or any(
        hides_tensors(part, depth + 1) for part in own
    )


def _fields(value: Any) -> dict[str, Any]:
    return {part.name: getattr(value, part.name) for part in dataclasses.fields(value)}
