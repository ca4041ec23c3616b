"""The programs of a pipeline: one recording for every kind of call, cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from whale_torch.errors import LossError, PlanError
from whale_torch.strategies.pipeline.outputs import losses_of, training_results
from whale_torch.trace.cut import cut
from whale_torch.trace.graph import Context, Graph, Node, map_nodes, tensors_in
from whale_torch.trace.program import StageProgram
from whale_torch.trace.reductions import Reductions, rewrite
from whale_torch.trace.tracer import Leaf, record
from whale_torch.trace.twin import Twin

__all__ = ["Mode", "Program", "Programs"]

Mode = Literal["train", "outputs"]


@dataclass(frozen=True)
class Program:
    """One kind of call, cut into stages.

    mode: "train" gives the loss and other scalars, "outputs" everything that the model returns. results: the nest that
    the user gets, with Nodes; the last stage returns `scalars` (train) or `results`. loss: which of the scalars.
    reductions: how scalars of micro-batches add up.
    """

    mode: Mode
    graph: Graph
    stages: tuple[StageProgram, ...]
    results: Any
    scalars: tuple[Node, ...] = ()
    loss: Node | None = None
    reductions: Reductions | None = None


class Programs:
    """Records and cuts the calls of one model, each kind once.

    leaf: which modules stay whole, and on which stage. Raises what recording, cutting and the loss's rewriting raise:
    TraceError, LossError.
    """

    def __init__(self, model: nn.Module, leaf: Leaf, num_stages: int, device: torch.device, micro_batch_loss: str | None):
        self._model, self._leaf, self._num_stages = model, leaf, num_stages
        self._twin = Twin.of(model, device)
        self._micro_batch_loss = micro_batch_loss
        self._modules, self._parameters = list(model.modules()), list(model.parameters())
        self._known: dict[Any, Program] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> Program:
        """The program for calls like this one; "train" becomes "outputs" where the model returns no loss."""
        key = mode, self._key(args, kwargs)
        if key not in self._known:
            self._twin.follow(self._model)
            graph = record(self._twin, args, kwargs, self._leaf)
            self._known[key] = self._make(graph, mode)
        return self._known[key]

    def _make(self, graph: Graph, mode: Mode) -> Program:
        loss, scalars = losses_of(graph) if mode == "train" else (None, [])
        if loss is None:
            return Program("outputs", graph, cut(graph, graph.output, self._num_stages), graph.output)
        reductions = rewrite(graph, scalars, micro_batch_loss=self._micro_batch_loss)
        rewritten = tuple(reductions.losses[node].node for node in scalars)
        stages = cut(reductions.graph, rewritten, self._num_stages)
        results = training_results(graph.output)
        return Program("train", graph, stages, results, tuple(scalars), loss, reductions)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        forms = tuple(
            (x.shape, x.dtype, x.stride()) if isinstance(x, Tensor) else x if isinstance(x, (int, float, str)) else repr(x)
            for x in leaves
        )
        state = (tuple(m.training for m in self._modules), tuple(p.requires_grad for p in self._parameters))
        return forms, str(spec), Context.now(), hash(state)


_ = (Callable, Sequence, LossError, PlanError, map_nodes, tensors_in)
