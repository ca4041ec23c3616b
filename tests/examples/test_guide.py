"""docs/guide.md: every script runs, prints what the page shows, and computes what the page says it does."""

from __future__ import annotations

import contextlib
import io
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.world import world
from whale_torch.strategies.runtime import is_parallelized

PAGE = Path(__file__).parents[2] / "docs" / "guide.md"
BAR = 2e-5
PORT, PLAN, PIPELINES = "Port a DistributedDataParallel script", "Plan on a laptop", "Pipelines"
CHECKPOINTS = "Checkpoints"
# Ranks of each script of a section, in order; 2 where nothing is said.
RANKS = {PLAN: (1, 4), CHECKPOINTS: (2, 1), PIPELINES: (4, 2, 2, 1, 1, 1)}
# Sections whose scripts feed the same global batches to any number of ranks, and end in the same weights.
EXACT = ["Read data", "Losses", "Accumulate and clip gradients", PIPELINES]
_kept: list[dict[str, Any]] = []  # DistributedDataParallel freed after its process group waits for ever


@cache
def sections() -> dict[str, list[tuple[str, str | None]]]:
    """By heading: each Python block, and the text block directly behind it, if any."""
    found: dict[str, list[tuple[str, str | None]]] = {}
    for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        blocks = re.findall(r"^```python\n(.*?)^```\n(?:\n^```text\n(.*?)^```)?", part, re.DOTALL | re.MULTILINE)
        if blocks:
            found[part.partition("\n")[0]] = [(code, text or None) for code, text in blocks]
    return found


def run(rank: int, n: int, code: str, folder: str) -> tuple[str, dict[str, Tensor]]:
    """What a script prints, and the weights of its model."""
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    _kept.append(names)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "train.py", "exec", dont_inherit=True), names)
    model = names.get("model")
    big = isinstance(model, nn.Module) and sum(p.numel() for p in model.parameters()) > 1_000_000
    told = isinstance(model, nn.Module) and is_parallelized(model) and not big
    return printed.getvalue(), wh.full_state_dict(model) if told else {}


@pytest.mark.parametrize("section", sections())
def test_scripts_run(section: str, tmp_path: Path) -> None:
    blocks = sections()[section]
    if any("transformers" in code for code, _ in blocks):
        pytest.importorskip("transformers", reason="transformers is not installed")
    for (code, text), n in zip(blocks, RANKS.get(section, (2,) * len(blocks)), strict=True):
        results = world(n, run, code, str(tmp_path), timeout=120)
        if text is not None:
            assert results[0][0] == text
        if any(line.startswith("    print") for line in code.splitlines()):
            assert results[0][0] and not any(printed for printed, _ in results[1:]), "one rank prints"


def test_the_ported_script_trains_the_same_model(tmp_path: Path) -> None:
    weights = []
    for code, _ in sections()[PORT]:
        world(2, run, code, str(tmp_path), timeout=60)
        weights.append(torch.load(tmp_path / "model.pt"))
    assert list(weights[0]) == list(weights[1])
    assert relative_error(weights[1], weights[0]) <= BAR


@pytest.mark.parametrize(
    ("section", "index"),
    [(name, index) for name in EXACT for index, (code, _) in enumerate(sections()[name]) if "parallelize" in code],
)
@pytest.mark.matrix(keep=1)
def test_what_is_called_exact_is_the_same_on_any_number_of_ranks(section: str, index: int, tmp_path: Path) -> None:
    code, _ = sections()[section][index]
    if "transformers" in code:
        pytest.importorskip("transformers", reason="transformers is not installed")
    (_, alone), *_ = world(1, run, code, str(tmp_path))
    assert alone
    for n in (2, 4):
        for _, weights in world(n, run, code, str(tmp_path)):
            assert relative_error(weights, alone) <= BAR


def test_contents_are_the_headings() -> None:
    text = PAGE.read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert re.findall(r"^- \[(.*?)\]\(#.*\)$", text, re.MULTILINE) == headings
    anchors = set(re.findall(r"\]\(#([a-z-]*)\)", text))
    assert anchors <= {heading.lower().replace(" ", "-") for heading in headings}


def test_the_table_of_errors_leads_to_sections_of_the_errors() -> None:
    errors = (PAGE.parent / "errors.md").read_text()
    known = set(re.findall(r"^- \[.*\]\(#(.*)\)$", errors, re.MULTILINE))
    anchors = re.findall(r"\]\(errors\.md#(.*?)\)", PAGE.read_text())
    assert anchors and set(anchors) <= known
