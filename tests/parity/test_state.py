"""State of cut parameters: parts in memory, whole tensors in files, copies and pickles."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import whale_torch as wh
from tests.parity.layouts import LAYOUTS, backward, batch, build, mine, step
from tests.parity.metric import relative_error
from tests.world import world
from whale_torch.comm.cut_tensor import CutTensor
from whale_torch.errors import CheckpointError, LossError, PlanError

BAR = 2e-5


class Tied(nn.Module):
    """A split embedding whose weight is the split head's, a buffer, a module of its own state."""

    def __init__(self) -> None:
        super().__init__()
        with wh.split():
            self.words, self.norm, self.head = nn.Embedding(10, 6), nn.BatchNorm1d(6), nn.Linear(6, 10)
        self.head.weight = self.words.weight
        self.calls = 3

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.words(ids)))


def tied() -> Tied:
    torch.manual_seed(0)
    return Tied()


def shared_memory(state: dict[str, Any]) -> bool:
    return state["words.weight"].data_ptr() == state["head.weight"].data_ptr()


def whole_state(rank: int, n: int) -> None:
    for layout in (name for name, worlds in LAYOUTS.items() if n in worlds):
        plain, model = build(layout), wh.parallelize(build(layout))
        whole = wh.full_state_dict(model)
        assert list(whole) == list(plain.state_dict()), layout
        assert all(torch.equal(whole[k], v) for k, v in plain.state_dict().items()), layout
        assert all(type(v) is Tensor for v in whole.values())
        assert list(model.state_dict()) == list(whole)
        fresh = build(layout, seed=5)
        fresh.load_state_dict(whole, strict=True)
        model.load_state_dict(build(layout, seed=7).state_dict())
        other, expected = wh.full_state_dict(model), build(layout, seed=7).state_dict()
        assert all(torch.equal(other[k], v) for k, v in expected.items()), layout
        part = wh.full_state_dict(model.head)
        assert torch.equal(part["weight"], expected["head.weight"])


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_whole_state_is_that_of_one_process_and_the_reverse(n: int) -> None:
    world(n, whole_state)


def tied_state(rank: int, n: int) -> None:
    plain = tied()
    model = wh.parallelize(tied())
    whole = wh.full_state_dict(model)
    assert whole.keys() == plain.state_dict().keys()
    assert whole["_extra_state"] == {"calls": 3}
    assert shared_memory(whole)
    assert whole._metadata["norm"]["version"] == 2
    file = io.BytesIO()
    torch.save(whole, file)
    assert len(file.getvalue()) < len(_saved(plain.state_dict())) + 400
    other = tied()
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue())), strict=True)
    assert all(torch.equal(v, whole[k]) for k, v in other.state_dict().items() if isinstance(v, Tensor))
    model.load_state_dict(plain.state_dict())
    assert model.words.weight is model.head.weight


def _saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


@pytest.mark.parametrize("n", [2, 3])
def test_tied_weights_stay_tied(n: int) -> None:
    world(n, tied_state)


def packed_blocks(rank: int, n: int) -> None:
    """Attention's packed projection: three blocks, cut by heads; 5 heads on n ranks. Its copy evaluates."""
    from whale_torch.comm.cut_tensor import join
    from whale_torch.comm.registry import ParameterPlace
    from whale_torch.mesh import start
    from whale_torch.planning.layout import Shard, balanced

    everyone = start("cpu").everyone()
    shard = Shard(0, balanced(5, n), (3 * 5 * 2, 4), blocks=3, unit=2)
    full = torch.arange(120.0).view(30, 4)
    place = ParameterPlace("in_proj", everyone, shard, everyone)
    assert torch.equal(join(shard.cut(full, rank), place), full)
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(20, 5, 7, batch_first=True).eval()
    model = wh.parallelize(wh.split(copy.deepcopy(plain)))
    assert all(torch.equal(v, plain.state_dict()[k]) for k, v in wh.full_state_dict(model).items())
    other = {k: v + 1 for k, v in plain.state_dict().items()}
    model.load_state_dict(other)
    assert all(torch.equal(v, other[k]) for k, v in wh.full_state_dict(model).items())
    model.load_state_dict(plain.state_dict())
    x = torch.randn(3, 4, 20, generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        assert torch.allclose(copy.deepcopy(model)(x), plain(x), atol=1e-5)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_blocks_join(n: int) -> None:
    world(n, packed_blocks)


def parts_in_memory(rank: int, n: int) -> None:
    model = wh.parallelize(build("own"))
    before = wh.full_state_dict(model)
    state = model.state_dict()
    weight = state["head.weight"]
    assert isinstance(weight, CutTensor)
    assert type(state["features.0.weight"]) is Tensor
    assert f"part {rank} of {n} of 'head.weight' (11, 8)" in repr(weight)
    copies = [
        copy.deepcopy(state),
        {k: v.clone() for k, v in state.items()},
        {k: v.detach().cpu() for k, v in state.items()},
    ]
    for kept in copies:
        assert isinstance(kept["head.weight"], CutTensor)
        assert torch.equal(kept["head.weight"], weight)
        assert kept["head.weight"].data_ptr is not None
    backward(model, *mine(model, *batch()))
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert relative_error(wh.full_state_dict(model), before) > 1e-3
    assert torch.equal(model.state_dict()["head.weight"], model.head.weight)
    for kept in copies:
        model.load_state_dict(kept)
        assert relative_error(wh.full_state_dict(model), before) == 0.0
    average = {k: v.clone() for k, v in state.items()}
    for k, v in model.state_dict().items():
        average[k].mul_(0.5).add_(v, alpha=0.5)
    model.load_state_dict(average)
    assert relative_error(wh.full_state_dict(model), before) < 1e-6
    penalty = sum(((p - kept[k].detach()) ** 2).sum() for k, p in model.named_parameters() for kept in copies[:1])
    assert type(penalty) is Tensor
    penalty.backward()
    assert type(model.head.weight.grad) is Tensor
    if rank == 0:  # no rank waits for another
        model.state_dict()
        model.load_state_dict(copies[0])


def test_parts_work_in_memory() -> None:
    world(2, parts_in_memory)


def written(rank: int, n: int) -> dict[str, str]:
    import numpy as np

    model = wh.parallelize(build("own"))
    model.eval()
    state = model.state_dict()
    ways = {
        "torch.save": lambda: torch.save(state, io.BytesIO()),
        "a clone": lambda: torch.save({k: v.clone().half() for k, v in state.items()}, io.BytesIO()),
        "flat": lambda: torch.save(torch.cat([v.flatten() for v in state.values()]), io.BytesIO()),
        "pickle": lambda: pickle.dumps(state["head.weight"]),
        "keep_vars": lambda: torch.save(model.state_dict(keep_vars=True), io.BytesIO()),
        "parameters": lambda: torch.save(list(model.parameters()), io.BytesIO()),
        "numpy": lambda: state["head.weight"].numpy(),
        "savez": lambda: np.savez(io.BytesIO(), **{k: v.detach().cpu().numpy() for k, v in state.items()}),
        "data_ptr": lambda: state["head.weight"].data_ptr(),  # safetensors
        "storage": lambda: state["head.weight"].untyped_storage(),
        "the model": lambda: torch.save(model, io.BytesIO()),
        "a member": lambda: torch.save(model.head, io.BytesIO()),
        "a copy": lambda: torch.save(copy.deepcopy(model), io.BytesIO()),
        "a copy's state": lambda: torch.save(copy.deepcopy(model).state_dict(), io.BytesIO()),
        "a copy's member": lambda: torch.save(copy.deepcopy(model).head, io.BytesIO()),
        "an average": lambda: torch.save(AveragedModel(model).state_dict(), io.BytesIO()),
    }
    out = {}
    for name, way in ways.items():
        try:
            way()
            out[name] = "written"
        except CheckpointError as error:
            out[name] = str(error)
    return out


def test_a_part_refuses_to_be_written() -> None:
    for found in world(2, written):
        for way, text in found.items():
            assert "is cut over ranks [0, 1]" in text, f"{way}: {text}"
            assert "wh.full_state_dict(model)" in text
            assert "layouts.py" in text
    assert "this rank holds (6, 8) of (11, 8)" in world(2, written)[0]["torch.save"]


def uneven(rank: int, n: int) -> list[str]:
    """One output on two ranks: the first holds all of it, the second nothing."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))
    model = copy.deepcopy(plain)
    wh.annotate(model, {"1": wh.split(cut="columns")})
    wh.parallelize(model)
    assert tuple(model[1].weight.shape) == ((1, 5) if rank == 0 else (0, 5))
    model.load_state_dict({k: v + 1 for k, v in plain.state_dict().items()})
    assert all(torch.equal(v, plain.state_dict()[k] + 1) for k, v in wh.full_state_dict(model).items())
    model.load_state_dict(model.state_dict())
    assert isinstance(model.state_dict()["1.weight"], CutTensor)
    state = plain.state_dict()
    state["1.weight"] = torch.zeros(0, 5)
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    return [str(caught.value)]


def test_uneven_parts_are_decided_by_the_declared_shape() -> None:
    for (text,) in world(2, uneven):
        assert "size mismatch for 1.weight" in text
        assert "torch.Size([0, 5]) from checkpoint, the shape in current model is torch.Size([1, 5])" in text


def loading(rank: int, n: int) -> None:
    model, plain = wh.parallelize(build("own")), build("own", seed=3)
    given = plain.state_dict()
    kept = dict(given)
    model.load_state_dict(given)
    assert all(given[k] is v for k, v in kept.items()), "the caller's dict"
    assert all(torch.equal(v, kept[k]) for k, v in given.items())
    given["head.weight"] = torch.zeros(3, 8)
    with pytest.raises(
        RuntimeError, match=r"(?s)size mismatch for head.weight.*\[3, 8\].*current model is torch.Size\(\[11, 8\]\)"
    ):
        model.load_state_dict(given)
    part = model.state_dict()["head.weight"].part()
    given["head.weight"] = part.clone()
    with pytest.raises(RuntimeError, match=r"size mismatch for head.weight"):
        model.load_state_dict(given)
    del given["head.weight"]
    given["tail"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r'(?s)Unexpected key.*"tail".*|Missing key.*"head.weight"'):
        model.load_state_dict(given)
    found = model.load_state_dict(given, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["head.weight"], ["tail"])
    for target in (model, model.head):
        with pytest.raises(CheckpointError, match="assign=True"):
            target.load_state_dict(plain.state_dict() if target is model else plain.head.state_dict(), assign=True)
    replica = wh.parallelize(build("replica"))
    with pytest.raises(CheckpointError, match=r"would replace 'features.0.weight'"):
        replica.load_state_dict(build("replica").state_dict(), assign=True)
    stolen = dict(model.state_dict())
    stolen["head.weight"] = stolen["head.weight"][:2]
    with pytest.raises(
        CheckpointError, match=r"'head.weight' is part . of 2 with shape \(., 8\), but .* has shape \(2, 8\)"
    ):
        model.load_state_dict(stolen)


def test_loading_is_strict_as_torchs() -> None:
    world(2, loading)


def copies(rank: int, n: int, layout: str) -> float:
    model = wh.parallelize(build(layout))
    x, y = batch()
    mine_x, mine_y = mine(model, x, y)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    plain = build(layout)
    plain_average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for m, a, rows in ((model, average, (mine_x, mine_y)), (plain, plain_average, (x, y))):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(2):
            step(m, optimizer, *rows)
            a.update_parameters(m)
    twin = copy.deepcopy(model)
    assert type(twin).__name__ == "Net"
    assert isinstance(twin, type(plain))
    model.eval(), twin.eval(), average.eval(), plain.eval(), plain_average.eval()
    with torch.no_grad():
        assert torch.equal(twin(mine_x), model(mine_x))
        assert torch.equal(copy.deepcopy(twin)(mine_x), model(mine_x))
        assert type(average(mine_x)) is Tensor
        error = float((average(mine_x) - mine(model, plain_average(x))[0]).abs().max())
    assert twin.head.weight is not model.head.weight
    whole = wh.full_state_dict(average)
    assert relative_error(whole, plain_average.state_dict()) < BAR
    assert relative_error(wh.full_state_dict(twin), wh.full_state_dict(model)) == 0.0
    twin.load_state_dict(plain.state_dict())
    twin.load_state_dict(model.state_dict())
    with pytest.raises(LossError, match="a copy of a parallelized one"):
        twin.train()(mine_x)
    with pytest.raises(LossError, match="a copy of a parallelized one"):
        F.cross_entropy(twin.eval()(mine_x), mine_y).backward()
    with pytest.raises(PlanError, match=r"got Net \(a copy of one\)"):
        wh.no_sync(twin)
    with pytest.raises(PlanError, match="parallelized already"):
        wh.parallelize(twin)
    for p in twin.parameters():
        p.requires_grad_(False)
    inputs = mine_x.clone().requires_grad_()
    twin.eval()(inputs).sum().backward()  # a frozen teacher
    backward(model.train(), mine_x, mine_y)
    return error


@pytest.mark.parametrize(("layout", "n"), [("own", 2), ("mixed", 4), ("replica", 2), ("shared", 2)])
def test_copies_evaluate_and_refuse_to_train(layout: str, n: int) -> None:
    assert max(world(n, copies, layout)) < BAR


def pickled(rank: int, n: int, layout: str, path: str) -> None:
    model = wh.parallelize(build(layout))
    x, y = batch()
    backward(model, *mine(model, x, y))
    if rank == 0:
        torch.save(model, path)
        torch.save(model.state_dict(), path + ".state")
        torch.save(copy.deepcopy(model), path + ".copy")
        torch.save(list(model.parameters()), path + ".parameters")
    shallow = copy.copy(model)
    assert shallow.head is model.head
    assert torch.equal(shallow.eval()(x), model.eval()(x))


def with_batch_norm(rank: int, n: int, path: str) -> None:
    with wh.replica(sync_batch_norm=True):
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    wh.parallelize(model)
    x, _ = batch()
    model(x).sum().backward()
    twin = copy.deepcopy(model).eval()
    assert torch.equal(twin(x), model.eval()(x))
    if rank == 0:
        torch.save(model, path)


def test_synchronised_batch_norm_pickles_as_a_plain_one(tmp_path: Path) -> None:
    world(2, with_batch_norm, str(tmp_path / "model.pt"))
    model = torch.load(tmp_path / "model.pt", weights_only=False)
    assert [type(m) for m in model] == [nn.Linear, nn.BatchNorm1d]
    assert "_group" not in vars(model[1])
    assert int(model[1].num_batches_tracked) == 1
    model(batch()[0]).sum().backward()


@pytest.mark.parametrize(("layout", "n"), [("replica", 2), ("own", 1)])
def test_a_model_without_cuts_pickles_as_a_plain_one(layout: str, n: int, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    world(n, pickled, layout, str(path))
    for name in (path, Path(f"{path}.copy")):
        model = torch.load(name, weights_only=False)
        plain = build(layout)
        assert type(model) is type(plain)
        assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
        assert torch.equal(model(batch()[0]), plain(batch()[0]))
        backward(model, *batch())
        assert [a for m in model.modules() for a in vars(m) if a.startswith(("_whale_runtime", "_region"))] == []
    torch.load(f"{path}.state", weights_only=True)
    torch.load(f"{path}.parameters", weights_only=True)


def odd_buffers(rank: int, n: int) -> list[Tensor]:
    model = nn.Linear(2, 2)
    for number, dtype in enumerate(ODD):
        model.register_buffer(f"odd{number}", torch.full((3,) if number else (), 1 + rank).to(dtype))
    state = wh.full_state_dict(wh.parallelize(model, timeout=20))
    return [state[f"odd{number}"] for number in range(len(ODD))]


ODD = [torch.int16, torch.uint16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.bfloat16]


def test_buffers_of_every_dtype_travel() -> None:
    for found in world(2, odd_buffers):
        assert [value.dtype for value in found] == ODD
        assert all(bool((value.to(torch.complex64) == 1).all()) for value in found)


def forgets_blocks(rank: int, n: int) -> float:
    """The mutation: every rank keeps the first part of what it loads."""
    from whale_torch.planning import layout

    model = wh.parallelize(build("own"))
    cut = layout.Shard.cut
    layout.Shard.cut = lambda self, full, index: cut(self, full, index)[: self.local_shape(index)[0]].roll(1, 0)
    model.load_state_dict(build("own", seed=7).state_dict())
    return relative_error(wh.full_state_dict(model), build("own", seed=7).state_dict())


def test_the_suite_catches_parts_of_other_rows() -> None:
    assert min(world(2, forgets_blocks)) > 100 * BAR
