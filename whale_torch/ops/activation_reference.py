"""What the ops of activations compute, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from whale_torch.ops.precision import statistics_dtype

__all__ = ["FORWARD", "FUNCTIONS", "moe_activate", "moe_activate_backward"]

_aten = torch.ops.aten


@dataclass(frozen=True)
class _Function:
    """backward: from the gradient and what went in."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


_FUNCTIONS = {
    "gelu": _Function(F.gelu, lambda grad, h: _aten.gelu_backward(grad, h)),
    "gelu_tanh": _Function(
        lambda h: F.gelu(h, approximate="tanh"), lambda grad, h: _aten.gelu_backward(grad, h, approximate="tanh")
    ),
    "relu": _Function(F.relu, lambda grad, h: _aten.threshold_backward(grad, h, 0)),
    "silu": _Function(F.silu, lambda grad, h: _aten.silu_backward(grad, h)),
}
FUNCTIONS = tuple(_FUNCTIONS)
FORWARD = tuple(one.forward for one in _FUNCTIONS.values())


def moe_activate(h: Tensor, u: Tensor | None, function: int, out: Tensor) -> None:
    """out = function(h), times u where it is given."""
    wide = statistics_dtype(h.dtype)
    value = FORWARD[function](h.to(wide))
    out.copy_(value if u is None else value * u.to(wide))


def moe_activate_backward(
    grad: Tensor,
    h: Tensor,
    u: Tensor | None,
    function: int,
    du: Tensor | None,
    dbias: Tensor | None,
    du_bias: Tensor | None,
) -> None:
    """grad, of out, becomes that of h; writes that of u to du; adds their sums over rows to dbias and du_bias."""
    wide = statistics_dtype(h.dtype)
    of, above, at = _FUNCTIONS[FUNCTIONS[function]], grad.to(wide), h.to(wide)
    if u is not None and du is not None:
        gate = above * of.forward(at)
        du.copy_(gate)
        if du_bias is not None:
            du_bias += gate.sum(0)
        above = above * u.to(wide)
    below = of.backward(above, at)
    grad.copy_(below)
    if dbias is not None:
        dbias += below.sum(0)
