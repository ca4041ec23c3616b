"""How far n ranks are from one process: what all parity tests compare, by one measure (docs/design.md, 6)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from whale_torch.state import full_tensor

__all__ = ["gradients", "relative_error", "relative_errors"]

_FLOOR = 0.01


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Whole gradients by name, copies; None where there is none. A collective where something is cut."""
    return {name: None if p.grad is None else full_tensor(p, p.grad) for name, p in model.named_parameters()}


def relative_errors(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> dict[str, float]:
    """By name: the largest error over max(that tensor's largest value, 1 % of the largest of all); inf for a NaN.

    Raises AssertionError where names or shapes differ, or one is None and the other is not.
    """
    assert found.keys() == expected.keys(), f"only on one side: {sorted(found.keys() ^ expected.keys())}"
    ours, theirs = _dense(found), _dense(expected)
    largest = max((float(t.abs().max()) for t in theirs.values() if t is not None and t.numel()), default=0.0)
    errors = {}
    for name, t in theirs.items():
        f = ours[name]
        assert (f is None) == (t is None), f"'{name}' is {'' if f is None else 'not '}None, unlike in one process"
        if f is None or t is None:
            continue
        assert f.shape == t.shape, f"'{name}' is {list(f.shape)}, and {list(t.shape)} in one process"
        if t.numel():
            scale = max(float(t.abs().max()), _FLOOR * largest, 1e-30)
            error = float((f - t).abs().max()) / scale
            errors[name] = error if error == error else float("inf")
    return errors


def relative_error(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> float:
    """The largest of relative_errors."""
    return max(relative_errors(found, expected).values(), default=0.0)


def _dense(values: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: v.to_dense() if v is not None and v.layout != torch.strided else v for name, v in values.items()}
