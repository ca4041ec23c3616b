"""Copies that drifted apart: what must agree over ranks is compared before an optimizer's step.

On the first three steps of each optimizer and on every hundredth a few float64 numbers a parameter travel: sum and norm
of its value and of its gradient. They are compared with a tolerance: ranks of one job may have different processors.
What gradients of cut parameters were multiplied by is compared on every step (scale.py).
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from whale_torch.comm.collectives import gather_equal
from whale_torch.comm.registry import ParameterPlace, by_name, place_of
from whale_torch.comm.scale import check_scales, note_scales
from whale_torch.errors import CommError
from whale_torch.mesh import Group

__all__ = ["check_gradients", "watch_optimizers"]

FIRST_STEPS = 3
EVERY = 100
_TOLERANCE = 1e-6
_HALF_TOLERANCE = 1e-3

_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
Placed = tuple[Tensor, ParameterPlace]


@functools.cache
def watch_optimizers() -> None:
    """From now on every torch.optim optimizer checks, before a step, what it holds of a parallelized model."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    number = _steps.get(optimizer, 0)
    _steps[optimizer] = number + 1
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    note_scales(parameters)
    if _is_due(number):
        check_gradients(parameters)
        check_scales(parameters)


def _is_due(number: int) -> bool:
    return number < FIRST_STEPS or (number + 1) % EVERY == 0


def check_gradients(parameters: Iterable[Tensor]) -> None:
    """Compares over ranks the copies of parameters and gradients.

    A collective over the ranks with copies; tensors of no parallelized model are passed over.
    Raises CommError on all these ranks, naming the first parameter, by name, that differs.
    """
    copies: dict[Group, list[Placed]] = {}
    for parameter in by_name(parameters):
        place = place_of(parameter)
        if place is None:
            break
        if place.copies.size > 1 and place.held:
            copies.setdefault(place.copies, []).append((parameter, place))
    for group, members in copies.items():
        _check_number(group, members)
        _check_copies(group, members)


def _sum_and_norm(x: Tensor) -> Tensor:
    x = x.detach()
    if x.is_sparse:
        x = x.coalesce().values()
    if x.is_complex():
        x = torch.view_as_real(x)
    return torch.stack([x.sum(dtype=torch.float64), torch.linalg.vector_norm(x, dtype=torch.float64)])


def _check_number(group: Group, members: list[Placed]) -> None:
    numbers = (
        gather_equal(torch.tensor([len(members)]), group, name="number of parameters of an optimizer")
        .flatten()
        .tolist()
    )
    if len(set(numbers)) > 1:
        raise CommError(
            f"the optimizers of ranks {list(group.ranks)} hold {numbers} parameters of the model.",
            fix="build the same optimizer on every rank",
            ranks=group.ranks,
        )


def _check_copies(group: Group, members: list[Placed]) -> None:
    nothing = torch.full(
        (2,), -1.0, dtype=torch.float64, device=members[0][0].device
    )  # no gradient: no norm is negative
    rows = [torch.cat([_sum_and_norm(p), nothing if p.grad is None else _sum_and_norm(p.grad)]) for p, _ in members]
    table = gather_equal(torch.stack(rows).cpu(), group, name="checksum of gradients").tolist()
    for number, (parameter, place) in enumerate(members):
        tolerance = _tolerance(parameter)
        for rank, found in zip(group.ranks, (ranks_rows[number] for ranks_rows in table), strict=True):
            first = table[0][number]
            if not _close(first[2:], found[2:], tolerance):
                _refuse_gradient(place.name, group.ranks[0], first[3], rank, found[3])
            if not _close(first[:2], found[:2], tolerance):
                raise CommError(
                    f"the copies of '{place.name}' differ before an optimizer's step: norm {first[1]:.6g} "
                    f"(sum {first[0]:.6g}) on rank {group.ranks[0]}, {found[1]:.6g} (sum {found[0]:.6g}) on rank "
                    f"{rank}.",
                    fix="likely an optimizer.step() on gradients that were not averaged (inside wh.no_sync), "
                    "or values changed on some ranks only",
                    ranks=(group.ranks[0], rank),
                )  # fmt: skip


def _close(a: list[float], b: list[float], tolerance: float) -> bool:
    """Whether (sum, norm) pairs agree to a share of the norm; the same infinities and NaNs agree."""
    same = [x == y or (math.isnan(x) and math.isnan(y)) for x, y in zip(a, b, strict=True)]
    return all(same) or (
        min(a[1], b[1]) >= 0 and max(abs(a[0] - b[0]), abs(a[1] - b[1])) <= tolerance * max(a[1], b[1])
    )


def _refuse_gradient(name: str, rank: int, norm: float, other: int, other_norm: float) -> None:
    told = [f"norm {x:.6g}" if x >= 0 else "None" if x == -1.0 else f"{x}" for x in (norm, other_norm)]
    raise CommError(
        f"the gradient of '{name}' differs between copies before an optimizer's step: "
        f"{told[0]} on rank {rank}, {told[1]} on rank {other}.",
        fix="likely torch.nn.utils.clip_grad_norm_ or torch.amp.GradScaler on a model with cut parameters (use "
        "wh.clip_grad_norm_ and wh.GradScaler), a step inside wh.no_sync, or gradients changed on some ranks only",
        ranks=(rank, other),
    )


def _tolerance(x: Tensor) -> float:
    return _TOLERANCE if x.dtype.itemsize >= 4 else _HALF_TOLERANCE
