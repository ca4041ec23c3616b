"""Ranks that ask for different things: all of them are told, alike, and nothing is written or changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.checkpoint.jobs import Job, left_over, said
from tests.world import world
from whale_torch.checkpoint.load import load
from whale_torch.checkpoint.save import save

SAVES: dict[str, tuple[Any, Any]] = {
    "run_dir": ("run", "other"), "step": (1, 2), "tag": (None, "best"), "keep_last": (2, 3), "wait": (True, False),
    "rng": (True, False), "optimizer": (True, False), "state": ({"a": 1}, {"b": 1}),
}  # fmt: skip
LOADS: dict[str, tuple[Any, Any]] = {
    "path": ("run", "other"), "step": (1, None), "tag": (None, "best"), "only": ("0", "2"),
    "assign": (None, {"a": "b"}),
    "missing_ok": (True, False), "dtype": ("same", "cast"), "optimizer": (True, False),
}  # fmt: skip


class _State:
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("nothing is loaded")


def _told(rank: int, n: int, folder: Path) -> list[tuple[str, str | None]]:
    job = Job()
    job.train()
    ones: list[Any] = [torch.tensor(1), np.int64(1)]
    save(folder / "base", step=ones[rank], model=job.model, optimizer=job.optimizer)
    told = []
    for name, values in SAVES.items():
        asked: dict[str, Any] = {"run_dir": "run", "step": 1} | ({name: values[rank]} if name != "state" else {})
        asked |= dict.fromkeys(values[rank], _State()) if name == "state" else {}
        asked |= {"run_dir": folder / asked["run_dir"], "optimizer": job.optimizer if asked.get("optimizer") else None}
        told.append((name, said(lambda asked=asked: save(model=job.model, **asked))))
    before = [p.detach().clone() for p in job.model.parameters()]
    job.train()
    now = [p.detach().clone() for p in job.model.parameters()]
    assert any((one != other).any() for one, other in zip(before, now, strict=True))
    for name, values in LOADS.items():
        asked = {"path": "base"} | {name: values[rank]}
        asked |= {"path": folder / asked["path"], "optimizer": job.optimizer if asked.get("optimizer") else None}
        told.append((name, said(lambda asked=asked: load(model=job.model, **asked))))
        assert all((one == other).all() for one, other in zip(job.model.parameters(), now, strict=True))
    return told


def test_what_ranks_ask_for_is_compared(tmp_path: Path) -> None:
    first, second = world(2, _told, tmp_path)
    assert first == second and len(first) == len(SAVES) + len(LOADS)
    for name, text in first:
        assert text is not None and name in text and "on rank 0 and" in text and "the same on every rank" in text, text
    assert not (tmp_path / "run").exists() and not (tmp_path / "other").exists() and not left_over(tmp_path / "base")


def _sees_another_folder(rank: int, n: int, folder: Path) -> str | None:
    job = Job()
    return said(lambda: save(_Elsewhere(folder, rank), step=1, model=job.model))


class _Elsewhere:
    """A path that names another folder on each rank, as one on a disk that ranks do not share."""

    def __init__(self, folder: Path, rank: int):
        self._folder, self._rank, self._asked = folder, rank, 0

    def __fspath__(self) -> str:
        self._asked += 1
        return str(self._folder / ("shared" if self._asked == 1 else str(self._rank)))


def test_a_folder_that_is_not_shared_is_told(tmp_path: Path) -> None:
    first, second = world(2, _sees_another_folder, tmp_path)
    assert first is not None and second is not None
    assert "which rank 0 made, is not there" in first and "a file system that all ranks share" in second


OPTIONS: dict[str, tuple[Any, Any]] = {
    "lr": (0.1, 0.2), "betas": ((0.9, 0.99), (0.9, 0.999)), "weight_decay": (np.float32(0.1), np.float32(0.2)),
    "eps": (torch.tensor(1e-8), torch.tensor(1e-7)), "amsgrad": (True, False), "kind": ("a", "b"),
    "steps": (torch.arange(3), torch.arange(3) + 1), "scale": (float("nan"), 1.0), "old": ({"a": 1}, {"a": 2}),
}  # fmt: skip


def _differing_options(rank: int, n: int, folder: Path) -> dict[str, str | None]:
    job = Job()
    job.train()
    group, told = job.optimizer.param_groups[0], {}
    group["fused"] = bool(rank)  # how it computes may differ
    for number, (name, values) in enumerate(OPTIONS.items()):
        before = dict(group)
        group[name] = values[0]
        save(folder, step=number, model=job.model, optimizer=job.optimizer)
        group[name] = values[rank]
        told[name] = said(lambda: save(folder, step=100, model=job.model, optimizer=job.optimizer))
        group.clear()
        group |= dict(sorted(before.items(), key=lambda one: one[0], reverse=bool(rank)))  # in any order
    return told


def test_options_that_differ_between_ranks_are_told(tmp_path: Path) -> None:
    first, second = world(2, _differing_options, tmp_path)
    assert first == second
    for name, text in first.items():
        assert text is not None and "'options of 1 groups' differs between ranks" in text and f'"{name}": ' in text
    assert '"lr": 0.1' in first["lr"] and '"lr": 0.2' in first["lr"]
