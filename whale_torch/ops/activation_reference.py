"""What the ops of activations compute, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from whale_torch.errors import LayoutError
from whale_torch.ops.precision import FLOATS, statistics_dtype

__all__ = ["FORWARD", "FUNCTIONS", "check_activation", "moe_activate", "moe_activate_backward"]

_aten = torch.ops.aten


@dataclass(frozen=True)
class _Function:
    """backward: from the gradient and what went in. value: what kernels give, where that is not torch's forward."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    value: Callable[[Tensor], Tensor] | None = None

    def of(self, h: Tensor) -> Tensor:
        return self.forward(h) if self.value is None else self.value(h)


def _gelu(h: Tensor) -> Tensor:
    """With a tail that is relatively exact: torch's is 0 from -6 on."""
    below: Tensor = 0.5 * torch.special.erfc(h.double() * -math.sqrt(0.5))
    return h * below.to(h.dtype)


_FUNCTIONS = {
    "gelu": _Function(F.gelu, lambda grad, h: _aten.gelu_backward(grad, h), _gelu),
    "gelu_tanh": _Function(
        lambda h: F.gelu(h, approximate="tanh"), lambda grad, h: _aten.gelu_backward(grad, h, approximate="tanh")
    ),
    "relu": _Function(F.relu, lambda grad, h: _aten.threshold_backward(grad, h, 0)),
    "silu": _Function(F.silu, lambda grad, h: _aten.silu_backward(grad, h)),
}
FUNCTIONS = tuple(_FUNCTIONS)
FORWARD = tuple(one.forward for one in _FUNCTIONS.values())


def check_activation(rows: dict[str, Tensor | None], sums: dict[str, Tensor | None] | None = None) -> None:
    """Raises LayoutError where rows are not of one shape and dtype, or sums not as wide as these; by their names."""
    first = next(iter(rows.values()))
    assert first is not None
    wide = statistics_dtype(first.dtype)
    for name, x in rows.items():
        if x is None:
            continue
        if x.dim() != 2 or x.dtype not in FLOATS or (x.shape, x.dtype) != (first.shape, first.dtype):
            raise LayoutError(f"{name} is {x.dtype} {tuple(x.shape)}, others are {first.dtype} {tuple(first.shape)}")
        if not x.is_contiguous():
            raise LayoutError(f"{name} is not contiguous")
    for name, x in (sums or {}).items():
        if x is not None and (x.shape != first.shape[1:] or x.dtype != wide):
            raise LayoutError(f"{name} is {x.dtype} {tuple(x.shape)}; sums are {wide} ({first.shape[1]},)")
    if "du" in rows and (rows["u"] is None) != (rows["du"] is None):
        raise LayoutError("u and its gradient come together: u= and du=, or neither")


def moe_activate(h: Tensor, u: Tensor | None, function: int, out: Tensor) -> None:
    """out = function(h), times u where it is given."""
    check_activation({"h": h, "u": u, "out": out})
    wide = statistics_dtype(h.dtype)
    value = _FUNCTIONS[FUNCTIONS[function]].of(h.to(wide))
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
    check_activation({"grad": grad, "h": h, "u": u, "du": du}, {"dbias": dbias, "du_bias": du_bias})
    wide = statistics_dtype(h.dtype)
    one, above, at = _FUNCTIONS[FUNCTIONS[function]], grad.to(wide), h.to(wide)
    if u is not None and du is not None:
        gate = above * one.of(at)
        du.copy_(gate)
        if du_bias is not None:
            du_bias += gate.sum(0)
        above = above * u.to(wide)
    below = one.backward(above, at)
    grad.copy_(below)
    if dbias is not None:
        dbias += below.sum(0)
