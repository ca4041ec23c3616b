"""transformers' mixtures of experts: their own routers and names, this package's dispatch, on one device or over ranks.

Since 5.0 their blocks keep experts in a module of stacked weights that is called with tokens, chosen experts and
weights. Such a module takes a class that runs it as a MoELayer; whatever else a block does stays as it is.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whale_torch.comm.slices import join, part_of, take
from whale_torch.errors import PlanError
from whale_torch.moe.dense import name_of
from whale_torch.moe.experts import Experts
from whale_torch.moe.feed_forward import Block, Stacks, feed_forward
from whale_torch.moe.gate import Gate
from whale_torch.moe.given import rows_of_tokens
from whale_torch.moe.layer import MoELayer
from whale_torch.moe.parallel import SplitMoELayer
from whale_torch.moe.routing import Routing
from whale_torch.ops.precision import cast_of
from whale_torch.planning.rules import register_rule, replicated
from whale_torch.planning.rules.experts import plan_routed_experts
from whale_torch.strategies.copies import Replacement
from whale_torch.strategies.runtime import is_parallelized
from whale_torch.strategies.split_rules import joined_class, register_class

__all__ = ["RoutedExperts", "SplitRoutedExperts", "from_huggingface"]


def from_huggingface(model: nn.Module) -> nn.Module:
    """Lets the experts of a model of transformers run through this package's dispatch, in place; returns the model.

    Mixtral, Qwen-MoE, DeepSeek, OLMoE, GPT-OSS and whatever else has experts in transformers' common form. Parameters
    stay the same objects under the same names, so that from_pretrained before and save_pretrained after are as always;
    routers, shared experts and losses are the model's own. Experts are split by
    wh.annotate(model, {r".*\\.experts": wh.split()}), or with the whole model.

    Raises: PlanError where no module has the form, and for a parallelized model; the model is then unchanged.
    """
    if is_parallelized(model):
        raise PlanError("from_huggingface(): this model is parallelized already.", fix="convert it before")
    found = [m for m in model.modules() if _has_common_form(m) and not isinstance(m, MoELayer)]
    if not found and not any(isinstance(m, RoutedExperts) for m in model.modules()):
        others = sorted({type(m).__name__ for m in model.modules() if "expert" in type(m).__name__.lower()})
        raise PlanError(
            f"no module of {type(model).__name__} has experts in transformers' common form"
            + (f"; it has {', '.join(others)}." if others else "."),
            fix="convert feed-forwards by moe.convert(model, {name_regex: function}); transformers from 5.0 on",
        )
    for module in found:
        _take_over(module)
    for block in list(model.modules()):
        experts = next((m for m in block.children() if isinstance(m, RoutedExperts)), None)
        if experts is not None:
            for router in block.children():
                if _is_router(router, experts):
                    replicated(type(router))
    return model


def _attributes(dim: int, num_experts: int) -> dict[str, Any]:
    """Those of a MoELayer that only dispatches; its gate is no member, as the block's router chooses."""
    plain = MoELayer(dim, num_experts, 1, expert=Experts(num_experts), gate=Gate(num_experts, 1), aux_loss_coef=0.0)
    theirs = {*nn.Module().__dict__, "num_experts"}
    own = {name: value for name, value in plain.__dict__.items() if name not in theirs}
    return own | {"gate": plain.gate}


class RoutedExperts(Replacement, MoELayer):
    """A MoELayer that others choose for: called with tokens [T, dim], experts [T, k] and weights [T, k].

    Its class is joined with that of transformers, whose parameters it runs. Experts from num_experts on are no routes.
    """

    @classmethod
    def _left_out(cls) -> set[str]:
        return super()._left_out() | set(_attributes(1, 1))

    @classmethod
    def _base(cls) -> type:
        return next(base for base in cls.__mro__ if not issubclass(base, (Replacement, MoELayer)))

    def _get_name(self) -> str:
        return self._base().__name__

    @property
    def experts(self) -> Any:  # type: ignore[override]
        """What a MoELayer asks of its Experts; the parameters are the layer's own."""
        return _Own(self)

    def as_recorded(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:  # type: ignore[override]
        k = top_k_index.shape[1]
        out = hidden_states.repeat(k, 1)
        if len(next(self.parameters())):
            out = self._each(out, [len(out)])
        out = out.view(k, *hidden_states.shape) * top_k_weights.t().unsqueeze(2)
        return out.sum(0).to(hidden_states.dtype)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:  # type: ignore[override]
        if hidden_states.is_meta:
            return self.as_recorded(hidden_states, top_k_index, top_k_weights)
        hidden_states = rows_of_tokens(hidden_states)
        return self._chosen(hidden_states, top_k_index, top_k_weights)

    def _chosen(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        experts = torch.where(experts < self.num_experts, experts, -1).int()
        wide = torch.float64 if weights.dtype == torch.float64 else torch.float32
        return self._between_graphs(self._routed, x, Routing(experts, weights.to(wide))).to(x.dtype)

    def _stacks(self) -> tuple[Any, Any, Any, Any]:
        """(weights of gate and up, their biases, weights of down, its biases)"""
        of: Any = self
        up = of.gate_up_proj if of.has_gate else of.up_proj
        up_bias = (of.gate_up_proj_bias if of.has_gate else of.up_proj_bias) if of.has_bias else None
        return up, up_bias, of.down_proj, of.down_proj_bias if of.has_bias else None

    def _activation(self) -> str | None:
        """That of experts which are plain feed-forwards, None where they are not."""
        of: Any = self
        plain_gate = not of.has_gate or (of.is_concatenated and of._apply_gate.__name__ == "_default_apply_gate")
        return _known(of.act_fn) if plain_gate and not of.has_post_expert_norm else None

    def _cast(self, x: Tensor) -> tuple[Tensor, Stacks]:
        """x and the weights in the type that they are multiplied in; gate and up are views of their one stack."""
        of: Any = self
        given: tuple[Any, ...] = (x, *self._stacks())
        if (dtype := cast_of(x)) is not None:
            given = tuple(None if t is None else t.to(dtype) for t in given)
        x, up, up_bias, down, down_bias = given
        if of.is_transposed:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        (w1, w3), (b1, b3) = (
            stack.chunk(2, dim=1) if of.has_gate and stack is not None else (stack, None) for stack in (up, up_bias)
        )
        return x, Stacks(w1, b1, down, down_bias, w3, b3)

    def _each(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        stacks = self._stacks()
        if not rows:  # a rank without experts is sent no rows: as an expert of zeros
            return self._one(x, *(None if stack is None else stack.sum(0) for stack in stacks))
        each = [[None] * len(rows) if stack is None else stack.unbind(0) for stack in stacks]
        return torch.cat([self._one(part, *of) for part, *of in zip(x.split(list(rows)), *each, strict=False)])

    def _one(self, x: Tensor, up: Any, up_bias: Any, down: Any, down_bias: Any) -> Tensor:
        of: Any = self
        if of.is_transposed:
            up, down = up.t(), down.t()
        hidden = F.linear(x, up, up_bias)
        hidden = of._apply_gate(hidden) if of.has_gate else of.act_fn(hidden)
        out = F.linear(hidden, down, down_bias)
        return of.post_expert_norm(out) if of.has_post_expert_norm else out

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, dim={self.dim}"


class _Own:
    """A layer's own parameters as its Experts, and as a FeedForward where these are plain ones."""

    slices = 1
    called = False  # it is no module: hooks are the layer's, and see the calls of that

    def __init__(self, layer: RoutedExperts):
        self._layer, self.num_experts = layer, layer.num_experts

    @property
    def takes_blocks(self) -> bool:
        return self._layer._activation() is not None

    def __call__(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        if not self.takes_blocks:
            return self._layer._each(x, rows)
        ends = itertools.accumulate(rows)
        return self.on_blocks(x, [(e, end - n, end) for e, (n, end) in enumerate(zip(rows, ends, strict=True))])

    def on_blocks(self, x: Tensor, blocks: Sequence[Block]) -> Tensor:
        x, stacks = self.cast(x)
        return feed_forward(x, blocks, self.activation, *stacks)

    def cast(self, x: Tensor) -> tuple[Tensor, Stacks]:
        return self._layer._cast(x)

    @property
    def activation(self) -> str:
        activation = self._layer._activation()
        assert activation is not None
        return activation

    @property
    def biased(self) -> tuple[bool, ...]:
        return (True,) * self.num_experts

    def without(self, x: Tensor) -> Tensor:
        return self._layer._each(x, [])

    def parameters(self) -> Iterator[nn.Parameter]:
        return self._layer.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._layer.named_parameters()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        return self._layer.named_buffers()


class SplitRoutedExperts(SplitMoELayer):
    """Its experts are this rank's; joined with a class of RoutedExperts."""

    def _feed_forwards(self) -> Any:
        own = self.experts
        return own if own.takes_blocks else None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:  # type: ignore[override]
        layer: Any = self
        twins = self._region.twins
        if hidden_states.is_meta:
            self._count_bytes(hidden_states)
            recorded: Tensor = layer.as_recorded(hidden_states, top_k_index, top_k_weights)
            return recorded
        hidden_states = rows_of_tokens(hidden_states)
        if twins.size == 1:
            out: Tensor = layer._chosen(hidden_states, top_k_index, top_k_weights)
            return out
        return self._between_graphs(self._of_slice, hidden_states, top_k_index, top_k_weights)

    def _of_slice(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:  # type: ignore[override]
        layer: Any = self
        twins, tokens = self._region.twins, len(hidden_states)
        mine, weights = take([hidden_states, top_k_weights], [0, 0], tokens, twins)
        chosen = layer._chosen(mine, top_k_index[part_of(tokens, twins)], weights)
        (out,) = join([chosen], [0], tokens, twins)
        return out


def _known(activation: Callable[[Tensor], Tensor]) -> str | None:
    """Which of the known activations a function is, tried out once."""
    if activation not in _KNOWN:
        with torch.device("cpu"), torch.autocast("cpu", enabled=False):
            _KNOWN[activation] = name_of(activation)
    return _KNOWN[activation]


_KNOWN: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()


def _has_common_form(module: nn.Module) -> bool:
    """Whether transformers' use_experts_implementation made the module's class."""
    marks = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated", "_apply_gate")
    down = module._parameters.get("down_proj")
    return all(hasattr(module, name) for name in (*marks, "num_experts")) and down is not None and down.dim() == 3


def _is_router(module: nn.Module, experts: RoutedExperts) -> bool:
    """Whether a member of a block scores experts, in a class of its own."""
    weight = module._parameters.get("weight")
    shape = (experts.num_experts, experts.dim)
    return weight is not None and tuple(weight.shape) == shape and not isinstance(module, nn.Linear)


def _take_over(module: Any) -> None:
    kind = type(module)
    joined = joined_class(RoutedExperts, kind)
    register_rule(joined, plan_routed_experts)
    number = int(module.num_experts)
    top_k = getattr(getattr(module, "config", None), "num_experts_per_tok", None)
    dim = module.down_proj.shape[2 if module.is_transposed else 1]
    attributes = _attributes(dim, number)
    if isinstance(top_k, int):
        attributes["top_k"] = min(top_k, number)
    module.__class__ = joined
    module.__dict__.update(attributes)


register_class("RoutedExperts", "experts", functools.partial(joined_class, SplitRoutedExperts))
