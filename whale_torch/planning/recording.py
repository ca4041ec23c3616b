"""What a training step of a pipeline uses and moves, from a forward recorded without memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from whale_torch.errors import PlanError, WhaleError, first_line
from whale_torch.planning.flops import Measured, measure
from whale_torch.planning.pipelines import Moved, PipelinePlan, leaf_of, topmost
from whale_torch.planning.slices import SlicedModules
from whale_torch.planning.taskgraph import TaskGraph
from whale_torch.trace.cut import cut
from whale_torch.trace.graph import Graph, Node, tensors_in
from whale_torch.trace.program import StageProgram, stages_of_tensors
from whale_torch.trace.sample_dims import BatchDim, Dims, SampleDims, micro_batch_rows
from whale_torch.trace.sizes import other_number
from whale_torch.trace.slices import mark_slices
from whale_torch.trace.tracer import Leaf, record
from whale_torch.trace.twin import Twin

__all__ = ["arguments", "check_busy", "count_rows", "record_step"]


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Sample inputs as the arguments of a call: a tensor, a tuple of positional or a dict of named ones."""
    if isinstance(inputs, Mapping):  # a tokenizer's are no dict
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def count_rows(model: nn.Module, inputs: Any, batch_dim: BatchDim) -> int:
    """Samples in sample inputs; 1 where nothing has any."""
    return SampleDims(model, batch_dim).count(*arguments(inputs))


def record_step(
    model: nn.Module,
    pipeline: PipelinePlan,
    inputs: Any,
    batch_dim: BatchDim,
    graphs: Sequence[TaskGraph],
    measured: Measured | None = None,
) -> PipelinePlan:
    """The pipeline with what a step on these inputs computes and moves, and which stages use a parameter.

    batch_dim: where inputs have samples. graphs: what runs how. measured: a forward on the inputs, where that is done
    already. The model is left alone. Raises TraceError for a forward that cannot be recorded, PlanError for one that
    fails, and for inputs without samples.
    """
    args, kwargs = arguments(inputs)
    sample_dims = SampleDims(model, batch_dim, where=pipeline.site)
    rows = sample_dims.count(args, kwargs)
    if not rows:
        raise PlanError(
            "a pipeline was given sample_inputs of 0 samples, which show nothing of a step.",
            where=pipeline.site,
            fix="give those of one full batch",
        )
    dims = sample_dims.of(args, kwargs, rows)
    sizes = Counter(micro_batch_rows(rows, pipeline.num_micro_batches))
    twin = Twin.of(model, torch.device("cpu"))
    twin.module.train()
    activations: Counter[tuple[int, int]] = Counter()
    gradients: Counter[tuple[int, int]] = Counter()
    output_bytes, sliced_bytes = 0, [0] * pipeline.num_stages
    sliced = SlicedModules(graphs)
    leaf = leaf_of(pipeline, sliced)
    programs: tuple[StageProgram, ...] = ()
    for size, times in sizes.items():
        graph = _record(twin, args, kwargs, leaf, dims, size, rows, pipeline.site)
        if sliced:
            other = _record(twin, args, kwargs, leaf, dims, other_number(size), rows, pipeline.site)
            mark_slices(graph, other, sliced.__contains__, size)
        wanted, has_loss = _results(graph)
        programs = cut(graph, wanted, pipeline.num_stages)
        check_busy(pipeline, programs)
        output_bytes += 0 if has_loss else times * _bytes_of(wanted)
        for program in programs:
            sliced_bytes[program.index] += times * sum(_joined_bytes(each.node) for each in program.instructions)
            for source, nodes in program.receives.items():
                activations[source, program.index] += times * _bytes_of(nodes)
                gradients[source, program.index] += times * _bytes_of(n for n in nodes if n.value.requires_grad)
    if measured is None:
        measured, _ = measure(model, args, kwargs)
    moved = [Moved(*edge, size, gradients[edge]) for edge, size in sorted(activations.items())]
    return replace(
        pipeline,
        moved=tuple(moved),
        stage_flops=() if measured is None else tuple(_flops(names, measured) for names in pipeline.stages),
        output_bytes=output_bytes,
        sliced_bytes=tuple(sliced_bytes) if any(sliced_bytes) else (),
        elsewhere=tuple(_elsewhere(model, pipeline, programs)),
        recorded=pipeline.digest,
    )


def _flops(names: Sequence[str], measured: Measured) -> int:
    """Of modules, or of what is called inside those that are not called themselves."""
    total = 0
    for name in names:
        inside = [name] if name in measured.flops else [n for n in measured.flops if n.startswith(f"{name}.")]
        total += sum(measured.flops[n] for n in topmost(inside))
    return total


def _record(
    twin: Twin, args: tuple[Any, ...], kwargs: dict[str, Any], leaf: Leaf, dims: Dims, rows: int, whole: int, site: str
) -> Graph:
    """A forward of a training step on one micro-batch, of so many rows of a whole batch's."""
    try:
        with torch.enable_grad():
            return record(twin, args, kwargs, leaf, dims=dims, rows=rows)
    except WhaleError:
        raise
    except Exception as error:  # the model is the user's
        part = "" if rows == whole else f" (on {rows} of {whole} samples)" if rows < whole else f" (on {rows} samples)"
        names = "" if rows == whole else "; where an input has no samples say so: wh.pipeline(batch_dim={...})"
        raise PlanError(
            f"a pipeline is cut where a forward is recorded, which fails on these sample_inputs: "
            f"{type(error).__name__}: {first_line(error)}{part}",
            where=site,
            fix="give what the model can be called with: a tensor, a tuple of positional or a dict of named inputs"
            + names,
        ) from error


def check_busy(pipeline: PipelinePlan, programs: Sequence[StageProgram]) -> None:
    """Raises PlanError for a stage that a forward leaves without work."""
    for program in programs:
        if not program.modules and not any(each.node.stage == program.index for each in program.instructions):
            names = ", ".join(f"'{name}'" for name in pipeline.stages[program.index][:3])
            raise PlanError(
                f"stage {program.index} of {pipeline.num_stages} ({names}) has nothing to run: a forward does not need "
                "its modules, or what they are given comes from later stages, where they run.",
                where=pipeline.site,
                fix="enter the wh.stage() scopes in the order in which the forward calls their modules",
            )


def _results(graph: Graph) -> tuple[tuple[Node, ...], bool]:
    """What a training step takes from the last stage, and whether a loss is in it."""
    has_loss = any(node.value.requires_grad for node in graph.scalars)
    tensors = [node for node in graph.returned if isinstance(node.value, Tensor)]
    return tuple(graph.scalars if has_loss else tensors), has_loss


def _joined_bytes(node: Node) -> int:
    """Of the whole tensors that the slices of a module are joined to: its outputs, and gradients of its inputs."""
    if node.slices is None:
        return 0
    given = [part.value for part in node.inputs()]
    tensors = [*tensors_in(node.value), *(x for x in tensors_in(given) if x.requires_grad)]
    return sum(x.numel() * x.element_size() for x in tensors)


def _bytes_of(nodes: Iterable[Node]) -> int:
    return sum(node.value.numel() * node.value.element_size() for node in nodes)


def _elsewhere(
    model: nn.Module, pipeline: PipelinePlan, programs: Sequence[StageProgram]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters that other stages use than their names say."""
    used = stages_of_tensors(model, programs)
    for name, stages in pipeline.users(model).items():
        seen = tuple(sorted(used.get(name, ())))
        if seen and seen != stages:
            yield name, seen
