"""Which checkpoints stay: the last, tagged ones, and what is being read; and how one of several is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import whale_torch as wh
from tests.world import world
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.folders import find
from whale_torch.checkpoint.load import load
from whale_torch.checkpoint.retention import reading
from whale_torch.checkpoint.save import save
from whale_torch.errors import CheckpointError


def steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in run_dir.glob("step-*"))


def test_the_last_and_the_tagged_stay(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for step in range(1, 6):
        save(tmp_path, step=step, model=model, keep_last=2, tag="best" if step in (1, 3) else None)
    assert steps(tmp_path) == [3, 4, 5], "step 1 was tagged until step 3 was"
    assert load(tmp_path, model=model, tag="best").step == 3
    assert load(tmp_path, model=model, step=4).step == 4 and load(tmp_path, model=model).step == 5
    save(tmp_path, step=6, model=model, keep_last=1)
    assert steps(tmp_path) == [3, 6]
    save(tmp_path, step=2, model=model, keep_last=1)
    assert steps(tmp_path) == [2, 3, 6], "later steps are not earlier ones"
    assert load(tmp_path, model=model).step == 2, "the latest is the one that was saved last"


def test_what_is_read_stays(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for step in (1, 2):
        save(tmp_path, step=step, model=model)
    with reading(Files(), tmp_path, step=1, tag=None) as folder, reading(Files(), folder, step=None, tag=None):
        save(tmp_path, step=3, model=model, keep_last=1)
        assert steps(tmp_path) == [1, 3]
    save(tmp_path, step=4, model=model, keep_last=1)
    assert steps(tmp_path) == [4]


class _Stuck(Files):
    def remove_folder(self, path: Path) -> None:
        raise OSError(5, "Input/output error", str(path))


def test_what_cannot_be_removed_is_told_and_is_no_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path, step=1, model=model)
    with pytest.raises(CheckpointError, match="the checkpoint is complete, but earlier ones could not be removed"):
        save(tmp_path, step=2, model=model, keep_last=1, files=_Stuck())
    assert find(tmp_path, Files()).name == "step-00000002"
    with pytest.raises(CheckpointError, match=r"has no step 1; there are 2\."):
        load(tmp_path, model=model, step=1)
    save(tmp_path, step=3, model=model)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"keep_last": 0}, "keep_last is 0"),
        ({"tag": "../best"}, r"tag is '\.\./best'"),
        ({"tag": ""}, "tag is ''"),
        ({"tag": "best.new-01234567"}, "tag is 'best.new-01234567'"),
    ],
)
def test_mistakes_of_a_save(given: dict[str, object], text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=text):
        save(tmp_path, step=1, model=nn.Linear(2, 2), **given)
    assert not tmp_path.exists() or not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tag": "first"}, r"no checkpoint tagged 'first'; tags: best\."),
        ({"step": 7}, r"no step 7; there are 1, 2\."),
        ({"step": 1, "tag": "best"}, "step=1 and tag='best' are two checkpoints"),
    ],
)
def test_mistakes_of_a_load(given: dict[str, object], text: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for step in (1, 2):
        save(tmp_path, step=step, model=model, tag="best")
    with pytest.raises(CheckpointError, match=text):
        load(tmp_path, model=model, **given)
    with pytest.raises(CheckpointError, match="is one checkpoint, with no steps and tags"):
        load(tmp_path / "step-00000001", model=model, step=1)


def _in_the_background(rank: int, n: int, folder: str) -> None:
    model = wh.parallelize(nn.Linear(2, 2))
    for step in range(1, 5):
        save(folder, step=step, model=model, wait=False, keep_last=2, tag="first" if step == 1 else None)
    assert load(folder, model=model).step == 4 and load(folder, model=model, tag="first").step == 1
    assert steps(Path(folder)) == [1, 3, 4]


def test_saves_in_the_background_keep_as_many(tmp_path: Path) -> None:
    world(2, _in_the_background, str(tmp_path))
