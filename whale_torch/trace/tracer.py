"""The recorder: modules that belong to a stage stay whole, what the model does between them becomes Nodes.

It runs the twin once. Every torch function of the glue passes through a TorchFunctionMode, every module through its
class's patched __call__; control flow is resolved by running it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from whale_torch.capture import call_site
from whale_torch.errors import TraceError
from whale_torch.trace.graph import Context, Graph, Made, Node, item, leaves_in, tensors_in
from whale_torch.trace.twin import Twin

__all__ = ["Leaf", "record"]

Leaf = Callable[[str, nn.Module], "int | Literal['loose'] | None"]
"""Of a module by name: the stage it belongs to, "loose" for one that runs whole wherever its inputs are, None to open
it: what it does is glue."""

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def record(
    twin: Twin,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    leaf: Leaf,
    *,
    resize: tuple[int, int, int] | None = None,
) -> Graph:
    """Runs the twin on inputs like these and returns what it did.

    args, kwargs: as the model is called; their tensors, in order, are the graph's inputs. resize: (dim, size, other)
    has every tensor that is `size` along `dim` seen as one of size `other`.
    Raises TraceError, naming the user's line, for glue that reads values, changes an input or a buffer in place, gets a
    tensor past its arguments, or hides one in an object.
    """
    args, kwargs = twin.inputs((args, dict(kwargs)), resize)
    recorder = _Recorder(twin.module, leaf)
    for number, x in enumerate(tensors_in((args, kwargs))):
        recorder.bind(x, recorder.add(Node("input", number)))
    with _random_state_kept(), twin.fake, recorder.draws, _patched(recorder), recorder:
        out = twin.module(*args, **kwargs)
        graph = recorder.graph
        graph.output, graph.value = recorder.nest(out), out
    return graph


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    generator = torch.default_generator
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)


class _Draws(TorchDispatchMode):
    """Whether an operation drew random numbers since `seen` was last cleared."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.seen = True
        return func(*args, **(kwargs or {}))


class _Recorder(TorchFunctionMode):
    def __init__(self, root: nn.Module, leaf: Leaf):
        super().__init__()
        self.graph = Graph(ambient=Context.now())
        self.draws = _Draws()  # type: ignore[no-untyped-call]
        self.root, self._leaf = root, leaf
        self._names = {id(module): name for name, module in root.named_modules()}
        self._attributes = _tensors_of(root)
        self._nodes: dict[int, Node] = {}
        self._versions: dict[int, int] = {}
        self._kept: list[Any] = []  # values whose ids are keys
        self._depth = 0  # inside a module that is called whole
        self._opened: set[int] = set()
        self._stage: int | None = None  # inside an opened module of this stage
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)

    # ---- values and their Nodes

    def add(self, node: Node) -> Node:
        """Appends a Node."""
        node.where = node.where or call_site()
        if node.stage is None:
            node.stage = self._stage
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
        elif not isinstance(value, _PLAIN):
            self._nodes[id(value)] = node

    def _bind_part(self, value: Any, node: Node, key: Any, *, attribute: bool = False) -> None:
        if isinstance(value, Tensor) or not isinstance(value, _PLAIN):
            part = item(node, key, value, attribute=attribute)
            part.stage = node.stage
            self.graph.nodes.append(part)
            self.bind(value, part)

    def nest(self, value: Any) -> Any:
        """The nest with Nodes for tensors and for objects that Nodes gave."""
        if isinstance(value, Tensor):
            return self._node(value)
        if isinstance(value, _PLAIN):
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
        if type(value) is dict:
            return {key: self.nest(part) for key, part in value.items()}
        if hides_tensors(value):
            raise TraceError(
                f"a {type(value).__name__} that holds tensors is handed from module to module.",
                where=call_site(),
                fix="hand on the tensors themselves, in tuples, lists, dicts or dataclasses (of a Hugging Face model: "
                "use_cache=False)",
            )
        return value

    def _node(self, x: Tensor) -> Node:
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
        if id(x) in self._attributes:
            kind, name = self._attributes[id(x)]
            node = Node(kind, name)
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

    # ---- functions of the glue

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._depth:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__":
            return self._attribute(func, args)
        before = [(number, x, x._version) for number, x in enumerate(leaves_in((args, kwargs))) if _is_tensor(x)]
        self.draws.seen = False
        out = _run(func, args, kwargs, f"{_name_of(func)}()")
        draws = self.draws.seen  # what is asked of tensors below passes here too
        changed = [(number, x) for number, x, version in before if x._version != version]
        given = [x for x in leaves_in(out) if isinstance(x, Tensor)]
        if not given and not changed:
            return out  # a shape, a dtype: resolved
        self._refuse_changes(func, [x for _, x in changed])
        self._refuse_saved_hooks(_name_of(func))
        for _, x in changed:
            if id(x) in self._versions:
                self._versions[id(x)] = x._version  # its arguments are read as they are now
        node = Node("call", func, self.nest(tuple(args)), self.nest(dict(kwargs)), draws=draws)
        if changed and not any(x is given_x for _, x in changed for given_x in given):
            node.writes = changed[0][0]
            self.bind(changed[0][1], self.add(node))
        else:
            self.bind(out, self.add(node))
        return out

    def _attribute(self, func: Any, args: tuple[Any, ...]) -> Any:
        """A tensor that is a property of another one: .T, .mT, .data."""
        out = func(*args)
        if isinstance(out, Tensor) and id(out) not in self._nodes and id(out) not in self._attributes:
            name = func.__self__.__name__
            self.bind(out, self.add(Node("call", getattr, (self._node(args[0]), name))))
        return out

    def _refuse_changes(self, func: Any, changed: list[Tensor]) -> None:
        for x in changed:
            source = self._nodes.get(id(x))
            kind, name = self._attributes.get(id(x), ("", ""))
            if name or (source is not None and source.kind == "input"):
                what = f"the {kind} '{name}'" if name else "an input of the model"
                raise TraceError(
                    f"{_name_of(func)}() changes {what} in place between stages.",
                    where=call_site(),
                    fix="use the form that returns a new tensor, or do it inside a stage's module",
                )

    def _refuse_saved_hooks(self, what: str) -> None:
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not self._hooks:
            raise TraceError(
                f"{what} is called between stages inside checkpoint() or saved_tensors_hooks, which would be lost.",
                where=call_site(),
                fix="put the checkpoint inside a stage's module",
            )

    def apply(self, function: type[torch.autograd.Function], original: Callable[..., Any], args: Any) -> Any:
        """A custom autograd.Function in the glue is one Node: taken apart it would lose its backward."""
        if self._depth:
            return original(*args)
        if function.__module__ == "torch.utils.checkpoint":
            raise TraceError(
                "checkpoint(use_reentrant=True) is called between stages, where it would be lost.",
                where=call_site(),
                fix="put the checkpoint inside a stage's module",
            )
        nest = self.nest(tuple(args))
        self.draws.seen = False
        with self._inside():
            out = original(*args)
        draws = self.draws.seen
        self.bind(out, self.add(Node("call", original, nest, draws=draws)))
        return out

    # ---- modules

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module's __call__."""
        name = self._names.get(id(module))
        if self._depth or name is None or id(module) in self._opened:
            return original(module, *args, **kwargs)
        kind = self._leaf(name, module)
        if kind is None:
            return original(module, *args, **kwargs)
        self._refuse_saved_hooks(f"module '{name}'")
        nest = self.nest(tuple(args)), self.nest(dict(kwargs))
        before = [(x, x._version) for x in leaves_in((args, kwargs)) if _is_tensor(x)]
        self.draws.seen = False
        with self._inside(), torch._C.DisableTorchFunction():
            out = _run(original, (module, *args), kwargs, f"module '{name}'")
        draws = self.draws.seen
        stage = kind if isinstance(kind, int) else None
        if any(_is_loss(x) for x in tensors_in(out)):
            return self._open(original, module, args, kwargs, stage)
        if hides_tensors(out):
            raise TraceError(
                f"module '{name}' returns a {type(out).__name__} that hides tensors.",
                where=call_site(),
                fix="return tensors, or tuples, lists, dicts or dataclasses of them",
            )
        for x, version in before:
            if x._version != version and id(x) in self._versions:
                self._versions[id(x)] = -1  # whoever reads it again would read what the module wrote
        self.bind(out, self.add(Node("module", name, *nest, draws=draws, stage=stage)))
        return out

    def _open(self, original: Any, module: nn.Module, args: Any, kwargs: Any, stage: int | None) -> Any:
        """Runs a module that gives a loss once more, its members called whole, so that the loss itself is seen."""
        self._opened.add(id(module))
        before, self._stage = self._stage, self._stage if stage is None else stage
        try:
            return original(module, *args, **kwargs)
        finally:
            self._stage = before
            self._opened.discard(id(module))

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


def _run(func: Callable[..., Any], args: Any, kwargs: Any, what: str) -> Any:
    try:
        return func(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise TraceError(
            f"{what} reads a tensor's value to decide what is done next, which differs from batch to batch.",
            where=call_site(),
            fix="in the code between stages: move it into a stage's module",
        ) from error


@contextlib.contextmanager
def _patched(recorder: _Recorder) -> Iterator[None]:
    """Calls of modules and of custom autograd.Functions go through the recorder."""
    classes = {
        cls
        for module in recorder.root.modules()
        for cls in type(module).__mro__
        if "__call__" in vars(cls) and issubclass(cls, nn.Module)
    }
    calls = {cls: vars(cls)["__call__"] for cls in classes}
    apply = vars(torch.autograd.Function)["apply"]

    def through(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda module, *args, **kwargs: recorder.call(original, module, args, kwargs)

    def apply_through(function: Any, *args: Any) -> Any:
        return recorder.apply(function, apply.__get__(None, function), args)

    try:
        for cls, original in calls.items():
            cls.__call__ = through(original)  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(apply_through)  # type: ignore[assignment, method-assign]
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        for cls, original in calls.items():
            cls.__call__ = original  # type: ignore[method-assign]


def _tensors_of(root: nn.Module) -> dict[int, tuple[Literal["parameter", "buffer"], str]]:
    """Tensors that belong to modules, by id: kind and dotted name."""
    found: dict[int, tuple[Literal["parameter", "buffer"], str]] = {}
    for name, module in root.named_modules():
        prefix = f"{name}." if name else ""
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                found.setdefault(id(value), ("buffer", prefix + key))
    found |= {id(buffer): ("buffer", name) for name, buffer in root.named_buffers()}
    found |= {id(parameter): ("parameter", name) for name, parameter in root.named_parameters()}
    return found


def _fields(value: Any) -> dict[str, Any]:
    return {part.name: getattr(value, part.name) for part in dataclasses.fields(value)}


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _is_loss(x: Tensor) -> bool:
    return x.dim() == 0 and x.is_floating_point() and x.requires_grad


def _name_of(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def hides_tensors(value: Any, depth: int = 0) -> bool:
    """Whether an object other than a nest has tensors among its attributes."""
    if isinstance(value, (*_PLAIN, Tensor)) or depth > 5:
        return False
    if isinstance(value, (tuple, list, set, frozenset)):
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
