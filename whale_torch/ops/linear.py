"""Linear and softmax in one, a chunk of the vocabulary at a time: n x k logits are never held."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from whale_torch.ops.precision import statistics_dtype

__all__ = ["linear_softmax_grad", "linear_softmax_stats"]


def _part(vector: Tensor | None, begin: int, end: int) -> Tensor | None:
    return None if vector is None else vector[begin:end]


def _logit_chunks(x: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yields (begin, end, logits of these classes); all chunks share one buffer."""
    num_rows, num_classes = x.shape[0], weight.shape[0]
    buffer = x.new_empty(num_rows * min(chunk, num_classes))
    for begin in range(0, num_classes, chunk):
        end = min(begin + chunk, num_classes)
        logits = buffer[: num_rows * (end - begin)].view(num_rows, end - begin)
        if bias is None:
            torch.mm(x, weight[begin:end].t(), out=logits)
        else:
            torch.addmm(bias[begin:end], x, weight[begin:end].t(), out=logits)
        yield begin, end, logits


def _combine(one: Tensor, two: Tensor) -> Tensor:
    """The statistics of two sets of classes together; sum of target logits holds as the target is in one of them."""
    largest = torch.maximum(one[0], two[0])
    shift = torch.where(largest == float("-inf"), 0.0, largest)
    total = one[1] * (one[0] - shift).exp() + two[1] * (two[0] - shift).exp()
    return torch.stack((largest, total, one[2] + two[2], one[3] + two[3]))


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
    """`softmax_stats` of x @ weight.T + bias."""
    stats = x.new_zeros((4, x.shape[0]), dtype=statistics_dtype(x.dtype))
    stats[0] = float("-inf")
    for begin, end, logits in _logit_chunks(x, weight, bias, chunk):
        part = torch.ops.whale.softmax_stats(
            logits, target, first_class + begin, _part(class_weight, begin, end), smoothing
        )
        stats = _combine(stats, part)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias) of x @ weight.T + bias under `softmax_grad`; dbias is empty without bias."""
    wide = statistics_dtype(x.dtype)
    dx = torch.zeros(x.shape, dtype=wide, device=x.device)
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    dbias = weight.new_empty((0,)) if bias is None else bias.new_empty(bias.shape)
    narrow = None if x.dtype == wide else x.new_empty(x.shape)
    for begin, end, logits in _logit_chunks(x, weight, bias, chunk):
        torch.ops.whale.softmax_grad_(
            logits, lse, target, first_class + begin, softmax_coef, target_coef, smooth_coef,
            _part(class_weight, begin, end),
        )  # fmt: skip
        if narrow is None:
            dx.addmm_(logits, weight[begin:end])
        else:
            dx += torch.mm(logits, weight[begin:end], out=narrow)
        torch.mm(logits.t(), x, out=dweight[begin:end])
        if bias is not None:
            torch.sum(logits, 0, out=dbias[begin:end])  # torch sums narrow floats in float32
    return dx.to(x.dtype), dweight, dbias
