"""Damaged checkpoints: each is refused before anything changes, and a load and verify name what is damaged."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoint.damage import KINDS, Damage, damage
from tests.checkpoint.jobs import Job, plain, said
from tests.checkpoint.peers import OUTCOMES, flipped
from tests.world import world
from whale_torch.checkpoint.inspection.verify import verify
from whale_torch.checkpoint.load import load
from whale_torch.checkpoint.save import save

CASES = 1040
BLOCKS = 8


def _tensor_at(folder: Path, file: str, offset: int) -> str | None:
    """The tensor whose value a byte of a payload file belongs to; None for the header."""
    index = json.loads((folder / "index.json").read_text())
    places = [(p["offset"], key) for key, one in index["tensors"].items() for p in one["pieces"] if p["file"] == file]
    return max((place for place in places if place[0] <= offset), default=(0, None))[1]


def _names_it(text: str, found: Damage, kind: str, tensor: str | None) -> bool:
    if kind == "swapped":
        return "rank-0000" in text and "under another name" in text
    if kind == "index of another run":
        return "id" in text
    if kind in ("of another step", "of another run"):
        return str(found.file) in text and "another checkpoint" in text
    chunk = found.offset is None or tensor is None or (f"'{tensor}'" in text and "chunk 0" in text)
    return str(found.file) in text and chunk


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_damage_is_found_before_anything_changes(runs: Path, block: int, tmp_path: Path) -> None:
    model, optimizer = plain()
    load(runs / "other", model=model, optimizer=optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
    for case in range(block, CASES, BLOCKS):
        kind, rng = KINDS[case % len(KINDS)], random.Random(case)
        run_dir = tmp_path / str(case)
        shutil.copytree(runs / "run", run_dir)
        found = damage(kind, run_dir, runs / "other", rng)
        tensor = None
        if found.offset is not None and found.file.suffix == ".safetensors":
            tensor = _tensor_at(found.file.parent, found.file.name, found.offset)
        path = run_dir if kind == "pointer bit" or rng.random() < 0.5 else run_dir / "step-00000002"
        text = said(lambda path=path: load(path, model=model, optimizer=optimizer))
        assert text is not None and "fix:" in text and _names_it(text, found, kind, tensor), (case, kind, found, text)
        told = verify(run_dir, cores=1).damages
        assert any(str(found.file) in one or kind.startswith("index of") for one in told), (case, kind, found, told)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        now = [value for state in optimizer.state.values() for value in state.values()]
        assert all(map(torch.equal, now, moments))
        shutil.rmtree(run_dir)


def test_the_chunk_is_named(tmp_path: Path) -> None:
    model = nn.Linear(1500, 1400)  # three chunks
    folder = save(tmp_path, step=1, model=model)
    path = folder / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[9 << 20 >> 1] ^= 4
    path.write_bytes(data)
    text = said(lambda: load(tmp_path, model=model))
    assert text is not None and "chunk 1 of 'model/weight'" in text and str(path) in text


def _one_reads_it(rank: int, n: int, folder: Path) -> str | None:
    job = Job()
    before = [p.detach().clone() for p in job.model.parameters()]
    text = said(lambda: load(folder, model=job.model, optimizer=job.optimizer))
    assert all(map(torch.equal, job.model.parameters(), before)) and not job.optimizer.state
    return text


def test_what_one_rank_finds_all_ranks_raise(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "run", tmp_path / "run")
    folder = tmp_path / "run" / "step-00000002"
    index = json.loads((folder / "index.json").read_text())
    (piece,) = (p for p in index["tensors"]["model/2.weight"]["pieces"] if p["box"][0][0] > 0)  # rank 1 reads this one
    data = bytearray((folder / piece["file"]).read_bytes())
    data[piece["offset"]] ^= 128
    (folder / piece["file"]).write_bytes(data)
    first, second = world(2, _one_reads_it, tmp_path / "run")
    assert first == second and first is not None
    assert "rank 1" in first and "model/2.weight" in first and piece["file"] in first


def test_flipped_bits_that_others_read_without_a_word_are_found(tmp_path: Path) -> None:
    """`python -m tests.checkpoint.peers` shows the same as a table."""
    found = flipped(tmp_path, 60)
    assert found.pop("wh.save") == {OUTCOMES[0]: 60}
    for name, counts in found.items():
        assert counts[OUTCOMES[1]] > 40, (name, counts)  # who finds them too deserves a line in the guide


def test_of_a_file_that_is_damaged_all_over_some_chunks_are_named(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    path = save(tmp_path, step=1, model=model, rng=False) / "rank-00000.safetensors"
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[:header] + bytes(255 - byte for byte in data[header:]))
    damages = verify(tmp_path).damages
    assert len(damages) == 11 and damages[-1].endswith("6 more chunks are not what was written.")
