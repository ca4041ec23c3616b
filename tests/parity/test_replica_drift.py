"""Copies that drift apart are found before the optimizer's step; what is right is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.replica_cases import WIDTH, batch_of, build, outside, share
from tests.world import world
from whale_torch.comm import drift
from whale_torch.strategies.runtime import runtime_of


class Headed(nn.Module):
    """Whole features and a cut head, or everything cut."""

    def __init__(self, all_cut: bool) -> None:
        super().__init__()
        if all_cut:
            with wh.split():
                self.net = nn.Sequential(nn.Linear(WIDTH, 16, bias=False), nn.Tanh(), nn.Linear(16, 5, bias=False))
        else:
            self.first = nn.Linear(WIDTH, 8)
            with wh.split():
                self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if hasattr(self, "net") else self.head(torch.tanh(self.first(x)))


def _nothing(model: nn.Module, rank: int, step: int) -> None:
    pass


def _edit(model: nn.Module, rank: int, step: int) -> None:
    if rank == 1:
        next(p for p in model.parameters() if p.grad is not None).grad.view(-1)[0] += 1e-3


def _forget(model: nn.Module, rank: int, step: int) -> None:
    if rank == 1:
        model.right.bias.grad = None


def _poke(model: nn.Module, rank: int, step: int) -> None:
    if rank == 1:
        next(model.parameters()).data.view(-1)[2] += 1e-3


def _clip(model: nn.Module, rank: int, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def _clip_by_value(model: nn.Module, rank: int, step: int) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def _unscale(model: nn.Module, rank: int, step: int) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= 1024.0


def _row(model: nn.Module, rank: int, step: int) -> None:
    """One rank alone writes into a row that it alone has."""
    if rank == 1:
        cut = [p for p in model.parameters() if p._whale_place.is_cut]
        cut[0].grad[-1] = 0.0


CHANGES: dict[str, Any] = {
    "nothing": _nothing, "edit": _edit, "forget": _forget, "poke": _poke, "clip": _clip,
    "clip by value": _clip_by_value, "unscale": _unscale, "row": _row,
}  # fmt: skip


def drift_rank(rank: int, n: int, model_kind: str, change: str, at: int, steps: int) -> str:
    torch.manual_seed(0)
    model = wh.parallelize(build("branches") if model_kind == "replica" else Headed(model_kind == "cut"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = share(batch_of(4 * n), [4] * n, rank)
    for step in range(steps):
        optimizer.zero_grad()
        try:
            outside(model, batch).backward()
            if step == at:
                CHANGES[change](model, rank, step)
            optimizer.step()
        except wh.CommError as caught:
            return f"step {step}: {caught}"
    return ""


@pytest.mark.parametrize(
    ("model", "change", "text"),
    [
        (
            "replica",
            "edit",
            r"step 2: the gradient of 'left.weight' differs between copies .* norm \S+ on rank 0, norm \S+ on rank 1",
        ),
        (
            "replica",
            "forget",
            r"step 2: the gradient of 'right.bias' differs between copies .* norm [\d.]+ on rank 0, None on rank 1",
        ),
        (
            "replica",
            "poke",
            r"step 2: the copies of 'left.weight' differ before an .* step: norm \S+ \(sum \S+\) on rank 0",
        ),
        (
            "headed",
            "clip",
            r"step 2: the gradient of 'first.bias' differs between copies(.|\n)*clip_grad_norm_(.|\n)*wh.clip_grad",
        ),
        (
            "cut",
            "clip",
            r"step 2: between backward and an optimizer's step the gradient of 'net.0.weight', which is cut, was mult",
        ),
    ],
)
def test_what_drifts_raises_on_every_rank(model: str, change: str, text: str) -> None:
    import re

    texts = world(2, drift_rank, model, change, 2, 3)
    assert re.search(text, texts[0]), texts[0]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("model", ["replica", "headed", "cut"])
@pytest.mark.parametrize("change", ["nothing", "clip by value", "unscale"])
def test_what_is_right_is_left_alone(model: str, change: str) -> None:
    assert world(2, drift_rank, model, change, 1, 4) == ["", ""]


def test_torch_clip_is_right_on_a_replica() -> None:
    assert world(2, drift_rank, "replica", "clip", 1, 3) == ["", ""]


@pytest.mark.parametrize(("at", "steps", "found"), [(3, 99, ""), (3, 100, "step 99"), (99, 100, "step 99")])
def test_the_first_steps_and_every_hundredth_are_checked(at: int, steps: int, found: str) -> None:
    assert all(
        text.startswith(found) and bool(text) == bool(found)
        for text in world(2, drift_rank, "replica", "poke", at, steps)
    )


def unsynced_rank(rank: int, n: int) -> str:
    model = wh.parallelize(build("mlp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wh.no_sync(model):
        outside(model, share(batch_of(8), [4] * n, rank)).backward()
    try:
        optimizer.step()
    except wh.CommError as caught:
        return str(caught)
    return ""


def test_a_step_on_gradients_that_were_not_averaged_raises() -> None:
    for text in world(2, unsynced_rank):
        assert "wh.no_sync" in text and "gradient of '0.bias'" in text


def others_rank(rank: int, n: int) -> list[int]:
    """Optimizers of other models, and fewer than all ranks: no message; unequal optimizers: an error."""
    model = wh.parallelize(build("mlp"))
    group = next(iter(model.parameters()))._whale_place.copies
    before = group.num_calls
    if rank == 0:
        stranger = build("mlp")
        optimizer = torch.optim.SGD(stranger.parameters(), lr=0.1)
        outside(stranger, batch_of(4)).backward()
        optimizer.step()
    quiet = group.num_calls - before
    outside(model, share(batch_of(8), [4] * n, rank)).backward()
    parameters = list(model.parameters())
    try:
        torch.optim.SGD(parameters if rank else parameters[1:], lr=0.1).step()
    except wh.CommError as caught:
        assert "hold [4, 5] parameters of the model" in str(caught)
        return [quiet, 1]
    return [quiet, 0]


def test_only_optimizers_of_the_model_exchange() -> None:
    assert world(2, others_rank) == [[0, 1], [0, 1]]


def alone_rank(rank: int, n: int) -> bool:
    calls: list[Any] = []
    drift.gather_equal = lambda *args, **kwargs: calls.append(args)  # type: ignore[attr-defined]
    drift_rank(rank, n, "replica", "nothing", 0, 4)
    drift_rank(rank, n, "cut", "nothing", 0, 4)
    return not calls


def test_one_process_exchanges_nothing() -> None:
    assert world(1, alone_rank) == [True]


def nan_rank(rank: int, n: int) -> str:
    model = wh.parallelize(build("mlp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, y = share(batch_of(8), [4] * n, rank)
    outside(model, (x * torch.nan if rank else x, y)).backward()
    optimizer.step()
    return ""


def test_gradients_that_are_not_finite_agree() -> None:
    world(2, nan_rank)


def _in_another_order(rank: int, n: int, model_kind: str) -> None:
    """The optimizer of rank 1 holds its parameters in another order, as from a set."""
    torch.manual_seed(0)
    model = wh.parallelize(build("mlp") if model_kind == "replica" else Headed(model_kind == "cut"))
    listed = list(model.parameters())
    optimizer = torch.optim.SGD(listed[::-1] if rank == 1 else listed, lr=0.01)
    outside(model, share(batch_of(8), [4] * n, rank)).backward()
    optimizer.step()


@pytest.mark.parametrize("model", ["replica", "headed", "cut"])
def test_the_order_of_the_parameters_is_of_no_account(model: str) -> None:
    world(2, _in_another_order, model)


@pytest.mark.parametrize(("model", "name"), [("headed", "head.weight"), ("cut", "net.0.weight")])
def test_a_local_clip_is_seen_on_every_step(model: str, name: str) -> None:
    texts = world(2, drift_rank, model, "clip", 5, 7)
    """Between the steps that compare copies, by the next forward."""
    assert f"step 6: between backward and an optimizer's step the gradient of '{name}', which is cut, was" in texts[0]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("model", ["replica", "headed", "cut"])
@pytest.mark.parametrize("change", ["clip by value", "unscale"])
def test_what_is_right_is_left_alone_on_every_step(model: str, change: str) -> None:
    assert world(2, drift_rank, model, change, 5, 7) == ["", ""]


@pytest.mark.parametrize("model", ["headed", "cut"])
@pytest.mark.parametrize("at", [1, 5])
def test_a_rank_may_write_into_its_own_part(model: str, at: int) -> None:
    assert world(2, drift_rank, model, "row", at, 7) == ["", ""]


def quiet_rank(rank: int, n: int, change: str) -> list[int]:
    """How many messages each step of an optimizer sends, among the first steps and later."""
    torch.manual_seed(0)
    model = wh.parallelize(Headed(True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = wh.GradScaler(model, init_scale=8.0)
    groups, sent = runtime_of(model, "the test").mesh.groups(), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = outside(model, share(batch_of(8), [4] * n, rank))
        (scaler.scale(loss) if change == "scaler" else loss).backward()
        if change == "scaler":
            scaler.unscale_(optimizer)
        wh.clip_grad_norm_(model, 0.05)
        before = sum(group.num_calls for group in groups)
        if change == "scaler":
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        sent.append(sum(group.num_calls for group in groups) - before)
    return sent


@pytest.mark.parametrize("change", ["clip", "scaler"])
def test_steps_between_the_checks_send_nothing(change: str) -> None:
    for sent in world(2, quiet_rank, change):
        assert sent[3:] == [0, 0]
