"""The bar of long saves and loads: on one rank, where it is asked for, and not of short ones."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import whale_torch as wh
from tests.world import world
from whale_torch.checkpoint import progress
from whale_torch.checkpoint.load import load
from whale_torch.checkpoint.save import save
from whale_torch.errors import CheckpointError


def _printed(rank: int, n: int, folder: str, patience_s: float, asked: bool | None) -> list[str]:
    progress._PATIENCE_S = patience_s
    model = wh.parallelize(nn.Sequential(*(nn.Linear(700, 700) for _ in range(8))))
    found = []
    for run in (
        lambda: save(folder, step=1, model=model, progress=asked),
        lambda: load(folder, model=model, progress=asked),
    ):
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            run()
        found.append(printed.getvalue())
    return found


@pytest.mark.parametrize(("patience_s", "asked", "shows"), [(-1, True, True), (-1, None, False), (60, True, False)])
@pytest.mark.matrix(keep=1)
def test_one_rank_shows_bytes_per_second(patience_s: float, asked: bool | None, shows: bool, tmp_path: Path) -> None:
    pytest.importorskip("rich", reason="rich is not installed")
    first, second = world(2, _printed, str(tmp_path), patience_s, asked, env={"COLUMNS": "160"})
    assert second == ["", ""]
    for what, text in zip(("saving", "loading"), first, strict=True):
        assert (f"{what} {tmp_path}" in text.replace("\n", "") and "/s" in text) if shows else not text, text


def test_all_bytes_of_a_load_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those that are checked where the kernel has them too."""
    pytest.importorskip("rich", reason="rich is not installed")
    bars: list[Any] = []

    class Bar(progress._Bar):
        def __init__(self, what: str, total_bytes: int):
            super().__init__(what, total_bytes)
            bars.append(self)

    monkeypatch.setattr(progress, "_Bar", Bar)
    model = nn.Linear(1500, 1400)
    save(tmp_path, step=1, model=model, progress=True)
    load(tmp_path, model=model, progress=True)
    assert [bar._done for bar in bars] == [bar._total for bar in bars] and bars[1]._total > 2 * 8_400_000


def test_a_terminal_shows_it_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich", reason="rich is not installed")
    seen: list[int] = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress._Bar, "advance", lambda self, num_bytes: seen.append(num_bytes))
    files = progress.Files()
    with progress.shown(files, "saving", 10, None) as shown:
        assert shown is not files
    with progress.shown(files, "saving", 10, False) as shown:
        assert shown is files


def test_asking_for_it_without_rich_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="progress=True needs rich"):
        save(tmp_path, step=1, extra={"x": torch.ones(2)}, progress=True)
    save(tmp_path, step=1, extra={"x": torch.ones(2)})
