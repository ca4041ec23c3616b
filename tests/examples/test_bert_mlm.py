"""The text, tokens and guesses of the example, and a small run of it as two pipelines of two stages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from tokenizers import Tokenizer

from examples.bert_mlm.data import LENGTH, NO_LABEL, Guesses, documents, sequences, train_tokenizer
from examples.bert_mlm.model import stages

ROOT = Path(__file__).parents[2]


def test_the_text_is_pythons_library_in_one_order() -> None:
    texts = list(islice(documents(), 20))
    assert texts == list(islice(documents(), 20))
    assert sum(map(len, texts)) > 100_000
    assert any('"""' in text and "import" in text for text in texts)


def test_files_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    for name in ("a.py", "test/b.py", "site-packages/c.py", "d/e.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    assert list(documents(tmp_path)) == ["a.py", "d/e.py"]


def test_sequences_are_the_text() -> None:
    texts = list(islice(documents(), 10))
    tokenizer = Tokenizer.from_str(train_tokenizer(texts, 500))
    rows, held_out = sequences(tokenizer, texts)
    assert rows.shape[1] == held_out.shape[1] == LENGTH and len(held_out) == -(-(len(rows) + len(held_out)) // 50)
    assert int(rows.max()) < 500 and int(rows.min()) >= 1
    shown = tokenizer.decode(held_out[0].tolist()).replace(" ", "")
    assert shown[:40] in "".join(texts[0].split())
    assert tokenizer.encode("return [MASK]").tokens[-1] == "[MASK]"


def test_a_seventh_is_to_be_guessed_and_a_sample_is_a_function_of_its_index() -> None:
    rows = torch.arange(3, 3 + 50 * LENGTH).view(50, LENGTH)
    num_tokens = 3 + rows.numel()
    one, other = (Guesses(rows, 200, num_tokens, seed=1) for _ in range(2))
    ids, labels = (torch.stack([one[index][key] for index in range(200)]) for key in ("input_ids", "labels"))
    asked = labels != NO_LABEL
    whole = rows.repeat(4, 1)
    assert torch.equal(ids[~asked], whole[~asked]) and torch.equal(labels[asked], whole[asked])
    assert asked.float().mean() == pytest.approx(0.15, abs=0.01)
    assert (ids[asked] == 2).float().mean() == pytest.approx(0.8, abs=0.03)
    assert (ids[asked] == whole[asked]).float().mean() == pytest.approx(0.1, abs=0.03)
    assert torch.equal(other[199]["input_ids"], ids[199])
    assert not torch.equal(ids[0], ids[50])  # the second time round other tokens are hidden


def test_layers_are_dealt_out_to_stages() -> None:
    layer = r"bert\.encoder\.layer\."
    first, last = stages(5, 2)
    assert first.split("|") == [f"{layer}0", f"{layer}1", r"bert\.embeddings"]
    assert last.split("|") == [f"{layer}2", f"{layer}3", f"{layer}4", "cls"]
    assert [len(pattern.split("|")) for pattern in stages(4, 4)] == [2, 1, 1, 2]
    assert stages(3, 1) == [rf"{layer}0|{layer}1|{layer}2|bert\.embeddings|cls"]


@pytest.mark.matrix(keep=0)
def test_main_runs_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["-m", "examples.bert_mlm.main", "--files", "12", "--steps", "20", "--batch", "8", "--width", "32"]
    command += ["--tokens", "300", "--layers", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "12 files of Python's library" in done.stdout and "16 sequences of 64 a step, 8 a pipeline" in done.stdout
    assert "1f1b: 2 stages on 2 ranks, 4 micro-batches" in done.stdout and "rank 1 |" in done.stdout
    assert "step 20/20" in done.stdout and "tokens/s" in done.stdout
    loss = re.search(r"never saw: loss ([0-9.]+), ", done.stdout)
    assert loss is not None and float(loss[1]) < 5.6, done.stdout  # ln 300 is 5.7
    assert "for i in ____(len(self)):" in done.stdout
