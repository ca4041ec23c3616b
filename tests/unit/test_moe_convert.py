"""Upcycling and conversion by name: what a dense feed-forward gives, its layer of experts gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import whale_torch as wh
from whale_torch import moe
from whale_torch.annotation import annotations_of

DIM = 8


class Gated(nn.Module):
    """Llama's."""

    def __init__(self, act: Callable[[Tensor], Tensor] = F.silu, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(DIM, 12, bias=bias), nn.Linear(DIM, 12, bias=bias)
        self.down_proj, self.act_fn = nn.Linear(12, DIM, bias=bias), act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


class Functional(nn.Module):
    """Its forward alone says which activation it has."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(DIM, 12), nn.Linear(DIM, 12), nn.Linear(12, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


class Odd(nn.Module):
    """Named as others are, and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(DIM, 12), nn.Linear(12, DIM), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(self.act(self.fc1(x)).cumsum(-1))
        return y


def _sequence(act: nn.Module, *rest: nn.Module, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 12, bias=bias), act, nn.Linear(12, DIM, bias=bias), *rest)


DENSE: dict[str, Callable[[], nn.Module]] = {
    "gelu": lambda: _sequence(nn.GELU()),
    "gelu_tanh": lambda: _sequence(nn.GELU("tanh"), bias=False),
    "relu": lambda: _sequence(nn.ReLU(), nn.Dropout(0.0)),
    "llama": Gated,
    "reglu": lambda: Gated(F.relu, bias=True),
    "functional": Functional,
}
COPIED: dict[str, Callable[[], nn.Module]] = {
    "tanh": lambda: _sequence(nn.Tanh()),
    "odd": Odd,
    "three": lambda: nn.Sequential(nn.Linear(DIM, 5), nn.Linear(5, 6), nn.Linear(6, DIM)),
    "normed": lambda: nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 5), nn.ReLU(), nn.Linear(5, DIM)),
    "prelu": lambda: _sequence(nn.PReLU()),
}


def _error(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).abs().max() / expected.abs().max()).detach())


def _difference(layer: nn.Module, dense: nn.Module) -> float:
    x = torch.randn(3, 5, DIM, dtype=next(dense.parameters()).dtype)
    return _error(layer(x), dense(x))


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", [*DENSE, *COPIED])
def test_copies_give_what_the_dense_one_gives(name: str, gate: Any) -> None:
    dense = (DENSE | COPIED)[name]().double()
    layer = moe.upcycle(dense, 4, 2, gate=gate)
    assert isinstance(layer.experts, moe.FeedForward) == (name in DENSE)
    assert _difference(layer, dense) < 1e-7  # weights of routes are float32
    assert {p.dtype for p in layer.parameters()} == {torch.float64}


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", DENSE)
def test_slices_give_what_the_dense_one_gives(name: str, gate: Any) -> None:
    """Three experts are one copy; a token has two copies of four."""
    dense = DENSE[name]().double()
    layer = moe.upcycle(dense, 12, 6, hidden=4, gate=gate)
    layer.gate.get_parameter("weight").data.mul_(100)
    x = torch.randn(50, DIM).double()
    assert layer.experts.get_parameter("w1").shape == (12, 4, DIM)
    assert _error(layer(x), dense(x)) < 1e-6
    assert layer.load is not None
    assert (layer.load.counts.view(4, 3) == layer.load.counts[::3, None]).all()


def test_weights_that_do_not_sum_to_one_are_made_up_for_where_the_gate_is_uniform() -> None:
    for gate, k in (("softmax", 1), ("softmax", 2), ("sigmoid", 2), ("prototypes", 2)):
        for hidden in (None, *([3] if k == 2 and gate != "prototypes" else [])):
            dense = _sequence(nn.GELU()).double()
            options: dict[str, Any] = {} if gate == "prototypes" else {"renormalize": "none"}
            if hidden:
                k = 4
            layer = moe.upcycle(dense, 8, k, gate=gate, hidden=hidden, exact=False, **options)  # type: ignore[arg-type]
            layer.gate.get_parameter("weight").data.zero_()
            assert _difference(layer, dense) < 1e-6, (gate, k, hidden)
    layer = moe.upcycle(dense, 4, 1, exact=False, scale="none")
    assert torch.equal(layer.experts.get_parameter("w2")[3], dense.get_parameter("2.weight"))


def test_even_scale_is_that_of_the_paper() -> None:
    """E = 8, G = 2, k = 2, before softmax: A = 8 * 2 / 2 = 8 for silu with a gate, 2 = 8 ** (1 / 3) for each."""
    dense = Gated()
    layer = moe.upcycle(dense, 8, 2, hidden=6, scale="even", exact=False, renormalize="none")
    torch.testing.assert_close(layer.experts.get_parameter("w1")[3], 2 * dense.gate_proj.weight[6:])
    torch.testing.assert_close(layer.experts.get_parameter("w3")[2], 2 * dense.up_proj.weight[:6])
    torch.testing.assert_close(layer.experts.get_parameter("w2")[5], 2 * dense.down_proj.weight[:, 6:])
    relu = _sequence(nn.ReLU())
    assert _difference(moe.upcycle(relu, 8, 4, hidden=6, scale="even"), relu) < 1e-5


def test_a_hash_gate_is_exact() -> None:
    dense = _sequence(nn.GELU())
    layer = moe.upcycle(dense, 4, 2, gate=moe.Hash(10, 4, 2))
    x = torch.randn(10, DIM)
    assert _error(layer(x, token_ids=torch.arange(10)), dense(x)) < 1e-6


def test_half_precision_is_exact() -> None:
    dense = _sequence(nn.GELU()).bfloat16()
    layer = moe.upcycle(dense, 4, 2)
    assert isinstance(layer.experts, moe.FeedForward)
    x = torch.randn(20, DIM).bfloat16()
    torch.testing.assert_close(layer(x), dense(x), atol=0, rtol=2**-7)


def test_noise_makes_experts_differ() -> None:
    dense = _sequence(nn.GELU())
    w1 = moe.upcycle(dense, 64, 2, noise=0.1).experts.get_parameter("w1").detach()
    spread = (w1 - dense.get_parameter("0.weight").detach()).std() / dense.get_parameter("0.weight").detach().std()
    assert float(spread) == pytest.approx(0.1, rel=0.05)
    assert not torch.equal(w1[0], w1[1])


def test_dropout_modes_and_frozen_weights_stay() -> None:
    dense = nn.Sequential(nn.Linear(DIM, 12), nn.GELU(), nn.Linear(12, DIM)).eval()
    dense[0].requires_grad_(False)
    layer = moe.upcycle(dense, 4, 2)
    assert isinstance(layer.experts, moe.FeedForward)
    assert not layer.training
    assert not dense.training
    assert [p.requires_grad for p in layer.experts.parameters()] == [False, True, False, True]  # w1 w2 b1 b2
    assert _difference(layer, dense) < 1e-6
    outer = _sequence(nn.GELU(), nn.Dropout(0.5))
    copied = moe.upcycle(outer, 4, 2)
    assert isinstance(copied.experts, moe.Stacked)
    assert (copied(torch.ones(50, DIM)) == 0).any()
    assert _difference(copied.eval(), outer.eval()) < 1e-6


class Tied(nn.Module):
    """Two layers on one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).tanh())
        return y


def test_weights_that_are_tied_inside_an_expert_stay_tied() -> None:
    dense = Tied()
    layer = moe.upcycle(dense, 3, 2)
    assert [name for name, _ in layer.experts.named_parameters()] == ["first__weight", "first__bias", "second__bias"]
    assert _difference(layer, dense) < 1e-6
    x = torch.randn(5, DIM)
    layer(x).sum().backward()
    dense(x).sum().backward()
    torch.testing.assert_close(layer.experts.first__weight.grad.sum(0), dense.first.weight.grad)


def test_noise_on_weights_of_one_number_is_none() -> None:
    layer = moe.upcycle(nn.Sequential(nn.Linear(1, 1), nn.GELU(), nn.Linear(1, 1)), 3, 2, noise=0.1)
    assert all(p.isfinite().all() for p in layer.parameters())


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "top 1": (lambda: moe.upcycle(_sequence(nn.GELU()), 4, 1), "the weights of a token's 1 experts do not sum to 1"),
    "prototypes": (
        lambda: moe.upcycle(_sequence(nn.GELU()), 4, 2, gate="prototypes"),
        "the weights of a token's 2 experts do not sum to 1",
    ),
    "width": (lambda: moe.upcycle(_sequence(nn.GELU()), 4, 2, hidden=5), "hidden=5 with 4 experts, of a dense"),
    "number": (lambda: moe.upcycle(_sequence(nn.GELU()), 4, 2, hidden=4), "hidden=4 with 4 experts, of a dense"),
    "odd top k": (
        lambda: moe.upcycle(_sequence(nn.GELU()), 6, 2, hidden=4),
        "a copy is 3 experts, and a token has 2",
    ),
    "even": (
        lambda: moe.upcycle(_sequence(nn.GELU()), 6, 3, hidden=4, scale="even"),
        'scale="even" reaches through the activation',
    ),
    "no scale": (lambda: moe.upcycle(_sequence(nn.GELU()), 6, 3, hidden=4, scale="none"), "is divided by 3"),
    "no form": (lambda: moe.upcycle(Odd(), 6, 3, hidden=4), "Odd has no form that could be cut"),
    "shared": (lambda: moe.upcycle(_sequence(nn.GELU()), shared=nn.Linear(DIM, DIM)), "the shared expert is added"),
    "its own": (lambda: moe.upcycle(_sequence(nn.GELU()), activation="relu"), "activation is as of the dense"),
    "unscaled": (lambda: moe.upcycle(Odd(), 4, 1, exact=False), "what Odd gives cannot be scaled"),
    "groups": (
        lambda: moe.upcycle(_sequence(nn.GELU()), 4, 2, hidden=6, gate="prototypes", exact=False),
        "a Prototypes gate does not choose the 2 slices",
    ),
    "meta": (lambda: moe.upcycle(_sequence(nn.GELU()).to("meta")), "is on the meta device"),
    "no module": (lambda: moe.upcycle(F.gelu), "upcycle takes an nn.Module, got builtin"),  # type: ignore[arg-type]
    "no width": (lambda: moe.upcycle(nn.LayerNorm(DIM)), "LayerNorm holds no linear layer"),
    "no ffn": (lambda: moe.upcycle(nn.Linear(DIM, 3)), r"from \[2, 8\] it makes \(2, 3\)"),
    "more inputs": (lambda: moe.upcycle(nn.Bilinear(DIM, DIM, DIM)), "holds no linear layer"),
    "attention": (
        lambda: moe.upcycle(nn.Sequential(nn.Linear(DIM, 5), nn.Bilinear(5, 5, DIM))),
        r"called with \[2, 8\] it raises TypeError",
    ),
    "noise": (lambda: moe.upcycle(_sequence(nn.GELU()), noise=-1.0), "noise=-1.0"),
    "no noise": (lambda: moe.upcycle(_sequence(nn.GELU()), noise=float("nan")), "noise=nan"),
    "twice": (lambda: moe.upcycle(moe.MoELayer(DIM, 4)), "a layer of experts already"),
    "no option": (
        lambda: moe.upcycle(_sequence(nn.GELU()), capacity_fact=1.0),
        r"no option 'capacity_fact'.(?s:.)*'capacity_factor'\?",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_upcycling_refuses(name: str) -> None:
    call, says = MISTAKES[name]
    with pytest.raises(wh.PlanError, match=says):
        call()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList([nn.ModuleDict({"norm": nn.LayerNorm(DIM), "mlp": Gated()}) for _ in range(2)])
        self.tied = self.blocks[0]["mlp"]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["mlp"](block["norm"](x))
        y: Tensor = x + self.tied(x)
        return y


def test_modules_are_replaced_by_name() -> None:
    model: Any = Model()
    before = copy.deepcopy(model)
    kept = {name: p for name, p in model.named_parameters() if "norm" in name}
    wh.annotate(model, {r"blocks\.1\.mlp": wh.split()})
    assert moe.convert(model, {r"blocks\..*\.mlp": {"num_experts": 4, "aux_loss_coef": 0.0}}) is model
    assert isinstance(model.blocks[0]["mlp"], moe.MoELayer)
    assert model.tied is model.blocks[0]["mlp"]
    assert [a.kind for a in annotations_of(model.blocks[1]["mlp"])] == ["split"]
    assert not annotations_of(model.blocks[0]["mlp"])
    assert all(model.get_parameter(name) is p for name, p in kept.items())
    x = torch.randn(4, DIM)
    assert _error(model(x), before(x)) < 1e-6


def test_functions_convert_too() -> None:
    model: Any = Model()
    old = model.blocks[1]["mlp"].gate_proj
    with wh.split():
        moe.convert(
            model,
            {
                r"blocks\.0\.mlp": lambda dense: moe.upcycle(dense, 2, 2),
                r"blocks\.1\.mlp": lambda dense: nn.Sequential(dense.gate_proj, nn.Linear(12, DIM)),
            },
        )
    assert model.blocks[1]["mlp"][0] is old
    assert [a.kind for a in annotations_of(model.blocks[0]["mlp"])] == ["split"]


def _hooked() -> nn.Module:
    model = Model()
    model.blocks[1]["mlp"].up_proj.register_forward_hook(lambda *_: None)
    return model


def _normed() -> nn.Module:
    model = Model()
    weight_norm(model.blocks[1]["mlp"].up_proj)
    return model


def _scoped() -> nn.Module:
    model: nn.Module = wh.annotate(Model(), {r"blocks\.1\.mlp\.up_proj": wh.split()})
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "nothing": (Model, {r"blocks\.\d\.mpl": {}}, r"matches no module. Close names: 'blocks\.\d\.mlp'"),
    "second": (Model, {r"blocks\.0\.mlp": {}, "head": {}}, "'head' matches no module"),
    "no regex": (Model, {"blocks(": {}}, "is not a regular expression"),
    "none": (Model, {}, "no pattern was given"),
    "twice": (Model, {r".*0\.mlp": {}, "tied": {}}, r"'tied' is matched by"),
    "inside": (Model, {r"blocks\.0": lambda m: m, r".*mlp": {}}, r"'blocks\.0' and 'blocks\.0\.mlp' inside it"),
    "itself": (Model, {"": {}}, "a pattern matches the model itself"),
    "hooks": (_hooked, {r".*mlp": {}}, r"'blocks\.1\.mlp\.up_proj' has hooks"),
    "parametrized": (_normed, {r".*mlp": {}}, r"'blocks\.1\.mlp\.up_proj' has parametrized"),
    "scopes": (_scoped, {r".*mlp": {}}, r"'blocks\.1\.mlp\.up_proj' has wh.split\(\)"),
    "no module": (Model, {r".*mlp": lambda m: None}, "gives NoneType"),
    "one gate": (Model, {r"blocks.*mlp": {"gate": moe.TopK(DIM, 8)}}, "2 layers that .* matches would share one gate"),
    "a list": (Model, [r".*mlp"], r"\['.\*mlp'\] says of no module"),  # type: ignore[dict-item]
    "a number": (Model, {r".*mlp": 8}, "8 says of no module"),
    "refused": (Model, {r".*mlp": {"top_k": 9}}, r"convert\(\): 'blocks\.0\.mlp': top_k is 9"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_conversion_refuses(name: str) -> None:
    build, patterns, says = REFUSED[name]
    model = build()
    before = dict(model.named_modules())
    with pytest.raises(wh.PlanError, match=says):
        moe.convert(model, patterns)
    assert dict(model.named_modules()) == before
