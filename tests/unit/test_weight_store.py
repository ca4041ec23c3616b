"""A backward in two parts: the input part leaves weight gradients to the weight part, and both are one backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tests.parity.metric import relative_error
from whale_torch.errors import LossError
from whale_torch.strategies.pipeline.weight_store import WeightStore

WIDTH = 6


class _Layers(nn.Module):
    """Two layers, and what `forward` makes of them."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], make: Callable[[], nn.Module] | None = None):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH) if make is None else make()
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def _prepared(change: Callable[[Any], object]) -> _Layers:
    model = _Layers(_chain)
    change(model)
    return model


def _chain(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.b(m.a(x).tanh())
    return out


def _penalty(m: Any, x: Tensor) -> Tensor:
    """A loss on gradients, through whose backward the outer one goes."""
    h = m.a(x)
    (slope,) = torch.autograd.grad(h.tanh().square().sum(), x, create_graph=True)
    out: Tensor = m.b(h) + slope
    return out


def _inner(m: Any, x: Tensor) -> Tensor:
    """A step of gradient descent inside the forward."""
    weight, bias = torch.autograd.grad(m.a(x).square().sum(), [m.a.weight, m.a.bias], create_graph=True)
    out: Tensor = F.linear(m.b(x), m.a.weight - 0.1 * weight, m.a.bias - 0.1 * bias)
    return out


class _Recomputes(torch.autograd.Function):
    """A checkpoint written by hand, whose backward asks torch.autograd.grad for the parameters' gradients."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.layer, ctx.x = layer, x.detach()
        with torch.no_grad():
            out: Tensor = layer(x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            out = ctx.layer(x)
        return None, *torch.autograd.grad(out, [x, *ctx.layer.parameters()], grad)


def _by_hand(m: Any, x: Tensor) -> Tensor:
    out: Tensor = _Recomputes.apply(m.b, m.a(x), *m.b.parameters())  # type: ignore[no-untyped-call]
    return out


def _reads_a_weight(m: Any, x: Tensor) -> Tensor:
    return _chain(m, x) + F.linear(x, m.b.weight) + m.a.weight.square().sum()


def _under_autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = m.a(x)
    with torch.autocast("cpu", enabled=False):
        out: Tensor = m.b(h.float())
    return out


def _mapped(m: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(m.b)(m.a(x).unsqueeze(1)).squeeze(1)


def _tie(m: Any) -> None:
    m.b.weight = m.a.weight


def _double(module: nn.Module, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(2 * grad for grad in grads)


def _conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(3)
    return Conv1D(WIDTH, WIDTH)


# How many calls wait for the weight part, and the model.
CASES: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "two layers": (2, lambda: _Layers(_chain)),
    "more dims": (2, lambda: _Layers(lambda m, x: _chain(m, x.view(2, 1, 4, WIDTH)))),
    "one row": (2, lambda: _Layers(lambda m, x: _chain(m, x[0]))),
    "written into": (2, lambda: _Layers(lambda m, x: m.b(m.a(x.view(2, 4, WIDTH)).relu_()).mul_(2))),
    "residual": (2, lambda: _Layers(lambda m, x: _chain(m, x) + x + m.a.bias)),
    "called twice": (3, lambda: _Layers(lambda m, x: m.a(_chain(m, x)))),
    "tied": (2, lambda: _prepared(_tie)),
    "frozen weight": (1, lambda: _prepared(lambda m: m.a.weight.requires_grad_(False))),
    "frozen bias": (2, lambda: _prepared(lambda m: m.a.bias.requires_grad_(False))),
    "frozen layer": (1, lambda: _prepared(lambda m: m.b.requires_grad_(False))),
    "no bias": (2, lambda: _Layers(_chain, lambda: nn.Linear(WIDTH, WIDTH, bias=False))),
    "checkpoint": (2, lambda: _Layers(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False)))),
    "reentrant checkpoint": (2, lambda: _Layers(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=True)))),
    "checkpoint by hand": (1, lambda: _Layers(_by_hand)),
    "penalty on gradients": (2, lambda: _Layers(_penalty)),
    "gradients inside": (2, lambda: _Layers(_inner)),
    "weights read": (2, lambda: _Layers(_reads_a_weight)),
    "autocast": (1, lambda: _Layers(_under_autocast)),
    "torch.func": (1, lambda: _Layers(_mapped)),
    "weight_norm": (1, lambda: _Layers(_chain, lambda: weight_norm(nn.Linear(WIDTH, WIDTH)))),
    "BatchNorm": (1, lambda: _Layers(_chain, lambda: nn.BatchNorm1d(WIDTH))),
    "hooked": (2, lambda: _prepared(lambda m: m.a.register_forward_hook(lambda m, args, out: 3 * out))),
    "gradients changed": (
        2,
        lambda: _prepared(lambda m: m.a.register_full_backward_pre_hook(_double)),
    ),
    "attention": (0, lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0).requires_grad_(False)),
    "an encoder": (2, lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0)),
    "another kind": (1, lambda: _Layers(_chain, lambda: type("Mine", (nn.Linear,), {})(WIDTH, WIDTH))),
    "transformers' Conv1D": (2, lambda: _Layers(_chain, _conv1d)),
}


@pytest.mark.parametrize("name", CASES)
def test_both_parts_are_a_backward(name: str) -> None:
    number, make = CASES[name]
    if "transformers" in name:
        pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    whole = make()
    parts = copy.deepcopy(whole)
    store = WeightStore(parts.modules(), {(0, 0), (0, 1)})
    inputs = [torch.randn(8, WIDTH, requires_grad=True) for _ in range(2)]
    copies = [x.detach().requires_grad_() for x in inputs]
    with store.in_place():
        for batch, x in enumerate(inputs):
            store.begin(0, batch)
            parts(x).square().sum().backward()
        assert len(store) == 2 * number
        store.finish(0, 1)
        assert len(store) == number
        store.finish(0, 0)
    for x in copies:
        whole(x).square().sum().backward()
    found, expected = (_gradients(m) for m in (parts, whole))
    assert found.keys() == expected.keys() and (not found or relative_error(found, expected) < 1e-5)
    for x, y in zip(inputs, copies, strict=True):
        assert (x.grad is None) == (y.grad is None)
        torch.testing.assert_close(x.grad, y.grad)
    assert not len(store) and not any("forward" in module.__dict__ for module in parts.modules())


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_the_input_part_makes_no_weight_gradient() -> None:
    model = _Layers(_chain)
    store = WeightStore(model.modules(), {(0, 0)})
    x = torch.randn(8, WIDTH, requires_grad=True)
    with store.in_place():
        store.begin(0, 1)  # of which the backward is whole
        model(x).sum().backward()
        assert len(store) == 0 and _gradients(model).keys() == dict(model.named_parameters()).keys()
        model.zero_grad()
        store.begin(0, 0)
        out = model(x).sum()
        assert len(store) == 0
        x.grad = None
        out.backward()
        assert not _gradients(model) and x.grad is not None and len(store) == 2
        store.finish(0, 0)
    assert _gradients(model).keys() == dict(model.named_parameters()).keys()


def test_a_gradient_of_few_rows_takes_the_rest() -> None:
    """A tied embedding with sparse gradients in the input part, a dense one in the weight part."""
    table = nn.Embedding(9, WIDTH, sparse=True)
    head = nn.Linear(WIDTH, 9, bias=False)
    head.weight = table.weight
    ids = torch.tensor([1, 1, 4])
    store = WeightStore([table, head], {(0, 0)})
    with store.in_place():
        store.begin(0, 0)
        head(table(ids)).square().sum().backward()
        store.finish(0, 0)
    found, head.weight.grad = head.weight.grad, None
    assert found is not None and found.layout is torch.strided
    table.sparse = False
    head(table(ids)).square().sum().backward()
    torch.testing.assert_close(found, head.weight.grad)


def test_what_is_wrong_inside_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    store = WeightStore(model.modules(), {(0, 0)})
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), store.in_place():
        store.begin(0, 0)
        model(torch.randn(2, WIDTH + 1))
    assert "forward" not in model[0].__dict__


def test_what_was_written_into_in_between_is_noticed() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    store, state = WeightStore([model], {(0, 3)}), torch.randn(2, WIDTH)
    with store.in_place():
        store.begin(0, 3)
        model(state).sum().backward()
        state.mul_(0.5)
        with pytest.raises(LossError, match=r"a linear layer of 6 to 6 features in stage 0 .* of micro-batch 3's"):
            store.finish(0, 3)
    assert model.weight.grad is None
