"""MoELayer: a feed-forward layer of which each token runs through a few experts of many."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from whale_torch import ops
from whale_torch.comm.collectives import all_gather_rows, gather_equal
from whale_torch.errors import LayoutError, PlanError
from whale_torch.mesh import Group
from whale_torch.moe.balance import Coefficients, add_losses
from whale_torch.moe.bias import note_choices
from whale_torch.moe.capacity import Capacity, drop, without_dropped
from whale_torch.moe.dispatch import combine, permute
from whale_torch.moe.experts import Experts, FeedForward, Stacked
from whale_torch.moe.gates import Gate, Hash, gate_of
from whale_torch.moe.routing import Renormalize, Routing
from whale_torch.moe.tally import Load, Tally
from whale_torch.trace.tweaks import register_tweak

__all__ = ["MoELayer", "OnRanks", "aux_loss"]


class OnRanks:
    """The ranks that run a layer: a copy of it runs on them too, and what a pickle of it makes is of one process."""

    def __init__(self, group: Group | None = None):
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> OnRanks:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return OnRanks, ()


_TOGETHER = "tokens of a layer of experts (the model is called on every rank)"


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
    capacity_factor, eval_capacity_factor, min_capacity, drop: of Capacity; by default nothing is dropped.
    renormalize: weights of a token's experts are made to sum to 1: "before" or "after" routes are dropped, or "none";
    by default "before" for top_k > 1. jitter: of the gate.
    aux_loss_coef, z_loss_coef, importance_coef: of the losses in Coefficients, whose gradient is added at the gate:
    there is nothing to add to the loss. It is as large as that of a loss which is added to the model's, scaled as
    wh.GradScaler(model) scales that; what else a loop multiplies its loss by (1 / k for k calls before a step) goes
    into `layer.loss_factor`. shared: a module that every token runs through, added to the experts' sum.
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
        aux_loss_coef: float = 0.01,
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
        if expert is None:
            wide = 4 * dim if hidden is None else hidden
            options: dict[str, Any] = {"activation": activation, "gated": gated, "bias": bias, "slices": slices}
            self.experts: Experts = FeedForward(self.num_experts, dim, wide, **options)
        elif hidden is not None or activation != "gelu" or gated or bias is not None:
            raise PlanError(
                "hidden, activation, gated and bias say how experts are built here, and expert= gives others.",
                fix="leave them out, or leave expert out",
            )
        elif slices != 1:
            raise PlanError(
                f"slices is {slices}, and experts are of a form of their own.",
                fix="expert=moe.FeedForward(num_experts, dim, hidden, slices=...), or slices=1",
            )
        else:
            self.experts = _experts(expert, self.num_experts)
        self.capacity = Capacity(capacity_factor, eval_capacity_factor, min_capacity, drop)
        self.losses = Coefficients(aux_loss_coef, z_loss_coef, importance_coef)
        self.shared = shared
        if not isinstance(chunks, int) or chunks < 1:
            raise PlanError(f"chunks is {chunks}.", fix="1, or as many parts as travel beside each other")
        if wire_dtype is not None and not (isinstance(wire_dtype, torch.dtype) and wire_dtype.is_floating_point):
            raise PlanError(f"wire_dtype is {wire_dtype!r}.", fix="a floating-point dtype, torch.bfloat16, or None")
        self.wire_dtype, self.node_memory, self.chunks = wire_dtype, node_memory, chunks
        self.loss_factor = 1.0
        self.load: Load | None = None
        self.tally: Tally | None = None  # where somebody watches
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
        self._check(x, mask, token_ids)
        flat = x.reshape(-1, self.dim)
        seen = None if mask is None else mask.reshape(-1)
        ids = None if token_ids is None else token_ids.reshape(-1)
        if self.gate.compiles:
            out = self._between_graphs(self._routed, flat, self._route(flat, seen, ids))
        else:
            out = self._between_graphs(self._gated, flat, seen, ids)
        return self._with_shared(flat, out).view(x.shape)

    def as_recorded(self, x: Tensor, mask: Tensor | None = None, *, token_ids: Tensor | None = None) -> Tensor:
        """Another forward of the same shape and about as many operations, for tensors without values."""
        self._check(x, mask, token_ids)
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

    def _check(self, x: Tensor, mask: Tensor | None, token_ids: Tensor | None) -> None:
        if x.dim() < 1 or x.shape[-1] != self.dim:
            raise LayoutError(
                f"x has shape {tuple(x.shape)}, and the layer is for [..., {self.dim}].",
                fix=f"tokens of {self.dim} numbers, or a layer of another dim",
            )
        if mask is not None and (mask.shape != x.shape[:-1] or mask.dtype != torch.bool):
            raise LayoutError(
                f"mask is {mask.dtype} of shape {tuple(mask.shape)} for x of shape {tuple(x.shape)}.",
                fix=f"bool, of shape {tuple(x.shape[:-1])}: True for tokens, False for padding",
            )
        if token_ids is None:
            return
        if not isinstance(self.gate, Hash):
            raise PlanError(
                f"token_ids are given, and a {type(self.gate).__name__} gate does not choose by them.",
                fix="gate=moe.Hash(num_tokens, num_experts), or leave token_ids out",
            )
        whole = not (token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool)
        if token_ids.shape != x.shape[:-1] or not whole:
            raise LayoutError(
                f"token_ids are {token_ids.dtype} of shape {tuple(token_ids.shape)} for x of shape {tuple(x.shape)}.",
                fix=f"whole numbers, of shape {tuple(x.shape[:-1])}",
            )

    def _between_graphs(self, run: Callable[..., Tensor], *given: Any) -> Tensor:
        """What `run` gives, untraced: how many tokens go where is read, differs from step to step, and is exchanged."""
        return run(*given)

    def _route(self, x: Tensor, mask: Tensor | None, token_ids: Tensor | None) -> Routing:
        if isinstance(self.gate, Hash) and token_ids is not None:
            return self.gate.of_ids(token_ids, mask)
        found: Routing = self.gate(x, mask)
        return found

    def _gated(self, x: Tensor, mask: Tensor | None, token_ids: Tensor | None) -> Tensor:
        return self._routed(x, self._route(x, mask, token_ids))

    def _routed(self, x: Tensor, routing: Routing) -> Tensor:
        """What the experts give tokens [T, dim]."""
        counts = _counts(routing.experts, self.num_experts)
        loss = torch.zeros((), device=x.device)
        weights = routing.weights
        routing = self._dropped(routing)
        if self.losses.any() and routing.logits is not None and torch.is_grad_enabled() and self.training:
            number = 1 if self._ranks is None else self._ranks.size
            weights, loss = add_losses(routing, counts, self.losses, self._total, number, self.loss_factor)
            routing = replace(routing, weights=weights)
        if self.gate.follows_load and torch.is_grad_enabled() and self.training:
            weights = note_choices(self.gate, routing.weights, counts, self._total)
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

    def _dropped(self, routing: Routing) -> Routing:
        limits = None
        if (
            self.capacity.each is not None
            or (self.capacity.factor if self.training else self.capacity.eval_factor) is not None
        ):
            tokens = len(routing.experts) if routing.mask is None else routing.mask.sum()
            mine = torch.as_tensor(tokens, dtype=torch.float64).view(1)
            number = int(self._total(mine).item())
            limits = self.capacity.of(number, self.top_k, self.num_experts, training=self.training)
        if limits is not None:
            routing = drop(routing, limits, self._of_all, self.capacity.order)
        return without_dropped(routing) if self.gate.renormalize == "after" else routing

    def _total(self, x: Tensor) -> Tensor:
        """The sum over all ranks that run the layer."""
        if self._ranks is None or self._ranks.size == 1:
            return x
        return gather_equal(x, self._ranks, name=_TOGETHER).sum(0)

    def _of_all(self, x: Tensor) -> tuple[Tensor, slice]:
        if self._ranks is None or self._ranks.size == 1:
            return x, slice(0, len(x))
        sizes = gather_equal(torch.tensor([len(x)]), self._ranks, name=_TOGETHER).flatten().tolist()
        start = sum(sizes[: self._ranks.index])
        whole = all_gather_rows(x.contiguous(), sizes, self._ranks, name=_TOGETHER)
        return whole, slice(start, start + len(x))


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


def aux_loss(model: nn.Module) -> Tensor:
    """The sum of the auxiliary losses of all MoE layers of a model in their last calls: for the log.

    Their gradient is added at the gates already; adding this to the loss changes nothing but the number shown. In a
    pipeline it is of the last micro-batch, and of this rank's stages: wh.moe.load(model) tells of all.
    """
    found = [m.load.loss for m in model.modules() if isinstance(m, MoELayer) and m.load is not None]
    return torch.stack(found).sum() if found else torch.zeros(())


def _counts(experts: Tensor, num_experts: int) -> Tensor:
    chosen = experts[experts >= 0].to(torch.int64)
    return torch.bincount(chosen, minlength=num_experts)


def _scores(routing: Routing) -> Tensor | None:
    if routing.probs is None and routing.logits is not None:
        return routing.logits.detach().softmax(1)
    return None if routing.probs is None else routing.probs.detach()


def _experts(expert: Callable[[], nn.Module] | Experts, num_experts: int) -> Experts:
    if isinstance(expert, nn.Module) and not isinstance(expert, Experts):
        raise PlanError(
            f"expert is a {type(expert).__name__}, one module, and {num_experts} are to be built.",
            fix=f"a function that builds one: expert=lambda: {type(expert).__name__}(...)",
        )
    made = expert if isinstance(expert, Experts) else Stacked([expert() for _ in range(num_experts)])
    if made.num_experts != num_experts * made.slices:
        raise PlanError(
            f"there are {made.num_experts} experts, and the layer has {num_experts}.", fix="equally many of both"
        )
    return made
