"""Options of a layer of experts: the parts that they make, and which of them do not fit together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from whale_torch.annotation import annotations_of
from whale_torch.capture import open_scopes
from whale_torch.errors import PlanError
from whale_torch.moe.experts import Experts, FeedForward, Stacked
from whale_torch.moe.gate import Gate
from whale_torch.moe.gates import Prototypes, TopK
from whale_torch.moe.routing import Renormalize

__all__ = ["check_first", "check_travel", "experts_of", "gate_of", "routes_of_each"]


def gate_of(
    gate: Gate | str,
    dim: int,
    num_experts: int | None,
    top_k: int | None,
    renormalize: Renormalize | None,
    jitter: float,
) -> Gate:
    """The gate of a layer: the one that is given, or one by its name.

    num_experts, top_k: None: 64 and 2, or those of the gate. Raises PlanError where options do not fit.
    """
    if isinstance(gate, Gate):
        if renormalize is not None or jitter:
            raise PlanError("a gate of your own says itself how it renormalizes and jitters.", fix="leave both out")
        _check_gate(gate, dim, num_experts, top_k)
        return gate
    num_experts, top_k = 64 if num_experts is None else num_experts, 2 if top_k is None else top_k
    if gate == "prototypes":
        if renormalize not in (None, "none"):
            raise PlanError(
                f'renormalize="{renormalize}" with gate="prototypes", whose weights are summed as they are.',
                fix="leave renormalize out",
            )
        return Prototypes(dim, num_experts, top_k, jitter=jitter)
    if gate not in ("softmax", "sigmoid"):
        raise PlanError(f"gate is {gate!r}.", fix='"softmax", "sigmoid", "prototypes", or a whale_torch.moe.Gate')
    return TopK(dim, num_experts, top_k, score=gate, renormalize=renormalize, jitter=jitter)  # type: ignore[arg-type]


def _check_gate(gate: Gate, dim: int, num_experts: int | None, top_k: int | None) -> None:
    """Raises PlanError where a gate was built for another layer."""
    wide = getattr(gate, "dim", dim)
    if wide != dim:
        raise PlanError(f"the gate is for tokens {wide} wide, the layer for {dim}.", fix=f"a gate of dim {dim}")
    if num_experts not in (None, gate.num_experts):
        raise PlanError(
            f"the gate has {gate.num_experts} experts, the layer {num_experts}.", fix=f"num_experts={gate.num_experts}"
        )
    if top_k not in (None, gate.top_k):
        raise PlanError(
            f"the gate gives a token {gate.top_k} experts, the layer has top_k {top_k}.", fix=f"top_k={gate.top_k}"
        )


def experts_of(
    expert: Callable[[], nn.Module] | Experts | None,
    num_experts: int,
    dim: int,
    *,
    hidden: int | None,
    activation: str,
    gated: bool,
    bias: bool | None,
    slices: int,
) -> Experts:
    """The experts of a layer: those that are given, or feed-forward ones. Raises PlanError where options do not fit."""
    if expert is None:
        wide = 4 * dim if hidden is None else hidden
        return FeedForward(num_experts, dim, wide, activation=activation, gated=gated, bias=bias, slices=slices)
    if hidden is not None or activation != "gelu" or gated or bias is not None:
        raise PlanError(
            "hidden, activation, gated and bias say how experts are built here, and expert= gives others.",
            fix="leave them out, or leave expert out",
        )
    if slices != 1:
        raise PlanError(
            f"slices is {slices}, and experts are of a form of their own.",
            fix="expert=moe.FeedForward(num_experts, dim, hidden, slices=...), or slices=1",
        )
    return _given_experts(expert, num_experts)


def _given_experts(expert: Callable[[], nn.Module] | Experts, num_experts: int) -> Experts:
    if isinstance(expert, nn.Module) and not isinstance(expert, Experts):
        raise PlanError(
            f"expert is a {type(expert).__name__}, one module, and {num_experts} are to be built.",
            fix=f"a function that builds one: expert=lambda: {type(expert).__name__}(...)",
        )
    made = expert if isinstance(expert, Experts) else _stacked(expert, num_experts)
    if made.num_experts != num_experts * made.slices:
        raise PlanError(
            f"there are {made.num_experts} experts, and the layer has {num_experts}.", fix="equally many of both"
        )
    return made


def _stacked(expert: Callable[[], nn.Module], num_experts: int) -> Stacked:
    """Raises PlanError for a split inside an expert: of experts that are stacked it would cut nothing."""
    around = {opening.annotation.entry for opening in open_scopes()}
    built = [expert() for _ in range(num_experts)]
    inside = (a for module in built[0].modules() for a in annotations_of(module))
    cut = next((a for a in inside if a.kind == "split" and a.entry not in around), None)
    if cut is not None:
        raise PlanError(
            f"{cut.call} stands inside an expert, whose parameters are stacked with those of all experts.",
            where=cut.site,
            fix="leave it out; MoELayer(slices=...) cuts each of its own experts",
        )
    return Stacked(built)


def routes_of_each(capacity: Sequence[int] | None, num_experts: int) -> tuple[int, ...] | None:
    """Each expert's own number of routes. Raises PlanError where they are not one for each."""
    each = None if capacity is None else tuple(capacity)
    if each is not None and (len(each) != num_experts or min(each) < 0):
        raise PlanError(f"capacity is {list(each)}.", fix=f"a number of routes for each of {num_experts} experts")
    return each


def check_first(aux_loss_of: str, gate: Gate) -> None:
    """Raises PlanError where a loss cannot be of what is named."""
    if aux_loss_of not in ("routes", "first") or (aux_loss_of == "first" and not gate.has_first):
        raise PlanError(
            f'aux_loss_of="{aux_loss_of}" with a {type(gate).__name__} gate.',
            fix='"routes"; "first" where the gate gives the experts of a token in falling order',
        )


def check_travel(chunks: int, wire_dtype: torch.dtype | None) -> None:
    """Raises PlanError where tokens cannot travel in such parts, or as such a type."""
    if not isinstance(chunks, int) or chunks < 1:
        raise PlanError(f"chunks is {chunks}.", fix="1, or as many parts as travel beside each other")
    if wire_dtype is not None and not (isinstance(wire_dtype, torch.dtype) and wire_dtype.is_floating_point):
        raise PlanError(f"wire_dtype is {wire_dtype!r}.", fix="a floating-point dtype, torch.bfloat16, or None")
