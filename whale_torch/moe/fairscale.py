"""fairscale's mixture of experts taken over: the experts of all its ranks, its gate, its capacity and its loss."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from whale_torch.errors import PlanError
from whale_torch.moe.dense import experts_of
from whale_torch.moe.gate import Gate
from whale_torch.moe.layer import MoELayer
from whale_torch.moe.routing import Routing

__all__ = ["GumbelTop2", "from_fairscale"]


class GumbelTop2(Gate):
    """fairscale's Top2Gate: the second expert is drawn by its probability (Gumbel-max), in evaluation too.

    l_aux: of the last call, mean_e(P_e f_e) over this rank's tokens, f of first choices, to be added to the loss; the
    layer's own aux_loss_coef does that by itself, with f of all routes.
    """

    def __init__(self, wg: nn.Linear):
        super().__init__(wg.out_features, 2, renormalize="after")
        self.wg = wg
        self.l_aux: Tensor | None = None

    @property
    def draws(self) -> bool:
        return True

    def route(self, x: Tensor, mask: Tensor | None) -> Routing:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(wide), self.wg.weight.to(wide))
        probs = logits.softmax(1)
        first = probs.argmax(1, keepdim=True)
        with torch.no_grad():
            zero, one = logits.new_zeros(()), logits.new_ones(())
            drawn = logits + torch.distributions.Gumbel(zero, one).rsample(logits.shape)
            second = drawn.scatter(1, first, float("-inf")).argmax(1, keepdim=True)
        experts = torch.cat((first, second), 1)
        self.l_aux = self._loss(probs, first, mask).to(x.dtype)
        return Routing(experts.int(), probs.gather(1, experts), logits, probs, mask)

    def _loss(self, probs: Tensor, first: Tensor, mask: Tensor | None) -> Tensor:
        seen = torch.ones_like(first, dtype=probs.dtype) if mask is None else mask.unsqueeze(1).to(probs.dtype)
        tokens = seen.sum().clamp(min=1)
        fractions = torch.zeros_like(probs).scatter(1, first, seen).sum(0) / tokens
        return ((probs * seen).sum(0) / tokens * fractions).mean()


def from_fairscale(layer: nn.Module, **options: Any) -> MoELayer:
    """A MoELayer with the gate and the experts of a fairscale MOELayer; on several ranks with all ranks' experts, so
    that it is called on all ranks of its group, and each of them holds all experts until wh.split() and wh.parallelize.

    Experts keep fairscale's order, the gate's weight stays the same object (as gate.wg.weight), `layer.l_aux` becomes
    `layer.gate.l_aux`. Capacity is fairscale's 2 T / E, of the tokens of all ranks rather than of each rank's.
    options: of MoELayer: another gate, capacity_factor=None to drop nothing, aux_loss_coef (0 here, by default); dim,
    where its own gate has no linear layer `wg` that tells it.
    Raises: PlanError for another module, and for a gate of yours where options give none.
    """
    theirs: Any = layer
    parts = ("gate", "experts", "group", "world_size", "num_local_experts")
    if type(layer).__name__ != "MOELayer" or not all(hasattr(layer, name) for name in parts):
        raise PlanError(
            f"from_fairscale() takes a fairscale.nn.MOELayer, got {type(layer).__name__}.",
            fix="other layers: moe.MoELayer(dim, expert=..., gate=...)",
        )
    if not options.get("gate") and type(theirs.gate).__name__ != "Top2Gate":
        raise PlanError(
            f"its gate is a {type(theirs.gate).__name__}, not fairscale's Top2Gate.",
            fix="from_fairscale(layer, gate=...), a whale_torch.moe.Gate that chooses as it does",
        )
    modules = _experts_of_all(theirs)
    given = {"capacity_factor": 1.0, "eval_capacity_factor": 1.0, "min_capacity": 0, "aux_loss_coef": 0.0} | options
    gate = given.pop("gate", None) or GumbelTop2(theirs.gate.wg)
    if "eval_capacity_factor" not in options and "capacity_factor" in options:
        given["eval_capacity_factor"] = options["capacity_factor"]
    top_k = given.pop("top_k", 2) if isinstance(gate, str) else gate.top_k
    wg = getattr(theirs.gate, "wg", None)
    dim = given.pop("dim", None if wg is None else wg.in_features)
    if dim is None:
        raise PlanError(
            f"its {type(theirs.gate).__name__} has no linear layer `wg`, which would say how wide tokens are.",
            fix="from_fairscale(layer, gate=..., dim=...)",
        )
    made = MoELayer(dim, len(modules), top_k, gate=gate, expert=experts_of(modules), **given)
    return made.train(layer.training)


def _experts_of_all(layer: Any) -> list[nn.Module]:
    """Those of the first rank first."""
    here = list(layer.experts)
    if layer.world_size == 1:
        return here
    found = [copy.deepcopy(expert) for _ in range(layer.world_size) for expert in here]
    with torch.no_grad():
        for number, expert in enumerate(here):
            for name, parameter in expert.named_parameters():
                each = [torch.empty_like(parameter) for _ in range(layer.world_size)]
                dist.all_gather(each, parameter.detach().contiguous(), group=layer.group)
                for rank, values in enumerate(each):
                    found[rank * len(here) + number].get_parameter(name).copy_(values)
    return found
