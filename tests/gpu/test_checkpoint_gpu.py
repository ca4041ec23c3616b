"""Checkpoints on a GPU: a training with dropout goes on bit by bit, in a plain process, and saved in the background."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import whale_torch as wh

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


def _training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.5), nn.Linear(256, 8)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(number)).cuda()
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("wait", [True, False])
def test_a_training_goes_on_bit_by_bit(wait: bool, tmp_path: Path) -> None:
    model, optimizer = _training(0)
    for number in range(3):
        _step(model, optimizer, number)
    pending = wh.save(tmp_path, step=3, model=model, optimizer=optimizer, wait=wait)
    expected = [_step(model, optimizer, number) for number in (3, 4)]
    if not isinstance(pending, Path):
        pending.wait()
    model, optimizer = _training(7)
    assert wh.load(tmp_path, model=model, optimizer=optimizer).rng == "restored"
    assert all(torch.equal(_step(model, optimizer, 3 + i), loss) for i, loss in enumerate(expected))
