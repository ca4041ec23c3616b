"""Which checkpoints stay: the last, tagged ones, and what is being read; and how one of several is chosen."""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import whale_torch as wh
from tests.checkpoint.jobs import left_over
from tests.checkpoint.power import MODES, Logged, after
from tests.world import world
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.folders import find
from whale_torch.checkpoint.formats.opened import open_source
from whale_torch.checkpoint.inspection.verify import verify
from whale_torch.checkpoint.load import load
from whale_torch.checkpoint.retention import reading
from whale_torch.checkpoint.save import save
from whale_torch.errors import CheckpointError


def steps(run_dir: Path) -> list[int]:
    names = (path.name.removeprefix("step-") for path in run_dir.glob("step-*"))
    return sorted(int(name) for name in names if name.isdecimal())


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


def test_what_weights_come_from_stays(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path, step=1, model=model)
    source = open_source(tmp_path)
    save(tmp_path, step=2, model=model, keep_last=1)
    assert steps(tmp_path) == [1, 2] and torch.equal(source.tensors["model/weight"].read(), model.weight.detach())
    del source
    save(tmp_path, step=3, model=model, keep_last=1)
    assert steps(tmp_path) == [3]


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
        ({"keep_last": 1.5}, "keep_last is 1.5"),
        ({"keep_last": True}, "keep_last is True"),
        ({"wait": False, "staging_bytes": -1}, "staging_bytes is -1"),
        ({"wait": False, "staging_bytes": "1GB"}, "staging_bytes is '1GB'"),
        ({"if_busy": "wiat"}, "if_busy is 'wiat'"),
        ({"tag": 3}, "tag is 3"),
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
        ({"only": 3}, "only is 3"),
        ({"assign": ["a"]}, r"assign is \['a'\]"),
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


def test_of_a_checkpoint_that_was_moved_its_link_goes(tmp_path: Path) -> None:
    model, run = nn.Linear(2, 2), tmp_path / "run"
    save(run, step=1, model=model)
    moved = (run / "step-00000001").rename(tmp_path / "elsewhere")
    (run / "step-00000001").symlink_to(moved)
    load(run, model=model, step=1)
    save(run, step=2, model=model, keep_last=1)
    assert steps(run) == [2] and not left_over(run) and (moved / "index.json").exists()


def _in_the_background(rank: int, n: int, folder: str) -> None:
    model = wh.parallelize(nn.Linear(2, 2))
    for step in range(1, 5):
        save(folder, step=step, model=model, wait=False, keep_last=2, tag="first" if step == 1 else None)
    assert load(folder, model=model).step == 4 and load(folder, model=model, tag="first").step == 1
    assert steps(Path(folder)) == [1, 3, 4]


def test_saves_in_the_background_keep_as_many(tmp_path: Path) -> None:
    world(2, _in_the_background, str(tmp_path))


def test_readers_find_a_whole_checkpoint_while_others_go(tmp_path: Path) -> None:
    """Three threads read the latest again and again, and a fourth saves and keeps one."""
    model = nn.Linear(40, 40)
    failed: list[BaseException] = []
    seen: set[int] = set()
    done = threading.Event()

    def save_next(step: int) -> None:
        with torch.no_grad():
            model.weight.fill_(step)
            model.bias.fill_(-step)
        save(tmp_path, step=step, model=model, keep_last=1, rng=False)

    def read() -> None:
        mine = nn.Linear(40, 40)
        try:
            while not done.is_set():
                step = load(tmp_path, model=mine).step
                assert (mine.weight == step).all() and (mine.bias == -step).all()
                seen.add(step)
        except BaseException as error:
            failed.append(error)

    save_next(1)
    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for step in range(2, 40):
        save_next(step)
    done.set()
    for reader in readers:
        reader.join()
    assert not failed and len(seen) > 5, failed
    save_next(40)
    assert steps(tmp_path) == [40]


class _Vanishing(Files):
    """Another job removes a checkpoint the moment before its index is opened or locked."""

    def __init__(self, operation: str, run_dir: Path):
        self._operation, self._run_dir = operation, run_dir

    def _go(self, operation: str, path: Path) -> None:
        if operation == self._operation and path.name == "index.json":
            self._operation = ""
            save(self._run_dir, step=2, model=nn.Linear(2, 2), keep_last=1)

    def open(self, path: Path) -> contextlib.AbstractContextManager[int]:
        self._go("open", path)
        return super().open(path)

    def lock(self, path: Path, *, create: bool = True, shared: bool = False) -> int | None:
        self._go("lock", path)
        return super().lock(path, create=create, shared=shared)


@pytest.mark.parametrize("operation", ["open", "lock"])
def test_a_checkpoint_that_goes_while_it_is_looked_for(operation: str, tmp_path: Path) -> None:
    save(tmp_path, step=1, model=nn.Linear(2, 2))
    assert load(tmp_path, model=nn.Linear(2, 2), files=_Vanishing(operation, tmp_path)).step == 2
    assert verify(tmp_path, files=_Vanishing("lock", tmp_path / "other")).damages == []


class _Tidy(Files):
    """Another job's save finds what is being removed, takes it for a dead job's, and removes it as well."""

    def remove_folder(self, path: Path) -> None:
        if ".tmp-" in path.name and path.name.startswith("step-00000001"):
            super().remove_folder(path)
        super().remove_folder(path)


def test_two_jobs_may_remove_the_same(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step=step, model=nn.Linear(2, 2), keep_last=1, files=_Tidy())
    assert steps(tmp_path) == [2] and left_over(tmp_path) == []


def test_an_index_that_is_missing_is_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for step in (1, 2):
        save(tmp_path, step=step, model=model, tag="best")
    (tmp_path / "step-00000002" / "index.json").unlink()
    for given in ({}, {"tag": "best"}, {"step": 2}):
        with pytest.raises(CheckpointError, match=r"step-00000002/index.json is missing\. Nothing was changed"):
            load(tmp_path, model=model, **given)
    assert verify(tmp_path).damages == [f"{tmp_path}/step-00000002/index.json is missing."]


def test_what_is_no_checkpoint_stays_and_is_not_counted(tmp_path: Path) -> None:
    foreign = ["step-00000002", "step-00000003.bak", "notes.txt", "step-7", "tags/.hidden", "events/log"]
    for name in foreign:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "step-00000000").mkdir()  # as of a copy that goes on
    (tmp_path / "step-00000000" / "rank-00000.safetensors").touch()
    model = nn.Linear(2, 2)
    for step in (3, 4, 5):
        save(tmp_path, step=step, model=model, keep_last=2)
    assert all((tmp_path / name).read_text() == "mine" for name in foreign)
    assert (tmp_path / "step-00000000" / "rank-00000.safetensors").exists()
    assert sorted(path.parent.name for path in tmp_path.glob("*/index.json")) == ["step-00000004", "step-00000005"]
    assert load(tmp_path, model=model).step == 5 and load(tmp_path, model=model, step=4).step == 4


class _Dies(Files):
    """Its job dies before a rename."""

    def rename(self, path: Path, to: Path) -> None:
        raise OSError(errno.EIO, "killed")

    def remove_folder(self, path: Path) -> None:
        raise OSError(errno.EIO, "killed")


def test_what_is_about_to_go_is_not_verified(tmp_path: Path) -> None:
    for step in (1, 2):
        folder = save(tmp_path, step=step, model=nn.Linear(2, 2))
    files = Files()
    fd = files.lock(folder / "index.json")  # as of the job that removes it
    assert fd is not None
    assert [one.name for one in verify(tmp_path).folders] == ["step-00000001"]
    files.unlock(fd)
    assert len(verify(tmp_path).folders) == 2


def test_a_tag_whose_checkpoint_never_came_names_the_one_before(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    save(tmp_path, step=1, model=model, tag="best")
    with pytest.raises(CheckpointError, match="killed"):
        save(tmp_path, step=2, model=other, tag="best", files=_Dies())
    assert load(tmp_path, model=other, tag="best").step == 1
    for step in (2, 3, 4):  # the job that was started again finds this step no best one
        save(tmp_path, step=step, model=other, keep_last=1)
    assert steps(tmp_path) == [1, 4] and load(tmp_path, model=other, tag="best").step == 1
    assert torch.equal(other.weight, model.weight)
    with pytest.raises(CheckpointError, match="killed"):
        save(tmp_path, step=5, model=other, tag="first", files=_Dies())
    save(tmp_path, step=5, model=other)
    with pytest.raises(CheckpointError, match=r"no checkpoint tagged 'first'; tags: best\."):
        load(tmp_path, model=other, tag="first")


def test_a_tag_that_moves_frees_the_checkpoint_that_had_it(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for step, tag in ((1, "best"), (2, None), (3, "first"), (4, "best"), (5, None)):
        save(tmp_path, step=step, model=model, tag=tag, keep_last=1)
    assert steps(tmp_path) == [3, 4, 5]
    assert load(tmp_path, model=model, tag="best").step == 4 and load(tmp_path, model=model, tag="first").step == 3


@pytest.mark.parametrize("tag", ["a/b", ".hidden", "..", "best\n", "two words", "-x", "x" * 300, "tags/best"])
def test_tags_that_are_no_names_are_refused_before_anything_is_written(tag: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tag is "):
        save(tmp_path / "run", step=1, model=nn.Linear(2, 2), tag=tag)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [0, 7, 10**8, 10**8 + 5, 12345678901, torch.tensor(3)])
def test_any_whole_step(step: int, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path, step=6, model=model)
    folder = save(tmp_path, step=step, model=model, keep_last=1)
    assert folder.name == f"step-{int(step):08d}" and load(tmp_path, model=model, step=int(step)).step == int(step)
    assert steps(tmp_path) == ([int(step)] if step > 6 else [int(step), 6]) and load(tmp_path, model=model).step == step
    with pytest.raises(CheckpointError, match=r"exists\.\n  fix:    another step or run_dir, or remove that folder"):
        save(tmp_path, step=step, model=model)


@pytest.mark.parametrize("step", [-1, 1.5, "3", None, torch.ones(2)])
def test_steps_that_are_none(step: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step is .*\n  fix:    a whole number, 0 or more"):
        save(tmp_path, step=step, model=nn.Linear(2, 2))  # type: ignore[call-overload]
    assert not list(tmp_path.iterdir())


def test_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    real = tmp_path / "läufe und ‘mehr’ 実験 %s [1]"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    save(tmp_path / "link", step=1, model=model, keep_last=1, tag="größte")
    monkeypatch.chdir(real)
    pending = save("", step=2, model=model, keep_last=1, wait=False, files=_Late())
    assert pending.path == real / "step-00000002"
    pending = save("deep/er", step=3, model=model, wait=False, files=_Late())
    monkeypatch.chdir(tmp_path)
    assert pending.wait() == real / "deep" / "er" / "step-00000003" and not (tmp_path / "deep").exists()
    assert steps(real) == [1, 2] and load("link", model=model).step == 2
    assert load(real, model=model, tag="größte").step == 1 and verify("link").damages == []


class _Late(Files):
    """Writes once the script has gone elsewhere."""

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        time.sleep(0.1)
        super().write(fd, data, offset)


class _ReadOnly(Files):
    """As a file system that is mounted to be read."""

    def _refuse(self, path: Path, *_: object, **__: object) -> Any:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    create = make_folder = rename = replace = remove = remove_folder = _refuse

    def lock(self, path: Path, *, create: bool = True, shared: bool = False) -> int | None:
        return super().lock(path, shared=True) if shared else self._refuse(path)


def test_a_file_system_that_is_only_read(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path, step=1, model=model, tag="best")
    files = _ReadOnly()
    assert load(tmp_path, model=model, files=files).step == load(tmp_path, model=model, tag="best", files=files).step
    assert verify(tmp_path, files=files).damages == []
    for wait in (True, False):
        with pytest.raises(CheckpointError, match=r"Read-only file system: .*\.lock"):
            save(tmp_path, step=2, model=model, files=files, wait=wait)
    with pytest.raises(CheckpointError, match=r"Read-only file system: .*new"):
        save(tmp_path / "new", step=2, model=model, files=files)


def test_what_goes_goes_whole_whenever_a_job_dies(tmp_path: Path) -> None:
    """A save that removes two others dies or loses power at every change."""
    base, models = tmp_path / "base", {step: nn.Linear(3, 2) for step in (1, 2, 3, 4)}
    for step in (1, 2, 3):
        save(base / "run", step=step, model=models[step], tag="best" if step == 1 else None)
    number, died = 0, True
    while died:
        root, log = tmp_path / f"root-{number}", tmp_path / f"{number}.log"
        shutil.copytree(base, root)
        files = Logged(root, log, own=number)
        try:
            save(root / "run", step=4, model=models[4], keep_last=1, tag="new", files=files)
        except CheckpointError as error:
            assert "killed" in str(error)
        died = files.changes > number
        for mode in MODES if died else ("killed",):
            left = tmp_path / f"left-{number}-{mode}"
            after(base, log, left, mode, random.Random(number))
            _all_load(left / "run", models, (number, mode))
        number += 1
    assert number > 20


def _all_load(run_dir: Path, models: dict[int, nn.Linear], where: object) -> None:
    there, read = steps(run_dir), nn.Linear(3, 2)
    assert there[0] == 1 and there[-1] in (3, 4), where
    for step in there:
        load(run_dir, model=read, step=step)
        assert torch.equal(read.weight, models[step].weight), where
    assert load(run_dir, model=read, tag="best").step == 1 and load(run_dir, model=read).step == there[-1], where
    assert verify(run_dir).damages == [], where
    save(run_dir, step=5, model=read, keep_last=1)
    assert left_over(run_dir) == [] and set(steps(run_dir)) <= {1, 4, 5}, where


def test_a_first_start_is_no_error_where_it_is_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for run_dir in (tmp_path / "not there", tmp_path):
        with pytest.raises(CheckpointError, match=r"has no checkpoint(.|\n)*first start, empty_ok=True"):
            load(run_dir, model=model)
        started = load(run_dir, model=model, empty_ok=True)
        assert (started.step, started.extra, started.path) == (0, {}, run_dir)
    folder = save(tmp_path, step=3, model=model, tag="best")
    assert load(tmp_path, model=model, empty_ok=True).step == 3
    assert load(folder.rename(tmp_path.parent / "copy"), model=model, empty_ok=True).step == 3
    for wrong in ({"step": 3}, {"tag": "best"}):
        with pytest.raises(CheckpointError, match="has no checkpoint"):
            load(tmp_path, model=model, empty_ok=True, **wrong)  # type: ignore[arg-type]
    for path in (tmp_path / "step-00000003", tmp_path / "latest"):
        with pytest.raises(CheckpointError, match="has no checkpoint"):
            load(path, model=model, empty_ok=True)


def _starts(rank: int, n: int, folder: Path) -> list[int]:
    model = wh.parallelize(nn.Linear(2, 2))
    found = [wh.load(folder, model=model, empty_ok=True).step]
    wh.save(folder, step=4, model=model)
    return [*found, wh.load(folder, model=model, empty_ok=True).step]


def test_all_ranks_start_alike(tmp_path: Path) -> None:
    assert world(2, _starts, tmp_path / "run") == [[0, 4]] * 2


def test_a_folder_of_another_form_is_told_from_none(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"has no checkpoint(.|\n)*weights of other forms") as one:
        load(tmp_path, model=nn.Linear(2, 2))
    assert "it does not exist" not in str(one.value)
    with pytest.raises(CheckpointError, match="has no checkpoint: it does not exist"):
        load(tmp_path / "none", model=nn.Linear(2, 2))


def test_a_state_dict_is_no_model(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path, step=1, model=model)
    for run in (lambda m: save(tmp_path, step=2, model=m), lambda m: load(tmp_path, model=m)):
        with pytest.raises(CheckpointError, match=r"model is of OrderedDict(.|\n)*not its state_dict"):
            run(model.state_dict())
