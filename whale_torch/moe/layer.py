"""MoELayer: a feed-forward layer of which each token runs through a few experts of many."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from whale_torch import ops
from whale_torch.comm.added_loss import AddedLoss
from whale_torch.comm.slices import ranks_run_whole
from whale_torch.errors import LayoutError, PlanError
from whale_torch.mesh import Group
from whale_torch.moe.balance import Coefficients, add_losses
from whale_torch.moe.bias import note_choices
from whale_torch.moe.capacity import Capacity, drop, without_dropped
from whale_torch.moe.dispatch import combine, permute
from whale_torch.moe.everyone import Everyone, OnRanks
from whale_torch.moe.experts import Experts
from whale_torch.moe.gate import Gate
from whale_torch.moe.gates import Hash
from whale_torch.moe.given import check_given, rows_of_tokens
from whale_torch.moe.options import check_first, check_travel, experts_of, gate_of, routes_of_each
from whale_torch.moe.routing import Renormalize, Routing
from whale_torch.moe.tally import Load, Tally
from whale_torch.moe.unscaled import watch_scale
from whale_torch.trace.tweaks import register_tweak

__all__ = ["MoELayer"]


class MoELayer(nn.Module):
    """y[t] = sum over the chosen experts e of token t of weight[t, e] * expert_e(x[t]); what is dropped adds nothing.

    Shapes: x [..., dim] -> [..., dim]. mask [...], bool: which tokens are no padding; the others get 0 and have no part
    in capacities and losses. token_ids [...]: of a Hash gate. Alone it runs on one device; under wh.split() each rank
    holds a part of the experts, and brings tokens of its own.

    dim, hidden: widths of an expert, hidden 4 * dim by default. num_experts, top_k: 64 and 2 by default, or those of
    the Gate that is given. gate: a Gate, or "softmax", "sigmoid" (TopK), "prototypes". expert: builds one expert of
    yours, a module from [n, dim] to [n, dim]; or an Experts; by default two linear layers with an activation, three
    where gated, which `slices` cuts along hidden into so many parts (a split inside each expert): under wh.split() they
    may lie on different ranks.
    capacity_factor, eval_capacity_factor, min_capacity, drop: of Capacity; by default nothing is dropped. capacity:
    each expert's own number of routes, in their place.
    renormalize: weights of a token's experts are made to sum to 1: "before" or "after" routes are dropped, or "none";
    by default "before" for top_k > 1. jitter: of the gate.
    aux_loss_coef, z_loss_coef, importance_coef: of the losses in Coefficients, whose gradient is added at the gate:
    there is nothing to add to the loss. aux_loss_of: whether the first of them is of all routes of a token or, as
    GShard's, of its first one. The gradient is as large as that of a loss which is added to the model's, scaled as
    wh.GradScaler(model) scales that; a loop that does more to its loss adds aux_loss(model, added=True) to it, or says
    in `layer.loss_factor` what it multiplies by (1 / k for k calls before a step). shared: a module that every token
    runs through, added to the experts' sum.
    wire_dtype: what tokens are cast to while they travel between ranks. node_memory: whether ranks of one host exchange
    them through memory that they share. chunks: parts of the tokens, of which one travels while experts run on another:
    for links that are slow beside the experts.
    Raises: PlanError for options that do not fit; when called, LayoutError for tensors that do not.
    Reference: Shazeer 2017 (arXiv 1701.06538), GShard (2006.16668), Switch (2101.03961), M6-T (2105.15082).
    """

    def __init__(
        self,
        dim: int,
        num_experts: int | None = None,
        top_k: int | None = None,
        *,
        hidden: int | None = None,
        activation: str = "gelu",
        gated: bool = False,
        bias: bool | None = None,
        expert: Callable[[], nn.Module] | Experts | None = None,
        gate: Gate | Literal["softmax", "sigmoid", "prototypes"] = "softmax",
        renormalize: Renormalize | None = None,
        jitter: float = 0.0,
        capacity_factor: float | None = None,
        eval_capacity_factor: float | None = None,
        min_capacity: int = 4,
        drop: Literal["position", "priority"] = "position",
        capacity: Sequence[int] | None = None,
        aux_loss_coef: float = 0.01,
        aux_loss_of: Literal["routes", "first"] = "routes",
        z_loss_coef: float = 0.0,
        importance_coef: float = 0.0,
        shared: nn.Module | None = None,
        wire_dtype: torch.dtype | None = None,
        node_memory: bool = True,
        chunks: int = 1,
        slices: int = 1,
    ):
        super().__init__()
        _break_graphs()
        if dim < 1:
            raise PlanError(f"dim is {dim}.", fix="as wide as tokens are, 1 or more")
        self.gate = gate_of(gate, dim, num_experts, top_k, renormalize, jitter)
        self.dim, self.num_experts, self.top_k = dim, self.gate.num_experts, self.gate.top_k
        form: dict[str, Any] = {"hidden": hidden, "activation": activation, "gated": gated, "bias": bias}
        self.experts = experts_of(expert, self.num_experts, dim, slices=slices, **form)
        each = routes_of_each(capacity, self.num_experts)
        self.capacity = Capacity(capacity_factor, eval_capacity_factor, min_capacity, drop, each)
        check_first(aux_loss_of, self.gate)
        self.losses = Coefficients(aux_loss_coef, z_loss_coef, importance_coef, of_first=aux_loss_of == "first")
        self.shared = shared
        check_travel(chunks, wire_dtype)
        self.wire_dtype, self.node_memory, self.chunks = wire_dtype, node_memory, chunks
        self.loss_factor = 1.0
        self.load: Load | None = None
        self.tally: Tally | None = None  # where somebody watches
        self._added_loss = AddedLoss()
        self._on_ranks = OnRanks()

    @property
    def _ranks(self) -> Group | None:
        """All that run this layer, on other tokens."""
        return self._on_ranks.group

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _break_graphs()

    def forward(self, x: Tensor, mask: Tensor | None = None, *, token_ids: Tensor | None = None) -> Tensor:
        if x.is_meta:
            return self.as_recorded(x, mask, token_ids=token_ids)
        x = rows_of_tokens(x)
        check_given(x, mask, token_ids, self.dim, self.gate)
        flat = x.reshape(-1, self.dim)
        seen = None if mask is None else mask.reshape(-1)
        ids = None if token_ids is None else token_ids.reshape(-1)
        if self.gate.compiles and not _asks(self.gate):
            out = self._between_graphs(self._routed, flat, self._route(flat, seen, ids))
        else:
            out = self._between_graphs(self._gated, flat, seen, ids)
        return self._with_shared(flat, out).view(x.shape)

    def as_recorded(self, x: Tensor, mask: Tensor | None = None, *, token_ids: Tensor | None = None) -> Tensor:
        """Another forward of the same shape and about as many operations, for tensors without values."""
        check_given(x, mask, token_ids, self.dim, self.gate)
        flat = x.reshape(-1, self.dim)
        if self.training and self.gate.draws:
            flat = flat + 0 * torch.rand_like(flat)
        routes = self.top_k * self.experts.slices
        out = flat.repeat(routes, 1)
        if all(len(stack) for stack in self.experts.parameters()):
            out = self.experts(out, [len(out)] + [0] * (self.experts.num_experts - 1))
        out = out.view(routes, *flat.shape).sum(0)
        for weight in self.gate.parameters():
            of_tokens = weight.dim() == 2 and weight.shape[1] == self.dim
            given = flat @ weight.to(flat.dtype).t() if of_tokens else weight.to(flat.dtype)
            out = out + 0 * given.sum()
        return self._with_shared(flat, out).view(x.shape)

    def _with_shared(self, x: Tensor, out: Tensor) -> Tensor:
        if self.shared is None:
            return out
        added: Tensor = self.shared(x)
        if added.shape != x.shape:  # a narrower one would be broadcast
            raise LayoutError(
                f"the shared expert makes {tuple(added.shape)} of tokens {tuple(x.shape)}.",
                fix=f"a module from [n, {self.dim}] to [n, {self.dim}]",
            )
        return out + added

    def _between_graphs(self, run: Callable[..., Tensor], *given: Any) -> Tensor:
        """What `run` gives, untraced: how many tokens go where is read, differs from step to step, and is exchanged."""
        return run(*given)

    def _route(self, x: Tensor, mask: Tensor | None, token_ids: Tensor | None) -> Routing:
        if isinstance(self.gate, Hash) and token_ids is not None:
            return self.gate.of_ids(token_ids, mask)
        found: Routing = self.gate(x, mask, Everyone(self._ranks)) if _asks(self.gate) else self.gate(x, mask)
        return found

    def _gated(self, x: Tensor, mask: Tensor | None, token_ids: Tensor | None) -> Tensor:
        self._check_rows()
        return self._routed(x, self._route(x, mask, token_ids))

    def _check_rows(self) -> None:
        ranks = ranks_run_whole()
        if ranks > 1 and (_asks(self.gate) or self.capacity.drops(training=self.training)):
            raise LayoutError(
                f"a micro-batch of fewer samples than the {ranks} ranks of a replica inside a stage: each would "
                "count its tokens for the capacity of experts.",
                fix=f"micro-batches of {ranks} samples or more; or the layer outside of that wh.replica()",
            )

    def _routed(self, x: Tensor, routing: Routing) -> Tensor:
        """What the experts give tokens [T, dim]."""
        self._check_rows()
        everyone = Everyone(self._ranks)
        counts = _counts(routing.experts, self.num_experts)
        balanced = _counts(routing.experts[:, :1], self.num_experts) if self.losses.of_first else counts
        loss = torch.zeros((), device=x.device)
        weights = routing.weights
        routing = self._dropped(routing, everyone)
        if self.losses.any() and routing.logits is not None and self.training:  # without grad too: a checkpoint's first
            part = self._added_loss.part()
            multiplier = self._added_loss.multiplier(part, self.loss_factor)
            watch_scale(self, self._added_loss)
            weights, loss = add_losses(routing, balanced, self.losses, everyone.total, everyone.size, part, multiplier)
            routing = replace(routing, weights=weights)
        if self.gate.follows_load and torch.is_grad_enabled() and self.training:
            weights = note_choices(self.gate, routing.weights, counts, everyone.total)
            routing = replace(routing, weights=weights)
        slices = self.experts.slices
        out, kept = self._through_experts(x, routing.sliced(slices))
        self.load = Load(counts, kept[::slices], loss, len(x), routing.mask, _scores(routing))
        if self.tally is not None:
            self.tally.add(self.load, training=self.training)
        return out

    def _through_experts(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """(the sum of what a token's experts give, tokens of each slice of an expert)"""
        positions, _, kept = ops.moe_positions(routing.experts, self.num_experts * self.experts.slices)
        rows: list[int] = kept.tolist()
        y = self.experts(permute(x, positions, sum(rows)), rows)
        self._check_made(y)
        return combine(y, positions, routing.weights), kept

    def _check_made(self, y: Tensor) -> None:
        """Raises LayoutError where experts do not give tokens."""
        if y.dim() != 2 or y.shape[1] != self.dim:
            raise LayoutError(
                f"of tokens {self.dim} wide experts made {y.shape[-1]} wide ones.",
                fix=f"experts from [n, {self.dim}] to [n, {self.dim}]",
            )

    def _dropped(self, routing: Routing, everyone: Everyone) -> Routing:
        limits = None
        if self.capacity.drops(training=self.training):
            tokens = len(routing.experts) if routing.mask is None else routing.mask.sum()
            mine = torch.as_tensor(tokens, dtype=torch.float64).view(1)
            number = int(everyone.total(mine).item())
            limits = self.capacity.of(number, self.top_k, self.num_experts, training=self.training)
        if limits is not None:
            routing = drop(routing, limits, everyone.joined, self.capacity.order)
        return without_dropped(routing, self.gate.scale) if self.gate.renormalize == "after" else routing


@functools.cache
def _break_graphs() -> None:
    """Lets torch.compile end a graph there. Called once there is a layer: importing torch's compiler takes a second."""
    MoELayer._between_graphs = torch.compiler.disable(MoELayer._between_graphs, reason=_REASON)  # type: ignore[method-assign]


_REASON = (
    "a layer of experts counts the tokens of each expert, so it is between two graphs: leave out fullgraph=True, or "
    "compile the parts around it"
)


@register_tweak
def _record(module: nn.Module) -> None:
    """Which experts a token takes, and so how many rows go where, cannot be told without values."""
    if isinstance(module, MoELayer):
        module.__dict__["forward"] = module.as_recorded


def _asks(gate: Gate) -> bool:
    """Whether a gate asks the other ranks."""
    return type(gate).route_among is not Gate.route_among


def _counts(experts: Tensor, num_experts: int) -> Tensor:
    chosen = experts[experts >= 0].to(torch.int64)
    return torch.bincount(chosen, minlength=num_experts)


def _scores(routing: Routing) -> Tensor | None:
    if routing.probs is None and routing.logits is not None:
        return routing.logits.detach().softmax(1)
    return None if routing.probs is None else routing.probs.detach()
