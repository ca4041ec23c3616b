"""A small job whose checkpoints tests damage: two parameters that ranks hold parts of, two that all hold, and Adam."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import whale_torch as wh
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.load import load
from whale_torch.checkpoint.save import save
from whale_torch.errors import CheckpointError

__all__ = ["Job", "equal", "left_over", "loaded", "plain", "said"]


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 12))
    wh.annotate(model, {"2": wh.split()})
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


class Job:
    """Parallelized, on every rank; each step's state is another."""

    def __init__(self, timeout: float = 20.0) -> None:
        model, _ = plain()
        self.model = wh.parallelize(model, timeout=timedelta(seconds=timeout))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.step = 0

    def train(self) -> None:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(self.step))
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), torch.arange(4)).backward()
        self.optimizer.step()
        self.step += 1

    def save(self, run_dir: Path, files: Files | None = None, *, wait: bool = True) -> Path:
        """Returns at the end of the save, also of one in the background."""
        extra = {"step": self.step, "noise": torch.full((3,), float(self.step))}
        found = save(
            run_dir, step=self.step, model=self.model, optimizer=self.optimizer, extra=extra, rng=False, files=files,
            wait=wait,
        )  # without random states, of which one process would not read every rank's  # fmt: skip
        return found if isinstance(found, Path) else found.wait()


def loaded(path: Path, files: Files | None = None) -> dict[str, Any]:
    """All that a checkpoint has, read by one process."""
    model, optimizer = plain()
    found = load(path, model=model, optimizer=optimizer, files=files)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    moments = {f"{i} {k}": v for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()}
    return {"step": found.step, **state, **moments, **{f"extra {k}": v for k, v in found.extra.items()}}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    same = (torch.equal(torch.as_tensor(one[k]), torch.as_tensor(other[k])) for k in one)
    return one.keys() == other.keys() and all(same)


def left_over(run_dir: Path) -> list[str]:
    """What is no checkpoint, no pointer and not the run's lock."""
    names = sorted(one.name for one in run_dir.iterdir())
    return [name for name in names if ".tmp-" in name or ".new-" in name]


def said(run: Callable[[], object]) -> str | None:
    """The CheckpointError's text, None without one."""
    try:
        run()
    except CheckpointError as error:
        return str(error)
    return None
