"""What each op takes and gives: its schema, and its result's shape for tracing (the fake)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

from whale_torch.ops.precision import statistics_dtype

__all__ = ["COMPILED_OPS", "HOST_OPS", "LIBRARY", "OPS"]

# Kept alive: a Library unregisters what it defined when it is collected.
LIBRARY = Library("whale", "DEF")

_LOSS_COEFS = "Tensor softmax_coef, Tensor target_coef, Tensor? smooth_coef, Tensor? class_weight"

_SCHEMAS = {
    "bucket_pack": "(Tensor[] tensors, int[] offsets, Tensor(a!) flat, float scale) -> ()",
    "bucket_unpack": "(Tensor flat, int[] offsets, Tensor(a!)[] tensors, float scale) -> Tensor",
    "bucket_amax": "(Tensor[] tensors) -> Tensor",
    "softmax_stats": "(Tensor logits, Tensor target, int first_class, Tensor? class_weight, bool smoothing) -> Tensor",
    "softmax_grad": f"(Tensor logits, Tensor lse, Tensor target, int first_class, {_LOSS_COEFS}) -> Tensor",
    "softmax_grad_": f"(Tensor(a!) logits, Tensor lse, Tensor target, int first_class, {_LOSS_COEFS}) -> ()",
    "moe_route": (
        "(Tensor logits, int k, bool sigmoid, Tensor? bias, int groups) "
        "-> (Tensor scores, Tensor experts, Tensor probs)"
    ),
    "moe_route_backward": (
        "(Tensor probs, Tensor experts, Tensor? dscores, Tensor? dprobs, bool sigmoid, int groups, ScalarType dtype) "
        "-> Tensor"
    ),
    "moe_positions": (
        "(Tensor experts, int num_experts, Tensor? capacity, int? slots, bool slot_major, Tensor? order) "
        "-> (Tensor positions, Tensor counts, Tensor kept)"
    ),
    "moe_permute": "(Tensor x, Tensor positions, Tensor(a!) out) -> ()",
    "moe_combine": "(Tensor y, Tensor positions, Tensor? weights, Tensor(a!) out) -> ()",
    "moe_combine_backward": "(Tensor dy, Tensor y, Tensor positions, Tensor weights, Tensor(a!) drows) -> Tensor",
    "moe_chunk_sort": "(Tensor x, Tensor lengths, bool inverse, Tensor(a!) out) -> ()",
    "moe_scatter": "(Tensor x, Tensor positions, Tensor(a!) out) -> ()",
    "moe_collect": "(Tensor y, Tensor positions, Tensor weights, Tensor(a!) out, Tensor(b!) rows) -> ()",
    "moe_scatter_backward": "(Tensor dy, Tensor rows, Tensor positions, Tensor weights, Tensor(a!) out) -> Tensor",
    "moe_activate": "(Tensor h, Tensor? u, int function, Tensor(a!) out) -> ()",
    "moe_activate_backward": (
        "(Tensor(a!) grad, Tensor h, Tensor? u, int function, Tensor(b!)? du, Tensor(c!)? dbias, "
        "Tensor(d!)? du_bias) -> ()"
    ),
    "copy_blocks": "(Tensor source, Tensor blocks, Tensor(a!) target) -> ()",
    "post_flag": "(Tensor(a!) flags, int place, int number) -> ()",
    "await_flags": "(Tensor flags, int[] places, int number, int timeout_ms) -> Tensor",
    "crc32c": "(Tensor data, int chunk_bytes, int start) -> Tensor",
    "linear_softmax_stats": (
        "(Tensor x, Tensor weight, Tensor? bias, Tensor target, int first_class, Tensor? class_weight, "
        "bool smoothing, int chunk) -> Tensor"
    ),
    "linear_softmax_grad": (
        f"(Tensor x, Tensor weight, Tensor? bias, Tensor lse, Tensor target, int first_class, {_LOSS_COEFS}, "
        "int chunk) -> (Tensor, Tensor, Tensor)"
    ),
}

OPS = tuple(_SCHEMAS)
# The linear ops loop over matmuls and the softmax ops in Python on every device: there is nothing to compile.
COMPILED_OPS = tuple(name for name in OPS if not name.startswith("linear_"))
# Of memory that processes of one host share, and of bytes on their way to a file: compiled for the CPU alone.
HOST_OPS = ("moe_scatter", "moe_collect", "moe_scatter_backward", "copy_blocks", "post_flag", "await_flags", "crc32c")

for _name, _schema in _SCHEMAS.items():
    LIBRARY.define(_name + _schema)


def _fake_bucket_pack(tensors: list[Tensor], offsets: list[int], flat: Tensor, scale: float) -> None:
    return None


def _fake_bucket_unpack(flat: Tensor, offsets: list[int], tensors: list[Tensor], scale: float) -> Tensor:
    return flat.new_empty((), dtype=statistics_dtype(None))


def _fake_bucket_amax(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((), dtype=statistics_dtype(None))


def _fake_softmax_stats(
    logits: Tensor, target: Tensor, first_class: int, class_weight: Tensor | None, smoothing: bool
) -> Tensor:
    return logits.new_empty((4, logits.shape[0]), dtype=statistics_dtype(logits.dtype))


def _fake_softmax_grad(logits: Tensor, *arguments: object) -> Tensor:
    return logits.new_empty(logits.shape)


def _fake_softmax_grad_(logits: Tensor, *arguments: object) -> None:
    return None


def _fake_moe_route(
    logits: Tensor, k: int, sigmoid: bool, bias: Tensor | None, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape, dtype = (logits.shape[0], k), statistics_dtype(logits.dtype)
    return (
        logits.new_empty(shape, dtype=dtype),
        logits.new_empty(shape, dtype=torch.int32),
        logits.new_empty(logits.shape, dtype=dtype),
    )


def _fake_moe_route_backward(
    probs: Tensor,
    experts: Tensor,
    dscores: Tensor | None,
    dprobs: Tensor | None,
    sigmoid: bool,
    groups: int,
    dtype: torch.dtype,
) -> Tensor:
    return probs.new_empty(probs.shape, dtype=dtype)


def _fake_moe_positions(experts: Tensor, num_experts: int, *arguments: object) -> tuple[Tensor, Tensor, Tensor]:
    counts, kept = (experts.new_empty((num_experts,), dtype=torch.int64) for _ in range(2))
    return experts.new_empty(experts.shape), counts, kept


def _fake_moe_permute(x: Tensor, positions: Tensor, out: Tensor) -> None:
    return None


def _fake_moe_combine(y: Tensor, positions: Tensor, weights: Tensor | None, out: Tensor) -> None:
    return None


def _fake_moe_combine_backward(dy: Tensor, y: Tensor, positions: Tensor, weights: Tensor, drows: Tensor) -> Tensor:
    return weights.new_empty(positions.shape)


def _fake_moe_chunk_sort(x: Tensor, lengths: Tensor, inverse: bool, out: Tensor) -> None:
    return None


def _fake_moe_scatter(x: Tensor, positions: Tensor, out: Tensor) -> None:
    return None


def _fake_moe_collect(y: Tensor, positions: Tensor, weights: Tensor, out: Tensor, rows: Tensor) -> None:
    return None


def _fake_moe_scatter_backward(dy: Tensor, rows: Tensor, positions: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    return weights.new_empty(positions.shape)


def _fake_moe_activate(*arguments: object) -> None:
    return None


def _fake_copy_blocks(source: Tensor, blocks: Tensor, target: Tensor) -> None:
    return None


def _fake_post_flag(flags: Tensor, place: int, number: int) -> None:
    return None


def _fake_await_flags(flags: Tensor, places: list[int], number: int, timeout_ms: int) -> Tensor:
    return flags.new_empty((), dtype=torch.int64)


def _fake_crc32c(data: Tensor, chunk_bytes: int, start: int) -> Tensor:
    return data.new_empty((-(-data.numel() // chunk_bytes),), dtype=torch.int64)


def _fake_linear_softmax_stats(x: Tensor, *arguments: object) -> Tensor:
    return x.new_empty((4, x.shape[0]), dtype=statistics_dtype(x.dtype))


def _fake_linear_softmax_grad(
    x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: object
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = weight.new_empty((0,)) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias


_FAKES: dict[str, Callable[..., Any]] = {
    "bucket_pack": _fake_bucket_pack,
    "bucket_unpack": _fake_bucket_unpack,
    "bucket_amax": _fake_bucket_amax,
    "softmax_stats": _fake_softmax_stats,
    "softmax_grad": _fake_softmax_grad,
    "softmax_grad_": _fake_softmax_grad_,
    "moe_route": _fake_moe_route,
    "moe_route_backward": _fake_moe_route_backward,
    "moe_positions": _fake_moe_positions,
    "moe_permute": _fake_moe_permute,
    "moe_combine": _fake_moe_combine,
    "moe_combine_backward": _fake_moe_combine_backward,
    "moe_chunk_sort": _fake_moe_chunk_sort,
    "moe_scatter": _fake_moe_scatter,
    "moe_collect": _fake_moe_collect,
    "moe_scatter_backward": _fake_moe_scatter_backward,
    "moe_activate": _fake_moe_activate,
    "moe_activate_backward": _fake_moe_activate,
    "copy_blocks": _fake_copy_blocks,
    "post_flag": _fake_post_flag,
    "await_flags": _fake_await_flags,
    "crc32c": _fake_crc32c,
    "linear_softmax_stats": _fake_linear_softmax_stats,
    "linear_softmax_grad": _fake_linear_softmax_grad,
}

for _name, _fake in _FAKES.items():
    register_fake(f"whale::{_name}", _fake, lib=LIBRARY)
