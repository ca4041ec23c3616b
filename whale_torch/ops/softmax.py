"""The two halves of softmax cross-entropy, so that ranks with a share of the classes can combine in between.

A rank computes its statistics, ranks combine them (max, rescaled sum, sums), each computes its classes' gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whale_torch.errors import LayoutError
from whale_torch.ops.library import op
from whale_torch.ops.precision import FLOATS, statistics_dtype

__all__ = ["linear_softmax_grad", "linear_softmax_stats", "softmax_grad", "softmax_stats"]

_STATS = op("softmax_stats")
_GRAD = op("softmax_grad")
_GRAD_ = op("softmax_grad_")
_LINEAR_STATS = op("linear_softmax_stats")
_LINEAR_GRAD = op("linear_softmax_grad")


def _check_loss(dtype: torch.dtype, shape: tuple[int, int], target: Tensor, class_weight: Tensor | None) -> None:
    num_rows, num_classes = shape
    if dtype not in FLOATS:
        raise LayoutError(f"logits are {dtype}, not floating point")
    if target.shape != (num_rows,) or target.dtype != torch.int64:
        raise LayoutError(
            f"target is {target.dtype} of shape {tuple(target.shape)}; "
            f"{num_rows} rows need int64 of shape ({num_rows},)"
        )
    if class_weight is not None and class_weight.shape != (num_classes,):
        raise LayoutError(f"class_weight has shape {tuple(class_weight.shape)} for {num_classes} classes here")


def _check_coefs(dtype: torch.dtype, num_rows: int, **coefs: Tensor | None) -> None:
    for name, coef in coefs.items():
        if coef is not None and (coef.shape != (num_rows,) or coef.dtype != statistics_dtype(dtype)):
            raise LayoutError(
                f"{name} is {coef.dtype} of shape {tuple(coef.shape)}; "
                f"{num_rows} rows of {dtype} need {statistics_dtype(dtype)} of shape ({num_rows},)"
            )


def _check_2d(name: str, tensor: Tensor) -> tuple[int, int]:
    if tensor.dim() != 2:
        raise LayoutError(f"{name} has {tensor.dim()} dims, not 2", fix="flatten the leading dims into rows")
    return tensor.shape[0], tensor.shape[1]


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> tuple[int, int]:
    num_rows, num_features = _check_2d("x", x)
    num_classes, weight_features = _check_2d("weight", weight)
    if num_features != weight_features:
        raise LayoutError(f"x has {num_features} features, weight {weight_features}")
    if bias is not None and bias.shape != (num_classes,):
        raise LayoutError(f"bias has shape {tuple(bias.shape)}, weight {num_classes} rows")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise LayoutError(f"{name} is {tensor.dtype}, x is {x.dtype}", fix="cast to one dtype")
    if chunk < 1:
        raise LayoutError(f"chunk is {chunk}; it counts classes and is at least 1")
    return num_rows, num_classes


def softmax_stats(
    logits: Tensor, target: Tensor, first_class: int, class_weight: Tensor | None, smoothing: bool
) -> Tensor:
    """One pass over logits for cross-entropy: max, sum of exp(z - max), the target's logit, the weighted sum of logits.

    Shapes: logits [n, k] with rows of any stride, classes first_class .. first_class + k; target int64 [n], where one
    outside these classes has logit 0; class_weight [k], None is ones; returns [4, n], float32 (float64 for float64).
    Row 3 is 0 unless smoothing. A NaN enters the sum, never the max; k == 0 or all -inf gives max -inf, sum 0.
    Not differentiable: `softmax_grad` is its backward once the statistics are combined.
    Raises: LayoutError if shapes or dtypes disagree.
    """
    _check_loss(logits.dtype, _check_2d("logits", logits), target, class_weight)
    with torch.no_grad():
        stats: Tensor = _STATS(logits, target, first_class, class_weight, smoothing)
    return stats


def softmax_grad(
    logits: Tensor,
    lse: Tensor,
    target: Tensor,
    first_class: int,
    softmax_coef: Tensor,
    target_coef: Tensor,
    smooth_coef: Tensor | None,
    class_weight: Tensor | None,
    inplace: bool,
) -> Tensor:
    """g[i, j] = exp(z - lse_i) softmax_coef_i - smooth_coef_i w_j - [j == target_i - first_class] target_coef_i.

    Shapes: logits [n, k]; lse and the coefficients [n], float32 (float64 for float64 logits); class_weight [k], None is
    ones; returns [n, k] in logits' dtype, which is logits itself if inplace. A row whose coefficients are all 0
    is exactly 0.
    Raises: LayoutError if shapes or dtypes disagree.
    """
    shape = _check_2d("logits", logits)
    _check_loss(logits.dtype, shape, target, class_weight)
    _check_coefs(
        logits.dtype, shape[0], lse=lse, softmax_coef=softmax_coef, target_coef=target_coef, smooth_coef=smooth_coef
    )
    arguments = (logits, lse, target, first_class, softmax_coef, target_coef, smooth_coef, class_weight)
    with torch.no_grad():
        if not inplace:
            grad: Tensor = _GRAD(*arguments)
            return grad
        _GRAD_(*arguments)
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(logits)
    return logits


def linear_softmax_stats(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    first_class: int,
    class_weight: Tensor | None,
    smoothing: bool,
    chunk: int,
) -> Tensor:
    """`softmax_stats` of x @ weight.T + bias, `chunk` classes at a time: n x chunk logits are held, never n x k.

    Shapes: x [n, d], weight [k, d], bias [k]; the rest as `softmax_stats`.
    Raises: LayoutError if shapes or dtypes disagree.
    """
    shape = _check_linear(x, weight, bias, chunk)
    _check_loss(x.dtype, shape, target, class_weight)
    with torch.no_grad():
        stats: Tensor = _LINEAR_STATS(x, weight, bias, target, first_class, class_weight, smoothing, chunk)
    return stats


def linear_softmax_grad(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    target: Tensor,
    first_class: int,
    softmax_coef: Tensor,
    target_coef: Tensor,
    smooth_coef: Tensor | None,
    class_weight: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dx, dweight, dbias) of x @ weight.T + bias under `softmax_grad`, `chunk` classes at a time.

    Shapes: as `linear_softmax_stats` and `softmax_grad`; dbias is None without bias. dx is summed over chunks in
    float32; the logits are computed again.
    Raises: LayoutError if shapes or dtypes disagree.
    """
    shape = _check_linear(x, weight, bias, chunk)
    _check_loss(x.dtype, shape, target, class_weight)
    _check_coefs(
        x.dtype, shape[0], lse=lse, softmax_coef=softmax_coef, target_coef=target_coef, smooth_coef=smooth_coef
    )
    coefs = (softmax_coef, target_coef, smooth_coef, class_weight)
    with torch.no_grad():
        dx, dweight, dbias = _LINEAR_GRAD(x, weight, bias, lse, target, first_class, *coefs, chunk)
    return dx, dweight, None if bias is None else dbias
