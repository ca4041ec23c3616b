"""Files that are damaged or hostile: nothing runs, nothing hangs, little is allocated, and the error names the file."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import random
import resource
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from whale_torch.checkpoint.convert import convert
from whale_torch.checkpoint.formats.opened import open_source
from whale_torch.checkpoint.save import save
from whale_torch.errors import CheckpointError

CASES = 60  # of each kind of file
SECONDS = 2.0  # for one of them
ROOM = 1 << 30  # bytes that may be allocated

Make = Callable[[Path], Path]


class Runs:
    """Reduces to a call that makes a file."""

    def __init__(self, call: Any, *arguments: Any):
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "a file made code run"


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def read_all(path: Path) -> None:
    """Either it can be read, or the error names it."""
    start = time.process_time()
    try:
        source = open_source(path)
        for entry in source.tensors.values():
            entry.read()
        if source.values:
            convert(path, path.with_name("out"), "torch")
    except CheckpointError as error:
        assert any(part in error.what for part in (str(path), *(one.name for one in files_of(path)))), error.what
    finally:
        shutil.rmtree(path.with_name("out"), ignore_errors=True)
    assert time.process_time() - start < SECONDS


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]


TENSORS = {"a.weight": torch.arange(12.0).view(3, 4), "a.bias": torch.ones(3).bfloat16(), "n": torch.tensor(4)}


def safetensors(folder: Path) -> Path:
    save_file(TENSORS, folder / "n.safetensors")
    return folder / "n.safetensors"


def hugging_face(folder: Path) -> Path:
    save_file({"a.weight": TENSORS["a.weight"]}, folder / "model-1.safetensors")
    save_file({"n": TENSORS["n"]}, folder / "model-2.safetensors")
    told = {"a.weight": "model-1.safetensors", "n": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": told}))
    return folder


def torch_file(folder: Path) -> Path:
    torch.save({"model": TENSORS, "step": 3}, folder / "n.pt")
    return folder / "n.pt"


def dcp(folder: Path) -> Path:
    from torch.distributed import checkpoint

    state = {"model": TENSORS, "optimizer": {"state": {"a.weight": {"exp_avg": torch.ones(3, 4)}}, "lr": 0.1}}
    checkpoint.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def megatron(folder: Path) -> Path:
    at = folder / "iter_0000001/mp_rank_00"
    at.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    model = {"embedding.word_embeddings.weight": torch.ones(4, 2), "decoder.final_layernorm.weight": torch.ones(2)}
    saved = {"args": argparse.Namespace(num_attention_heads=1), "iteration": 1, "model": model}
    state = {number: {"exp_avg": torch.ones_like(one)} for number, one in enumerate(model.values())}
    groups = [{"params": [0], "wd_mult": 1.0}, {"params": [1], "wd_mult": 0.0}]
    torch.save({**saved, "optimizer": {"state": state, "param_groups": groups}}, at / "model_optim_rng.pt")
    return folder


def deepspeed(folder: Path) -> Path:
    shapes = [{"a": torch.Size([2, 3])}]
    model = {"module": {"a": torch.ones(2, 3).half()}, "param_shapes": shapes, "global_steps": 1, "shared_params": {}}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    base = {"state": {0: {"exp_avg": torch.ones(6), "step": 1}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    told = {"single_partition_of_fp32_groups": [torch.ones(6)], "zero_stage": 1, "partition_count": [1]}
    path = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": {**told, "base_optimizer_state": base}}, path)
    return folder


def all_of_it(folder: Path) -> Path:
    """A folder of torch with an optimizer, a schedule and random states."""
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    save(folder / "run", step=1, model=net, optimizer=optimizer, extra={"a": torch.ones(2)}, schedule=schedule)
    convert(folder / "run", folder / "torch", "torch")
    return folder / "torch"


def changed(data: bytes, chance: random.Random) -> bytes:
    """A few bytes are others, are gone, or are there twice; numbers become large."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at, kind = chance.randrange(max(1, len(found))), chance.random()
        if kind < 0.5:
            found[at : at + 1] = bytes([chance.randrange(256)])
        elif kind < 0.65:
            found[at : at + chance.randrange(1, 9)] = b""
        elif kind < 0.8:
            found[at:at] = found[at : at + chance.randrange(1, 40)]
        elif kind < 0.9:
            found[at : at + 8] = chance.choice((b"\xff" * 8, (1 << 60).to_bytes(8, "little"), b"99999999"))
        else:
            del found[at:]
    return bytes(found)


def whole(path: Path, chance: random.Random) -> None:
    path.write_bytes(changed(path.read_bytes(), chance))


def inside(path: Path, chance: random.Random) -> None:
    """Of a file of torch.save the pickle, in a zip file that is whole."""
    if not zipfile.is_zipfile(path):
        whole(path, chance)
        return
    with zipfile.ZipFile(path) as archive:
        records = {one: archive.read(one) for one in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            archive.writestr(name, changed(data, chance) if name.endswith("data.pkl") else data)


def header(path: Path, chance: random.Random) -> None:
    """Of a safetensors file the header's text, and its length as it then is."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    told = json.loads(data[8 : 8 + size])
    replaced(told, chance)
    text = json.dumps(told).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def values(path: Path, chance: random.Random) -> None:
    told = json.loads(path.read_text())
    replaced(told, chance)
    path.write_text(json.dumps(told))


def inner(path: Path, chance: random.Random) -> None:
    saved = torch.load(path)
    told = json.loads(saved["whale_torch"]["index"])
    replaced(told, chance)
    saved["whale_torch"]["index"] = json.dumps(told)
    torch.save(saved, path)


ODD = (None, -1, 1 << 60, 1 << 200, 1e308, "", "x", "../n.safetensors", "/etc/passwd", [], [1 << 60, 1 << 60], {}, True,
       "\x00", "a/../../b", [[[]]], {"a": {"b": {}}}, "F64", "model-1.safetensors", float("nan"))  # fmt: skip


def replaced(tree: Any, chance: random.Random) -> None:
    """One value somewhere in it is another."""
    places = []
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one))
        places += [(one, key) for key in keys]
        waiting += [one[key] for key in keys if isinstance(one[key], dict | list)]
    holder, key = chance.choice(places)
    holder[key] = chance.choice(ODD)


KINDS: dict[str, tuple[Make, Callable[[Path, random.Random], None], str]] = {
    "safetensors": (safetensors, whole, "*"),
    "safetensors' header": (safetensors, header, "*"),
    "index of Hugging Face": (hugging_face, values, "*.json"),
    "index of Hugging Face, bytes": (hugging_face, whole, "*.json"),
    "file of torch.save": (torch_file, whole, "*"),
    "pickle of torch.save": (torch_file, inside, "*"),
    "metadata of DCP": (dcp, whole, ".metadata"),
    "files of DCP": (dcp, whole, "*.distcp"),
    "pickles of Megatron": (megatron, inside, "*.pt"),
    "pickles of DeepSpeed": (deepspeed, inside, "*.pt"),
    "index in a folder of torch": (all_of_it, inner, "extra.pt"),
    "files of DeepSpeed": (deepspeed, whole, "*.pt"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.matrix(keep=1)
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_are_read_or_named(kind: str, tmp_path: Path, canary: Path) -> None:
    make, change, pattern = KINDS[kind]
    path = make(tmp_path)
    read_all(path)
    kept = {one: one.read_bytes() for one in files_of(path)}
    for case in range(CASES):
        chance = random.Random(f"{kind} {case}")
        chosen = chance.choice(sorted(one for one in kept if path == one or one.match(pattern)))
        change(chosen, chance)
        read_all(path)
        for one, data in kept.items():
            one.write_bytes(data)


def hostile(canary: Path) -> list[Any]:
    """Objects whose pickles call something that makes a file."""
    text = f"open({str(canary)!r}, 'w').close()"
    return [
        Runs(os.system, f"touch {canary}"),
        Runs(eval, text),
        Runs(exec, text),
        Runs(os.mkdir, str(canary)),
        Runs(getattr, Runs(__import__, "os"), "system"),
        Runs(torch.save, {}, str(canary)),
        Runs(torch.load, str(canary)),
        Runs(map, eval, [text]),
        Runs(torch.ops.load_library, str(canary)),
        Runs(argparse.FileType("w"), str(canary)),
        Runs(argparse._sys.modules.__getitem__, "os"),  # type: ignore[attr-defined]
        Runs(io.open, str(canary), "w"),
    ]


@pytest.mark.parametrize("place", ["torch", "dcp", "megatron", "deepspeed", "extra", "universal"])
@pytest.mark.filterwarnings("ignore")
def test_no_pickle_runs(place: str, tmp_path: Path, canary: Path) -> None:
    for number, evil in enumerate(hostile(canary)):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            pickle.dumps(evil)
        except (pickle.PicklingError, TypeError, AttributeError):
            continue
        if place == "torch":
            path = folder / "n.pt"
            torch.save({"model": {**TENSORS, "evil": evil}}, path)
        elif place == "extra":
            path = folder
            torch.save(TENSORS, folder / "model.pt")
            torch.save({"step": 1, "extra": evil}, folder / "extra.pt")
        elif place == "dcp":
            path = folder / "dcp"
            path.mkdir()
            (path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": evil}))
        elif place == "universal":
            path = folder / "global_step1_universal"
            (path / "zero/a").mkdir(parents=True)
            torch.save({"param": evil}, path / "zero/a/fp32.pt")
        else:
            path = (megatron if place == "megatron" else deepspeed)(folder)
            (file, *_) = sorted(path.rglob("*.pt"))
            torch.save({**torch.load(file, weights_only=False), "args": evil, "module": evil}, file)
        with pytest.raises(CheckpointError, match=r"could run code|damaged|cannot be read") as raised:
            convert(path, folder / "out", "torch")
        assert any(one.name in str(raised.value) for one in files_of(path))
        assert number or "could run code" in str(raised.value)
    assert not canary.exists()


def test_sizes_that_files_do_not_have(tmp_path: Path) -> None:
    claims = {"a": {"dtype": "F32", "shape": [1 << 58], "data_offsets": [0, 1 << 60]}}
    text = json.dumps(claims).encode()
    (tmp_path / "data.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    (tmp_path / "header.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + text)
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data.pkl", bytes(1 << 26))
    for name, told in (
        ("data.safetensors", "reaches to byte"),
        ("header.safetensors", "header would have 1152921504606846976 bytes"),
        ("bomb.pt", "is compressed"),
    ):
        with pytest.raises(CheckpointError, match=told) as raised:
            open_source(tmp_path / name)
        assert name in str(raised.value)


def test_names_lead_nowhere_else(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "secret.safetensors")
    torch.save(TENSORS, tmp_path / "secret.bin")
    for number, name in enumerate(("../secret", str(tmp_path / "secret"), "a/../../secret", "..", "", "\x00")):
        for index, ending in (
            ("model.safetensors.index.json", ".safetensors"),
            ("pytorch_model.bin.index.json", ".bin"),
        ):
            folder = tmp_path / f"{number}{ending}"
            folder.mkdir()
            (folder / index).write_text(json.dumps({"weight_map": {"n": name + ending if name else name}}))
            with pytest.raises(CheckpointError) as raised:
                open_source(folder)
            assert str(folder) in str(raised.value)
    # a link is the user's own, and is followed
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    assert open_source(tmp_path / "linked").tensors.keys() == {f"model/{name}" for name in TENSORS}
