"""The recorder: modules that belong to a stage stay whole, what the model does between them becomes Nodes.

It runs the twin once. Every torch function of the glue passes through a TorchFunctionMode, every module through its
class's patched __call__; control flow is resolved by running it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from whale_torch.capture import call_site
from whale_torch.errors import TraceError
from whale_torch.names import joined
from whale_torch.trace.graph import Graph, Node, is_scalar, leaves_in, memory, tensors_in
from whale_torch.trace.patching import patched
from whale_torch.trace.randomness import foreign_random_kept, random_state_kept
from whale_torch.trace.sample_dims import Dims
from whale_torch.trace.settings import Watch
from whale_torch.trace.twin import Twin
from whale_torch.trace.values import Values, hides_tensors

__all__ = ["Leaf", "Opened", "record"]


class Opened(NamedTuple):
    """A module of a stage whose own code is glue of that stage."""

    stage: int


Leaf = Callable[[str, nn.Module], "int | Literal['loose'] | Opened | None"]
"""Of a module by name: the stage it belongs to, "loose" for one that runs whole wherever its inputs are, Opened or None
to open it: what it does is glue."""

_LOST = frozenset(
    {
        *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad, Tensor.backward),
        *(torch.autograd.backward, torch.autograd.grad),
    }
)
"""What gives no value, or takes one from autograd's graph of the recording."""


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
        recorder.values.bind(x, recorder.values.add(Node("input", number)))
        recorder.keep_unchanged(x, "input", "")
    with (
        random_state_kept(),
        twin.fake,
        recorder.draws,
        recorder.watch.over(twin.module.modules()),
        patched(twin.module, recorder.call, recorder.apply),
        recorder,
    ):
        out = recorder.call(_forward, twin.module, args, kwargs)
        graph = recorder.values.graph
        graph.output, graph.value = recorder.values.nest(out), out
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
        self.values = Values(root)
        self.draws = _Seen()
        self.root, self._leaf = root, leaf
        self._names = {id(module): name for name, module in root.named_modules()}
        self._unchanged: dict[int, tuple[str, Any]] = {}
        for x, kind, name in self.values.attributes.values():
            self.keep_unchanged(x, kind, name)
        self._parameters = {id(p): name for name, p in root.named_parameters()}
        self.watch = Watch(self._names)
        self.opened: dict[str, None] = {}  # names of modules that were taken apart
        self._opened: set[int] = set()
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def keep_unchanged(self, x: Tensor, kind: str, name: Any) -> None:
        """Glue may not write into this tensor, nor into views of it."""
        self._unchanged.setdefault(memory(x), (kind, name))

    # ---- functions of the glue

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.watch.depth:
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
            self.values.changed(x)  # its arguments are read as they are now
        changes = frozenset(memory(x) for _, x in changed)
        node = Node(
            "call", func, self.values.nest(tuple(args)), self.values.nest(dict(kwargs)), draws=draws, changes=changes
        )
        if changed and not any(x is given_x for _, x in changed for given_x in given):
            node.writes = changed[0][0]
            self.values.bind(changed[0][1], self.values.add(node))
        else:
            self.values.bind(out, self.values.add(node))
        return out

    def _attribute(self, func: Any, args: tuple[Any, ...]) -> Any:
        """A tensor that is a property of another one: .T, .mT, .data."""
        out = func(*args)
        if isinstance(out, Tensor) and not self.values.knows(out):
            name = func.__self__.__name__
            self.values.bind(out, self.values.add(Node("call", getattr, (self.values.node(args[0]), name))))
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
        if self.watch.depth:
            return original(*args)
        if function.__module__ == "torch.utils.checkpoint":
            raise TraceError(
                "checkpoint(use_reentrant=True) is called between stages, where it would be lost.",
                where=call_site(),
                fix="put the checkpoint inside a stage's module",
            )
        nest = self.values.nest(tuple(args))
        self.draws.clear()
        with self._inside():
            out = original(*args)
        draws = self.draws.seen
        self.values.bind(out, self.values.add(Node("call", original, nest, draws=draws)))
        return out

    # ---- modules

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module's __call__."""
        name = self._names.get(id(module))
        if self.watch.depth or name is None or id(module) in self._opened:
            return original(module, *args, **kwargs)
        kind = self._leaf(name, module)
        if kind is None or isinstance(kind, Opened):
            self._note_opened(name, module)
            with self._glue_of(None if kind is None else kind.stage):
                return original(module, *args, **kwargs)
        self._refuse_saved_hooks(f"module '{name}'")
        nest = self.values.nest(tuple(args)), self.values.nest(dict(kwargs))
        before = [(x, x._version) for x in leaves_in((args, kwargs)) if _is_tensor(x)]
        buffers = [(key, x, x._version) for key, x in _buffers(module)]
        self.draws.clear()
        with self._inside(), torch._C.DisableTorchFunction(), foreign_random_kept():
            out = _run(original, (module, *args), kwargs, f"module '{name}'")
        draws = self.draws.seen
        self._refuse_borrowed(name, module, (args, kwargs))
        stage = kind if isinstance(kind, int) else None
        if any(is_scalar(x) and x.requires_grad for x in tensors_in(out)):
            return self._open(original, module, args, kwargs, stage)
        if hides_tensors(out):
            raise TraceError(
                f"module '{name}' returns a {type(out).__name__} that hides tensors.",
                where=call_site(),
                fix="return tensors, or tuples, lists, dicts or dataclasses of them",
            )
        now = dict(_buffers(module))
        written = [key for key, x, version in buffers if now.get(key) is not x or x._version != version]
        self.values.graph.written.update(dict.fromkeys(joined(name, key) for key in written))
        changed = [x for x, version in before if x._version != version]
        for x in changed:
            self.values.spoil(x)
        changes = frozenset(map(memory, changed))
        self.values.bind(out, self.values.add(Node("module", name, *nest, draws=draws, stage=stage, changes=changes)))
        return out

    def _note_opened(self, name: str, module: nn.Module) -> None:
        """A module's own code becomes glue."""
        self.opened[name] = None
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
        try:
            with self._glue_of(stage):
                return original(module, *args, **kwargs)
        finally:
            self._opened.discard(id(module))

    @contextlib.contextmanager
    def _glue_of(self, stage: int | None) -> Iterator[None]:
        """What is recorded belongs to this stage."""
        before = self.values.stage
        self.values.stage = before if stage is None else stage
        try:
            yield
        finally:
            self.values.stage = before

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self.watch.depth += 1
        try:
            yield
        finally:
            self.watch.depth -= 1


def _run(func: Callable[..., Any], args: Any, kwargs: Any, what: str) -> Any:
    try:
        return func(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise TraceError(
            f"{what} reads a tensor's value to decide what is done next, which differs from batch to batch.",
            where=call_site(),
            fix="in the code between stages: move it into a stage's module",
        ) from error


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return list(module.named_buffers(remove_duplicate=False))


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _name_of(func: Any) -> str:
    return str(getattr(func, "__name__", func))
