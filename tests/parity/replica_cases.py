"""Models, batches and losses of the replica suites, and the one way they are compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whale_torch as wh
from tests.parity.metric import gradients

Batch = tuple[Tensor, Tensor]
CLASSES, WIDTH = 5, 6


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 7, bias=False), nn.GELU(), nn.Linear(7, CLASSES))


class Unused(nn.Module):
    """A layer that no rank uses, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare, self.frozen = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, CLASSES)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(x)))))


class Tied(nn.Module):
    """One weight in two modules, and a module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.twice.weight
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.twice(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.second(self.twice(h))))


class Branches(nn.Module):
    """Rows whose first feature is positive take one path, the others another: ranks differ in what they use."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        take = x[:, 0] > 0
        out = x.new_zeros(x.shape[0], CLASSES)
        if bool(take.any()):
            out = out.index_add(0, take.nonzero()[:, 0], self.left(x[take]))
        if not bool(take.all()):
            out = out.index_add(0, (~take).nonzero()[:, 0], self.right(x[~take]))
        return out


class Convolution(nn.Module):
    """Channels-last weights and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.last = nn.Linear(4 * WIDTH, CLASSES)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        image = torch.stack([x, x * x], 1).unsqueeze(-1).to(memory_format=torch.channels_last)
        return self.last(torch.tanh(self.conv(image)).flatten(1))


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH), nn.Tanh())
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.body, x, use_reentrant=False)
        return self.last(checkpoint(self.body, h, use_reentrant=False))


class Inside(nn.Module):
    """The loss inside the model, some labels ignored: returns (loss, logits)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.net(x)
        return logits if labels is None else (F.cross_entropy(logits, labels), logits)


class Empty(nn.Module):
    """Parameters of no elements, of no dimensions, and many small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.scale = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(1.5))
        self.small = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(60)])
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for p in self.small:
            x = torch.tanh(x * p)
        return self.last(x) * self.scale + self.nothing.sum()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, 8, dtype=torch.complex64) * 0.3)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x.to(torch.complex64) @ self.turn).abs())


def outside(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def inside(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0], labels=batch[1])[0]


def summed(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor] = outside
    ignored: bool = False


CASES: dict[str, Case] = {
    "mlp": Case(mlp),
    "unused": Case(Unused),
    "tied": Case(Tied),
    "branches": Case(Branches),
    "convolution": Case(Convolution),
    "recomputed": Case(Recomputed),
    "inside": Case(Inside, inside, ignored=True),
    "empty": Case(Empty),
    "complex": Case(Complex),
}
"""Models that run under the default scope, without any annotation."""


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return CASES[name].build()


def batch_of(num_rows: int, *, ignored: bool = False, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, WIDTH, generator=generator)
    y = torch.randint(0, CLASSES, (num_rows,), generator=generator)
    x[:, 0] = torch.linspace(1, -1, num_rows)  # the first ranks take one branch, the last the other
    if ignored:
        y[torch.rand(num_rows, generator=generator) < 0.3] = -100
    return x, y


def rows_of(n: int, kind: str) -> list[int]:
    """Rows of each of n feeds: even, uneven, or with an empty one."""
    if kind == "even":
        return [4] * n
    rows = [(3 * rank) % 5 + 1 for rank in range(n)]
    if kind == "empty" and n > 1:
        rows[n // 2] = 0
    return rows


def share(batch: Batch, rows: list[int], feed: int) -> Batch:
    return batch[0].split(rows)[feed], batch[1].split(rows)[feed]


@dataclass
class Result:
    loss: float
    gradients: dict[str, Tensor | None]
    stepped: dict[str, Tensor]
    evaluated: Tensor


def train(model: nn.Module, case: Case, batch: Batch, *, steps: int = 1, lr: float = 0.1) -> Result:
    """Steps of SGD with momentum: loss and gradients of the first, weights and eval output of the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    first: tuple[float, dict[str, Tensor | None]] | None = None
    for _ in range(steps):
        optimizer.zero_grad()
        loss = case.loss(model, batch)
        loss.backward()
        first = first or (float(loss.detach()), gradients(model))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        evaluated = model(batch[0])
    assert first is not None
    return Result(*first, {k: v.detach().clone() for k, v in model.state_dict().items()}, evaluated)


def same_on_all_ranks(results: list[dict[str, Tensor | None]]) -> bool:
    """Bit by bit."""
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for other in results[1:]
        for a, b in ((results[0][name], other[name]) for name in results[0])
    )


def replica_rank(rank: int, n: int, name: str, rows: list[int], steps: int, options: dict[str, Any]) -> Result:
    """The rank function of most tests: the case under wh.replica(**options), or under the default scope."""
    case = CASES[name]
    model = build(name, seed=rank)  # another seed on every rank: parallelize makes them equal
    if rank:
        torch.manual_seed(rank)
    model = wh.parallelize(model, default=wh.replica(**options) if options else None)
    return train(model, case, share(batch_of(sum(rows), ignored=case.ignored), rows, rank), steps=steps)


def one_process(name: str, rows: list[int], steps: int) -> Result:
    case = CASES[name]
    return train(build(name), case, batch_of(sum(rows), ignored=case.ignored), steps=steps)
