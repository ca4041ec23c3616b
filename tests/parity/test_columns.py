"""Operations on a split's output: values and gradients are those of one process, inside the model and outside."""

from __future__ import annotations

import einops
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.parity.split_case import BAR, Use, build, compare
from tests.world import world
from whale_torch.comm.columns import Columns

LAYOUTS = [
    (1, "own", 7, [4]),
    (2, "own", 7, [3, 2]),
    (3, "own", 7, [2, 0, 3]),
    (4, "own", 10, [1, 4, 2, 3]),
    (4, "own", 3, [2]),
    (4, "groups", 5, [3, 1, 2, 2]),
    (4, "shared", 5, [3, 2]),
    (4, "mixed", 10, [3, 1]),
    (8, "mixed", 10, [2, 1, 0, 3]),
]


def _weights(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Equal on all ranks, different for every column, whatever the number of rows."""
    generator = torch.Generator().manual_seed(3)
    last = torch.rand(shape[-1], generator=generator).to(dtype) + 0.5
    return last.expand(shape)


def _total(value: Tensor) -> Tensor:
    """The mean over rows of a weighed sum: a loss with a gradient of its own for every element."""
    flat = value.flatten(1) if value.dim() > 1 else value.unsqueeze(1)
    return (flat * _weights(tuple(flat.shape), flat.dtype)).sum() / max(flat.shape[0], 1)


KEEPS: dict[str, Use] = {  # what leaves Columns as they are
    "relu": lambda z, y: _total(F.relu(z)),
    "gelu": lambda z, y: _total(F.gelu(z, approximate="tanh")),
    "numbers": lambda z, y: _total((2 * z - 1) / 3 + z**2 + (1 - z) + 1 / (z * z + 1)),
    "number in a tensor": lambda z, y: _total(z * torch.tensor(0.3)),
    "clamp": lambda z, y: _total(z.clamp(-0.5, 0.7)),
    "two": lambda z, y: _total(F.silu(z) * z + torch.maximum(z, -z)),
    "reshape": lambda z, y: _total(
        z.view(z.shape[0], 1, z.shape[1]).reshape(-1, z.shape[-1]).unsqueeze(1).flatten(0, 1)
    ),
    "copies": lambda z, y: _total(z.clone().double().float().contiguous().to(torch.float32)),
}

GATHERS: dict[str, Use] = {
    "softmax": lambda z, y: _total(F.softmax(z, -1) * F.log_softmax(z, dim=-1)),
    "reductions": lambda z, y: _total(
        z.mean(-1) + z.sum(1) * 0.1 + z.logsumexp(-1) + z.norm(dim=-1) + z.min(-1).values
    ),
    "matmul": lambda z, y: _total(z @ _weights((2, z.shape[1])).t()),
    "linear": lambda z, y: _total(F.linear(z, _weights((3, z.shape[1])))),
    "indexing": lambda z, y: _total(z[:, 1:]) + _total(z[..., 0]),
    "where": lambda z, y: _total(torch.where(z > 0, z, z * 0.1)) + _total(z.masked_fill(z < 0.2, 0.0)),
    "per row": lambda z, y: _total(z * torch.arange(1.0, z.shape[0] + 1).unsqueeze(1)),
    "own number": lambda z, y: (
        _total(z.rows() / max(z.shape[0], 1)) if isinstance(z, Columns) else _total(z / max(z.shape[0], 1))
    ),
    "cat": lambda z, y: _total(torch.cat([z, 2 * z], 1)) + _total(torch.stack([z, z.exp()], 1)),
    "transpose": lambda z, y: _total((z.t() @ z)[None].expand(z.shape[0], -1, -1) / max(z.shape[0], 1)),
    "einops": lambda z, y: _total(einops.reduce(einops.rearrange(z, "b (c k) -> b k c", k=1), "b k c -> b c", "mean")),
    "einsum": lambda z, y: _total(torch.einsum("bc,bd->bcd", z, z)) + _total(einops.einsum(z, z, "b c, b d -> b c d")),
    "repeat": lambda z, y: _total(einops.repeat(z, "b c -> b r c", r=2)),
    "into a plain tensor": lambda z, y: _total(torch.zeros(z.shape).add_(z) + torch.ones(z.shape).mul(z)),
    "hinge": lambda z, y: F.multi_margin_loss(z, y, reduction="none").sum() / max(z.shape[0], 1),
    "bce": lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, z.shape[1]).float()),
    "nll": lambda z, y: F.nll_loss(F.log_softmax(z, -1), y),
    "none": lambda z, y: F.cross_entropy(z, y, reduction="none").square().sum() / max(z.shape[0], 1),
    "rows twice": lambda z, y: _total(z.sin().exp()) + _total(z.softmax(-1)) + _total(z.max(-1).values),
    "topk": lambda z, y: _total(z.topk(2, -1).values) + _total(z.max(-1, keepdim=True)[0]),
}


WRITES: dict[str, Use] = {  # in-place forms that modules of a model have
    "relu": lambda z, y: _total(F.relu(z, inplace=True) + 0),
    "both see it": lambda z, y: (F.leaky_relu(z, 0.1, inplace=True), _total(z))[1],
    "dropout": lambda z, y: (F.dropout(z, 1.0, True, True), _total(z) + _total(z.exp()))[1],
}


def _uses(rank: int, n: int, layout: str, num_classes: int, counts: list[int], inside: bool) -> dict[str, float]:
    case = build(rank, n, layout, num_classes, counts)
    uses = KEEPS | GATHERS | {f"{name} in place": use for name, use in WRITES.items() if inside}
    return {name: compare(case, use, whole_batch=False, inside=inside) for name, use in uses.items()}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("n", "layout", "num_classes", "counts"), LAYOUTS)
def test_gradients(n: int, layout: str, num_classes: int, counts: list[int], inside: bool) -> None:
    for errors in world(n, _uses, layout, num_classes, counts, inside):
        assert {name: error for name, error in errors.items() if not error < BAR} == {}
