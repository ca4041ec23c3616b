"""Weight gradients that wait: what a backward in two parts leaves for its weight part.

While such a schedule runs, linear layers run through an autograd function that gives the gradient of its input at once
and keeps, of each call, the input and the output's gradient. The weight part makes gradients of them (arXiv
2401.10241). Every other parameter gets its gradient in the input part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale_torch.errors import LossError

__all__ = ["WeightStore"]

Key = tuple[int, int]
"""Stage and micro-batch."""


class _Kept(NamedTuple):
    """One call of a layer: what it was given, and the gradient of what it gave.

    weight, bias: those that want a gradient. turned: the weight is (in, out), as transformers' Conv1D has it. x: (rows,
    in); grad: (rows, out). versions: of both.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    turned: bool
    x: Tensor
    grad: Tensor
    versions: tuple[int, int] = (0, 0)

    def weight_factors(self) -> tuple[Tensor, Tensor]:
        """Two matrices whose product is the weight's gradient."""
        return (self.x.t(), self.grad) if self.turned else (self.grad.t(), self.x)

    def kept(self) -> _Kept:
        """The same, without the graph behind it, for later."""
        return self._replace(x=self.x.detach(), versions=(self.x._version, self.grad._version))

    def check(self, stage: int, micro_batch: int) -> None:
        """Raises LossError where it was written into since, as torch does before a whole backward."""
        if (self.x._version, self.grad._version) != self.versions:
            out, into = self.grad.shape[1], self.x.shape[1]
            raise LossError(
                f"a linear layer of {into} to {out} features in stage {stage} was given a tensor that was written into "
                f"between the input part and the weight part of micro-batch {micro_batch}'s backward: a buffer that "
                "changes from micro-batch to micro-batch, perhaps.",
                fix='give the layer a clone of it, or run whole backwards: wh.pipeline(schedule="1f1b")',
            )


class WeightStore:
    """What the linear layers of one rank keep between the input and the weight parts of one step.

    modules: those among which the layers are. parts: whose backward comes in two parts, by stage and micro-batch.
    """

    def __init__(self, modules: Iterable[nn.Module], parts: Collection[Key]):
        self._layers = _layers(list(modules)) if parts else []
        self._parts = parts
        self._now: Key | None = None
        self._kept: dict[Key, list[_Kept]] = {}

    def __len__(self) -> int:
        """Calls that are kept."""
        return sum(map(len, self._kept.values()))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Layers keep what their weight gradients are made of, where `begin` says that they may."""
        for layer in self._layers:
            layer.__dict__["forward"] = partial(self._forward, layer, type(layer).forward)
        try:
            yield
        finally:
            self._now = None
            for layer in self._layers:
                del layer.__dict__["forward"]

    def begin(self, stage: int, micro_batch: int) -> None:
        """From here on, a forward of this stage and micro-batch runs, or what its backward recomputes."""
        self._now = (stage, micro_batch) if (stage, micro_batch) in self._parts else None

    def finish(self, stage: int, micro_batch: int) -> None:
        """The weight part: adds to the parameters' gradients what was kept, and lets go of it."""
        kept = self._kept.pop((stage, micro_batch), [])
        kept.reverse()
        while kept:
            call = kept.pop()
            call.check(stage, micro_batch)
            with torch.no_grad(), torch.autocast(call.x.device.type, enabled=False):
                if call.weight is not None:
                    _add_product(call.weight, *call.weight_factors())
                if call.bias is not None:
                    _add(call.bias, call.grad.sum(0))

    def _forward(self, layer: nn.Module, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
        if self._now is None or kwargs or len(args) != 1 or not _splits(args[0], weight, bias):
            return plain(layer, *args, **kwargs)
        kept = self._kept.setdefault(self._now, [])
        x: Tensor = args[0]
        flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])  # so that its output is no view: users write into it
        out: Tensor = _Linear.apply(flat, weight, bias, type(layer) is not nn.Linear, kept)  # type: ignore[no-untyped-call]
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


def _layers(modules: list[nn.Module]) -> list[nn.Module]:
    """Linear layers whose class is no other and whose forward nobody replaced, compiles, or hooks in the old way."""
    compiled = {
        id(member)
        for module in modules
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules
        for member in module.modules()
    }
    return [
        module
        for module in dict.fromkeys(modules)
        if (type(module) is nn.Linear or _is_conv1d(type(module)))
        and id(module) not in compiled
        and "forward" not in module.__dict__
        and not (module._backward_hooks and not module._is_full_backward_hook)
    ]


def _is_conv1d(kind: type) -> bool:
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _splits(x: Any, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the backward of a call may come in two parts: plain tensors in plain autograd, a weight that trains."""
    return (
        type(x) is Tensor
        and type(weight) is nn.Parameter
        and (bias is None or type(bias) is nn.Parameter)
        and weight.requires_grad
        and weight.numel() > 0
        and weight.is_floating_point()
        and x.dim() > 0
        and x.layout is torch.strided
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


class _Linear(torch.autograd.Function):
    """A linear layer that puts its parameters' gradients off. turned, kept: as in _Kept, and where it goes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, turned: bool, kept: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameters, ctx.turned, ctx.kept = (weight, bias), turned, kept
        return F.linear(x, weight.t() if turned else weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        into_x = grad @ (weight.t() if ctx.turned else weight) if ctx.needs_input_grad[0] else None
        asked = [_asked(node) for node, _ in ctx.next_functions[1:]]
        weight_too, bias_too = [p if a else None for p, a in zip(ctx.parameters, [*asked, False], strict=False)]
        call = _Kept(weight_too, bias_too, ctx.turned, x, grad)
        if None in asked or torch.is_grad_enabled():  # whoever wants these gradients now may want to go through them
            left, right = call.weight_factors()
            return into_x, left @ right, grad.sum(0) if ctx.needs_input_grad[2] else None, None, None
        if any(asked):
            ctx.kept.append(call.kept())
        return into_x, None, None, None, None


def _asked(node: Any) -> bool | None:
    """Whether the backward that runs gives a parameter its gradient; None where torch.autograd.grad returns it."""
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch says so of the leaves that torch.autograd.grad was asked for
        return None


def _add_product(parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
    grad = parameter.grad
    if grad is not None and grad.layout is torch.strided and grad.dtype is left.dtype:
        grad.addmm_(left, right)
    else:
        _add(parameter, left @ right)


def _add(parameter: nn.Parameter, grad: Tensor) -> None:
    parameter.grad = grad if parameter.grad is None else grad + parameter.grad
