"""The programs of a pipeline: one recording for every kind of call, cut into stages."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor, nn

from whale_torch.comm.cut_tensor import kinds_of
from whale_torch.errors import LossError, TraceError, WhaleError, first_line
from whale_torch.planning.pipelines import leaf_of
from whale_torch.planning.plan import Plan
from whale_torch.planning.slices import SlicedModules
from whale_torch.strategies.pipeline.batches import MicroBatches, micro_batches
from whale_torch.strategies.pipeline.outputs import losses_of, numbers_of, numbers_that_grow, training_results
from whale_torch.trace.cut import cut
from whale_torch.trace.forms import frozen
from whale_torch.trace.graph import Context, Graph, Node
from whale_torch.trace.mixing import refuse_mixing
from whale_torch.trace.program import Instruction, StageProgram
from whale_torch.trace.reductions import Combine, Count, rewrite
from whale_torch.trace.sample_dims import Dims, SampleDims
from whale_torch.trace.settings import Settings, hooks_of
from whale_torch.trace.sizes import Sizes, differing_dims, other_number
from whale_torch.trace.slices import mark_slices
from whale_torch.trace.tracer import record
from whale_torch.trace.twin import Twin

__all__ = ["Mode", "Program", "Programs"]

Mode = Literal["train", "outputs"]

_MOST = 64
"""Programs that are kept; those that were not used for longest go first."""


@dataclass(frozen=True, eq=False)
class Program:
    """One kind of call, cut into stages.

    mode: "train" gives the loss and other scalars, "outputs" everything that the model returns. results: the nest that
    the user gets, with Nodes. returned: its Nodes, in the order in which the last stage gives their values. combine:
    how those among them that are numbers add up, by place. loss: which of the returned. counts: of the numbers.
    whole: all of the batch has to be one micro-batch, for a number that is no sum over samples, or has a gradient, and
    for a tensor whose rows cannot be told. dims: along which returned tensors have a row for each sample, by place;
    the others are the same for all micro-batches. numbers: Python numbers of the results, as so much for each sample.
    written: buffers that modules change. digest: of what stages send each other and return.
    """

    mode: Mode
    stages: tuple[StageProgram, ...]
    results: Any
    returned: tuple[Node, ...]
    combine: Mapping[int, Combine] = field(default_factory=dict)
    loss: Node | None = None
    counts: tuple[StageProgram, ...] = ()
    whole: bool = False
    dims: Mapping[int, int] = field(default_factory=dict)
    numbers: Mapping[Node, Fraction] = field(default_factory=dict)
    written: tuple[str, ...] = ()

    @functools.cached_property
    def digest(self) -> int:
        sent = [[(source, [*map(_told, nodes)]) for source, nodes in stage.receives.items()] for stage in self.stages]
        told = sent, [*map(_told, self.returned)], sorted(self.combine.items()), sorted(self.dims.items()), self.whole
        return zlib.crc32(repr(told).encode())


def _told(node: Node) -> Any:
    x = node.value
    return (tuple(x.shape), str(x.dtype), x.requires_grad) if isinstance(x, Tensor) else type(x).__name__


class Programs:
    """Records and cuts the calls of one model, each kind once.

    Raises what recording, cutting and the rewriting of the loss raise, TraceError and LossError.
    """

    def __init__(self, model: nn.Module, plan: Plan, device: torch.device):
        assert plan.pipeline is not None
        self._model, self._plan = model, plan.pipeline
        self._sample_dims = SampleDims(model, plan.batch_dim, where=plan.pipeline.site)
        self._sliced = SlicedModules(plan.taskgraphs)
        self._leaf = leaf_of(plan.pipeline, self._sliced)
        self._twin = Twin.of(model, device)
        self._modules, self._parameters = list(model.modules()), list(model.parameters())
        self._named = dict(model.named_modules())
        self._known: dict[Any, list[tuple[Settings, Program]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))

    def of_batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, mode: Mode
    ) -> tuple[MicroBatches, list[Program]]:
        """A call's micro-batches, and the program of each."""
        dims = self._sample_dims.of(args, kwargs, rows)
        cut = micro_batches(args, kwargs, rows, self._plan.num_micro_batches, dims)
        with _cut_from(rows, cut.rows[0], self._plan.site):
            kinds = {rows: self.of(*cut.call(rows), rows, mode, dims) for rows in dict.fromkeys(cut.rows)}
        if len(cut.rows) > 1 and any(program.whole for program in kinds.values()):
            cut = micro_batches(args, kwargs, rows, 1, dims)
            kinds = {rows: self.of(*cut.call(rows), rows, mode, dims)}
        return cut, [kinds[rows] for rows in cut.rows]

    def ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> tuple[StageProgram, ...]:
        """The stages of the first micro-batch of a call to come, of inputs like these."""
        with torch.enable_grad():
            _, programs = self.of_batch(args, kwargs, rows, "train" if self._model.training else "outputs")
        return programs[0].stages

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int, mode: Mode, dims: Dims) -> Program:
        """The program for calls like this one, of `rows` samples; "train" becomes "outputs" where there is no loss.

        dims: along which the tensors have a row for each sample.
        """
        key = mode, rows, dims, self._key(args, kwargs)
        found = next((program for settings, program in self._known.get(key, ()) if settings.hold()), None)
        made = [] if found else [self._record(args, kwargs, rows, mode, dims)]
        self._known[key] = [*self._known.pop(key, ()), *made]  # the last one used comes last
        self._forget()
        return found or made[0][1]

    def _record(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int, mode: Mode, dims: Dims
    ) -> tuple[Settings, Program]:
        """A new program, and the settings that it holds for."""
        self._twin.follow(self._model)
        graph = record(self._twin, args, kwargs, self._leaf)
        other = self._other(args, kwargs, rows, dims)
        mark_slices(graph, other, self._sliced.__contains__, rows)
        program = self._make(graph, other, mode, rows)
        opened = dict.fromkeys((*graph.opened, *other.opened))
        self._check_hooks(opened)
        return Settings(self._named, dict.fromkeys((*graph.reads, *other.reads)), opened), program

    def _other(self, args: Any, kwargs: Any, rows: int, dims: Dims) -> Graph:
        """A recording at another batch size."""
        other = other_number(rows)
        try:
            return record(self._twin, args, kwargs, self._leaf, dims=dims, rows=other)
        except WhaleError:
            raise
        except Exception as error:  # the model is the user's
            raise TraceError(
                f"the forward runs on {rows} samples and fails on {other}: {type(error).__name__}: {first_line(error)}",
                where=self._plan.site,
                fix="a pipeline records it at two numbers of samples to see what mixes them: let it take any number, "
                f"put what needs one into a module of a stage, or, {_NO_SAMPLES}",
            ) from error

    def _check_hooks(self, opened: Iterable[str]) -> None:
        """Raises TraceError for a hook that came later on a module whose code was recorded."""
        copies = dict(self._twin.module.named_modules())
        for name in opened:
            if name and hooks_of(self._named[name]) != hooks_of(copies[name]):
                raise TraceError(
                    f"a hook of module '{name}' was added or removed after wh.parallelize, and the module is taken "
                    "apart: the code between its stages is recorded.",
                    where=self._plan.site,
                    fix="put hooks on modules of stages, or on this one before wh.parallelize",
                )

    def _forget(self) -> None:
        while len(self) > _MOST:
            key, found = next(iter(self._known.items()))
            del found[0]
            if not found:
                del self._known[key]

    def _make(self, graph: Graph, other: Graph, mode: Mode, rows: int) -> Program:
        loss, scalars = losses_of(graph) if mode == "train" else (None, [])
        if loss is None:
            mode, scalars = "outputs", numbers_of(graph)
        how: Any = self._plan.micro_batch_loss or ("mean" if self._plan.mixing == "accept" else None)
        if mode == "outputs" and any(node.value.requires_grad for node in scalars):
            return self._whole(graph)  # a loss in eval(), from which backward may start
        output, numbers = numbers_that_grow(graph.output, other.output, rows, other_number(rows))
        try:
            rewritten = rewrite(graph, scalars, micro_batch_loss=how, other=other)
        except LossError:
            if mode == "train":
                raise
            return self._whole(graph)
        losses = dict(zip(scalars, rewritten.losses, strict=True))
        returned = scalars if mode == "train" else graph.returned
        given = [losses[node].node if node in losses else node for node in returned]
        # An accepted mean of micro-batches' losses accepts what they are made of.
        kept = [given[i] for i, node in enumerate(returned) if how is None or node not in losses]
        if kept and self._plan.mixing is None:
            refuse_mixing(rewritten.graph.needed(kept), Sizes.of(graph, other))
        dims: dict[int, int] = {}
        if mode == "outputs":
            told = _dims_of(graph, other, [None if node in losses else node for node in returned], rows)
            if told is None:
                return self._whole(graph)
            dims = told
        return Program(
            mode,
            cut(rewritten.graph, tuple(given), self._plan.num_stages),
            training_results(output) if mode == "train" else output,
            tuple(returned),
            {returned.index(node): found.combine for node, found in losses.items()},
            loss,
            tuple(_count_program(count) for count in rewritten.counts),
            dims=dims,
            numbers=numbers,
            written=tuple(graph.written),
        )

    def _whole(self, graph: Graph) -> Program:
        outputs = tuple(graph.returned)
        stages = cut(graph, outputs, self._plan.num_stages)
        return Program("outputs", stages, graph.output, outputs, whole=True, written=tuple(graph.written))

    def _key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        state = tuple(module.training for module in self._modules), tuple(kinds_of(self._parameters))
        return _form(args), _form(dict(kwargs)), Context.now(), hash(state)


@contextlib.contextmanager
def _cut_from(whole: int, rows: int, site: str) -> Iterator[None]:
    """Raises TraceError for a forward that torch refuses on a part of a batch."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        if rows == whole or isinstance(error, WhaleError):
            raise
        raise TraceError(
            f"the forward fails on a micro-batch of {rows} samples of {whole}: {first_line(error)}",
            where=site,
            fix=f"let it take any number of samples, or, {_NO_SAMPLES}",
        ) from error


_NO_SAMPLES = "where an input that has no samples is as long as the batch, say so: wh.pipeline(batch_dim={...})"


def _form(x: Any) -> Any:
    """What of a call's arguments a recording may depend on, hashable."""
    if isinstance(x, Tensor):
        return x.shape, x.dtype, x.stride()
    if isinstance(x, (tuple, list)):
        return type(x), tuple(map(_form, x))
    if isinstance(x, dict):
        return type(x), tuple((key, _form(value)) for key, value in x.items())
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return type(x), tuple((part.name, _form(getattr(x, part.name, None))) for part in dataclasses.fields(x))
    return frozen(x)


def _dims_of(graph: Graph, other: Graph, returned: list[Node | None], rows: int) -> dict[int, int] | None:
    """Along which dim each returned tensor has a row for each sample, by place; None where that cannot be said of one.

    A tensor that none of the inputs' rows goes into has no such dim. other: a recording at another number of samples.
    returned: None for a number.
    """
    try:
        sizes = Sizes.of(graph, other)
    except LossError:  # it makes other calls there
        return None
    found: dict[int, int] = {}
    for place, node in enumerate(returned):
        if node is None or not isinstance(node.value, Tensor):
            continue
        pair = sizes.pairs[node].value
        if node.value.dim() != pair.dim():
            return None
        dims = differing_dims(node.value, pair)
        if len(dims) == 1 and node.value.shape[dims[0]] == rows:
            found[place] = dims[0]
        elif dims or any(source.kind == "input" and sizes.differ(source) for source in graph.needed([node])):
            return None
    return found


def _count_program(count: Count) -> StageProgram:
    instructions = tuple(Instruction.of(node, ()) for node in count.nodes)
    return StageProgram(0, instructions, {}, {}, count.result, False, ())
