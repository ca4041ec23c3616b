"""The pictures and captions of the example, and a small run of it, pseudo then real, on four ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from examples.m6.data import CAPTION, DIGITS, RELATIONS, SIDE, WORDS, Scenes, read, told, words_of
from examples.m6.model import PATCHES, Captioner

ROOT = Path(__file__).parents[2]


def test_captions_are_words_and_back() -> None:
    for relation in RELATIONS:
        caption = f"a three {relation} an eight"
        numbers = words_of(caption)
        assert len(numbers) == CAPTION and told(numbers.tolist()) == caption
    assert len(set(WORDS)) == len(WORDS) == 18


def test_pictures_show_what_their_captions_say() -> None:
    images = torch.zeros(2, 8, 8)
    images[0, :, 0], images[1, 0, :] = 1.0, 1.0  # a stroke down for 4, one across for 9
    scenes = Scenes((images, torch.tensor([4, 9])), 200, seed=0)
    seen = set()
    for picture, numbers in (scenes[index] for index in range(200)):
        _, first, *relation, _, second = told(numbers.tolist()).split()
        seen.add(" ".join(relation))
        assert picture.shape == (SIDE, SIDE) and float(picture.sum()) == 16
        for name, there in ((first, slice(0, 8)), (second, slice(8, 16))):
            part = picture[:, there] if relation[0] == "left" else picture[there]
            assert float(part.sum()) == 8 and float(part.amax(0).sum()) == (1 if name == DIGITS[4] else 8)
    assert seen == set(RELATIONS)
    assert all(torch.equal(a, b) for a, b in zip(scenes[5], scenes[5], strict=True))


def test_digits_held_out_are_never_trained_on() -> None:
    (images, labels), (others, theirs) = read()
    assert len(images) + len(others) == 1797 and len(labels) == len(images) and len(theirs) == len(others) == 180
    assert {int(label) for label in theirs} == set(range(10)) and float(images.max()) == 1


def test_a_word_sees_the_picture_and_what_stands_before_it() -> None:
    torch.manual_seed(0)
    model = Captioner(num_layers=2, width=8, num_heads=2, num_experts=4).eval()
    pictures, captions = torch.rand(1, SIDE, SIDE), words_of("a one above a two")[None]
    _, logits = model(pictures, captions)
    changed = captions.clone()
    changed[0, 4] = 5
    _, others = model(pictures, changed)
    same = torch.isclose(logits, others, atol=1e-5).all(-1)[0]  # rows of other numbers are rounded otherwise
    assert same.tolist() == [True] * 4 + [False] * (CAPTION - 4)
    pictures[0, -1, -1] += 1
    assert not bool((model(pictures, captions)[1] == logits).all(-1).any())
    assert PATCHES == 16


@pytest.mark.matrix(keep=0)
def test_main_runs_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["-m", "examples.m6.main", "--pseudo", "12", "--real", "12", "--batch", "4", "--width", "16"]
    command += ["--layers", "2", "--experts", "6", "--unseen", "16", "--pictures", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "110"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    sizes = [int(found.replace(",", "")) for found in re.findall(r"of 6 experts, ([0-9,]+) parameters", done.stdout)]
    model = Captioner(2, 16, num_experts=6)
    of_a_layer = sum(p.numel() for p in model.layers[0].parameters())
    assert sizes == [
        sum(p.numel() for p in model.parameters()) - of_a_layer,
        sum(p.numel() for p in model.parameters()),
    ]
    assert "pseudo step 12/12 loss" in done.stdout and "real step 12/12 loss" in done.stdout
    losses = [float(found) for found in re.findall(r"step 12/12 loss ([0-9.]+)", done.stdout)]
    assert losses[1] < losses[0] < 3.0  # ln 18 is 2.9
    assert done.stdout.count("of 16 captions of digits it never saw are right") == 2
    for stage in ("pseudo", "real"):
        drawing = (tmp_path / f"load_{stage}.svg").read_text()
        assert f"{stage}: load of experts over 12 steps" in drawing and "layers.1.experts" in drawing
