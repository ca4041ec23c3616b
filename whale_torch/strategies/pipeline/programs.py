"""The programs of a pipeline: one recording for every kind of call, cut into stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from whale_torch.comm.cut_tensor import dtypes_of_trained
from whale_torch.errors import LossError
from whale_torch.planning.pipelines import leaf_of
from whale_torch.planning.plan import Plan
from whale_torch.strategies.pipeline.batches import MicroBatches, micro_batches
from whale_torch.strategies.pipeline.outputs import losses_of, numbers_of, training_results
from whale_torch.trace.cut import cut
from whale_torch.trace.graph import Context, Graph, Node, nodes_in
from whale_torch.trace.mixing import refuse_mixing
from whale_torch.trace.program import StageProgram, Step
from whale_torch.trace.reductions import Combine, Count, rewrite
from whale_torch.trace.sizes import Sizes
from whale_torch.trace.tracer import record
from whale_torch.trace.twin import Twin

__all__ = ["Mode", "Program", "Programs"]

Mode = Literal["train", "outputs"]

_PRIMES = (1009, 1013)


@dataclass(frozen=True)
class Program:
    """One kind of call, cut into stages.

    mode: "train" gives the loss and other scalars, "outputs" everything that the model returns. results: the nest that
    the user gets, with Nodes. returned: its Nodes, in the order in which the last stage gives their values. combine:
    how those among them that are numbers add up, by place. loss: which of the returned. counts: of the numbers.
    whole: all of the batch has to be one micro-batch, for a number that is no sum over samples, or has a gradient.
    """

    mode: Mode
    stages: tuple[StageProgram, ...]
    results: Any
    returned: tuple[Node, ...]
    combine: Mapping[int, Combine] = field(default_factory=dict)
    loss: Node | None = None
    counts: tuple[StageProgram, ...] = ()
    whole: bool = False


class Programs:
    """Records and cuts the calls of one model, each kind once.

    Raises what recording, cutting and the rewriting of the loss raise, TraceError and LossError.
    """

    def __init__(self, model: nn.Module, plan: Plan, device: torch.device):
        assert plan.pipeline is not None
        self._model, self._plan = model, plan.pipeline
        self._batch_dim = plan.batch_dim if isinstance(plan.batch_dim, int) else 0
        self._leaf = leaf_of(plan.pipeline)
        self._twin = Twin.of(model, device)
        self._modules, self._parameters = list(model.modules()), list(model.parameters())
        self._known: dict[Any, Program] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of_batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, mode: Mode
    ) -> tuple[MicroBatches, list[Program]]:
        """A call's micro-batches, and the program of each."""
        cut = micro_batches(args, kwargs, rows, self._plan.num_micro_batches, self._batch_dim)
        kinds = {rows: self.of(*cut.call(rows), rows, mode) for rows in dict.fromkeys(cut.rows)}
        if len(cut.rows) > 1 and any(program.whole for program in kinds.values()):
            cut = micro_batches(args, kwargs, rows, 1, self._batch_dim)
            kinds = {rows: self.of(*cut.call(rows), rows, mode)}
        return cut, [kinds[rows] for rows in cut.rows]

    def ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> tuple[StageProgram, ...]:
        """The stages of the first micro-batch of a call to come, of inputs like these."""
        with torch.enable_grad():
            _, programs = self.of_batch(args, kwargs, rows, "train" if self._model.training else "outputs")
        return programs[0].stages

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int, mode: Mode) -> Program:
        """The program for calls like this one, of `rows` samples; "train" becomes "outputs" where there is no loss."""
        key = mode, rows, self._key(args, kwargs)
        if key not in self._known:
            self._twin.follow(self._model)
            graph = record(self._twin, args, kwargs, self._leaf)
            self._known[key] = self._make(graph, mode, args, kwargs, rows)
        return self._known[key]

    def _make(self, graph: Graph, mode: Mode, args: Any, kwargs: Any, rows: int) -> Program:
        resize = (self._batch_dim, rows, next(p for p in _PRIMES if p != rows))
        other = record(self._twin, args, kwargs, self._leaf, resize=resize)
        loss, scalars = losses_of(graph) if mode == "train" else (None, [])
        if loss is None:
            mode, scalars = "outputs", numbers_of(graph)
        how: Any = self._plan.micro_batch_loss or ("mean" if self._plan.mixing == "accept" else None)
        if mode == "outputs" and any(node.value.requires_grad for node in scalars):
            return self._whole(graph)  # a loss in eval(), from which backward may start
        try:
            rewritten = rewrite(graph, scalars, micro_batch_loss=how, other=other)
        except LossError:
            if mode == "train":
                raise
            return self._whole(graph)
        losses = dict(zip(scalars, rewritten.losses, strict=True))
        returned = scalars if mode == "train" else list(dict.fromkeys(nodes_in(graph.output)))
        given = [losses[node].node if node in losses else node for node in returned]
        if self._plan.mixing is None:
            # An accepted mean of micro-batches' losses accepts what they are made of.
            kept = [given[i] for i, node in enumerate(returned) if how is None or node not in losses]
            if kept:
                refuse_mixing(rewritten.graph.needed(kept), Sizes.of(graph, other))
        return Program(
            mode,
            cut(rewritten.graph, tuple(given), self._plan.num_stages),
            training_results(graph.output) if mode == "train" else graph.output,
            tuple(returned),
            {returned.index(node): found.combine for node, found in losses.items()},
            loss,
            tuple(_count_program(count) for count in rewritten.counts),
        )

    def _whole(self, graph: Graph) -> Program:
        outputs = tuple(dict.fromkeys(nodes_in(graph.output)))
        return Program("outputs", cut(graph, outputs, self._plan.num_stages), graph.output, outputs, whole=True)

    def _key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        modes = tuple(m.training for m in self._modules)
        state = (modes, tuple(dtype is not None for dtype in dtypes_of_trained(self._parameters)))
        return _form(args), _form(dict(kwargs)), Context.now(), hash(state)


def _form(x: Any) -> Any:
    """What of a call's arguments a recording may depend on, hashable."""
    if isinstance(x, Tensor):
        return x.shape, x.dtype, x.stride()
    if isinstance(x, (tuple, list)):
        return type(x), tuple(map(_form, x))
    if isinstance(x, dict):
        return type(x), tuple((key, _form(value)) for key, value in x.items())
    return x if isinstance(x, (int, float, str, type(None))) else repr(x)


def _count_program(count: Count) -> StageProgram:
    steps = tuple(Step.of(node, ()) for node in count.nodes)
    return StageProgram(0, steps, {}, {}, count.result, False, (), ())
