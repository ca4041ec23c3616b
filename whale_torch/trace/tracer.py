"""The recorder: modules that belong to a stage stay whole, what the model does between them becomes Nodes.

It runs the twin once. Every torch function of the glue passes through a TorchFunctionMode, every module through its
class's patched __call__; control flow is resolved by running it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set, ValuesView
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from whale_torch.capture import call_site
from whale_torch.errors import TraceError
from whale_torch.trace.graph import Context, Graph, Made, Node, item, leaves_in, like_dict, memory, tensors_in
from whale_torch.trace.randomness import foreign_random_kept, random_state_kept
from whale_torch.trace.sample_dims import Dims
from whale_torch.trace.settings import Watch
from whale_torch.trace.twin import Twin

__all__ = ["Leaf", "record"]

Leaf = Callable[[str, nn.Module], "int | Literal['loose'] | None"]
"""Of a module by name: the stage it belongs to, "loose" for one that runs whole wherever its inputs are, None to open
it: what it does is glue."""

_LOST = frozenset(
    {
        *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad, Tensor.backward),
        *(torch.autograd.backward, torch.autograd.grad),
    }
)
"""What gives no value, or takes one from autograd's graph of the recording."""
_OF_TORCH = frozenset(vars(nn.Module()))
_DEEPEST = 3
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
    dims: Dims | None = None,
    rows: int = 0,
) -> Graph:
    """Runs the twin on inputs like these and returns what it did.

    args, kwargs: as the model is called; their tensors, in order, are the graph's inputs. dims: has tensors seen as
    `rows` long along their dim of samples.
    The model's own hooks do not run: they do where the model itself is called.
    Raises TraceError, naming the user's line, for glue that reads values, changes an input, a buffer or an attribute,
    draws numbers that torch does not know of, gets a tensor past its arguments, or hides one in an object.
    """
    if torch.is_inference_mode_enabled():  # whose tensors do not tell that they were changed
        with torch.inference_mode(False), torch.no_grad():
            return record(twin, args, kwargs, leaf, dims=dims, rows=rows)
    args, kwargs = twin.inputs((args, dict(kwargs)), dims, rows)
    recorder = _Recorder(twin.module, leaf)
    for number, x in enumerate(tensors_in((args, kwargs))):
        recorder.bind(x, recorder.add(Node("input", number)))
        recorder.keep_unchanged(x, "input", "")
    with (
        random_state_kept(),
        twin.fake,
        recorder.draws,
        recorder.watch.over(recorder.taken_apart()),
        _patched(recorder),
        recorder,
    ):
        out = recorder.call(_forward, twin.module, args, kwargs)
        graph = recorder.graph
        graph.output, graph.value = recorder.nest(out), out
    graph.reads, graph.opened = tuple(recorder.watch.reads), tuple(recorder.opened)
    return graph


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


class _Seen(TorchDispatchMode):
    """What operations did since it was last cleared: `seen` whether they drew random numbers, `touched` the ids of the
    tensors they were given."""

    seen = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.touched: set[int] = set()

    def clear(self) -> None:
        self.seen = False
        self.touched.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.seen = True
        self.touched.update(map(id, args))
        return func(*args, **(kwargs or {}))


class _Recorder(TorchFunctionMode):
    def __init__(self, root: nn.Module, leaf: Leaf):
        super().__init__()
        self.graph = Graph(ambient=Context.now())
        self.draws = _Seen()
        self.root, self._leaf = root, leaf
        self._names = {id(module): name for name, module in root.named_modules()}
        self._attributes = _tensors_of(root)
        self._unchanged: dict[int, tuple[str, Any]] = {}
        for x, kind, name in self._attributes.values():
            self.keep_unchanged(x, kind, name)
        self._parameters = {id(p): name for name, p in root.named_parameters()}
        self.watch = Watch(self._names, lambda: not self._depth)
        self.opened: dict[str, None] = {}  # names of modules that were taken apart
        self._nodes: dict[int, Node] = {}
        self._versions: dict[int, int] = {}
        self._kept: list[Any] = []  # values whose ids are keys
        self._depth = 0  # inside a module that is called whole
        self._opened: set[int] = set()
        self._stage: int | None = None  # inside an opened module of this stage
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def taken_apart(self) -> Iterator[nn.Module]:
        """The modules whose own code is glue, as far as is known before."""
        for name, module in self.root.named_modules():
            if self._leaf(name, module) is None or not name:
                yield module

    def keep_unchanged(self, x: Tensor, kind: str, name: Any) -> None:
        """Glue may not write into this tensor, nor into views of it."""
        self._unchanged.setdefault(memory(x), (kind, name))

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
            _, kind, name = self._attributes[id(x)]
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

    # ---- functions of the glue

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._depth:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__":
            return self._attribute(func, args)
        if func in _LOST or getattr(func, "__name__", "") == "__set__":
            self._refuse_lost(func)
        before = [(number, x, x._version) for number, x in enumerate(leaves_in((args, kwargs))) if _is_tensor(x)]
        self.draws.clear()
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
        changes = frozenset(memory(x) for _, x in changed)
        node = Node("call", func, self.nest(tuple(args)), self.nest(dict(kwargs)), draws=draws, changes=changes)
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
            kind, name = self._unchanged.get(memory(x), ("", ""))
            if kind:
                name = name[0] if isinstance(name, tuple) else name
                what = f"the {kind} '{name}'" if name else "an input of the model"
                raise TraceError(
                    f"{_name_of(func)}() changes {what} in place between stages.",
                    where=call_site(),
                    fix="use the form that returns a new tensor, or do it inside a stage's module",
                )

    def _refuse_lost(self, func: Any) -> None:
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        what = f"a tensor's .{owner} is set" if owner else f"{_name_of(func)}() is called"
        raise TraceError(
            f"{what} between stages, where it would be lost: code there is recorded once and not run in every step.",
            where=call_site(),
            fix="do it inside a module of a stage; a hook can be on the module",
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
        self.draws.clear()
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
            self._note_opened(name, module)
            return original(module, *args, **kwargs)
        self._refuse_saved_hooks(f"module '{name}'")
        nest = self.nest(tuple(args)), self.nest(dict(kwargs))
        before = [(x, x._version) for x in leaves_in((args, kwargs)) if _is_tensor(x)]
        buffers = [(key, x, x._version) for key, x in _buffers(module)]
        self.draws.clear()
        with self._inside(), torch._C.DisableTorchFunction(), foreign_random_kept():
            out = _run(original, (module, *args), kwargs, f"module '{name}'")
        draws = self.draws.seen
        self._refuse_borrowed(name, module, (args, kwargs))
        stage = kind if isinstance(kind, int) else None
        if any(_is_loss(x) for x in tensors_in(out)):
            return self._open(original, module, args, kwargs, stage)
        if hides_tensors(out):
            raise TraceError(
                f"module '{name}' returns a {type(out).__name__} that hides tensors.",
                where=call_site(),
                fix="return tensors, or tuples, lists, dicts or dataclasses of them",
            )
        now = dict(_buffers(module))
        written = [key for key, x, version in buffers if now.get(key) is not x or x._version != version]
        prefix = f"{name}." if name else ""
        self.graph.written.update(dict.fromkeys(f"{prefix}{key}" for key in written))
        changed = [x for x, version in before if x._version != version]
        for x in changed:
            if id(x) in self._versions:
                self._versions[id(x)] = -1  # whoever reads it again would read what the module wrote
        changes = frozenset(map(memory, changed))
        self.bind(out, self.add(Node("module", name, *nest, draws=draws, stage=stage, changes=changes)))
        return out

    def _note_opened(self, name: str, module: nn.Module) -> None:
        """A module's own code becomes glue."""
        self.opened[name] = None
        self.watch.add(module)
        if module is not self.root and (module._backward_hooks or module._backward_pre_hooks):
            raise TraceError(
                f"module '{name}' has a backward hook, and is taken apart: the code between its stages is recorded.",
                where=call_site(),
                fix="put the hook on modules of stages, or all of this module into one stage",
            )

    def _refuse_borrowed(self, name: str, module: nn.Module, given: Any) -> None:
        """A module that uses another one's parameters past its arguments would miss them on its rank."""
        touched = self.draws.touched & self._parameters.keys()
        touched -= {id(p) for p in module.parameters()} | {id(x) for x in leaves_in(given)}
        if touched:
            raise TraceError(
                f"module '{name}' uses the parameter '{self._parameters[next(iter(touched))]}', which is none of its "
                "own: a rank that runs it might not hold that.",
                where=call_site(),
                fix="register it there as well (self.weight = other.weight), or hand it over as an argument",
            )

    def _open(self, original: Any, module: nn.Module, args: Any, kwargs: Any, stage: int | None) -> Any:
        """Runs a module that gives a loss once more, its members called whole, so that the loss itself is seen."""
        self._opened.add(id(module))
        self._note_opened(self._names[id(module)], module)
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


def _tensors_of(root: nn.Module) -> dict[int, tuple[Tensor, Literal["parameter", "buffer"], Any]]:
    """Tensors that belong to modules, by id: themselves, kind, and dotted name or (name, *where in the attribute)."""
    found: dict[int, tuple[Tensor, Literal["parameter", "buffer"], Any]] = {}
    for name, module in root.named_modules():
        prefix = f"{name}." if name else ""
        for key, value in vars(module).items():
            if key in _OF_TORCH:
                continue
            for path, x in _inside_of(value, ()):
                found.setdefault(id(x), (x, "buffer", (prefix + key, *path) if path else prefix + key))
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


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return list(module.named_buffers(remove_duplicate=False))


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
