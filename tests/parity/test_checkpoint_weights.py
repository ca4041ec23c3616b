"""Weights out of files at build: every form gives the same values, and a rank reads its own slices only."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.checkpoint_cases import whole
from tests.world import world
from whale_torch import initial_values
from whale_torch.checkpoint.convert import convert
from whale_torch.checkpoint.files import Files
from whale_torch.checkpoint.plain import Weights, read_weights
from whale_torch.checkpoint.save import save
from whale_torch.errors import CheckpointError


class Net(nn.Module):
    """Packed projections, rows and columns of several types, ties, buffers of both kinds."""

    def __init__(self, width: int = 16):
        super().__init__()
        with wh.split():
            self.attention = nn.MultiheadAttention(width, 4)
            self.words, self.head = nn.Embedding(37, width), nn.Linear(width, 37, bias=False)
            self.half = nn.Linear(width, 2 * width).bfloat16()
        with wh.split(cut="rows"):
            self.rows = nn.Linear(2 * width, width)
        with wh.replica():
            self.norm, self.angles = nn.BatchNorm1d(width), Angles()
        self.head.weight = self.words.weight


class Angles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(5), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.angles.copy_(torch.arange(5.0))


def made(seed: int = 3, width: int = 16) -> Net:
    torch.manual_seed(seed)
    net = Net(width)
    net.norm.running_mean.normal_()
    return net


FORMS = {"safetensors": "files", "hf": "folder", "torch": "net.pt", "dcp": "dcp"}


def built(rank: int, n: int, folder: str) -> dict[str, Tensor]:
    paths = {form: Path(folder, name) for form, name in FORMS.items()} | {"own": Path(folder, "run")}
    paths["one file"] = Path(folder, "net.safetensors")
    out = {}
    for form, path in paths.items():
        with torch.device("meta"):
            net = Net()
        wh.parallelize(net, weights=path, seed=rank * 0)
        assert torch.equal(net.angles.angles, torch.arange(5.0))
        assert net.head.weight is net.words.weight
        out |= {f"{form} {key}": value for key, value in wh.full_state_dict(net).items()}
    real = made(5)
    wh.parallelize(real, weights=paths["own"])
    return out | {f"real {key}": value for key, value in wh.full_state_dict(real).items()}


def test_every_form_gives_the_same_values(tmp_path: Path) -> None:
    expected = made()
    save(tmp_path / "run", step=1, model=expected)
    for form, name in FORMS.items():
        convert(tmp_path / "run", tmp_path / name, form, shard_bytes=4000)
    convert(tmp_path / "run", tmp_path / "net.safetensors", "safetensors")
    assert len(list((tmp_path / "folder").glob("*.safetensors"))) > 2
    for found in world(3, built, str(tmp_path)):
        assert len(found) == 7 * len(expected.state_dict())
        for key, value in found.items():
            one = expected.state_dict()[key.rpartition(" ")[2]]
            assert torch.equal(value, one) and value.dtype == one.dtype, key


def counted(rank: int, n: int, path: str, width: int) -> int:
    read, total = Files.read, [0]

    def count(self: Files, fd: int, into: memoryview, offset: int) -> int:
        total[0] += len(into)
        return read(self, fd, into, offset)

    Files.read = count
    with torch.device("meta"):
        net = Net(width)
    wh.parallelize(net, weights=path)
    return total[0]


def test_a_rank_reads_its_slices_only(tmp_path: Path) -> None:
    net = made(width=256)
    save(tmp_path / "run", step=1, model=net)
    convert(tmp_path / "run", tmp_path / "net.safetensors", "safetensors")
    cut = sum(p.numel() * p.element_size() for name, p in net.named_parameters() if "norm" not in name)
    for read in world(4, counted, str(tmp_path / "net.safetensors"), 256):
        assert read < 0.3 * cut, f"{read} bytes of {cut}: the parts are a quarter"


def damaged(rank: int, n: int, path: str) -> list[str]:
    with torch.device("meta"):
        net = Net()
    with pytest.raises(CheckpointError) as raised:
        wh.parallelize(net, weights=path)
    assert type(net) is Net and all(p.is_meta for p in net.parameters())
    return str(raised.value)


def test_damage_is_named_before_the_model_changes(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", step=1, model=made(), rng=False)
    (file,) = folder.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    told = world(2, damaged, str(folder))
    assert all("is damaged" in text and file.name in text for text in told), told
    convertible = tmp_path / "x.safetensors"
    with pytest.raises(CheckpointError, match="is damaged"):
        convert(folder, convertible, "safetensors")
    assert not convertible.exists() and list(tmp_path.iterdir()) == [tmp_path / "run"]


class Layers(nn.Module):
    """Layers of experts, which may share one set of weights."""

    def __init__(self, number: int = 3):
        super().__init__()
        self.layers = nn.ModuleList(wh.moe.MoELayer(WIDTH, 4, 2, hidden=6) for _ in range(number))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.head(x)
        return out


WIDTH = 8


def pseudo(number: int) -> tuple[Layers, torch.optim.Adam]:
    torch.manual_seed(2)
    model = Layers(number)
    if number > 1:
        wh.moe.share(model.layers)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, WIDTH)).sum().backward()
    optimizer.step()
    return model, optimizer


def real(meta: bool) -> Layers:
    with torch.device("meta" if meta else "cpu"):
        model = Layers()
    wh.annotate(model, {r"layers\.\d+": wh.split()})
    return model


def made_real(rank: int, n: int, folder: str) -> list[dict[str, Tensor]]:
    found = []
    for name in ("shared", "alone"):
        model = wh.parallelize(real(meta=False))
        optimizer = torch.optim.Adam(model.parameters())
        assign = {r"layers\.\d+": "layers.0"}
        wh.load(Path(folder, name, "back"), model=model, optimizer=optimizer, assign=assign)
        state, moments = whole(model, optimizer)
        found.append(state | {f"{key} of Adam": value for key, value in moments.items()})
    for form in FORMS.values():  # which say what is one tensor
        model = wh.parallelize(real(meta=True), weights=Path(folder, "shared", form))
        found.append(wh.full_state_dict(model))
    return found


def test_shared_layers_become_real_ones(tmp_path: Path) -> None:
    """Of one set of weights three, with what Adam knew of it: one to many, over converted files."""
    for name, number in (("shared", 3), ("alone", 1)):
        (tmp_path / name).mkdir()
        model, optimizer = pseudo(number)
        save(tmp_path / name / "run", step=1, model=model, optimizer=optimizer)
        for form, path in FORMS.items():
            convert(tmp_path / name / "run", tmp_path / name / path, form)
        convert(tmp_path / name / "run", tmp_path / name / "whole", "torch")
        convert(tmp_path / name / "whole", tmp_path / name / "back", "whale")
    for states in world(2, made_real, str(tmp_path)):
        for number, found in enumerate(states):
            model, optimizer = pseudo(1 if number == 1 else 3)
            first = model.layers[0].state_dict()
            for layer in range(3):
                for key, value in first.items():
                    assert torch.equal(found[f"layers.{layer}.{key}"], value), (number, layer, key)
            moments = {k: v for k, v in found.items() if k.endswith("exp_avg of Adam") and k.startswith("layers")}
            assert number > 1 or len(moments) == 3 * len(list(model.layers[0].parameters()))
            for key, value in moments.items():
                name = re.sub(r"^layers\.\d+", "layers.0", key).removesuffix(" of Adam")
                parameter = model.get_parameter(name.removesuffix("/exp_avg").removesuffix(".exp_avg"))
                assert torch.equal(value, optimizer.state[parameter]["exp_avg"]), key


def test_names_behind_a_prefix_are_told() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    longer = {f"model.{key}": value for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"more 'model\.' in front: .* --rename 'model\\\.\(\.\*\)' '\\1'"):
        read_weights(longer, model)
    outer = nn.ModuleDict({"model": model, "head": nn.Linear(2, 2)})
    with pytest.raises(CheckpointError, match=r"lack 'model\.' in front: .* --rename '\(\.\*\)' 'model\.\\1'"):
        read_weights(model.state_dict(), outer)
    with pytest.raises(CheckpointError, match=r"several are to have the values of one, wh.load\(.*assign="):
        read_weights({k: v for k, v in model.state_dict().items() if k.startswith("0")}, model)


def while_another_saves(rank: int, n: int, folder: str) -> dict[str, Tensor]:
    """A job saves step 2 when the first rank has looked and the second has not."""
    looked, look = Path(folder, "looked"), initial_values.latest_of

    def latest(weights: Weights) -> Path | None:
        if rank:
            while not looked.exists():
                time.sleep(0.01)
            save(Path(folder, "run"), step=2, model=made(4))
        found = look(weights)
        looked.touch()
        return found

    initial_values.latest_of = latest
    net = Net()
    wh.parallelize(net, weights=Path(folder, "run"))
    return wh.full_state_dict(net)


def test_ranks_take_one_checkpoint_while_another_is_saved(tmp_path: Path) -> None:
    expected = made(3)
    save(tmp_path / "run", step=1, model=expected)
    for found in world(2, while_another_saves, str(tmp_path)):
        assert all(torch.equal(found[key], value) for key, value in expected.state_dict().items())
