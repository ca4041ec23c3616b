"""The classifier on GPUs: one rank equals plain torch; several, where there are GPUs, equal one process over NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.world import world

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


class Classifier(nn.Module):
    def __init__(self, annotated: bool, reduce_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features, self.head = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24)), nn.Linear(24, 1003)
        if annotated:
            wh.replica(self.features, reduce_dtype=reduce_dtype)
            wh.split(self.head)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 16, generator=generator), torch.randint(0, 1003, (24,), generator=generator)


def _three_steps(model: nn.Module, x: Tensor, y: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def _train(rank: int, ranks: int, reduce_dtype: torch.dtype) -> list[Tensor]:
    model = wh.parallelize(Classifier(True, reduce_dtype))
    assert next(model.parameters()).is_cuda
    _three_steps(model, *(t.chunk(ranks)[rank].cuda() for t in _batch()))
    return [value.cpu() for value in wh.full_state_dict(model).values()]


def _reference() -> list[Tensor]:
    model = Classifier(False)
    _three_steps(model, *_batch())
    return [value.detach() for value in model.state_dict().values()]


def _error(outcome: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(outcome, _reference(), strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_equals_one_process(ranks: int, dtype: torch.dtype, bar: float) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} GPUs needed, {torch.cuda.device_count()} here")
    outcomes: list[Any] = world(ranks, _train, dtype, timeout=120)
    assert max(_error(outcome) for outcome in outcomes) <= bar


class Staged(nn.Module):
    """Four layers with dropout between them, in two stages; the loss is inside."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(dropout)) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(x, y % 16)


def _pipelined(rank: int, ranks: int, dropout: float, schedule: str) -> list[Tensor]:
    model = Staged(dropout)
    stages = {r"layers\.[01]": wh.stage(), r"layers\.[23]": wh.stage()}
    wh.annotate(model, stages, inside=wh.pipeline(num_micro_batches=3, schedule=schedule))  # type: ignore[call-overload]
    wh.parallelize(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(*(t.cuda() for t in _batch())).backward()
        optimizer.step()
    return [value.cpu() for value in wh.full_state_dict(model).values()]


def _alone() -> list[Tensor]:
    model = Staged(0.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(*_batch()).backward()
        optimizer.step()
    return [value.detach() for value in model.state_dict().values()]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pipeline_equals_one_process(ranks: int, schedule: str) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} GPUs needed, {torch.cuda.device_count()} here")
    (first, *_) = world(ranks, _pipelined, 0.0, schedule, timeout=120)
    assert max(float((a - b).abs().max()) for a, b in zip(first, _alone(), strict=True)) < 1e-4


def test_dropout_depends_on_no_schedule() -> None:
    first, second = (world(1, _pipelined, 0.5, schedule, timeout=120)[0] for schedule in ("gpipe", "1f1b"))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
