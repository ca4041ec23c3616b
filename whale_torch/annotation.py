"""Annotations: the frozen data a scope leaves on a module, and the rules by which annotations nest."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from whale_torch.errors import AnnotationError

__all__ = [
    "KINDS",
    "MEMORY_KINDS",
    "Annotation",
    "annotate_module",
    "annotations_of",
    "check_nesting",
    "check_open",
    "close_annotations",
    "effective_annotations",
    "inherited_annotations",
    "merge",
]

MEMORY_KINDS = ("recompute", "cpu_offload")
KINDS = ("auto_parallel", "replica", "pipeline", "stage", "split", *MEMORY_KINDS)

_KEY = "_whale_annotations"

# Not written on the modules: a copy of one, or a pickled one, is free again.
_CLOSED: weakref.WeakSet[nn.Module] = weakref.WeakSet()

# What may stand directly around each kind (memory scopes are transparent); None: nothing.
# A stage without a pipeline is legal until the whole model is looked at: the pipeline may be put on a container later.
_ALLOWED_OUTSIDE: dict[str, tuple[str | None, ...]] = {
    "auto_parallel": (None,),
    "replica": (None, "auto_parallel", "stage"),
    "pipeline": (None, "auto_parallel", "replica"),
    "stage": (None, "auto_parallel", "replica", "pipeline"),
    "split": (None, "auto_parallel", "replica", "stage"),
}


@dataclass(frozen=True, slots=True)
class Annotation:
    """One scope as a module remembers it.

    kind: the scope's name, one of KINDS.
    options: the options given that differ from the scope's defaults, as sorted (name, hashable value) pairs.
    site: "file.py:12", where the user wrote the scope; for messages only.
    entry: a number that tells this entry of a scope from every other one of the process.
    """

    kind: str
    options: tuple[tuple[str, object], ...]
    site: str
    entry: int

    def get(self, name: str, default: object = None) -> object:
        """Returns the option `name`, or `default` where it was not given."""
        return dict(self.options).get(name, default)

    @property
    def call(self) -> str:
        """The scope as the user wrote it, such as `wh.split(size=8)`."""
        texts = (f"{name}={dict(value) if isinstance(value, tuple) else value!r}" for name, value in self.options)
        return f"wh.{self.kind}({', '.join(texts)})"

    def __str__(self) -> str:
        return f"{self.call} at {self.site}"


def annotations_of(module: nn.Module) -> tuple[Annotation, ...]:
    """Returns the module's own annotations, outer to inner."""
    found: tuple[Annotation, ...] = module.__dict__.get(_KEY, ())
    return found


def merge(
    stack: Iterable[Annotation], new: Iterable[Annotation], existing: Iterable[Annotation]
) -> tuple[Annotation, ...]:
    """Returns stack + new + existing without repetitions: open scopes outermost, what was there before innermost."""
    return tuple(dict.fromkeys((*stack, *new, *existing)))


def annotate_module(
    module: nn.Module, stack: Iterable[Annotation], new: Iterable[Annotation] = (), *, name: str | None = None
) -> None:
    """Writes annotations on a module: those of the open scopes (`stack`), then `new`, then what it already has.

    Nothing is written if the result does not nest.

    Raises: AnnotationError where the resulting order is illegal, and for a module of a parallelized model; it calls the
    module `name`, or its class name.
    """
    annotations = merge(stack, new, annotations_of(module))
    check_open(module, annotations, name)
    check_nesting(annotations, type(module).__name__ if name is None else name)
    module.__dict__[_KEY] = annotations


def close_annotations(model: nn.Module) -> None:
    """From now on the modules of this model take no annotation: its plan is in force."""
    _CLOSED.update(model.modules())


def check_open(module: nn.Module, annotations: Iterable[Annotation], name: str | None = None) -> None:
    """Raises AnnotationError if the module belongs to a parallelized model and does not have these annotations yet."""
    added = [annotation for annotation in annotations if annotation not in annotations_of(module)]
    if added and module in _CLOSED:
        called = type(module).__name__ if name is None else f"module '{name}'"
        raise AnnotationError(
            f"{added[-1]}: {called} belongs to a model that is parallelized already; a scope would change nothing now.",
            where=added[-1].site,
            fix="annotate it before wh.parallelize",
        )


def check_nesting(
    annotations: Iterable[Annotation], module_name: str | None, *, complete: bool = False, max_splits: int = 1
) -> None:
    """Checks the order of annotations, outer to inner, of a module ("" is the model's root, None: of no module yet).

    Legal: auto_parallel outermost; replica > pipeline > stage > (split or replica); replica > split; memory scopes
    anywhere. `max_splits` is how many splits may be nested directly (2 inside an expert of a split MoE layer).
    With `complete`, a stage outside any pipeline is an error too; without, the pipeline may still be added.

    Raises: AnnotationError, naming both scopes, their sites and the fix.
    """
    outside: list[Annotation] = []
    for inner in annotations:
        if inner.kind in MEMORY_KINDS:
            continue
        outer = outside[-1] if outside else None
        kind = outer.kind if outer else None
        splits = sum(annotation.kind == "split" for annotation in outside)
        legal = kind in _ALLOWED_OUTSIDE[inner.kind] or (inner.kind == kind == "split" and splits < max_splits)
        # A second pipeline or stage is illegal at any distance: replica may stand between it and the first.
        repeated = next((a for a in outside if inner.kind == a.kind and inner.kind in ("pipeline", "stage")), None)
        if not repeated and inner.kind == "pipeline":
            repeated = next((a for a in outside if a.kind == "stage"), None)
        if not legal or repeated:
            raise _illegal(repeated or outer, inner, module_name)
        if complete and inner.kind == "stage" and kind != "pipeline":
            raise AnnotationError(
                f"{_named(module_name)}{inner} is not inside wh.pipeline()"
                + (f", but directly inside {outer}." if outer else "."),
                where=inner.site,
                fix="open `with wh.pipeline(num_micro_batches=...):` around all stages, or wh.annotate them with "
                "inside=wh.pipeline().",
            )
        outside.append(inner)


def effective_annotations(model: nn.Module, *, complete: bool = False) -> dict[str, tuple[Annotation, ...]]:
    """Returns for every module name, in `named_modules` order, the annotations that act on it, outer to inner.

    Names, and modules reachable under several of them, are as in `inherited_annotations`.

    Raises: AnnotationError where an order is illegal; with `complete`, also for a stage outside any pipeline.
    """
    result = inherited_annotations(model)
    for name, found in result.items():
        # Where a module adds nothing its parent's check holds.
        if not name or found != result[name.rpartition(".")[0]]:
            check_nesting(found, name, complete=complete)
    return result


def inherited_annotations(
    model: nn.Module, own: Mapping[nn.Module, tuple[Annotation, ...]] | None = None
) -> dict[str, tuple[Annotation, ...]]:
    """Returns what `effective_annotations` returns, unchecked.

    A child has its parent's annotations, then those of its own that are not among them. A module object reachable
    under several names has one entry, under its first name, and the annotations of that path.
    `own` replaces what is written on some modules: to look at annotations before they are written.
    """
    replaced = own or {}
    result: dict[str, tuple[Annotation, ...]] = {}
    for name, module in model.named_modules():
        around = result[name.rpartition(".")[0]] if name else ()
        result[name] = merge(around, (), replaced.get(module, annotations_of(module)))
    return result


def _named(module_name: str | None) -> str:
    if module_name is None:
        return ""
    return f"module '{module_name}': " if module_name else "the model: "


_OUTERMOST = "make wh.auto_parallel() the outermost scope: what is inside it is kept as a constraint."
_FIXES = {
    ("stage", "stage"): "close the first stage before the next one begins: stages stand side by side in one pipeline.",
    ("pipeline", "pipeline"): "keep one of the two pipelines; a model has one.",
    ("stage", "pipeline"): "open the pipeline outside its stages; a model has one.",
    ("split", "split"): "keep one; a wider split is wh.split(size=...), one inside an expert MoELayer(slices=...).",
    ("split", "replica"): "exchange them: `with wh.replica(): with wh.split(): ...` splits inside each replica.",
    ("replica", "replica"): "keep one of the two; inside a replica only a pipeline's stage may hold another replica.",
    ("split", "pipeline"): "exchange them: a pipeline's stages hold splits.",
    ("split", "stage"): "exchange them: `with wh.stage(): with wh.split(): ...` splits inside the stage.",
    ("pipeline", "replica"): "open it inside one of the pipeline's `with wh.stage():` scopes, or outside the pipeline.",
    ("pipeline", "split"): "open it inside one of the pipeline's `with wh.stage():` scopes.",
}


def _illegal(outer: Annotation | None, inner: Annotation, module_name: str | None) -> AnnotationError:
    assert outer is not None, "every kind may stand outermost"
    fix = _OUTERMOST if inner.kind == "auto_parallel" else _FIXES[outer.kind, inner.kind]
    return AnnotationError(
        f"{_named(module_name)}{inner} cannot be inside {outer}.", where=f"{inner.site}, inside {outer.site}", fix=fix
    )
