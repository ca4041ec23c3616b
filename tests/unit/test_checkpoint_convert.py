"""Conversions: round trips are bit-equal, ties come back, what is damaged or hostile is named, memory stays small."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import whale_torch as wh
from tests.world import world
from whale_torch.checkpoint.boxes import Box, blocks
from whale_torch.checkpoint.convert import convert
from whale_torch.checkpoint.formats import targets
from whale_torch.checkpoint.formats.opened import open_source
from whale_torch.checkpoint.formats.source import Composed, InMemory, Part, Reshaped
from whale_torch.checkpoint.formats.unread import Unread
from whale_torch.checkpoint.inspection.difference import difference
from whale_torch.checkpoint.load import load
from whale_torch.checkpoint.plain import load_weights, read_weights
from whale_torch.checkpoint.save import save
from whale_torch.checkpoint.values import tensors_in
from whale_torch.errors import CheckpointError

ROOT = Path(__file__).parents[2]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.low = nn.Embedding(50, 16), nn.Linear(16, 16).bfloat16()
        self.head, self.norm = nn.Linear(16, 50, bias=False), nn.BatchNorm1d(16)
        self.register_buffer("empty", torch.empty(0, 3))
        self.head.weight = self.words.weight


def trained(seed: int = 0) -> tuple[Net, torch.optim.Adam]:
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return net, optimizer


def saved(folder: Path) -> Path:
    net, optimizer = trained()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    extra = {"seen": 3, "ids": torch.arange(3)}
    save(folder / "run", step=7, model=net, optimizer=optimizer, extra=extra, schedule=schedule)
    return folder / "run"


def assert_same(one: Path, other: Path, *, model_only: bool = False) -> None:
    a, b = open_source(one), open_source(other)
    keys = {key for key in a.tensors if not model_only or key.startswith("model/")}
    assert keys == set(b.tensors)
    for key in keys:
        x, y = a.tensors[key].read(), b.tensors[key].read()
        assert x.dtype == y.dtype and torch.equal(x, y), key
    assert a.ties == b.ties
    if not model_only:
        assert (a.values, a.step) == (b.values, b.step)


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_whole_checkpoints_there_and_back(form: str, tmp_path: Path) -> None:
    run = saved(tmp_path)
    assert convert(run, tmp_path / "other", form).left_out == []
    assert_same(run, tmp_path / "other")
    convert(tmp_path / "other", tmp_path / "back", "whale")
    assert_same(run, tmp_path / "back")
    net, optimizer = trained(1)
    loaded = load(tmp_path / "back", model=net, optimizer=optimizer)
    expected = trained()
    assert loaded.step == 7 and loaded.extra["seen"] == 3
    for mine, theirs in zip(net.parameters(), expected[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert all(torch.equal(v, expected[1].state[theirs][k]) for k, v in optimizer.state[mine].items())


class Noted(nn.Linear):
    """With states of its own: a tensor, and tensors among plain data."""

    note: Any = torch.tensor([3, 4])

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def several(seed: int, place: int = 0) -> dict[str, Any]:
    """Two models, an average, an optimizer each, groups whose options are tensors, and a state of each rank."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"one": Noted(3, 3), "two": Noted(3, 2)})
    model["two"].note = {"scale": torch.randn(2), "list": (1, [torch.randn(3)]), "array": numpy.arange(3)}
    critic, average = nn.Linear(3, 1), torch.optim.swa_utils.AveragedModel(nn.Linear(3, 3))
    made = {
        "one": torch.optim.Adam(model["one"].parameters(), lr=torch.tensor(0.1)),
        "two": torch.optim.SGD([{"params": [p], "lr": 0.1 + p.dim()} for p in model["two"].parameters()], momentum=0.9),
    }
    parts = {"model": model, "optimizer": made, "critic": critic, "average": average}
    parts["of_critic"] = torch.optim.AdamW(critic.parameters())
    for optimizer in (*made.values(), parts["of_critic"]):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn_like(p)
        optimizer.step()
    parts["schedule"] = torch.optim.lr_scheduler.StepLR(made["two"], 2)
    return parts | {"loader": Loader(place)}


class Loader:
    def __init__(self, place: int):
        self.state = {"place": place, "order": torch.arange(place), 3: {1.5, 2.5}, "shape": torch.Size([2])}

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


def save_all(rank: int, n: int, folder: str) -> None:
    parts = several(0, rank + 3)
    wh.parallelize(parts["model"])
    torch.manual_seed(rank)
    numpy.random.seed(rank)
    save(Path(folder), step=4, extra={"array": numpy.ones(2), "pair": (1, None)}, **parts)


def load_all(rank: int, n: int, folder: str) -> list[dict[str, Any]]:
    found = []
    for name in ("from torch", "from dcp"):
        parts = several(1)
        wh.parallelize(parts["model"])
        loaded = load(Path(folder, name), **parts)
        assert loaded.rng == "restored" and loaded.extra["pair"] == (1, None)
        assert loaded.extra["array"].tolist() == [1, 1]
        assert parts["loader"].state["place"] == rank + 3 and len(parts["loader"].state["order"]) == rank + 3
        found.append(whole(parts))
    return found


def whole(parts: dict[str, Any]) -> dict[str, Any]:
    """State dicts of all but what differs between ranks."""
    parts = {name: one for name, one in parts.items() if name not in ("optimizer", "loader")} | parts["optimizer"]
    return {name: one.state_dict() for name, one in parts.items()}


def test_all_that_ranks_save_there_and_back(tmp_path: Path) -> None:
    world(2, save_all, str(tmp_path / "run"))
    for form in ("torch", "dcp"):
        assert convert(tmp_path / "run", tmp_path / form, form).left_out == []
        assert_same(tmp_path / "run", tmp_path / form)
        convert(tmp_path / form, tmp_path / f"from {form}", "whale")
        assert_same(tmp_path / "run", tmp_path / f"from {form}")
    for found in world(2, load_all, str(tmp_path)):
        for one in found:
            assert_equal(one, whole(several(0)), "")


def assert_equal(one: Any, other: Any, path: str) -> None:
    if isinstance(other, torch.Tensor | numpy.ndarray):
        assert type(one) is type(other) and one.dtype == other.dtype and (one == other).all(), path
    elif isinstance(other, dict):
        assert one.keys() - {"param_names"} == other.keys(), path
        for key in other:
            assert_equal(one[key], other[key], f"{path}/{key}")
    elif isinstance(other, list | tuple):
        assert len(one) == len(other)
        for number, (x, y) in enumerate(zip(one, other, strict=True)):
            assert_equal(x, y, f"{path}/{number}")
    else:
        assert one == other, path


def test_a_folder_of_torch_is_what_torch_reads(tmp_path: Path) -> None:
    save_all(0, 1, str(tmp_path / "run"))
    convert(tmp_path / "run", tmp_path / "folder", "torch")
    expected, other = several(0), several(1)
    for name, state in torch.load(tmp_path / "folder/optimizer.pt").items():
        other["optimizer"][name].load_state_dict(state)
        assert_equal(other["optimizer"][name].state_dict(), expected["optimizer"][name].state_dict(), name)
    rest = torch.load(tmp_path / "folder/extra.pt")
    assert rest["step"] == 4 and rest["extra"]["pair"] == (1, None)
    for name in ("critic", "average", "of_critic", "schedule"):
        other[name].load_state_dict(rest["states"][name])
        assert_equal(other[name].state_dict(), expected[name].state_dict(), name)
    state = torch.load(tmp_path / "folder/model.pt")
    assert_equal(state["two._extra_state"]["list"], expected["model"]["two"].note["list"], "")


@pytest.mark.parametrize("form", ["whale", "torch", "dcp"])
def test_names_change_in_all_that_is_saved(form: str, tmp_path: Path) -> None:
    save_all(0, 1, str(tmp_path / "run"))
    rename = {r"two\.(.*)": r"body.\1", r"module\.weight": "mean", "bias": "shift"}
    convert(tmp_path / "run", tmp_path / "new", form, rename=rename)
    found = open_source(tmp_path / "new")
    for key in ("model/body.weight", "optimizer/@two/body.bias/momentum_buffer", "states/average/mean",
                "states/critic/shift", "states/of_critic/states/critic/shift/exp_avg",
                "model/body._extra_state/list/1/0"):  # fmt: skip
        assert key in found.tensors, key
    assert found.values["optimizer/@two/groups"][0]["params"] == ["body.weight"]
    assert found.values["states/of_critic/groups"][0]["params"] == ["states/critic/weight", "states/critic/shift"]
    assert set(tensors_in(list(found.values.values()))) <= found.tensors.keys()
    back = {r"body\.(.*)": r"two.\1", "mean": r"module.weight", "shift": "bias"}
    convert(tmp_path / "new", tmp_path / "old", "whale", rename=back)
    assert_same(tmp_path / "run", tmp_path / "old")


@pytest.mark.parametrize(("form", "name"), [("safetensors", "n.safetensors"), ("torch", "n.pt"), ("dcp", "dcp")])
def test_an_extra_state_that_is_a_tensor(form: str, name: str, tmp_path: Path) -> None:
    net = nn.Sequential(Noted(2, 2))
    net[0].note = torch.randn(3)
    save(tmp_path / "run", step=1, model=net, rng=False)
    assert convert(tmp_path / "run", tmp_path / name, form).left_out == []
    convert(tmp_path / name, tmp_path / "back", "whale", step=1)
    other = nn.Sequential(Noted(2, 2))
    load(tmp_path / "back", model=other)
    assert torch.equal(other[0].note, net[0].note)
    again = nn.Sequential(Noted(2, 2))
    load_weights(again, read_weights(tmp_path / name, again))
    assert torch.equal(again[0].note, net[0].note) and type(again[0].note) is torch.Tensor
    net[0].note = {"scale": torch.randn(2)}
    save(tmp_path / "run", step=2, model=net, rng=False)
    weights = read_weights(tmp_path / "run", again)
    load_weights(again, weights)
    assert torch.equal(again[0].note["scale"], net[0].note["scale"])


def test_weights_of_a_tie_that_differ(tmp_path: Path) -> None:
    net = trained()[0]
    state = {key: value.clone() for key, value in net.state_dict().items()}
    save_file(state, tmp_path / "n.safetensors")
    assert read_weights(state, net) is state
    read_weights(tmp_path / "n.safetensors", net)
    state["head.weight"][3, 2] += 1
    save_file(state, tmp_path / "n.safetensors")
    for weights in (state, tmp_path / "n.safetensors"):
        with pytest.raises(CheckpointError, match=r"words\.weight and head\.weight are one tensor .* values differ"):
            read_weights(weights, net)


def test_a_tie_of_two_tensors(tmp_path: Path) -> None:
    state = trained()[0].state_dict()
    save_file({key: value.clone() for key, value in state.items()}, tmp_path / "n.safetensors")
    convert(tmp_path / "n.safetensors", tmp_path / "run", "whale", step=1)
    net = trained(1)[0]
    load(tmp_path / "run", model=net)
    assert torch.equal(net.head.weight, state["words.weight"]) and net.head.weight is net.words.weight
    state = {key: value + (key == "head.weight") for key, value in state.items()}
    save_file(state, tmp_path / "other.safetensors")
    convert(tmp_path / "other.safetensors", tmp_path / "run", "whale", step=2)
    with pytest.raises(CheckpointError, match=r"head.weight and words.weight are one tensor .*, and their values diff"):
        load(tmp_path / "run", model=net)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_options_by_names_of_parameters(tmp_path: Path) -> None:
    """As torch's flatten_optimizer_state_dict writes them."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    net = trained()[0]
    parameters = list(net.parameters())
    optimizer = torch.optim.Adam([{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:]}])
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    model, optim = get_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": model, "optimizer": optim}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "run", "whale", step=1)
    other = trained(1)[0]
    parameters = list(other.parameters())
    theirs = torch.optim.Adam([{"params": parameters[:2]}, {"params": parameters[2:]}])
    load(tmp_path / "run", model=other, optimizer=theirs)
    assert [group["lr"] for group in theirs.param_groups] == [0.5, 0.001]
    assert_equal(theirs.state_dict()["state"], optimizer.state_dict()["state"], "")


@pytest.mark.parametrize(
    ("form", "name"), [("safetensors", "n.safetensors"), ("safetensors", "many"), ("torch", "n.pt")]
)
def test_models_there_and_back(form: str, name: str, tmp_path: Path) -> None:
    run = saved(tmp_path)
    done = convert(run, tmp_path / name, form, shard_bytes=1500)
    assert done.left_out == ["optimizer", "extra", "states", "rng"] and done.num_tensors == 9
    assert_same(run, tmp_path / name, model_only=True)
    convert(tmp_path / name, tmp_path / "back", "whale", step=7)
    assert_same(run, tmp_path / "back", model_only=True)
    net = trained(1)[0]
    load(tmp_path / "back", model=net)
    assert all(torch.equal(v, net.state_dict()[k]) for k, v in trained()[0].state_dict().items())
    with pytest.raises(CheckpointError, match="exists"):
        convert(run, tmp_path / name, form)


def test_what_is_written_opens_where_it_belongs(tmp_path: Path) -> None:
    run, (net, optimizer) = saved(tmp_path), trained()
    state = net.state_dict()
    convert(run, tmp_path / "n.safetensors", "safetensors")
    found = load_file(tmp_path / "n.safetensors")
    assert found.keys() == state.keys() - {"head.weight"}
    assert all(torch.equal(value, state[key]) for key, value in found.items())
    convert(run, tmp_path / "files", "torch")
    plain = torch.load(tmp_path / "files/model.pt")
    assert all(torch.equal(plain[key], value) for key, value in state.items())
    assert plain["head.weight"].data_ptr() == plain["words.weight"].data_ptr()
    assert zipfile.ZipFile(tmp_path / "files/model.pt").testzip() is None
    other, theirs = trained(1)
    theirs.load_state_dict(torch.load(tmp_path / "files/optimizer.pt"))
    mine = optimizer.state[net.low.weight]["exp_avg_sq"]
    assert torch.equal(theirs.state[other.low.weight]["exp_avg_sq"], mine)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_reads_what_is_written_and_the_reverse(tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    run, (net, optimizer) = saved(tmp_path), trained()
    convert(run, tmp_path / "dcp", "dcp")
    other, theirs = trained(1)
    model, optim = get_state_dict(other, theirs)
    state = {"model": model, "optimizer": optim}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(other, theirs, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in net.state_dict().items())
    for mine, yours in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[mine]["exp_avg"], theirs.state[yours]["exp_avg"])
    model, optim = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optimizer": optim, "epoch": 3}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    convert(tmp_path / "theirs", tmp_path / "back", "whale", step=1)
    other, theirs = trained(1)
    assert load(tmp_path / "back", model=other, optimizer=theirs).extra == {"epoch": 3}
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in net.state_dict().items())
    assert torch.equal(optimizer.state[net.low.bias]["exp_avg"], theirs.state[other.low.bias]["exp_avg"])


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    model = BertForMaskedLM(config)
    config.save_pretrained(tmp_path / "config")
    save(tmp_path / "run", step=1, model=model)
    done = convert(tmp_path / "run", tmp_path / "hf", "hf", config=tmp_path / "config", shard_bytes=10_000)
    assert done.left_out == ["rng"] and (tmp_path / "hf/model.safetensors.index.json").exists()
    again, told = BertForMaskedLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
    convert(tmp_path / "hf", tmp_path / "back", "whale", step=1)
    assert_same(tmp_path / "run", tmp_path / "back", model_only=True)


def test_names_can_change(tmp_path: Path) -> None:
    run = saved(tmp_path)
    convert(run, tmp_path / "new", "whale", rename={r"low\.(.*)": r"body.\1", r"words(\..*)": r"tokens\1"})
    source = open_source(tmp_path / "new")
    assert "model/body.weight" in source.tensors and "optimizer/tokens.weight/exp_avg" in source.tensors
    assert source.ties == {"model/head.weight": "model/tokens.weight"}
    assert source.values["optimizer/groups"][0]["params"][:3] == ["tokens.weight", "body.weight", "body.bias"]
    with pytest.raises(CheckpointError, match=r"rename: \['no'\] match no tensor"):
        convert(run, tmp_path / "x.pt", "torch", rename={"no": "yes"})
    with pytest.raises(CheckpointError, match="two tensors one name"):
        convert(run, tmp_path / "x.pt", "torch", rename={r"low\..*": "one"})
    for pattern, name, text in (("(", "x", "no regular expression"), (r"low\.(.*)", r"\2", "does not follow from")):
        with pytest.raises(CheckpointError, match=text):
            convert(run, tmp_path / "x.pt", "torch", rename={pattern: name})


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/whale_torch_was_here",)


def test_hostile_and_broken_files_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps({"state_dict_metadata": Evil()}))
    (tmp_path / "text.pt").write_text("weights")
    save_file({"a": torch.ones(4, 4)}, tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cut.safetensors").read_bytes()[:-8])
    (tmp_path / "long.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 80]}}).encode()
    (tmp_path / "wrong.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(80))
    (tmp_path / "out.safetensors.index.json").write_text('{"weight_map": {"a": "../cut.safetensors"}}')
    (tmp_path / "nothing").mkdir()
    for name, text in (
        ("evil.pt", r"could run code: .*GLOBAL .*system"),
        ("dcp", r"could run code, or it is damaged: UnpicklingError: GLOBAL \w+\.system"),
        ("text.pt", "cannot be read as a file of torch.save"),
        ("cut.safetensors", "'a' reaches to byte"),
        ("long.safetensors", "its header would have 1099511627776 bytes"),
        ("wrong.safetensors", r"'a' of shape \[2\] would have bytes 0 to 80"),
        ("out.safetensors.index.json", "leads to another folder"),
        ("nothing", "holds no weights"),
        ("missing.safetensors", "cannot be read as safetensors: FileNotFoundError"),
    ):
        with pytest.raises(CheckpointError, match=text):
            convert(tmp_path / name, tmp_path / "out.pt", "torch")
    assert not Path("/tmp/whale_torch_was_here").exists() and not (tmp_path / "out.pt").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_damaged_dcp_folder_is_named(tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    dcp.save({"a": torch.ones(4, 4)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{file.name} is too short: 'a' reaches to byte"):
        open_source(tmp_path / "dcp")
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"{file.name} is missing"):
        open_source(tmp_path / "dcp")


def test_an_optimizer_of_numbers_alone(tmp_path: Path) -> None:
    net, optimizer = trained()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}, tmp_path / "n.pt")
    with pytest.raises(CheckpointError, match="knows its 5 parameters by numbers"):
        open_source(tmp_path / "n.pt")
    named = torch.optim.Adam(net.named_parameters())
    named.load_state_dict(optimizer.state_dict())
    torch.save({"model": net.state_dict(), "optimizer": named.state_dict(), "step": 2}, tmp_path / "n.pt")
    convert(tmp_path / "n.pt", tmp_path / "run", "whale")
    other, theirs = trained(1)
    assert load(tmp_path / "run", model=other, optimizer=theirs).step == 2
    assert torch.equal(theirs.state[other.low.bias]["exp_avg"], optimizer.state[net.low.bias]["exp_avg"])


def test_boxes_of_what_is_put_together() -> None:
    whole = torch.arange(60.0).view(5, 12)
    parts = [Part(Box((0, at), (5, n)), InMemory(whole[:, at : at + n].clone()), (0, 0)) for at, n in ((0, 5), (5, 7))]
    entry = Composed(torch.float32, (5, 12), parts)
    for box in (Box((1, 3), (3, 6)), Box.whole((5, 12)), Box((4, 11), (1, 1))):
        inside = tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))
        assert torch.equal(entry.read(box), whole[inside])
    shaped = Reshaped(InMemory(torch.arange(70.0)), (5, 3, 4), 10)
    assert torch.equal(shaped.read(Box((1, 0, 1), (3, 2, 2))), (whole + 10).view(5, 3, 4)[1:4, 0:2, 1:3])
    lazy = Unread.of(entry)
    goal = torch.zeros(5, 12, dtype=torch.float64)
    assert torch.equal(goal.copy_(lazy), whole.double())
    assert torch.equal(lazy.narrow(1, 2, 4).cpu(), whole[:, 2:6]) and torch.equal(lazy + 1, whole + 1)
    assert all(torch.equal(row.cpu(), other) for row, other in zip(lazy, whole, strict=True))
    for most in (1, 5, 13, 1000):
        boxes = list(blocks(Box.whole((5, 12)), most))
        assert torch.equal(torch.cat([entry.read(box).reshape(-1) for box in boxes]), whole.reshape(-1))
        assert all(box.numel <= most for box in boxes)


SMALL = """
import sys
from pathlib import Path
from whale_torch.checkpoint.convert import convert

def most():  # getrusage's would begin with that of the process that started this one
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])

convert(sys.argv[1], sys.argv[2] + ".warm", sys.argv[3])
before = most()
convert(sys.argv[4], sys.argv[2], sys.argv[3])
print(most() - before)
"""


@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp", "whale"])
@pytest.mark.matrix(keep=1)
def test_memory_is_a_chunk(form: str, tmp_path: Path) -> None:
    save(tmp_path / "small", step=1, model=nn.Linear(4, 4))
    save(tmp_path / "run", step=1, model=nn.Linear(4096, 13_000))  # 213 MB
    arguments = [str(tmp_path / name) for name in ("small", "out")] + [form, str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SMALL, *arguments], env=env, capture_output=True, text=True, check=True
    )
    most = 80 if form == "dcp" else 24  # a record of DCP has 32 MiB, and is in memory twice
    assert int(done.stdout) < most << 10, f"{int(done.stdout) / 1024:.0f} MiB more"


def test_what_is_converted_is_not_removed_meanwhile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    save(tmp_path / "run", step=1, model=model)
    write = targets.write_safetensors

    def late(*given: Any) -> list[str]:
        save(tmp_path / "run", step=2, model=nn.Linear(4, 4), keep_last=1)
        return write(*given)

    monkeypatch.setattr(targets, "write_safetensors", late)
    convert(tmp_path / "run", tmp_path / "out.safetensors", "safetensors")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["weight"], model.weight)
    save(tmp_path / "run", step=3, model=model, keep_last=1)
    assert [one.name for one in (tmp_path / "run").glob("step-*")] == ["step-00000003"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    """As after torch.set_default_device: what is read from files is made on the CPU."""
    run, expected = saved(tmp_path), open_source(tmp_path / "run")
    with torch.device("meta"):
        for form, name in (("torch", "torch"), ("dcp", "dcp"), ("safetensors", "n.safetensors"), ("torch", "n.pt")):
            convert(run, tmp_path / name, form)  # type: ignore[arg-type]
            source = open_source(tmp_path / name)
            assert all(torch.equal(one.read(), expected.tensors[key].read()) for key, one in source.tensors.items())
        convert(tmp_path / "dcp", tmp_path / "back", "whale")
        assert not difference(run, tmp_path / "back")
        net = Net().to_empty(device="cpu")
        load_weights(net, read_weights(tmp_path / "n.safetensors", net))
    assert torch.equal(net.words.weight, expected.tensors["model/words.weight"].read())


@pytest.mark.parametrize(
    ("form", "name", "options", "text"),
    [
        ("safetensors", "n.safetensors", {"vocabulary": 5}, "vocabulary=5, .*run.* no vocabulary"),
        ("hf", "n", {"config": "nothing.json"}, "nothing.json is not there"),
        ("dcp", "n", {"config": "."}, "config= is of to='hf'"),
        ("hf", "n", {"step": 3}, "step=3, and hf has no place for it"),
        ("torch", "n.pt", {"step": 3}, "step=3, and a file of torch has no place for it"),
        ("torch", "n", {"step": -3}, "step is -3"),
        ("safetensors", "n", {"shard_bytes": 0}, "shard_bytes is 0"),
        ("torch", "no/n.pt", {}, "no.* is no folder"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    form: Any, name: str, options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    save(tmp_path / "run", step=1, model=nn.Linear(4, 4))
    with pytest.raises(CheckpointError, match=text):
        convert(tmp_path / "run", tmp_path / name, form, **options)
    assert not (tmp_path / name).exists()


def test_what_a_folder_holds_is_counted_whatever_its_name(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    save(tmp_path / "run", step=1, model=model, extra={"more": torch.ones(2)}, rng=False)
    for form, name, expected in (("dcp", "a.pt", 3), ("whale", "b.pt", 3), ("torch", "c", 3), ("torch", "d.pt", 2)):
        assert convert(tmp_path / "run", tmp_path / name, form).num_tensors == expected  # type: ignore[arg-type]


def test_the_command(tmp_path: Path) -> None:
    run = saved(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def command(*arguments: object) -> subprocess.CompletedProcess[str]:
        told = [sys.executable, "-m", "whale_torch", "convert", *map(str, arguments)]
        return subprocess.run(told, env=env, capture_output=True, text=True)

    done = command(run, tmp_path / "n.safetensors", "--to", "safetensors", "--rename", r"low\.(.*)", r"body.\1")
    assert done.returncode == 0 and "n.safetensors: 9 tensors" in done.stdout, done.stderr
    assert "left out: optimizer, extra, states, rng" in done.stdout
    assert "body.weight" in load_file(tmp_path / "n.safetensors")
    done = command(run, tmp_path / "n.safetensors", "--to", "safetensors")
    assert done.returncode == 2 and "exists" in done.stderr
