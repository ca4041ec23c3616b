"""The default kernels, in plain torch: the specification of the compiled ones, and what runs where none is loaded."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from whale_torch.ops.precision import arithmetic_dtype, statistics_dtype

__all__ = [
    "await_flags",
    "bucket_amax",
    "bucket_pack",
    "bucket_unpack",
    "copy_blocks",
    "post_flag",
    "softmax_grad",
    "softmax_grad_",
    "softmax_stats",
]


def _cast(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return x if scale == 1.0 else x.to(arithmetic_dtype(x.dtype, dtype)) * scale


def bucket_pack(tensors: list[Tensor], offsets: list[int], flat: Tensor, scale: float) -> None:
    """flat[offsets[i] : offsets[i] + numel] = cast(tensors[i] * scale), in logical (row-major) order."""
    for tensor, offset in zip(tensors, offsets, strict=True):
        flat.narrow(0, offset, tensor.numel()).view(tensor.shape).copy_(_cast(tensor, scale, flat.dtype))


def bucket_unpack(flat: Tensor, offsets: list[int], tensors: list[Tensor], scale: float) -> Tensor:
    """The inverse of `bucket_pack`; returns 1.0 if any value read was not finite, else 0.0."""
    non_finite = flat.new_zeros((), dtype=torch.bool)
    for tensor, offset in zip(tensors, offsets, strict=True):
        part = flat.narrow(0, offset, tensor.numel())
        non_finite = non_finite | ~part.isfinite().all()
        tensor.copy_(_cast(part.view(tensor.shape), scale, tensor.dtype))
    return non_finite.to(torch.float32)


def bucket_amax(tensors: list[Tensor]) -> Tensor:
    """max |x| over all tensors; NaN counts as larger than inf."""
    largest = tensors[0].new_zeros((), dtype=torch.float32)
    for tensor in tensors:
        if tensor.numel():
            largest = torch.maximum(largest, tensor.detach().abs().amax().to(torch.float32))
    return largest


def copy_blocks(source: Tensor, blocks: Tensor, target: Tensor) -> None:
    """target[to : to + size] = source[start : start + size] for each (start, to, size) of blocks, in bytes."""
    for start, to, size in blocks.tolist():
        target.narrow(0, to, size).copy_(source.narrow(0, start, size))


def post_flag(flags: Tensor, place: int, number: int) -> None:
    """flags[place, 0] = number, after all that this process wrote before."""
    flags[place, 0] = (number + (1 << 31)) % (1 << 32) - (1 << 31)


def await_flags(flags: Tensor, places: list[int], number: int, timeout_ms: int) -> Tensor:
    """Waits until flags[place, 0] - number >= 0 at all places; the first one where it is not in time, -1 if none.

    The difference is one of int32, so that numbers may go past the largest.
    """
    deadline = time.monotonic() + timeout_ms / 1000
    for place in places:
        while (int(flags[place, 0]) - number + (1 << 31)) % (1 << 32) < 1 << 31:
            if time.monotonic() > deadline:
                return torch.tensor(place)
            time.sleep(0.0002)
    return torch.tensor(-1)


def _local_target(target: Tensor, first_class: int, num_classes: int) -> tuple[Tensor, Tensor]:
    local = target - first_class
    inside = (local >= 0) & (local < num_classes)
    return torch.where(inside, local, 0), inside


def softmax_stats(
    logits: Tensor, target: Tensor, first_class: int, class_weight: Tensor | None, smoothing: bool
) -> Tensor:
    """[4, n]: max, sum of exp(z - max), the target's logit, the weighted sum of logits.

    A NaN never enters the max, always the sum. A row with nothing above -inf has max -inf and sum 0: shards combine.
    """
    num_rows, num_classes = logits.shape
    stats = logits.new_zeros((4, num_rows), dtype=statistics_dtype(logits.dtype))
    stats[0] = float("-inf")
    if num_classes == 0:
        return stats
    z = logits.to(stats.dtype)
    largest = torch.where(z.isnan(), float("-inf"), z).amax(1)
    stats[0] = largest
    stats[1] = (z - torch.where(largest == float("-inf"), 0.0, largest)[:, None]).exp().sum(1)
    local, inside = _local_target(target, first_class, num_classes)
    stats[2] = torch.where(inside, z.gather(1, local[:, None])[:, 0], 0.0)
    if smoothing:
        stats[3] = (z if class_weight is None else z * class_weight.to(z.dtype)).sum(1)
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
) -> Tensor:
    """g[i, j] = exp(z - lse_i) softmax_coef_i - smooth_coef_i w_j - [j == target_i - first_class] target_coef_i."""
    num_classes = logits.shape[1]
    if num_classes == 0:
        return logits.new_empty(logits.shape)
    z = logits.to(statistics_dtype(logits.dtype))
    grad = (z - lse[:, None]).exp() * softmax_coef[:, None]
    used = (softmax_coef != 0) | (target_coef != 0)
    if smooth_coef is not None:
        grad -= smooth_coef[:, None] * (1.0 if class_weight is None else class_weight.to(z.dtype))
        used |= smooth_coef != 0
    local, inside = _local_target(target, first_class, num_classes)
    grad.scatter_add_(1, local[:, None], torch.where(inside, -target_coef, 0.0)[:, None])
    grad = torch.where(used[:, None], grad, 0.0)
    return grad.to(logits.dtype).contiguous()


def softmax_grad_(
    logits: Tensor,
    lse: Tensor,
    target: Tensor,
    first_class: int,
    softmax_coef: Tensor,
    target_coef: Tensor,
    smooth_coef: Tensor | None,
    class_weight: Tensor | None,
) -> None:
    """`softmax_grad`, written into logits."""
    arguments = (lse, target, first_class, softmax_coef, target_coef, smooth_coef, class_weight)
    logits.copy_(softmax_grad(logits, *arguments))
