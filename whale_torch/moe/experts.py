"""Experts: networks of one form, the parameters of all of them in one tensor each, expert by expert along dim 0."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from whale_torch.errors import PlanError
from whale_torch.moe.feed_forward import Block, Stacks, feed_forward
from whale_torch.ops.activation import FUNCTIONS
from whale_torch.ops.precision import cast_of

__all__ = ["Experts", "FeedForward", "Stacked"]


class Experts(nn.Module):
    """num_experts: those that the parameters hold, slices of experts where they are cut: parameters are
    [num_experts, ...]. slices: of an expert, whose outputs are summed. first: the first one here, of all."""

    def __init__(self, num_experts: int, *, slices: int = 1):
        super().__init__()
        if slices < 1:
            raise PlanError(f"slices is {slices}.", fix="1, or into how many parts each expert is cut")
        self.num_experts, self.slices, self.first = num_experts * slices, slices, 0

    takes_blocks: ClassVar[bool] = False
    """Whether `on_blocks` runs experts on rows that lie anywhere; not so where a subclass has a forward of its own."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "forward" in vars(cls) and not {"on_blocks", "takes_blocks"} & vars(cls).keys():
            cls.takes_blocks = False

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers in training."""
        return False

    @property
    def called(self) -> bool:
        """Whether its calls are more than its own forward: hooks see them, or a forward was put on the object."""
        hooks = self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks
        return any(hooks) or "forward" in vars(self)

    def forward(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Each expert on its rows: x [sum(rows), dim], those of the first expert first -> the same number of rows."""
        raise NotImplementedError

    def on_blocks(self, x: Tensor, blocks: Sequence[Block]) -> Tensor:
        """Experts on their blocks of rows of x, which together are all rows."""
        raise NotImplementedError

    def without(self, x: Tensor) -> Tensor:
        """What a rank that holds no expert makes of x [0, dim], as one expert of zeros: ranks exchange rows of one
        dtype, and all of them want a gradient or none."""
        zeros = {name: p.sum(0, keepdim=True) for name, p in self.named_parameters()}
        out: Tensor = functional_call(self, zeros, (x, [0]))
        return out


class FeedForward(Experts):
    """activation(x W1 + b1) W2 + b2, or, gated, (activation(x W1) * (x W3)) W2, each of [dim, hidden].

    slices: parameters hold the slices of an expert along hidden one after the other, [num_experts * slices, ...]; b2 is
    the first slice's, and 0 in the others.
    """

    takes_blocks = True

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden: int,
        *,
        activation: str = "gelu",
        gated: bool = False,
        bias: bool | None = None,
        slices: int = 1,
    ):
        super().__init__(num_experts, slices=slices)
        if hidden % slices:
            raise PlanError(f"{slices} slices do not divide a hidden width of {hidden}.", fix="a divisor of it")
        num_experts, hidden = num_experts * slices, hidden // slices
        if activation not in FUNCTIONS:
            raise PlanError(f"activation is {activation!r}.", fix=f"one of {', '.join(map(repr, FUNCTIONS))}")
        if dim < 1 or hidden < 1:
            raise PlanError(f"experts of dim={dim}, hidden={hidden}.", fix="1 or more")
        self.dim, self.hidden, self.activation, self.gated = dim, hidden, activation, gated
        with_bias = not gated if bias is None else bias
        self.w1, self.w2 = _parameter(num_experts, hidden, dim), _parameter(num_experts, dim, hidden)
        self.w3 = _parameter(num_experts, hidden, dim) if gated else None
        self.b1 = _parameter(num_experts, hidden) if with_bias else None
        self.b2 = _parameter(num_experts, dim) if with_bias else None
        self.b3 = _parameter(num_experts, hidden) if with_bias and gated else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As nn.Linear."""
        for weight, bias in ((self.w1, self.b1), (self.w3, self.b3), (self.w2, self.b2)):
            if weight is not None:
                bound = 1 / math.sqrt(weight.shape[2] * (self.slices if weight is self.w2 else 1))
                nn.init.uniform_(weight, -bound, bound)
                if bias is not None:
                    nn.init.uniform_(bias, -bound, bound)
        if self.b2 is not None and self.slices > 1:
            with torch.no_grad():
                self.b2[[not biased for biased in self.biased]] = 0

    def forward(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        ends = list(accumulate(rows))
        return self.on_blocks(
            x, [(e, end - number, end) for e, (number, end) in enumerate(zip(rows, ends, strict=True))]
        )

    def on_blocks(self, x: Tensor, blocks: Sequence[Block]) -> Tensor:
        x, stacks = self.cast(x)
        return feed_forward(x, blocks, self.activation, *stacks, biased=self.biased)

    @property
    def biased(self) -> tuple[bool, ...]:
        """Which of the experts here add b2."""
        return tuple((self.first + e) % self.slices == 0 for e in range(len(self.w2)))

    def cast(self, x: Tensor) -> tuple[Tensor, Stacks]:
        """x and the weights in the type that they are multiplied in."""
        stacks = Stacks(self.w1, self.b1, self.w2, self.b2, self.w3, self.b3)
        dtype = cast_of(x)
        if dtype is None:
            return x, stacks
        return x.to(dtype), Stacks(*(None if t is None else t.to(dtype) for t in stacks))  # type: ignore[arg-type]

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
        """Says where values of b2 would count for nothing."""
        super()._load_from_state_dict(state, prefix, *others)
        given: Any = state.get(f"{prefix}b2")
        if self.b2 is None or type(given) not in (Tensor, nn.Parameter) or given.is_meta:
            return
        if given.shape == self.b2.shape and bool(given[[not biased for biased in self.biased]].any()):
            others[-1].append(
                f"{prefix}b2 is 0 but for the first of an expert's {self.slices} slices: put the sum of them there."
            )

    def extra_repr(self) -> str:
        gated = ", gated" if self.gated else ""
        return f"{self.num_experts} x ({self.dim}, {self.hidden}), {self.activation}{gated}"


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class Stacked(Experts):
    """Experts of a module of yours: of every parameter those of all experts in one tensor, under the name with "." as
    "__".

    Raises PlanError for modules that differ in more than values, that have buffers, or that have no parameters.
    """

    def __init__(self, modules: Sequence[nn.Module]):
        super().__init__(len(modules))
        first = modules[0]
        named = [dict(module.named_parameters()) for module in modules]
        forms = [{name: p.shape for name, p in found.items()} for found in named]
        if any(type(m) is not type(first) or form != forms[0] for m, form in zip(modules, forms, strict=True)):
            raise PlanError("experts of one layer have one type and one shape.", fix="build them alike")
        if not named[0] or next(first.buffers(), None) is not None:
            what = "no parameters" if not named[0] else f"the buffer '{next(iter(dict(first.named_buffers())))}'"
            raise PlanError(f"an expert of type {type(first).__name__} has {what}.", fix="parameters only")
        template = copy.deepcopy(first).to("meta")
        object.__setattr__(self, "template", template)  # no member: its parameters are nobody's
        stacks = {id(p): name.replace(".", "__") for name, p in reversed(list(first.named_parameters()))}
        every = first.named_parameters(remove_duplicate=False)  # a tied one under each of its names
        self._names = {name: stacks[id(p)] for name, p in every}
        for name, p in named[0].items():
            whole = torch.stack([found[name].detach() for found in named])
            self.register_parameter(self._names[name], nn.Parameter(whole, requires_grad=p.requires_grad))

    template: nn.Module

    @property
    def draws(self) -> bool:
        return any(isinstance(module, _DROPOUTS) for module in self.template.modules())

    def reset_parameters(self) -> None:
        """As the modules that were stacked initialise themselves."""
        whole = copy.deepcopy(self.template)
        for number in range(self.num_experts):
            one = whole.to_empty(device=getattr(self, next(iter(self._names.values()))).device)
            for module in one.modules():
                reset = getattr(module, "reset_parameters", None)
                if reset is None and module._parameters:
                    raise PlanError(
                        f"an expert's {type(module).__name__} was built on the meta device and has no "
                        "reset_parameters().",
                        fix="give it one, or build the model with memory",
                    )
                if reset is not None:
                    reset()
            with torch.no_grad():
                for name, parameter in one.named_parameters():
                    getattr(self, self._names[name])[number].copy_(parameter)

    def forward(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        self.template.train(self.training)
        parts = {key: getattr(self, key).unbind(0) for key in set(self._names.values())}
        out = [
            functional_call(self.template, {name: parts[key][number] for name, key in self._names.items()}, (part,))
            for number, part in enumerate(x.split(list(rows)))
            if len(part) or not number
        ]
        return torch.cat(out)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))
