"""Numbers of the load of experts, beside the same counted by hand."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from whale_torch import moe
from whale_torch.errors import PlanError


class Net(nn.Module):
    def __init__(self, recompute: bool | None = None, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.layers = nn.ModuleList(moe.MoELayer(8, 4, 2, hidden=6, **options) for _ in range(2))
        self.recompute = recompute

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            if self.recompute is not None:
                h = h + checkpoint(layer, h, mask, use_reentrant=self.recompute)
            else:
                h = h + layer(h, mask)
        return h


def _by_hand(layer: moe.MoELayer, x: Tensor, limit: int | None = None) -> dict[str, Any]:
    probs = (x @ layer.gate.weight.detach().t()).softmax(1)
    chosen = probs.topk(2, 1).indices
    routes = torch.bincount(chosen.flatten(), minlength=4).double()
    load = routes / routes.sum()
    dropped = (routes - (limit or len(x))).clamp(min=0)
    return {
        "tokens": float(len(x)),
        "routes": routes.tolist(),
        "load": load.tolist(),
        "dropped": dropped.tolist(),
        "drop_rate": float(dropped.sum() / routes.sum()),
        "balance": float(load.max() / load.mean()),
        "load_entropy": float(-(load * load.clamp(min=1e-30).log()).sum() / math.log(4)),
        "gate_entropy": float(-(probs * probs.log()).sum(1).mean() / math.log(4)),
    }


@pytest.mark.parametrize("limit", [None, 3])
def test_numbers_are_those_counted_by_hand(limit: int | None) -> None:
    torch.manual_seed(0)
    layer = moe.MoELayer(8, 4, 2, hidden=6, capacity_factor=None if limit is None else limit / 6, min_capacity=1)
    layer.gate.weight.data.normal_()  # type: ignore[operator, union-attr]
    x = torch.randn(12, 8)
    layer(x)
    (found,) = moe.load(layer).values()
    expected = _by_hand(layer, x, limit)
    assert found["loss"] == pytest.approx(float(moe.aux_loss(layer)))
    for key, value in expected.items():
        assert found[key] == pytest.approx(value), key
    json.dumps(found)
    mask = torch.arange(12) < 7
    layer(x, mask)
    (masked,) = moe.load(layer).values()
    assert masked["tokens"] == 7 and sum(masked["routes"]) == 14
    assert masked["gate_entropy"] == pytest.approx(_by_hand(layer, x[:7])["gate_entropy"])


def test_even_is_one() -> None:
    layer = moe.MoELayer(4, 4, 1, hidden=2)
    layer.gate.weight.data.copy_(1e3 * torch.eye(4))  # type: ignore[operator, union-attr]
    layer(torch.eye(4))
    (found,) = moe.load(layer).values()
    assert found["balance"] == found["load_entropy"] == 1 and found["gate_entropy"] == 0
    layer(torch.eye(4)[:1])
    (found,) = moe.load(layer).values()
    assert found["balance"] == 4 and found["load_entropy"] == 0 and found["load"] == [1, 0, 0, 0]
    (found,) = moe.load(layer).values()
    assert found["tokens"] == found["balance"] == 0, "nothing since"


@pytest.mark.parametrize("recompute", [None, False, True], ids=["kept", "recomputed", "reentrant"])
def test_a_step_is_told_once_however_it_is_made(recompute: bool | None) -> None:
    torch.manual_seed(0)
    model = Net(recompute)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: list[moe.Loads] = []
    handle = moe.on_load(model, told.append)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(3):
            model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
        other.step()
    assert list(told[0]) == ["layers.0", "layers.1"]
    assert [found["tokens"] for step in told for found in step.values()] == [12.0] * 4
    assert [sum(found["routes"]) for step in told for found in step.values()] == [24.0] * 4
    handle.remove()
    optimizer.step()
    assert len(told) == 2


def test_every_few_steps_and_no_longer_than_the_model_lives() -> None:
    model = Net()
    optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1)
    told: list[moe.Loads] = []
    moe.on_load(model, told.append, every=2)
    for _ in range(5):
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
    assert [found["layers.0"]["tokens"] for found in told] == [8, 8]
    del model
    optimizer.step()
    assert len(told) == 2


def test_each_who_asks_is_told_all() -> None:
    model = Net()
    optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1)
    every, second = [], []
    moe.on_load(model, every.append)
    moe.on_load(model, second.append, every=2)
    for _ in range(4):
        model(torch.randn(3, 5)).sum().backward()
        optimizer.step()
    assert [found["layers.0"]["tokens"] for found in every] == [3] * 4
    assert [found["layers.0"]["tokens"] for found in second] == [6] * 2
    assert moe.load(model)["layers.0"]["tokens"] == 12


def test_training_and_evaluation_are_told_apart() -> None:
    model = Net()
    moe.on_load(model, lambda found: None).remove()
    model(torch.randn(4, 5))
    model.eval()
    model(torch.randn(7, 5))
    assert moe.load(model)["layers.1"]["tokens"] == 7
    model.train()
    assert moe.load(model)["layers.1"]["tokens"] == 4


def test_scalars_have_a_name_each() -> None:
    model = Net()
    model(torch.randn(4, 5))
    twin = copy.deepcopy(model)
    found = moe.scalars(moe.load(model))
    assert found == moe.scalars(moe.load(twin))
    assert len(found) == 2 * (3 * 4 + 6) and all(type(value) is float for value in found.values())
    assert found["layers.1/tokens"] == 4 and {"layers.0/load/3", "layers.0/balance"} <= found.keys()


def test_what_overflowed_once_is_forgotten() -> None:
    layer = moe.MoELayer(8, 4, 2, hidden=6)
    for x in (torch.full((3, 8), torch.nan), torch.randn(3, 8)):
        layer(x)
        (found,) = moe.load(layer).values()
    assert found["tokens"] == 3 and math.isfinite(found["loss"]) and found["loss"] > 0 and found["gate_entropy"] > 0.9


def test_gates_without_scores() -> None:
    layer = moe.MoELayer(8, 4, 1, hidden=6, gate=moe.Hash(10, 4))
    layer(torch.randn(6, 8), token_ids=torch.arange(6))
    (found,) = moe.load(layer).values()
    assert found["tokens"] == 6 and found["gate_entropy"] == 0 and sum(found["routes"]) == 6


def test_what_cannot_be_told_is_said() -> None:
    with pytest.raises(PlanError, match="this Linear has no MoELayer"):
        moe.load(nn.Linear(2, 2))
    with pytest.raises(PlanError, match="every is 0"):
        moe.on_load(Net(), print, every=0)
    with pytest.raises(PlanError, match="this is a list, not a model"):
        moe.on_load([Net()], print)  # type: ignore[arg-type]


def _history(steps: int) -> list[moe.Loads]:
    model = Net()
    found: list[moe.Loads] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moe.on_load(model, found.append)
    for _ in range(steps):
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
    return found


@pytest.mark.parametrize("steps", [1, 3, 400])
def test_a_heat_map_is_a_drawing_of_all_layers(steps: int, tmp_path: Path) -> None:
    history = _history(min(steps, 3)) * (steps // min(steps, 3)) + _history(steps % 3 if steps > 3 else 0)
    assert len(history) == steps
    moe.draw_loads(history, tmp_path / "load.svg", title="a < b")
    drawing = ElementTree.parse(tmp_path / "load.svg").getroot()
    texts = [found.text for found in drawing.findall(".//{*}text")]
    assert texts[0] == "a < b" and {"layers.0", "layers.1", "even", str(steps)} <= set(texts)
    cells = [found for group in drawing.findall(".//{*}g") for found in group]
    assert 8 <= len(cells) <= 2 * 4 * 160
    width, height = (float(drawing.get(name) or 0) for name in ("width", "height"))
    for found in drawing.findall(".//{*}rect"):
        x, y, wide, high = (float(found.get(name) or 0) for name in ("x", "y", "width", "height"))
        assert x + wide <= width and y + high <= height
    across = sum(float(found.get("width") or 0) for found in cells)
    assert across == pytest.approx(8 * (900 - 56 - 110), rel=1e-3)


def test_colours_of_a_heat_map(tmp_path: Path) -> None:
    step = {"": {"load": [0.25, 0.75, 0.0, 0.0]}}
    moe.draw_loads([step], tmp_path / "load.svg")
    drawing = ElementTree.parse(tmp_path / "load.svg").getroot()
    fills = [found.get("fill") for group in drawing.findall(".//{*}g") for found in group]
    assert fills[0] == "#f7f7f7" and fills[2] == fills[3] == "#2166ac" and fills[1] not in fills[2:]


def test_pictures_that_cannot_be_drawn(tmp_path: Path) -> None:
    step = {"": {"load": [0.5, 0.5]}}
    with pytest.raises(PlanError, match="nothing to draw"):
        moe.draw_loads([], tmp_path / "a.svg")
    for odd in (step, [{"": 1}], [[0.5, 0.5]]):
        with pytest.raises(PlanError, match="this is no list of loads"):
            moe.draw_loads(odd, tmp_path / "a.svg")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"step 0 has the layers and experts \{'': 2\}, step 1 has \{'': 1\}"):
        moe.draw_loads([step, {"": {"load": [1.0]}}], tmp_path / "a.svg")
    with pytest.raises(PlanError, match=r"a.gif: no picture ends in '.gif'"):
        moe.draw_loads([step], tmp_path / "a.gif")


def test_a_heat_map_as_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    moe.draw_loads(_history(3), tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
