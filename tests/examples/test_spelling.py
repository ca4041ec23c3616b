"""The demo's data is what its README says, and the demo runs under torchrun."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import whale_torch as wh
from examples.spelling.data import LENGTH, SEEN_IN_THE_WILD, Misspellings, edit, encode, is_held_out, vocabulary
from examples.spelling.model import SpellingCorrector

ROOT = Path(__file__).parents[2]


def test_the_list_is_what_the_readme_says() -> None:
    words = vocabulary(None)
    assert words == sorted(set(words))
    assert f"{len(words):,} entries" in (ROOT / "examples/spelling/README.md").read_text()
    assert set(SEEN_IN_THE_WILD.values()) <= set(words)
    assert not set(SEEN_IN_THE_WILD) & set(words)


def test_a_smaller_vocabulary_is_always_the_same_one() -> None:
    words = vocabulary(1000)
    assert len(words) == len(set(words)) == 1000 and words == vocabulary(1000)
    assert set(SEEN_IN_THE_WILD.values()) <= set(words)
    with pytest.raises(ValueError, match=r"234283 words.*so 3 will not do"):
        vocabulary(3)


def test_letters_are_numbers() -> None:
    assert encode("abz").tolist() == [1, 2, 26] + [0] * (LENGTH - 3)
    assert encode("a" * 40).tolist() == [1] * LENGTH


def test_held_out_misspellings_are_never_trained_on() -> None:
    words = vocabulary(200)
    train = {Misspellings(words, 4000, seed=1).pair(i)[0] for i in range(4000)}
    held_out = {Misspellings(words, 1000, seed=2, held_out=True).pair(i)[0] for i in range(1000)}
    assert not train & held_out and not train & set(SEEN_IN_THE_WILD)
    assert not (train | held_out) & set(words)
    assert all(map(is_held_out, held_out)) and not any(map(is_held_out, train))


def test_a_sample_is_a_function_of_its_index() -> None:
    words = vocabulary(50)
    one, other = Misspellings(words, 100, seed=1), Misspellings(words, 100, seed=1)
    for index in (99, 0, 50):
        torch.testing.assert_close(one[index][0], other[index][0])
        assert one[index][1] == other[index][1] == index % 50


def test_an_edit_is_one_slip() -> None:
    rng = random.Random(0)
    made = {edit("whale", rng) for _ in range(2000)}
    assert {"hwale", "wale", "whalle", "whald"} <= made
    assert {len(word) for word in made} == {4, 5, 6}
    assert edit("", rng) in {"", *"abcdefghijklmnopqrstuvwxyz"}


@pytest.mark.matrix(keep=0)
def test_main_runs_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "examples.spelling.main", "--classes", "60", "--steps", "60", "--batch", "30", "--compare", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    accuracy = re.search(r"Right on ([0-9.]+)%", done.stdout)
    assert accuracy is not None and float(accuracy[1]) > 50, done.stdout
    assert "60 words to tell apart, 2 ranks" in done.stdout and "DistributedDataParallel" in done.stdout
    plan = str(wh.plan(SpellingCorrector(60), cluster=wh.Cluster.of(1, 2)))
    told = [line for line in plan.splitlines() if "model.py" not in line]  # the rest begins with the place of the call
    assert [line for line in told if line not in done.stdout.splitlines()] == [], "not cut at 80 columns"
    heads = [line for line in done.stdout.splitlines() if line.startswith("┃")]
    assert heads and all(cell.strip() for line in heads for cell in line.strip("┃").split("┃")), heads
