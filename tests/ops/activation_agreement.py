"""Compares the activation kernels that a device runs with the specification, on CPU and in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from whale_torch import ops
from whale_torch.ops import activation_reference as reference
from whale_torch.ops.precision import statistics_dtype

TOLERANCES = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-13},
    torch.float32: {"rtol": 4e-6, "atol": 4e-6},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
}


def check_activation(device: str, n: int, d: int, dtype: torch.dtype, function: str, *, gated: bool = False) -> None:
    generator = torch.Generator().manual_seed(n * 31 + d)
    wide, number = statistics_dtype(dtype), reference.FUNCTIONS.index(function)

    def draw() -> Tensor:
        return (2 * torch.randn(n, d, generator=generator, dtype=torch.float64)).to(dtype)

    h, u, above = draw(), draw() if gated else None, draw()
    h1, grad1, u1 = h.to(device), above.to(device, copy=True), None if u is None else u.to(device)
    out = torch.empty_like(h1)
    ops.moe_activate(h1, function, out, u=u1)
    exact, exact_u = h.double(), None if u is None else u.double()
    expected = torch.empty_like(exact)
    reference.moe_activate(exact, exact_u, number, expected)
    close = TOLERANCES[dtype]
    torch.testing.assert_close(out.cpu(), expected.to(dtype), **close)

    du = None if u1 is None else torch.empty_like(u1)
    sums = [torch.ones(d, dtype=wide, device=device) for _ in range(1 + gated)]
    ops.moe_activate_backward(grad1, h1, function, u=u1, du=du, dbias=sums[0], du_bias=sums[1] if gated else None)
    grad2, du2 = above.to(torch.float64, copy=True), None if u is None else torch.empty_like(exact)
    sums2 = [torch.ones(d, dtype=torch.float64) for _ in sums]
    reference.moe_activate_backward(grad2, exact, exact_u, number, du2, sums2[0], sums2[1] if gated else None)
    torch.testing.assert_close(grad1.cpu(), grad2.to(dtype), **close)
    if du is not None and du2 is not None:
        torch.testing.assert_close(du.cpu(), du2.to(dtype), **close)
    for one, two in zip(sums, sums2, strict=True):
        torch.testing.assert_close(one.cpu(), two.to(wide), rtol=1e-5, atol=1e-5 * max(1, n) ** 0.5)
