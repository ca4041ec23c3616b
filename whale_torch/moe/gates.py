"""Gates: from tokens to routes. All compute in float32, whatever the model does (bfloat16 changes the choice)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whale_torch import ops
from whale_torch.errors import PlanError
from whale_torch.moe.gate import Gate
from whale_torch.moe.groups import route_within_groups
from whale_torch.moe.routing import LEAST, Renormalize, Routing

__all__ = ["Hash", "LinearGate", "Prototypes", "TopK"]


class LinearGate(Gate):
    """Scores are a linear function of tokens, without a bias.

    jitter: in training tokens are multiplied by uniform numbers in [1 - jitter, 1 + jitter] before (Switch, 2.2).
    """

    def __init__(
        self, dim: int, num_experts: int, top_k: int, *, renormalize: Renormalize = "none", jitter: float = 0.0
    ):
        super().__init__(num_experts, top_k, renormalize=renormalize)
        if not 0 <= jitter < 1:
            raise PlanError(f"jitter is {jitter}.", fix="0 <= jitter < 1")
        self.dim, self.jitter = dim, jitter
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    @property
    def draws(self) -> bool:
        return self.jitter > 0

    def logits(self, x: Tensor) -> Tensor:
        """[T, num_experts], float32 or wider."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(wide)
            if self.training and self.jitter:
                x = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
            return F.linear(x, self.weight.to(wide))

    def extra_repr(self) -> str:
        return f"{self.dim}, num_experts={self.num_experts}, top_k={self.top_k}, renormalize={self.renormalize!r}"


class TopK(LinearGate):
    """The k experts of the largest scores: softmax (top_k=1: Switch, 2.1; 2: GShard, 2.2), or sigmoid.

    second: of a top-2 gate, "random" keeps the second expert with probability min(1, 2 * its score) in training
    (GShard, algorithm 1). bias_rate: how far the bias of an expert moves in a step towards an even load; the bias takes
    part in the choice only (DeepSeek-V3, 2.1.2). num_groups, top_groups: experts are so many equal blocks, and a token
    chooses in the best so many of them: those of the best expert, or with score="sigmoid" of the largest sum of the two
    best; group_best=1 or 2 says which (DeepSeek-V2, 2.1.2, and V3). scale: what weights are multiplied by in the end.
    Ties go to the lowest expert; NaN is below everything.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int = 2,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        renormalize: Renormalize | None = None,
        jitter: float = 0.0,
        second: Literal["all", "random"] = "all",
        bias_rate: float = 0.0,
        num_groups: int = 1,
        top_groups: int | None = None,
        group_best: int | None = None,
        scale: float = 1.0,
    ):
        default: Renormalize = "before" if top_k > 1 else "none"
        super().__init__(
            dim, num_experts, top_k, renormalize=default if renormalize is None else renormalize, jitter=jitter
        )
        if score not in ("softmax", "sigmoid"):
            raise PlanError(f"score is {score!r}.", fix='score="softmax" or score="sigmoid"')
        if not 0 <= bias_rate < math.inf:
            raise PlanError(f"bias_rate is {bias_rate}.", fix="0 for no bias, or a small positive number")
        if second not in ("all", "random") or (second == "random" and top_k != 2):
            raise PlanError(f"second={second!r} with top_k={top_k}.", fix='second="random" is for top_k=2')
        self.score, self.second, self.bias_rate, self.scale = score, second, bias_rate, scale
        self.num_groups, self.top_groups = num_groups, num_groups if top_groups is None else top_groups
        self.group_best = (2 if score == "sigmoid" else 1) if group_best is None else group_best
        self._check_groups()
        self.bias: Tensor | None
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.register_buffer("bias", torch.zeros(num_experts, dtype=wide) if bias_rate else None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TopK:
        """Keeps the bias in float32 at least: in half precision it stands still where its steps are rounded away."""
        before = self.bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before is not None and self.bias is not None and torch.finfo(self.bias.dtype).bits < 32:
            self.bias = self.bias.to(before.dtype) if before.is_meta else before.to(self.bias.device)
        return self

    def _check_groups(self) -> None:
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise PlanError(
                f"{self.num_experts} experts are no {self.num_groups} equal groups.",
                fix="a number of groups that divides that of experts",
            )
        width = self.num_experts // self.num_groups
        if not 1 <= self.top_groups <= self.num_groups or self.top_groups * width < self.top_k:
            raise PlanError(
                f"top_groups is {self.top_groups}: of {self.num_groups} groups of {width} experts, of which a token "
                f"takes {self.top_k}.",
                fix="groups that are there, and have top_k experts together",
            )
        if self.group_best not in (1, 2):
            raise PlanError(f"group_best is {self.group_best}.", fix="1: the best expert; 2: the sum of the two best")

    def reset_parameters(self) -> None:
        super().reset_parameters()
        bias: Tensor | None = getattr(self, "bias", None)
        if bias is not None:
            nn.init.zeros_(bias)

    @property
    def draws(self) -> bool:
        return super().draws or self.second == "random"

    def route(self, x: Tensor, mask: Tensor | None) -> Routing:
        logits = self.logits(x)
        scores, experts, probs = self._routes(logits)
        if self.second == "random" and self.training:
            keep = torch.rand_like(scores[:, 1]) < 2 * scores[:, 1].detach()
            experts = torch.stack((experts[:, 0], torch.where(keep, experts[:, 1], -1)), 1)
            scores = torch.stack((scores[:, 0], scores[:, 1].where(keep, 0.0)), 1)
        if self.score == "sigmoid":
            probs = probs / probs.sum(1, keepdim=True).clamp(min=LEAST)
        return Routing(experts, scores, logits, probs, mask)

    def _routes(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.top_groups == self.num_groups:
            return ops.moe_route(logits, self.top_k, score=self.score, bias=self.bias)
        groups = {"num_groups": self.num_groups, "top_groups": self.top_groups, "best": self.group_best}
        return route_within_groups(logits, self.top_k, score=self.score, bias=self.bias, **groups)

    @property
    def follows_load(self) -> bool:
        return self.bias is not None

    @torch.no_grad()
    def update(self, counts: Tensor) -> None:
        if self.bias is not None:
            load = counts.to(self.bias.dtype)
            self.bias += self.bias_rate * (load.mean() - load).sign()


class Prototypes(LinearGate):
    """k groups of top-1: experts are `top_k` equal blocks, a token takes the best of each, by a softmax over the block.

    M6-T (arXiv 2105.15082, 3.3).
    """

    has_first = False

    def __init__(self, dim: int, num_experts: int, top_k: int = 2, *, jitter: float = 0.0):
        super().__init__(dim, num_experts, top_k, jitter=jitter)
        if num_experts % top_k:
            raise PlanError(
                f"{num_experts} experts are no {top_k} equal groups.", fix="a number of experts that top_k divides"
            )

    def route(self, x: Tensor, mask: Tensor | None) -> Routing:
        logits = self.logits(x)
        scores, experts, probs = ops.moe_route(logits, self.top_k, groups=self.top_k)
        return Routing(experts, scores, logits, probs, mask)


class Hash(Gate):
    """Fixed experts by token id (arXiv 2106.04426): call the layer with `token_ids`. Nothing is learned."""

    compiles = False
    table: Tensor

    def __init__(self, num_tokens: int, num_experts: int, top_k: int = 1, *, seed: int = 0):
        super().__init__(num_experts, top_k)
        if num_tokens < 1:
            raise PlanError(f"num_tokens is {num_tokens}.", fix="the number of token ids, 1 or more")
        self.seed = seed
        self.register_buffer("table", torch.empty(num_tokens, top_k, dtype=torch.int32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the table by its seed."""
        if self.table.is_meta:
            return
        generator = torch.Generator().manual_seed(self.seed)
        drawn = [torch.randperm(self.num_experts, generator=generator, device="cpu")[: self.top_k] for _ in self.table]
        self.table.copy_(torch.stack(drawn))

    def route(self, x: Tensor, mask: Tensor | None) -> Routing:
        raise PlanError(
            "a Hash gate chooses by token ids, and the layer was called without.", fix="moe(x, token_ids=ids)"
        )

    def of_ids(self, ids: Tensor, mask: Tensor | None) -> Routing:
        """The routes of tokens with these ids [T]; those of padding may be any."""
        if mask is not None:
            ids = ids.masked_fill(~mask, 0)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(self.table):
            raise PlanError(
                f"token ids are {int(ids.min())} to {int(ids.max())}, the table has {len(self.table)} rows.",
                fix="moe.Hash(num_tokens, ...) with as many tokens as there are ids",
            )
        experts = self.table[ids.long()]
        return Routing(experts, torch.full(experts.shape, 1.0 / self.top_k, device=experts.device), mask=mask).masked()
