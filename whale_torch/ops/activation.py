"""Activations of feed-forward experts, with what stands beside them: a gate, and the sums that biases need."""

from __future__ import annotations

from torch import Tensor

from whale_torch.errors import LayoutError
from whale_torch.ops.activation_reference import FORWARD, FUNCTIONS, check_activation
from whale_torch.ops.library import op, run, written

__all__ = ["FUNCTIONS", "activated", "moe_activate", "moe_activate_backward"]

_ACTIVATE = op("moe_activate")
_ACTIVATE_BACKWARD = op("moe_activate_backward")


def _number(function: str) -> int:
    if function not in FUNCTIONS:
        raise LayoutError(f"function is {function!r}; it is one of {', '.join(map(repr, FUNCTIONS))}")
    return FUNCTIONS.index(function)


def moe_activate(h: Tensor, function: str, out: Tensor, *, u: Tensor | None = None) -> None:
    """out = function(h), times u where it is given; in float32 at least.

    Shapes: h, u and out [rows, features], contiguous and of one dtype. function: "gelu", "gelu_tanh", "relu", "silu".
    Raises: LayoutError if they disagree. Not differentiable.
    """
    run(_ACTIVATE, lambda: check_activation({"h": h, "u": u, "out": out}), h, u, _number(function), out)
    written(out)


def moe_activate_backward(
    grad: Tensor,
    h: Tensor,
    function: str,
    *,
    u: Tensor | None = None,
    du: Tensor | None = None,
    dbias: Tensor | None = None,
    du_bias: Tensor | None = None,
) -> None:
    """Of moe_activate: grad, of its out, becomes that of h; writes that of u to du; adds sums over rows to the others.

    Shapes: grad, h, u and du [rows, features]; dbias and du_bias [features], float32 (float64 beside float64).
    Raises: LayoutError if they disagree. The same result for any number of threads. Not differentiable.
    """
    run(
        _ACTIVATE_BACKWARD,
        lambda: check_activation({"grad": grad, "h": h, "u": u, "du": du}, {"dbias": dbias, "du_bias": du_bias}),
        grad, h, u, _number(function), du, dbias, du_bias,
    )  # fmt: skip
    written([of for of in (grad, du, dbias, du_bias) if of is not None])


def activated(x: Tensor, function: str) -> Tensor:
    """function(x), in plain torch and differentiable."""
    return FORWARD[_number(function)](x)
