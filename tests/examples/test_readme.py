"""README.md: its Python runs in a world of two ranks, its paths exist, its commands are the Makefile's."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.world import world

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/spelling/README.md", "docs/design.md"]
PAGES += ["docs/guide.md", "docs/errors.md", "examples/bert_mlm/README.md", "examples/m6/README.md"]
PAGES += ["examples/resume/README.md"]


def _blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def _run_block(rank: int, n: int, code: str, folder: str) -> tuple[float, str]:
    """(the loss, NaN where there is none; what is printed)"""
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "README.md", "exec"), names)
    return float(names["loss"].detach()) if "loss" in names else math.nan, printed.getvalue()


@pytest.mark.parametrize("n", [1, 2])
def test_python_runs(n: int, tmp_path: Path) -> None:
    classifier, experts, checkpoint = _blocks("README.md", "python")
    for loss, _ in world(n, _run_block, classifier, str(tmp_path)):
        assert 10 < loss < 13  # log(100_000) = 11.5
    assert [printed for _, printed in world(n, _run_block, checkpoint, str(tmp_path))] == ["100\n"] * n
    for _, printed in world(n, _run_block, experts, str(tmp_path)):
        routes = json.loads(printed)
        assert len(routes) == 8 and sum(routes) == n * 4 * 12 * 2


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z-]+)", "".join(_blocks(page, "")), re.MULTILINE)) <= targets


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_demo_installs_only_what_it_needs() -> None:
    """What make would run where nothing is installed."""
    told = {
        target: subprocess.run(
            ["make", "-n", target, "VENV=nowhere", "PYTHON=python3.12", "VERSION=3.12"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout
        for target in ("demo", "test")
    }  # fmt: skip
    for text in told.values():
        assert 'install --quiet --no-build-isolation --editable ".[demo]"' in text
    tools = ("transformers", "pytest", "mypy", "extra ==")
    assert [tool for tool in tools if tool in told["demo"]] == []
    assert [tool for tool in tools if tool in told["test"]] == list(tools)
