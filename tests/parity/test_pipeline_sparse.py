"""Sparse gradients of embeddings in a pipeline: averaged over replicas and ties as everywhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.world import world
from whale_torch.state import full_tensor

WORDS, WIDTH = 12, 4


class Words(nn.Module):
    """Two stages; the embedding is alone, tied to the head of the other stage, or used by both."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.table, self.hidden = nn.Embedding(WORDS, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)
        self.head: Any = nn.Linear(WIDTH, WORDS)
        self.again = nn.Embedding(WORDS, WIDTH, sparse=True) if kind == "twice" else None
        if kind == "tied":
            self.head.weight = self.table.weight
        if self.again is not None:
            self.again.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.hidden(self.table(ids).tanh())
        h = h if self.again is None else h + self.again(ids)
        return F.cross_entropy(self.head(h), labels)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole and dense, by name; zero where there is none."""
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return {name: full_tensor(p, grads[name].to_dense()) for name, p in model.named_parameters()}


def _trained(rank: int, n: int, kind: str, options: dict[str, Any]) -> tuple[list[float], bool | None]:
    """Errors beside one process, and whether the embedding's gradient is sparse where it is held."""
    torch.manual_seed(0)
    alone = Words(kind)
    model: Any = copy.deepcopy(alone)
    wh.annotate(model, {"table": wh.stage(), "hidden|again|head": wh.stage()}, inside=wh.pipeline(**options))  # type: ignore[call-overload]
    wh.parallelize(model)
    index, count = wh.data_rank(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, alone)]
    errors, sparse = [], None
    torch.manual_seed(1)
    for _ in range(2):
        ids, labels = torch.randint(WORDS, (10,)), torch.randint(WORDS, (10,))
        for m, rows in ((model, slice(index, None, count)), (alone, slice(None))):
            m.zero_grad()
            for factor in (0.5, 2.0):
                (m(ids[rows], labels[rows]) * factor).backward()
        errors.append(relative_error(_gradients(model), _gradients(alone)))
        grad = model.table.weight.grad
        sparse = None if grad is None else grad.is_sparse
        for optimizer in optimizers:
            optimizer.step()
    return [*errors, relative_error(wh.full_state_dict(model), alone.state_dict())], sparse


@pytest.mark.parametrize("kind", ["alone", "tied", "twice"])
@pytest.mark.parametrize(("n", "options"), [(4, {}), (2, {}), (4, {"num_ranks": 1}), (1, {})])
@pytest.mark.matrix(keep=1)
def test_sparse_embeddings(n: int, kind: str, options: dict[str, Any]) -> None:
    for errors, sparse in world(n, _trained, kind, options):
        assert max(errors) < 1e-5
        assert sparse in ((False, True) if kind == "tied" else (None, True))


class Lookup(nn.Module):
    """A sparse gradient of no embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(WORDS, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.rows, sparse=True)


def _lookup(rank: int, n: int) -> None:
    model = nn.Sequential(Lookup(), nn.Linear(WIDTH, 2))
    wh.parallelize(wh.annotate(model, {"0": wh.stage(), "1": wh.stage()}, inside=wh.pipeline(num_ranks=1)))
    model(torch.tensor([1, 2])).sum().backward()


def test_a_sparse_gradient_of_no_embedding_raises_with_its_name() -> None:
    with pytest.raises(wh.LossError, match=r"gradient of '0\.rows' is torch.sparse_coo, but it belongs to no nn.Emb"):
        world(2, _lookup)
