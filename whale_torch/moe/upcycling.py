"""Sparse upcycling: a layer of experts from a trained dense feed-forward, whose output it gives at first."""

from __future__ import annotations

import difflib
import inspect
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from whale_torch.errors import PlanError
from whale_torch.moe.dense import Dense, feed_forward_of, read_dense, width_of
from whale_torch.moe.experts import Experts, FeedForward, Stacked
from whale_torch.moe.gate import Gate
from whale_torch.moe.gates import Hash, Prototypes, TopK
from whale_torch.moe.layer import MoELayer

__all__ = ["upcycle"]

_OF_THE_DENSE = ("activation", "bias", "dim", "dropout", "expert", "gated")


def upcycle(
    dense: nn.Module,
    num_experts: int = 8,
    top_k: int = 2,
    *,
    hidden: int | None = None,
    noise: float = 0.0,
    scale: Literal["exact", "even", "none"] = "exact",
    exact: bool = True,
    **options: Any,
) -> MoELayer:
    """A MoELayer whose experts are copies of a dense feed-forward, in its dtype, on its device; the gate is new.

    dense: nn.Sequential(Linear, activation, Linear), or a module with two or three linear layers of the usual names
        (gate_proj/up_proj/down_proj, w1/w3/w2, wi_0/wi_1/wo, c_fc/c_proj, fc1/fc2, ...); any other module from
        [n, dim] to [n, dim] is copied as it is.
    hidden: width of an expert where that is a part of the dense one's (granular upcycling): with G = dense / hidden,
        expert e has slice e mod G, and G experts in a row share a row of the gate, so that a top_k that G divides
        chooses whole copies.
    noise: standard deviation of what is added to the experts' weights, in that of each weight.
    scale: what makes up for slices, and for weights of routes that do not sum to 1 (by a gate that is uniform):
        "exact": a factor on the layers after the activation only, or, for relu, evenly on all of them; "even": evenly
        on all, whatever the activation (arXiv 2410.07524); "none".
    exact: without noise the layer gives what the dense one gives, as long as nothing is dropped; False accepts a layer
        that does not.
    options: of MoELayer, but for those of its experts.
    Raises: PlanError for a module that is no feed-forward or has no values yet, options that do not fit, and, with
    exact, a layer that would give something else.
    Reference: sparse upcycling (arXiv 2212.05055).
    """
    _check(dense, num_experts, noise, scale, options)
    read = read_dense(dense)
    slices = _slices(dense, read, num_experts, hidden)
    dim = width_of(dense) if read is None else read.dim
    layer = MoELayer(dim, num_experts, top_k, expert=_Later(num_experts), **options)
    if exact:
        _check_exact(layer, read, slices, scale)
    factor = _Factors.of(layer, slices, scale)
    layer.experts = (
        _copies(dense, num_experts, factor) if read is None else _slices_of(read, num_experts, slices, factor)
    )
    weight = next(dense.parameters())
    layer.gate.to(weight.device, weight.dtype)
    if slices > 1:
        _share_rows(layer.gate, slices)
    if noise:
        _disturb(layer.experts, noise)
    return layer.train(dense.training)


@dataclass(frozen=True)
class _Factors:
    """What weights are multiplied by: `product`, spread over the layers, and `bias`, that of the last layer."""

    product: float
    bias: float
    even: bool

    @staticmethod
    def of(layer: MoELayer, slices: int, scale: str) -> _Factors:
        if scale == "none":
            return _Factors(1.0, 1.0, even=False)
        total = layer.top_k * _weight_of_a_route(layer)
        return _Factors(slices / total, 1 / total if scale == "exact" else 1.0, even=scale == "even")


class _Later(Experts):
    """Stands in while the layer is built."""


def _check(dense: nn.Module, num_experts: int, noise: float, scale: str, options: dict[str, Any]) -> None:
    if not isinstance(dense, nn.Module):
        raise PlanError(
            f"upcycle takes an nn.Module, got {type(dense).__name__}.",
            fix="upcycle(nn.Sequential(linear, act, linear))",
        )
    if isinstance(dense, MoELayer):
        raise PlanError("this is a layer of experts already.", fix="upcycle the dense feed-forward")
    known = list(inspect.signature(MoELayer).parameters)
    odd = next((name for name in options if name not in known), None)
    if odd is not None:
        close = difflib.get_close_matches(odd, known, 1, cutoff=0.5)
        raise PlanError(
            f"a MoELayer has no option '{odd}'.", fix=f"'{close[0]}'?" if close else f"one of {', '.join(known)}"
        )
    own = sorted(set(options) & set(_OF_THE_DENSE))
    if own:
        raise PlanError(f"{', '.join(own)} is as of the dense feed-forward.", fix=f"leave {', '.join(own)} out")
    if not 0 <= noise < math.inf or scale not in ("exact", "even", "none") or num_experts < 1:
        raise PlanError(
            f"upcycle(num_experts={num_experts}, noise={noise}, scale={scale!r}).",
            fix='num_experts >= 1, noise >= 0, scale="exact", "even" or "none"',
        )
    empty = next((name for name, p in dense.named_parameters() if p.is_meta), None)
    if empty is not None:
        raise PlanError(
            f"'{empty}' of {type(dense).__name__} is on the meta device: there are no values to copy.",
            fix="load the dense model first",
        )


def _slices(dense: nn.Module, read: Dense | None, num_experts: int, hidden: int | None) -> int:
    """Of how many experts a copy of the dense one consists."""
    if hidden is None:
        return 1
    if read is None:
        raise PlanError(
            f"{type(dense).__name__} has no form that could be cut into experts of hidden={hidden}.",
            fix="nn.Sequential(Linear, activation, Linear), or leave hidden out",
        )
    if hidden < 1 or read.hidden % hidden or num_experts % (read.hidden // hidden):
        raise PlanError(
            f"hidden={hidden} with {num_experts} experts, of a dense feed-forward {read.hidden} wide.",
            fix=f"a hidden that divides {read.hidden}, and a multiple of {read.hidden} / hidden experts",
        )
    return read.hidden // hidden


def _check_exact(layer: MoELayer, read: Dense | None, slices: int, scale: str) -> None:
    """Raises PlanError where the layer would not give what the dense one gives."""
    why = None
    if layer.gate.renormalize == "none" and layer.num_experts > 1 and not isinstance(layer.gate, Hash):
        why = f"the weights of a token's {layer.top_k} experts do not sum to 1", 'top_k > 1 and renormalize="before"'
    elif slices > 1 and layer.top_k % slices:
        why = f"a copy is {slices} experts, and a token has {layer.top_k}", f"top_k a multiple of {slices}"
    elif slices > 1 and scale == "none":
        why = f"the sum of {slices} slices is divided by {slices}", 'scale="exact"'
    elif slices > 1 and scale == "even" and (read is None or read.activation != "relu"):
        why = 'scale="even" reaches through the activation', 'scale="exact"'
    elif layer.shared is not None:
        why = "the shared expert is added to it", "shared=None"
    if why is not None:
        raise PlanError(
            f"the layer would not give what the dense feed-forward gives: {why[0]}.", fix=f"{why[1]}, or exact=False"
        )


def _weight_of_a_route(layer: MoELayer) -> float:
    """By a gate to which all experts are alike."""
    gate = layer.gate
    if gate.renormalize != "none" or layer.num_experts == 1 or isinstance(gate, Hash):
        return 1 / layer.top_k
    if isinstance(gate, TopK):
        return 0.5 if gate.score == "sigmoid" else 1 / layer.num_experts
    if isinstance(gate, Prototypes):
        return layer.top_k / layer.num_experts
    raise PlanError(
        f"how large the weights of a {type(gate).__name__} are is not known here.", fix='scale="none", or renormalize'
    )


@torch.no_grad()
def _slices_of(read: Dense, number: int, slices: int, factor: _Factors) -> FeedForward:
    """Expert e is slice e mod slices."""
    each = read.slices(slices)
    experts = feed_forward_of([each[e % slices] for e in range(number)])
    s1, s2, s3 = _spread(read, factor)
    by = {"w1": s1, "b1": s1, "w2": s2, "b2": factor.bias, "w3": s3, "b3": s3}
    for name, parameter in experts.named_parameters():
        parameter.mul_(by[name])
    return experts


def _spread(read: Dense, factor: _Factors) -> tuple[float, float, float]:
    """What the layers before the activation, after it, and beside it are multiplied by."""
    gated = read.w3 is not None
    if factor.even or read.activation == "relu":
        root = factor.product ** (1 / 3 if gated else 1 / 2)
        return root, root, root
    return (1.0, factor.product**0.5, factor.product**0.5) if gated else (1.0, factor.product, 1.0)


def _copies(dense: nn.Module, number: int, factor: _Factors) -> Stacked:
    if factor.product != 1:
        raise PlanError(
            f"what {type(dense).__name__} gives cannot be scaled, as its form is not known.",
            fix='weights that sum to 1, or scale="none"',
        )
    return Stacked([dense] * number)


def _share_rows(gate: Gate, slices: int) -> None:
    if not isinstance(gate, TopK):
        raise PlanError(
            f"a {type(gate).__name__} gate does not choose the {slices} slices of a copy together.",
            fix='gate="softmax" or "sigmoid", or leave hidden out',
        )
    with torch.no_grad():
        rows = gate.weight[: gate.num_experts // slices]
        gate.weight.copy_(rows.repeat_interleave(slices, 0))


@torch.no_grad()
def _disturb(experts: Experts, noise: float) -> None:
    for weight in (p for p in experts.parameters() if p.dim() > 2):
        for one in weight if weight[0].numel() > 1 else ():  # of one number there is no deviation
            one.add_(torch.randn_like(one), alpha=noise * float(one.std()))
