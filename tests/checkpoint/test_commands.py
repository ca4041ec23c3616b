"""python -m whale_torch verify, inspect and diff."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoint.damage import KINDS, damage
from whale_torch.__main__ import main
from whale_torch.checkpoint.inspection.verify import verify
from whale_torch.checkpoint.save import save

ROOT = Path(__file__).parents[2]


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*given: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["whale_torch", *map(str, given)])
        with pytest.raises(SystemExit) as end:
            main()
        assert isinstance(end.value.code, int)
        return end.value.code, *capsys.readouterr()

    return run


def test_verify_reads_all_and_finds_nothing(runs: Path, command: Command) -> None:
    status, out, _ = command("verify", runs / "run")
    assert status == 0 and "2 checkpoints" in out and "all is as it was written" in out
    assert re.search(r"\d B|[kMG]B in \d+\.\d\d s, .*B/s by \d+ threads?; ", out), out
    assert command("verify", runs / "run" / "step-00000001")[0] == 0
    assert command("verify", runs)[0] == command("verify", runs / "nothing")[0] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_verify_names_the_damage(kind: str, runs: Path, tmp_path: Path) -> None:
    for seed in range(10):
        run_dir = tmp_path / str(seed)
        shutil.copytree(runs / "run", run_dir)
        found = damage(kind, run_dir, runs / "other", random.Random(seed))
        told = verify(run_dir, cores=2).damages
        assert told and (kind.startswith("index of") or any(str(found.file) in one for one in told)), (
            seed,
            found,
            told,
        )
        assert len(verify(run_dir / "step-00000001").damages) == 0


def test_verify_names_all_that_is_damaged(tmp_path: Path, command: Command) -> None:
    model = nn.Linear(1500, 1400)
    path = save(tmp_path, step=1, model=model) / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    for offset in (1 << 20, 7 << 20, 20):
        data[offset] ^= 1
    path.write_bytes(data)
    status, out, _ = command("verify", tmp_path)
    assert status == 1 and "3 damages" in out
    assert "chunk 0 of 'model/weight'" in out and "chunk 1 of 'model/weight'" in out and "its header" in out


def test_verify_looks_at_tags(tmp_path: Path) -> None:
    for step, tag in ((1, "best"), (2, "last")):
        save(tmp_path, step=step, model=nn.Linear(2, 2), tag=tag)
    assert not verify(tmp_path).damages
    path = tmp_path / "tags" / "best"
    path.write_bytes(path.read_bytes().replace(b"step-00000001", b"step-00000002"))
    (damage,) = verify(tmp_path).damages
    assert str(path) in damage
    shutil.copy(tmp_path / "tags" / "last", path)
    shutil.rmtree(tmp_path / "step-00000002")
    assert not verify(tmp_path).damages  # as where a job died before its checkpoint was complete


def test_inspect_tells_tensors_and_where_they_lie(runs: Path, command: Command) -> None:
    status, out, _ = command("inspect", runs / "run")
    assert status == 0 and "step 2" in out and "optimizer/groups" in out
    first = next(line for line in out.splitlines() if line.startswith("model/2.weight"))
    assert "float32" in first and "[12, 8]" in first and "[0:6, 0:8]" in first
    status, out, _ = command("inspect", runs / "run" / "step-00000001", "--json")
    found = json.loads(out)
    pieces = found["tensors"]["model/2.weight"]["pieces"]
    assert status == 0 and found["step"] == 1 and [piece["start"] for piece in pieces] == [[0, 0], [6, 0]]


def test_diff_tells_what_differs_and_by_how_much(runs: Path, tmp_path: Path, command: Command) -> None:
    assert command("diff", runs / "run", runs / "other")[:2] == (0, "no difference\n")
    status, out, _ = command("diff", runs / "run" / "step-00000001", runs / "run")
    assert status == 1 and "model/2.weight" in out and "extra" in out and "96 of 96" in out
    model = nn.Linear(2, 3)
    one = save(tmp_path, step=1, model=model)
    with torch.no_grad():
        model.weight[0, 0] += 1.0
        model.bias[0] = float("nan")
    other = save(tmp_path, step=2, model=nn.ModuleDict({"more": nn.Linear(2, 2)}))
    third = save(tmp_path, step=3, model=model)
    status, out, _ = command("diff", one, third)
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert "1 of 6" in lines["model/weight"] and " 1 " in lines["model/weight"] and "inf" in lines["model/bias"]
    status, out, _ = command("diff", one, other)
    assert status == 1 and f"only in {one}" in out and f"only in {other}" in out
    assert command("diff", one, tmp_path / "nothing")[0] == 2


def test_diff_of_large_whole_numbers_and_infinity(tmp_path: Path, command: Command) -> None:
    model = nn.Module()
    model.register_buffer("count", torch.tensor([1 << 60, -(1 << 62), 5]))
    model.register_buffer("mask", torch.tensor([(1 << 64) - 1, 3], dtype=torch.uint64))
    model.register_buffer("loss", torch.tensor([1.0, 2.0]))
    save(tmp_path / "run", step=1, model=model, rng=False)
    model.count[0] += 1
    model.mask = torch.tensor([(1 << 64) - 3, 3], dtype=torch.uint64)
    model.loss[1] = float("inf")
    save(tmp_path / "run", step=2, model=model, rng=False)
    _, out, _ = command("diff", *sorted(tmp_path.glob("run/step-*")))
    assert [line.split() for line in out.splitlines()[1:-1]] == [
        ["model/count", "1", "of", "3", "1", "2.17e-19"],
        ["model/loss", "1", "of", "2", "inf", "inf"],
        ["model/mask", "1", "of", "2", "2", "1.08e-19"],
    ], out


def test_diff_of_nested_values_names_what_differs(tmp_path: Path, command: Command) -> None:
    paths = [
        save(
            tmp_path, step=step, model=nn.Linear(2, 2), extra={"a": {"b": [1, step], "c": 5}, "rest": [0] * 50 + [step]}
        )
        for step in (1, 2)
    ]
    _, out, _ = command("diff", *paths)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "extra/a/b/1 1 and 2" in lines and not any("extra/a/c" in line or "extra/rest/" in line for line in lines)
    assert any(line.startswith("extra/rest [0, 0,") for line in lines)
    assert re.fullmatch(r"\d differences between .*step-00000001 and .*step-00000002", lines[-1]), lines
    assert max(map(len, out.splitlines())) < 250


def test_inspect_of_a_run_tells_its_steps_and_tags(tmp_path: Path, command: Command) -> None:
    for step, tag in ((1, "best"), (2, None)):
        save(tmp_path, step=step, model=nn.Linear(2, 2), tag=tag)
    assert f"{tmp_path} has step 1 (best), step 2\n" in command("inspect", tmp_path)[1]
    found = json.loads(command("inspect", tmp_path, "--json")[1])
    assert found["steps"] == [1, 2] and found["tags"] == {"best": 1}
    assert "best" not in command("inspect", tmp_path / "step-00000001")[1]


def test_verify_of_a_damaged_run_names_what_is_whole(tmp_path: Path, command: Command) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step=step, model=nn.Linear(2, 2))
    (tmp_path / "step-00000002" / "rank-00000.safetensors").unlink()
    status, out, _ = command("verify", tmp_path)
    assert status == 1 and out.endswith("1 damage\nwhole: step-00000001, step-00000003\n"), out


def test_a_terminal_gets_tables(
    runs: Path, command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich", reason="rich is not installed")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    status, out, _ = command("inspect", runs / "run")
    assert status == 0 and "┃" in out and "rank-00001 [6:12, 0:8]" in out and "[0:6, 0:8]" in out and "[12, 8]" in out
    status, out, _ = command("diff", runs / "run" / "step-00000001", runs / "run")
    assert status == 1 and "┃" in out and "96 of 96" in out


def test_sizes_that_are_none_are_told(runs: Path, tmp_path: Path, command: Command) -> None:
    for size in ("nan", "inf", "0", "-1"):
        status, _, told = command("convert", runs / "run", tmp_path / "x", "--to", "safetensors", "--shard-gb", size)
        assert status == 2 and re.search(r"shard-gb is (nan|inf)|shard_bytes is ", told), told


@pytest.mark.parametrize("name", ["verify", "inspect", "diff", "convert"])
def test_help_tells_the_exit_status(name: str, command: Command) -> None:
    status, out, _ = command(name, "--help")
    assert status == 0 and "Exit status: 0" in out and re.search("and 2|2 without", " ".join(out.split()))


def test_as_a_command(runs: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "whale_torch", "verify", str(runs / "run")],
        capture_output=True, text=True, timeout=100, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr and "all is as it was written" in done.stdout


def test_nobody_has_to_read_to_the_end(runs: Path) -> None:
    command = f"{sys.executable} -W error -m whale_torch inspect {runs / 'run'} | head -0"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=100, cwd=ROOT, check=False
    )  # fmt: skip
    assert not done.stderr
