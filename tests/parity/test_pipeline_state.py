"""What another rank of a pipeline holds is not read, written or averaged as if it were zeros."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.pipeline_cases import WIDTH, Chain
from tests.world import world


class Scaled(Chain):
    """A scalar parameter and running statistics in the second stage."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.BatchNorm1d(WIDTH))
        self.b.scale = nn.Parameter(torch.tensor(1.5))


def _pipeline(**options: Any) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    model: Any = Scaled()
    stages = {name: wh.stage() for name in "abcd"}
    wh.annotate(model, stages, inside=(wh.replica(), wh.pipeline(num_micro_batches=2, **options)))  # type: ignore[call-overload]
    batch = {"x": torch.randn(8, WIDTH), "y": torch.randint(5, (8,))}
    wh.parallelize(model, sample_inputs=batch)
    return model, batch


def _ways(model: Any, optimizer: Any, path: str) -> dict[str, Callable[[], Any]]:
    """Ways to write or read what is not here."""
    state = model.state_dict()
    parameters = list(model.parameters())
    last = model.d
    return {
        "torch.save of the state": lambda: torch.save(model.state_dict(), io.BytesIO()),
        "of a clone": lambda: torch.save({k: v.clone() for k, v in state.items()}, io.BytesIO()),
        "of a deep copy": lambda: torch.save(copy.deepcopy(state), io.BytesIO()),
        "kept variables": lambda: torch.save(model.state_dict(keep_vars=True), io.BytesIO()),
        "the model": lambda: torch.save(model, io.BytesIO()),
        "pickle": lambda: pickle.dumps(model),
        "a copy": lambda: torch.save(copy.deepcopy(model), io.BytesIO()),
        "a copy's state": lambda: torch.save(copy.deepcopy(model).state_dict(), io.BytesIO()),
        "a member": lambda: torch.save(last, io.BytesIO()),
        "a member's state": lambda: torch.save(last.state_dict(), io.BytesIO()),
        "a member's copy": lambda: pickle.dumps(copy.deepcopy(last)),
        "parameters": lambda: torch.save(parameters, io.BytesIO()),
        "a scalar": lambda: torch.save({k: v for k, v in state.items() if k in ("b.scale", "d.bias")}, io.BytesIO()),
        "data": lambda: torch.save([p.data for p in parameters], io.BytesIO()),
        "buffers": lambda: torch.save([*model.b.buffers(), model.d.weight.data], io.BytesIO()),
        "safetensors": lambda: safetensors.save_file(state, path),
        "safetensors of parameters": lambda: safetensors.save_file(
            {name: p.detach() for name, p in model.named_parameters()}, path
        ),
        "safetensors' save_model": lambda: safetensors.save_model(model, path),
        "numpy": lambda: [v.numpy() for v in state.values()],
        "a vector": lambda: torch.save(nn.utils.parameters_to_vector(parameters), io.BytesIO()),
        "an average": lambda: torch.save(AveragedModel(model).state_dict(), io.BytesIO()),
        "the optimizer": lambda: torch.save(optimizer.state_dict(), io.BytesIO()),
        "a part": lambda: [v.part() for v in state.values() if hasattr(v, "part")],
        "a norm": lambda: [p.norm() for p in parameters],
        "a norm of data": lambda: [p.data.norm() for p in parameters],
        "a norm of the state": lambda: [v.float().norm() for v in state.values()],
        "sums": lambda: sum(p.sum() for p in parameters),
        "squares": lambda: sum((p**2).sum() for p in parameters),
        "a total": lambda: torch.cat([p.detach().flatten() for p in parameters]).abs().mean(),
        "an entry": lambda: [float(p.detach().flatten()[0]) for p in parameters],
        "a list": lambda: [p.tolist() for p in parameters],
        "equality": lambda: [torch.equal(p, torch.zeros_like(p)) for p in parameters],
        "all close": lambda: [torch.allclose(p, p) for p in parameters],
        "norms together": lambda: torch._foreach_norm(parameters),
        "copied into": lambda: torch.zeros(8, 8).copy_(model.a.weight) + torch.zeros(5, 8).copy_(model.d.weight),
        "values and where": lambda: [p.max(0).values.sum() for p in parameters if p.dim()],
        "sorted": lambda: torch.save([p.sort() for p in parameters], io.BytesIO()),
        "a decomposition": lambda: [torch.linalg.qr(p).R.norm() for p in parameters if p.dim() > 1],
        "how many": lambda: [len(p.nonzero()) for p in parameters],
        "which": lambda: [p[p > 0].numel() for p in parameters],
        "how many different": lambda: [torch.unique(p).numel() + p.unique().numel() for p in parameters],
        "where": lambda: [torch.where(p > 0) for p in parameters],
        "a vector written into": lambda: nn.utils.parameters_to_vector(parameters).mul_(0.5),
        "singular values": lambda: [torch.linalg.svdvals(p) for p in parameters if p.dim() > 1],
        "given as out": lambda: [torch.add(p.data, 1, out=torch.zeros(p.shape)) for p in parameters],
        "copied together": lambda: torch._foreach_copy_([torch.zeros(p.shape) for p in parameters], parameters),
        "assigned to": lambda: [_assign(torch.zeros(p.shape), p) for p in parameters],
        "added to": lambda: [torch.zeros(p.shape).add_(p) for p in parameters],
    }


def _assign(target: Tensor, value: Tensor) -> None:
    target[...] = value.detach()


def _said(rank: int, n: int, path: str) -> dict[str, str]:
    model, batch = _pipeline()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(**batch).backward()
    optimizer.step()
    found = {}
    for name, way in _ways(model, optimizer, f"{path}-{rank}").items():
        try:
            way()
            found[name] = "nothing"
        except (wh.CheckpointError, wh.LayoutError) as error:
            found[name] = str(error)
    return found


def test_what_another_rank_holds_is_not_taken_for_zeros(tmp_path: Path) -> None:
    for rank, found in enumerate(world(4, _said, str(tmp_path / "x"))):
        for way, text in found.items():
            if "member" in way and rank == 3:
                assert text == "nothing", (rank, way, text)
            elif way == "the optimizer":
                assert "is without that of" in text and "state.pop('other stages')" in text
            else:
                assert f"this rank ({rank}) has no values of it" in text, (rank, way, text)
                assert "wh.full_state_dict(model)" in text


def _past_torch(rank: int, n: int) -> None:
    """What torch does not ask a class of tensors about gives no zeros either."""
    model, _ = _pipeline()
    for p in model.parameters():
        target = nn.Parameter(torch.zeros(p.shape))
        target.data = p.data
        for value in (torch.Tensor(p), target.detach()):
            assert value.isnan().all() != p._whale_place.held


@pytest.mark.parametrize("n", [2])
@pytest.mark.matrix(keep=0)
def test_what_reaches_the_memory_of_others_finds_no_numbers(n: int) -> None:
    world(n, _past_torch)


def _asked_for(rank: int, n: int) -> float:
    """A step by hand, with torch.autograd.grad, beside one process."""
    model, batch = _pipeline()
    alone: Any = Scaled()
    alone.load_state_dict(wh.full_state_dict(model))
    for m in (model.eval(), alone.eval()):  # BatchNorm as it is
        parameters = list(m.parameters())
        for p, grad in zip(parameters, torch.autograd.grad(m(**batch), parameters, allow_unused=True), strict=True):
            if grad is not None:
                p.data.sub_(0.1 * grad)
    return relative_error(wh.full_state_dict(model), dict(alone.state_dict()))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.matrix(keep=0)
def test_gradients_may_be_asked_for(n: int) -> None:
    assert max(world(n, _asked_for)) < 1e-5


def _drawn_again(rank: int, n: int) -> float:
    """New first values after wh.parallelize are those of one process, from one random state."""
    model, _ = _pipeline()
    alone = Scaled()
    for m in (model, alone):
        torch.manual_seed(3)
        for module in m.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        nn.init.orthogonal_(m.c.weight)
        nn.init.normal_(m.a.bias)
        nn.init.constant_(m.b.scale, 2.0)
        m.d.bias.data[1:].uniform_()
    return relative_error(wh.full_state_dict(model), dict(alone.state_dict()))


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.matrix(keep=0)
def test_values_may_be_drawn_again(n: int) -> None:
    assert max(world(n, _drawn_again)) == 0.0


def _saved_as_they_are(rank: int, n: int, path: str) -> str:
    model, _ = _pipeline()
    with pytest.raises((ValueError, wh.CheckpointError)) as caught:  # safetensors' own: "a non contiguous tensor"
        safetensors.save_file(dict(model.named_parameters()), f"{path}-{rank}")
    return str(caught.value)


@pytest.mark.parametrize("n", [2])
@pytest.mark.matrix(keep=0)
def test_safetensors_takes_no_parameters_of_other_ranks(n: int, tmp_path: Path) -> None:
    assert all(world(n, _saved_as_they_are, str(tmp_path / "x")))
    assert not list(tmp_path.iterdir())


def _right(rank: int, n: int) -> list[float]:
    """Errors of what has to be right: averages, whole states of model, member and copies; states that come back."""
    model, batch = _pipeline()
    alone = Scaled()
    alone.load_state_dict(wh.full_state_dict(model))
    expected = copy.deepcopy(alone)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    by_hand = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for number in range(2):
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
        average.update_parameters(model)
        with torch.no_grad():
            for mine, theirs in zip(by_hand.parameters(), model.parameters(), strict=True):
                mine.mul_(0.5 * number).add_(theirs, alpha=1.0 - 0.5 * number)  # the first one counts whole
                mine.data *= 1.0
    whole = wh.full_state_dict(model)
    error = relative_error(wh.full_state_dict(copy.deepcopy(model)), whole)
    error = max(error, relative_error(wh.full_state_dict(model.b), {k: whole[f"b.{k}"] for k in model.b.state_dict()}))
    error = max(error, relative_error(wh.full_state_dict(copy.deepcopy(model.b)), wh.full_state_dict(model.b)))
    names = [name for name, _ in alone.named_parameters()]
    hand, swa = wh.full_state_dict(by_hand), wh.full_state_dict(average)
    averages = relative_error({k: hand[k] for k in names}, {k: swa[f"module.{k}"] for k in names})
    model.load_state_dict(before)
    back = relative_error(wh.full_state_dict(model), expected.state_dict())
    model.double()
    model(batch["x"].double(), batch["y"]).backward()
    stored = sum(Tensor.untyped_storage(p.detach().as_subclass(Tensor)).nbytes() for p in model.parameters())
    own = sum(p.nbytes for p in model.parameters() if p._whale_place.held)
    assert own <= stored <= own + 80, "converted, without memory for the others"
    return [error, averages, back]


def test_copies_averages_and_states_are_right() -> None:
    for errors in world(4, _right):
        assert max(errors) < 1e-6


def _resumed(rank: int, n: int, path: str) -> float:
    """Each rank's own state of the optimizer, written and read back, as the guide has it."""
    model, batch = _pipeline()
    start = wh.full_state_dict(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def train(optimizer: Any) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(**batch).backward()
            optimizer.step()

    train(optimizer)
    state = optimizer.state_dict()
    state.pop("other stages")
    for values in state["state"].values():
        for name, value in values.items():
            values[name] = value.part() if hasattr(value, "part") else value
    torch.save(state, f"{path}-{rank}")
    middle = wh.full_state_dict(model)
    train(optimizer)
    expected = wh.full_state_dict(model)
    assert relative_error(expected, start) > 0.01
    model.load_state_dict(middle)
    again = torch.optim.Adam(model.parameters(), lr=0.01)
    again.load_state_dict(torch.load(f"{path}-{rank}"))
    train(again)
    error = relative_error(wh.full_state_dict(model), expected)
    return error


def test_the_optimizer_of_each_rank_is_its_own(tmp_path: Path) -> None:
    assert max(world(2, _resumed, str(tmp_path / "optimizer"))) == 0.0
