"""Indexes that someone changed by hand, with a right checksum: each is refused by name before anything changes."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale_torch as wh
from whale_torch.checkpoint.inspection.verify import verify
from whale_torch.checkpoint.payload import checksum
from whale_torch.checkpoint.seal import seal
from whale_torch.errors import CheckpointError, WhaleError

SEEDS = 400
BLOCKS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.embed(x)))
        return out


def _training(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.arange(5)).square().mean().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    of = _training(0)
    extra = {"t": torch.arange(3), "names": ("a", {1: 2.5}), "seen": {3, 4}}
    return wh.save(tmp_path_factory.mktemp("saved"), step=7, extra=extra, **of)


def _edited(folder: Path, to: Path, change: Callable[[Any], Any]) -> Path:
    """A copy whose index was changed, with a right checksum; `change` may give another index, or a text."""
    shutil.copytree(folder, to / folder.name)
    index = json.loads((folder / "index.json").read_text())
    del index["checksum"]
    other = change(index)
    other = index if other is None else other
    text = other if isinstance(other, str) else json.dumps(other)
    (to / folder.name / "index.json").write_bytes(seal(text))
    return to / folder.name


def _image(of: dict[str, Any]) -> list[Any]:
    """All that a load may change."""
    state = [*of["model"].state_dict().values(), torch.get_rng_state()]
    state += [v for one in of["optimizer"].state.values() for v in one.values()]
    options = [{k: v for k, v in group.items() if k != "params"} for group in of["optimizer"].param_groups]
    return [[value.clone() for value in state], copy.deepcopy(options)]


def _alike(a: list[Any], b: list[Any]) -> bool:
    same = len(a[0]) == len(b[0]) and all(map(torch.equal, a[0], b[0]))
    return same and repr(a[1]) == repr(b[1])


TENSOR = "model/embed.weight"


def _tensor(index: Any) -> Any:
    return index["tensors"][TENSOR]


def _piece(index: Any) -> Any:
    return _tensor(index)["pieces"][0]


def _set(**values: Any) -> Callable[[Any], None]:
    return lambda index: _piece(index).update(values)


def _cut(index: Any) -> None:
    """Two pieces that overlap in a row, and leave another out."""
    piece = _piece(index)
    parts = [copy.deepcopy(piece) for _ in range(2)]
    parts[0]["box"], parts[1]["box"] = [[0, 0], [3, 4]], [[2, 0], [2, 4]]
    parts[1]["offset"] += 3 * 16
    _tensor(index)["pieces"] = parts


def _huge(index: Any, elements: int = 1 << 60) -> None:
    """Of an extra value, for which a load makes memory."""
    index["tensors"]["extra/t"]["shape"] = [elements]
    index["tensors"]["extra/t"]["pieces"][0]["box"] = [[0], [elements]]


def _huge_file(index: Any) -> None:
    """And the file is said to be as large."""
    _huge(index, 1 << 57)
    (name,) = index["files"]
    index["files"][name][0] = 1 << 62


def _bytes_of_another(index: Any) -> None:
    _piece(index)["offset"] = index["tensors"]["model/norm.weight"]["pieces"][0]["offset"]


def _renamed(name: str) -> Callable[[Any], None]:
    def change(index: Any) -> None:
        (file,) = index["files"]
        index["files"][name] = index["files"].pop(file)
        for stored in index["tensors"].values():
            for piece in stored["pieces"]:
                piece["file"] = name

    return change


def _tie(**ties: str) -> Callable[[Any], None]:
    def change(index: Any) -> None:
        index["ties"] = {f"model/{a}.weight": f"model/{b}.weight" for a, b in ties.items()}

    return change


def _value(key: str, value: Any) -> Callable[[Any], None]:
    return lambda index: index["values"].update({key: value})


def _deep(index: Any) -> str:
    deep = "[" * 100_000 + "]" * 100_000
    return json.dumps(index).replace('"extra":', f'"deep": {deep}, "extra":')


def _nested(index: Any) -> str:
    deep = '{"__kind__":"tuple","value":[' * 450 + "]}" * 450
    return json.dumps(index).replace('"extra":', f'"extra": {{"x": {deep}}}, "former extra":')


CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "negative start": (_set(box=[[-1, 0], [5, 4]]), f"'{TENSOR}' has piece 0, which has box [[-1, 0], [5, 4]]"),
    "negative size": (_set(box=[[0, 0], [-5, 4]]), f"'{TENSOR}' has piece 0, which has box"),
    "a box beyond the shape": (_set(box=[[1, 0], [5, 4]]), "has piece 0, which reaches beyond shape [5, 4]"),
    "a box of other dims": (_set(box=[[0], [20]]), f"'{TENSOR}' has piece 0, which has box [[0], [20]]"),
    "a box of numbers": (_set(box=[0, 5]), "which has box [0, 5]"),
    "a smaller box": (_set(box=[[0, 0], [4, 4]]), f"'{TENSOR}' has pieces of 16 elements, and shape [5, 4]"),
    "boxes that overlap": (_cut, f"'{TENSOR}' has pieces that overlap"),
    "bytes of another": (_bytes_of_another, "has bytes of both 'model/"),
    "beyond the file": (_set(offset=1 << 40), f"'{TENSOR}' has piece 0, which lies at {1 << 40} with 80 bytes"),
    "before the data": (_set(offset=0), f"'{TENSOR}' has piece 0, which lies at 0"),
    "a negative offset": (_set(offset=-8), f"'{TENSOR}' has piece 0, which lies at -8"),
    "an offset of another kind": (_set(offset=1.0), f"'{TENSOR}' has piece 0, which lies at 1.0"),
    "a huge shape": (_huge, "'extra/t' has piece 0, which lies at"),
    "a huge file": (_huge_file, f"'extra/t' has piece 0, which has 1 checksums for {1 << 38} chunks"),
    "a shape beyond addresses": (lambda i: _tensor(i).update(shape=[1 << 40, 1 << 40]), "has shape [1099511627776,"),
    "a negative shape": (lambda i: _tensor(i).update(shape=[-5, -4]), f"'{TENSOR}' has shape [-5, -4]"),
    "a shape of booleans": (lambda i: _tensor(i).update(shape=[True, 20]), f"'{TENSOR}' has shape [True, 20]"),
    "no pieces": (lambda i: _tensor(i).update(pieces=[]), f"'{TENSOR}' has pieces of 0 elements"),
    "an unknown dtype": (lambda i: _tensor(i).update(dtype="float3"), f"'{TENSOR}' has dtype 'float3'"),
    "a dtype that is a function": (lambda i: _tensor(i).update(dtype="save"), f"'{TENSOR}' has dtype 'save'"),
    "a wider dtype": (lambda i: _tensor(i).update(dtype="complex128"), "has bytes of both"),
    "no checksums": (_set(checksums=[]), f"'{TENSOR}' has piece 0, which has 0 checksums for 1 chunks"),
    "more checksums": (_set(checksums=[1, 2]), f"'{TENSOR}' has piece 0, which has 2 checksums for 1 chunks"),
    "a checksum too large": (_set(checksums=[1 << 32]), f"'{TENSOR}' has piece 0, which has checksums that are none"),
    "a file that is not there": (_set(file="rank-00009.safetensors"), "has piece 0, which lies in 'rank-00009"),
    "a file above": (_renamed("../../rank-00000.safetensors"), "'../../rank-00000.safetensors' is no name of a file"),
    "an absolute file": (_renamed("/etc/passwd.safetensors"), "'/etc/passwd.safetensors' is no name of a file"),
    "a hidden file": (_renamed(".safetensors"), "'.safetensors' is no name of a file"),
    "a file with a null": (_renamed("a\0.safetensors"), "is no name of a file"),
    "a header as large as the file": (lambda i: i["files"].update({k: [9, 10, 0] for k in i["files"]}), "its header"),
    "a tie to nothing": (_tie(head="nothing"), "'model/head.weight' is tied to 'model/nothing.weight'"),
    "ties in a ring": (_tie(a="b", b="a"), "'model/a.weight' is tied to 'model/b.weight', which is no tensor"),
    "a tie of a tensor": (_tie(embed="norm"), f"'{TENSOR}' is a tensor, and tied to"),
    "an unknown kind": (_value("extra", {"a": {"__kind__": "call"}}), "'extra' holds a value of kind 'call'"),
    "a kind of another kind": (_value("extra", {"a": [{"__kind__": [1]}]}), "'extra' holds a value of kind [1]"),
    "a tensor that is not there": (_value("extra", {"__kind__": "tensor", "key": "x"}), "'extra' holds the tensor 'x'"),
    "a float that is none": (_value("extra", {"a": {"__kind__": "float", "value": "x"}}), "'extra': a value"),
    "bytes that are none": (_value("extra", {"a": {"__kind__": "bytes", "value": "?"}}), "'extra': a value"),
    "extra that is no dict": (_value("extra", [1]), "'extra' is no dict"),
    "extra that is none once read": (_value("extra", {"__kind__": "float", "value": "nan"}), "'extra' is no dict"),
    "values nested too deep": (_nested, "nested too deep"),
    "a text nested too deep": (_deep, "RecursionError"),
    "feeds that are none": (_value("feeds", [[2, 1]]), "'feeds' is no list of feeds"),
    "names of another kind": (_value("by_rank", [{}]), "'by_rank' is no list of names"),
    "groups without options": (_value("optimizer/groups", [{"params": []}]), "'optimizer/groups' has a group without"),
    "a random state that is none": (_value("rng", {"torch": 1}), "random state is none"),
    "chunks of another size": (lambda i: i.update(chunk_bytes=1), "has chunks of 1 bytes"),
    "no step": (lambda i: i.update(step="7"), "has step '7'"),
    "no tensors": (lambda i: i.pop("tensors") and None, "has no tensors"),
    "a list": (lambda i: "[1}", "cannot be read as an index"),
    "another format": (lambda i: i.update(format="x"), "is of format 'x'"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_makes_no_sense_is_refused(name: str, saved: Path, tmp_path: Path) -> None:
    change, text = CASES[name]
    folder = _edited(saved, tmp_path, change)
    of = _training(1)
    before = _image(of)
    with pytest.raises(CheckpointError) as caught:
        wh.load(folder, **of)
    assert text in str(caught.value)
    assert str(folder) in str(caught.value)
    assert _alike(_image(of), before)
    if "index.json" in str(caught.value):
        assert verify(folder).damages


def test_an_index_that_is_no_text(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / saved.name)
    path = tmp_path / saved.name / "index.json"
    sealed = bytearray(seal('{"a":"bb"}'))
    sealed[6:8] = b"\xff\xfe"
    body = sealed[: -len(b',"checksum":"01234567"}')]
    path.write_bytes(bytes(body) + b',"checksum":"%08x"}' % checksum(memoryview(body)))
    with pytest.raises(CheckpointError, match=r"index\.json is no text"):
        wh.load(tmp_path / saved.name, **_training(1))


@pytest.mark.parametrize("text", ['{"checkpoints":[["../../x","1"]]}', '{"a":1}', '{"checkpoints":[1]}'])
def test_pointers_that_are_none(text: str, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / saved.name)
    (tmp_path / "latest").write_bytes(seal(text))
    with pytest.raises(CheckpointError, match="latest is no pointer that is written here"):
        wh.load(tmp_path, **_training(1))
    wh.load(tmp_path / saved.name, **_training(1))


ODD: list[Any] = [
    None, True, False, 0, 1, -1, 7, 1 << 31, 1 << 60, 1 << 70, 1.5, -0.0, "", "x", "../x", "float64", "\ud800", [], [0],
    [[0], [1]], [[1, 0], [4, 4]], {}, {"__kind__": "tensor", "key": TENSOR}, {"__kind__": "dict", "value": [[[], 1]]},
    {"__kind__": "set", "value": [[1]]}, {"__kind__": "float", "value": "nan"}, {"__kind__": "numpy", "value": 1},
]  # fmt: skip


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """All places of an index, each in what holds it."""
    found = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            for key in one if isinstance(one, dict) else range(len(one)):
                found.append((one, key))
                waiting.append(one[key])
    return found


def _change(index: Any, draw: random.Random) -> None:
    places = _nodes(index)
    inside, key = draw.choice(places)
    how = draw.randrange(6)
    if how == 0:
        del inside[key]
    elif how == 1:
        other, at = draw.choice(places)
        inside[key] = copy.deepcopy(other[at])
    elif how == 2 and isinstance(inside[key], int):
        inside[key] += draw.choice([-1, 1, 4, 1 << 32])
    elif how == 3 and isinstance(inside, dict):
        inside[draw.choice(["x", TENSOR, "__kind__", "ranks/0/rng", ""])] = inside.pop(key)
    elif how == 4 and isinstance(inside, list):
        inside.append(copy.deepcopy(inside[key]))
    else:
        inside[key] = copy.deepcopy(draw.choice(ODD))


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_changes_by_chance(block: int, saved: Path, tmp_path: Path) -> None:
    """A load refuses them and changes nothing, or loads what is still a checkpoint."""
    refused = 0
    of = _training(1)
    before = _image(of)
    for seed in range(block, SEEDS, BLOCKS):
        draw = random.Random(seed)

        def change(index: Any, draw: random.Random = draw) -> None:
            for _ in range(draw.randint(1, 2)):
                _change(index, draw)

        folder = _edited(saved, tmp_path / str(seed), change)
        try:
            wh.load(folder, **of)
        except WhaleError as error:
            refused += 1
            assert _alike(_image(of), before), (seed, error)
        else:
            of = _training(1)
            torch.manual_seed(1)
            before = _image(of)
        shutil.rmtree(tmp_path / str(seed))
    assert refused > SEEDS // BLOCKS // 2
