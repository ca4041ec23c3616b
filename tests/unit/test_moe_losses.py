"""The gradient of a layer's auxiliary loss is that of a loss that was added, whatever a loop does to its loss."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from whale_torch import moe
from whale_torch.errors import LossError, PlanError

DIM, E = 6, 5


class Twice(nn.Module):
    """Two layers of experts, run as they are or as checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            moe.MoELayer(DIM, E, 2, hidden=7, aux_loss_coef=0.3, z_loss_coef=0.1) for _ in range(2)
        )
        for layer in self.layers:
            layer.gate.weight.data.normal_()  # type: ignore[union-attr]
        self.reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant))
        return x


def _model() -> Twice:
    torch.manual_seed(0)
    return Twice().double()


def _x() -> Tensor:
    return torch.randn(9, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def _task(y: Tensor) -> Tensor:
    return y.square().mean()


def _gradients(model: nn.Module, loss: Callable[[Tensor], Tensor], times: float = 1.0) -> list[Tensor]:
    loss(model(_x())).backward()
    return [p.grad / times for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("added", [False, True])
def test_recomputation_neither_loses_nor_doubles_it(reentrant: bool | None, added: bool) -> None:
    plain, model = _model(), _model()
    model.reentrant = reentrant
    expected = _gradients(plain, _task)
    y = model(_x())
    torch.testing.assert_close(moe.aux_loss(model), moe.aux_loss(plain))
    assert moe.aux_loss(model) > 0.5 and not moe.aux_loss(model).requires_grad
    (_task(y) + moe.aux_loss(model, added=True) if added else _task(y)).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)
    torch.testing.assert_close(moe.aux_loss(model), moe.aux_loss(plain))


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_what_is_added_follows_all_that_is_done_to_the_loss(reentrant: bool | None) -> None:
    expected = _gradients(_model(), _task)
    scaled, divided, weighed, factor = (_model() for _ in range(4))
    for model in (scaled, divided, weighed, factor):
        model.reentrant = reentrant
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(scaled.parameters(), lr=0.0)
    found = _gradients(scaled, lambda y: scaler.scale(_task(y) + moe.aux_loss(scaled, added=True)), 1024.0)
    torch.testing.assert_close(found, expected)
    scaler.step(optimizer)  # is not refused
    found = _gradients(divided, lambda y: (moe.aux_loss(divided, added=True) + _task(y)) / 3, 1 / 3)
    torch.testing.assert_close(found, expected)
    for layer in factor.layers:
        layer.loss_factor = 0.25
        layer.losses = type(layer.losses)(0.3 * 2, 0.1 * 2)  # type: ignore[assignment]
    two = _gradients(weighed, lambda y: _task(y) / 4 + 0.5 * moe.aux_loss(weighed, added=True), 0.25)
    torch.testing.assert_close(two, _gradients(factor, lambda y: _task(y) / 4, 0.25))


def test_each_forward_of_an_accumulation_has_its_own() -> None:
    expected = _model()
    for k in (2, 5):
        for layer in expected.layers:
            layer.loss_factor = 1 / k
        (_task(expected(_x())) / k).backward()
    one, other = _model(), _model()
    parts = [(_task(one(_x())) + moe.aux_loss(one, added=True)) / k for k in (2, 5)]
    (parts[0] + parts[1]).backward()
    for k in (2, 5):
        ((_task(other(_x())) + moe.aux_loss(other, added=True)) / k).backward()
    for model in (one, other):
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()])


def test_a_backward_that_failed_tells_the_next_nothing() -> None:
    model, expected = _model(), _gradients(_model(), _task)

    def fail(grad: Tensor) -> Tensor:
        raise ValueError("no")

    y = model(_x())
    y.register_hook(fail)
    with pytest.raises(ValueError, match="no"):
        (8 * (_task(y) + moe.aux_loss(model, added=True))).backward()
    model.zero_grad()
    torch.testing.assert_close(_gradients(model, _task), expected)


def test_gradients_of_autograd_follow_too() -> None:
    model, expected = _model(), _gradients(_model(), _task)
    loss = 7 * (_task(model(_x())) + moe.aux_loss(model, added=True))
    found = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close([g / 7 for g in found], expected)
    assert all(p.grad is None for p in model.parameters())


def test_torchs_scaler_is_refused_where_it_does_not_scale_the_auxiliary_loss() -> None:
    model = _model()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(_task(model(_x()))).backward()
    with pytest.raises(PlanError, match=r"multiplied the loss by 1024, .* of a MoELayer was multiplied by 1"):
        scaler.step(optimizer)
    for layer in model.layers:
        layer.loss_factor = 1024.0  # a loop may say so itself
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(_task(model(_x()))).backward()
    scaler.step(optimizer)
    switched_off = torch.amp.GradScaler("cpu", enabled=False)
    for layer in model.layers:
        layer.loss_factor = 1.0
    switched_off.scale(_task(model(_x()))).backward()
    switched_off.step(optimizer)


def test_an_order_that_autograd_does_not_keep_is_refused() -> None:
    """As on two devices, each of which goes backward by itself."""
    model, x = _model(), _x()
    y = model(x)
    late = model.layers[0]._added_loss
    x.register_hook(lambda grad: late._reached(torch.ones(()), late._forwards))  # type: ignore[operator,union-attr,arg-type]
    with pytest.raises(LossError, match="came to a layer before it came to the auxiliary loss"):
        _task(y).backward()


def test_a_layer_that_ran_can_be_copied_and_written() -> None:
    model = _model()
    (_task(model(_x())) + moe.aux_loss(model, added=True)).backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(_x()), model(_x()))


def test_without_grad_or_layers_it_is_a_number() -> None:
    model = _model()
    with torch.no_grad():
        model(_x())
        assert not moe.aux_loss(model, added=True).requires_grad and moe.aux_loss(model) > 0
        model.eval()(_x())
    assert moe.aux_loss(model) == 0
    assert moe.aux_loss(nn.Linear(1, 1), added=True) == 0
