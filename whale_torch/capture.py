"""Capture: an open scope sees, by torch's public registration hooks, which modules are born inside it.

While a scope is open, the hooks report every module that gets a parameter, buffer or child. Those born inside it, and
every child assigned inside it, are annotated (annotation.py). Nothing else is changed.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from whale_torch.annotation import Annotation, annotate_module, annotations_of, check_nesting
from whale_torch.errors import AnnotationError

__all__ = ["Scope", "call_site", "capture", "open_scopes"]

T = TypeVar("T", bound=Callable[..., object])


class Scope:
    """A parallel or memory scope with its options: open it with `with`, or call it on a module, class or function.

    On a class, its `__init__` is wrapped: each instance is annotated. On a function, each call is an entry of its own
    and the module it returns is annotated. Scopes can be used again and inside themselves.
    """

    __slots__ = ("_openings", "kind", "options", "site")

    def __init__(self, kind: str, options: tuple[tuple[str, object], ...], site: str) -> None:
        self.kind, self.options, self.site = kind, options, site
        self._openings: list[OpenScope] = []

    def entry(self, site: str | None = None) -> Annotation:
        """Returns the annotation of a new entry of this scope, at `site` or where the scope was made."""
        return Annotation(self.kind, self.options, self.site if site is None else site, next(_entry_numbers))

    def __enter__(self) -> Scope:
        opening = OpenScope(self.entry(call_site()))
        opening.__enter__()
        self._openings.append(opening)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        here = [opening for opening in open_scopes() if opening in self._openings]
        # A generator that holds a scope may be closed by another thread: the entry is then not among those open here.
        opening = (here or self._openings)[-1]
        self._openings.remove(opening)
        opening.__exit__(kind, error, traceback)

    def __call__(self, target: T) -> T:
        """Annotates a module, or makes a class or a builder function annotate what it builds.

        Raises: AnnotationError where the nesting is illegal, where the target is none of these, and for a module of a
        model that is parallelized already.
        """
        site = call_site()
        if isinstance(target, nn.Module):
            capture(target, open_scopes(), (self.entry(site),))
            return target
        if isinstance(target, type):
            _wrap_class(self, target, site)
            return target
        if callable(target):
            return cast(T, _wrap_builder(self, target, site))
        raise AnnotationError(
            f"wh.{self.kind}() takes a module, a class or a function, but got {type(target).__name__} {target!r}.",
            where=site,
            fix=f"options have names, such as wh.{self.kind}(name=value); call the scope on each module by itself.",
        )

    def __repr__(self) -> str:
        return Annotation(self.kind, self.options, self.site, 0).call


class OpenScope:
    """One entry of a scope while it is open."""

    def __init__(self, annotation: Annotation) -> None:
        self.annotation = annotation
        self.captured = self.closed = False
        self.older: tuple[nn.Module, ...] = ()  # modules whose __init__ was running when the scope was opened

    def __enter__(self) -> OpenScope:
        opened = open_scopes()
        check_nesting([opening.annotation for opening in opened] + [self.annotation], None)
        self.older = tuple(_modules_in_construction())
        _hooks.acquire()
        _openings.set((*opened, self))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.closed, self.older = True, ()
        # Not a reset by token: a generator may close its scope after one that was opened later.
        _openings.set(open_scopes())
        _hooks.release()
        if kind is None and not self.captured:
            raise AnnotationError(
                f"{self.annotation} closed without capturing an nn.Module: "
                "scopes annotate modules while they are built.",
                where=self.annotation.site,
                fix=f"open it where modules are built (__init__, not forward), "
                f"or call wh.{self.annotation.kind}(module) on a module that exists.",
            )


class _Hooks:
    """torch's registration hooks, installed while any scope of the process is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0
        self._handles: list[RemovableHandle] = []

    def acquire(self) -> None:
        with self._lock:
            self._num_open += 1
            if self._num_open == 1:
                self._handles = [
                    register_module_module_registration_hook(_on_child),
                    register_module_parameter_registration_hook(_on_parameter),
                    register_module_buffer_registration_hook(_on_buffer),
                ]

    def release(self) -> None:
        with self._lock:
            self._num_open -= 1
            if self._num_open == 0:
                for handle in self._handles:
                    handle.remove()


_entry_numbers = itertools.count()
_hooks = _Hooks()
_openings: ContextVar[tuple[OpenScope, ...]] = ContextVar("whale_torch_open_scopes", default=())


def open_scopes() -> tuple[OpenScope, ...]:
    """Returns the scopes open in this context, outer to inner."""
    # A context copied into a task or a thread outlives the scopes that were open when it was copied.
    return tuple(opening for opening in _openings.get() if not opening.closed)


def capture(
    module: nn.Module, opened: Iterable[OpenScope], new: Iterable[Annotation] = (), name: str | None = None
) -> None:
    """Annotates a module with the open scopes and, inside them, with `new`.

    Raises: AnnotationError where the nesting is illegal.
    """
    opened = tuple(opened)
    annotate_module(module, [opening.annotation for opening in opened], new, name=name)
    for opening in opened:
        opening.captured = True


def _on_child(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    opened = open_scopes()
    if opened and child is not None:
        capture(child, opened, name=name)
    _capture_if_born_inside(parent, opened)


def _on_buffer(module: nn.Module, name: str, buffer: Tensor | None) -> None:
    _capture_if_born_inside(module, open_scopes())


def _on_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    opened = open_scopes()
    _capture_if_born_inside(module, opened)
    if opened and parameter is not None and opened[-1].annotation not in annotations_of(module):
        annotation = opened[-1].annotation
        raise AnnotationError(
            f"parameter '{name}' was assigned to {type(module).__name__}, which is older than {annotation}: "
            "a scope holds whole modules, not single parameters of a module outside it.",
            where=f"{call_site()}, inside {annotation.site}",
            fix=f"put '{name}' into a module of its own and build that here, or assign it outside the scope "
            "(tied weights: tie them after the scope has closed).",
        )


def _capture_if_born_inside(module: nn.Module, opened: tuple[OpenScope, ...]) -> None:
    if not opened or opened[-1].annotation in annotations_of(module):
        return
    if not any(constructed is module for constructed in _modules_in_construction()):
        return
    for count in range(len(opened), 0, -1):
        if not any(older is module for older in opened[count - 1].older):
            capture(module, opened[:count])
            return


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _modules_in_construction() -> Iterator[nn.Module]:
    """Yields the modules whose `__init__` is running in this thread, the latest first."""
    for frame in _frames():
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            constructed = frame.f_locals.get(code.co_varnames[0])
            if isinstance(constructed, nn.Module):
                yield constructed


def call_site() -> str:
    """Returns the "file:line" of the innermost frame of the user's, relative to the current directory."""
    package = __name__.partition(".")[0]
    for frame in _frames():
        # contextlib: a scope entered by an ExitStack belongs to the line that called it; torch: so does an assignment.
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in (package, "contextlib", "torch"):
            break
    path = Path(frame.f_code.co_filename)
    try:
        path = path.relative_to(Path.cwd())
    except (ValueError, OSError):
        return f"{path}:{frame.f_lineno}"
    return f"{path}:{frame.f_lineno}"


def _wrap_class(scope: Scope, cls: type, site: str) -> None:
    if not issubclass(cls, nn.Module):
        raise AnnotationError(
            f"wh.{scope.kind}() on class {cls.__name__}, which is not an nn.Module.",
            where=site,
            fix="decorate a subclass of nn.Module, or a function that builds a module.",
        )
    if cls.__module__.partition(".")[0] == "torch":
        raise AnnotationError(
            f"wh.{scope.kind}() on torch's own class {cls.__name__} would annotate every {cls.__name__} there is.",
            where=site,
            fix=f"annotate an instance, wh.{scope.kind}(nn.{cls.__name__}(...)), or decorate a subclass.",
        )
    init = cls.__init__

    @functools.wraps(init)
    def construct(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        with OpenScope(scope.entry(site)):
            # First, because the __init__ of a subclass may already be running: its instance is not "older".
            capture(self, open_scopes())
            init(self, *args, **kwargs)

    cls.__init__ = construct  # type: ignore[method-assign]


def _wrap_builder(scope: Scope, function: Callable[..., object], site: str) -> Callable[..., object]:
    @functools.wraps(function)
    def build(*args: Any, **kwargs: Any) -> object:
        with OpenScope(scope.entry(site)):
            built = function(*args, **kwargs)
            if isinstance(built, nn.Module):
                capture(built, open_scopes())
        return built

    return build
