"""Layers that share weights and then do not: as one layer called several times, and as layers that never shared."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.split_case import gradients_of
from tests.world import world
from whale_torch import moe
from whale_torch.errors import CheckpointError, PlanError, WhaleError

DIM, LAYERS = 8, 3
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)
        self.mix = nn.Linear(DIM, DIM)
        self.ffn = moe.MoELayer(DIM, num_experts=4, top_k=2, hidden=12)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.ffn(self.mix(self.norm(x)).tanh())
        return out


class Net(nn.Module):
    """repeat: one layer called that often, in place of layers."""

    def __init__(self, layers: int = LAYERS, repeat: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(5, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.last = nn.Linear(DIM, 7)
        self.repeat = repeat

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            for _ in range(self.repeat):
                h = layer(h)
        out: Tensor = self.last(h)
        return out


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, seed: int) -> list[float]:
    """Losses of a few steps."""
    draw = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(number):
        x = torch.randn(16, 5, generator=draw, dtype=next(model.parameters()).dtype)
        y = torch.randint(7, (16,), generator=draw)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    optimizer.zero_grad()
    return losses


def _equal(a: Any, b: Any) -> None:
    """The same names with the same values, bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_shared_layers_are_one_layer_called_several_times(kind: str) -> None:
    torch.manual_seed(0)
    model, alone = Net(), Net(layers=1, repeat=LAYERS)
    for norm in (m for net in (model, alone) for m in net.modules() if isinstance(m, nn.BatchNorm1d)):
        norm.momentum = 0.0  # of the one layer they would see all inputs
    moe.share(model.layers)
    alone.load_state_dict(model.state_dict(), strict=False)
    assert len(list(model.parameters())) == len(list(alone.parameters()))
    losses = _steps(model, OPTIMIZERS[kind](model.parameters()), 4, 1)
    assert losses == pytest.approx(_steps(alone, OPTIMIZERS[kind](alone.parameters()), 4, 1))
    for name, p in alone.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), p)


def test_buffers_stay_each_layers_own() -> None:
    torch.manual_seed(0)
    model = Net()
    moe.share(model.layers)
    _steps(model, OPTIMIZERS["sgd"](model.parameters()), 2, 1)
    means = [layer.norm.running_mean for layer in model.layers]
    assert len({m.data_ptr() for m in means}) == LAYERS and not torch.equal(means[0], means[1])


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("state", ["copy_scaled", "copy", "reset"])
def test_delinked_layers_are_layers_that_never_shared(kind: str, state: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    moe.share(model.layers)
    optimizer = OPTIMIZERS[kind](model.parameters())
    _steps(model, optimizer, 3, 1)
    real = Net()
    real.load_state_dict(model.state_dict())
    by_hand = OPTIMIZERS[kind](real.parameters())
    powers = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "momentum_buffer": 1, "step": 0}
    for name, p in real.named_parameters():
        known = optimizer.state[model.get_parameter(name)]
        shared = name.startswith("layers")
        by = LAYERS if shared and state == "copy_scaled" else 1
        if known and not (shared and state == "reset"):
            by_hand.state[p] = {k: None if v is None else v.clone() / by ** powers[k] for k, v in known.items()}
    x = torch.randn(4, 5)
    before = model.eval()(x)
    moe.delink(model.layers, optimizer, state=state)
    assert torch.equal(model(x), before)
    model.train()
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert len({p.data_ptr() for p in model.parameters()}) == len(list(real.parameters()))
    assert _steps(model, optimizer, 3, 2) == _steps(real, by_hand, 3, 2)
    _equal(model.state_dict(), real.state_dict())
    states = optimizer.state_dict()["state"], by_hand.state_dict()["state"]
    for index in states[1]:
        _equal(states[0][index], states[1][index])


class Wide(nn.Module):
    """Layers side by side, which get equal gradients while they are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 7) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


ELEMENT_WISE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-30),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-30, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-30),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01, eps=1e-30),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-30, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-30),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1, eps=1e-30),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_scaled_state_is_that_of_one_layers_gradients(name: str) -> None:
    torch.manual_seed(0)
    pseudo, real = Wide().double(), Wide().double()
    moe.share(pseudo.layers)
    real.load_state_dict(pseudo.state_dict())
    ours, theirs = ELEMENT_WISE[name](pseudo.parameters()), ELEMENT_WISE[name](real.parameters())
    _steps(pseudo, ours, 7, 1), _steps(real, theirs, 7, 1)
    moe.delink(pseudo.layers, ours)
    for p, q in zip(pseudo.parameters(), real.parameters(), strict=True):
        for key, value in theirs.state[q].items():
            torch.testing.assert_close(ours.state[p][key], value)
    _steps(pseudo, ours, 3, 2), _steps(real, theirs, 3, 2)
    for p, q in zip(pseudo.parameters(), real.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_groups_and_state_follow_their_weights() -> None:
    model = Net()
    moe.share(model.layers)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    _steps(model, optimizer, 1, 1)
    schedule.step()
    moe.delink(model.layers, optimizer)
    for group, decays in zip(optimizer.param_groups, (True, False), strict=True):
        assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters() if (p.dim() > 1) is decays]
        assert group["lr"] == pytest.approx(5e-4)
    ids = {id(value) for p in model.parameters() for value in optimizer.state[p].values()}
    assert len(ids) == 3 * len(list(model.parameters()))


def test_frozen_and_tied_weights_stay_frozen_and_tied() -> None:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    for layer in layers:
        layer[1].weight = layer[0].weight
        layer[2].requires_grad_(False)
    moe.share(layers)
    assert len(list(layers.parameters())) == 5
    moe.delink(layers, torch.optim.SGD((p for p in layers.parameters() if p.requires_grad), lr=0.1))
    assert len(list(layers.parameters())) == 10
    for layer in layers:
        assert layer[1].weight is layer[0].weight
        assert [p.requires_grad for p in layer.parameters()] == [True] * 3 + [False] * 2


def test_recurrent_layers_use_the_weights_they_are_given() -> None:
    layers = nn.ModuleList(nn.GRU(4, 4) for _ in range(2))
    moe.share(layers)
    x = torch.randn(3, 2, 4)
    assert torch.equal(layers[0](x)[0], layers[1](x)[0])
    moe.delink(layers, None)
    layers[1].weight_hh_l0.data.zero_()
    assert not torch.equal(layers[0](x)[0], layers[1](x)[0])


def test_adagrad_begins_anew() -> None:
    model = Wide()
    moe.share(model.layers)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    _steps(model, optimizer, 2, 1)
    moe.delink(model.layers, optimizer, state="reset")
    for p in model.parameters():
        assert float(optimizer.state[p]["step"]) == 0 and bool((optimizer.state[p]["sum"] == 0.5).all())
    _steps(model, optimizer, 1, 2)


def test_a_copy_of_one_layer_has_weights_of_its_own() -> None:
    model = Net()
    moe.share(model.layers)
    one = copy.deepcopy(model.layers[1])
    assert len(list(one.parameters())) == len(list(model.layers[0].parameters()))
    both = copy.deepcopy(model)
    moe.delink(both.layers, None)
    assert len(list(both.layers.parameters())) == LAYERS * len(list(model.layers.parameters()))
    assert len(list(model.layers.parameters())) == len(list(one.parameters()))


def _refused(match: str, fn: Callable[[], Any], kind: type[Exception] = PlanError) -> None:
    with pytest.raises(kind, match=match):
        fn()


def test_what_cannot_be_shared_is_said() -> None:
    block = nn.Linear(4, 4)
    _refused("takes a sequence of modules, and got an empty one", lambda: moe.share([]))
    _refused("got a str in it", lambda: moe.share(nn.ModuleDict({"a": block})))
    _refused("takes a sequence of modules, and got a Linear", lambda: moe.share(block))  # type: ignore[arg-type]
    shared = [nn.Linear(4, 4) for _ in range(4)]
    moe.share(shared[:3])
    _refused("layer 0 shares its weights with 2 other layers, of which 0 are given", lambda: moe.share(shared[2:]))
    moe.share(shared)
    moe.delink(shared, None)
    _refused("a Linear is part of layer 0 and of layer 1", lambda: moe.share([block, block]))
    _refused(
        r"layers 0 and 1 cannot share weights: 'weight' is float32 \[4, 4\] on cpu in layer 0 and float32 \[5, 4\]",
        lambda: moe.share([block, nn.Linear(4, 5)]),
    )
    _refused("'bias' is float32 .* in layer 0 and absent in layer 2", lambda: moe.share(
        [block, nn.Linear(4, 4), nn.Linear(4, 4, bias=False)]
    ))  # fmt: skip
    _refused(
        "the layer is torch.nn.modules.linear.Linear in layer 0 and .*Embedding",
        lambda: moe.share([block, nn.Embedding(4, 4)]),
    )
    frozen = nn.Linear(4, 4).requires_grad_(False)
    _refused(r"\[4, 4\] on cpu in layer 0 and float32 \[4, 4\] on cpu, frozen", lambda: moe.share([block, frozen]))


def test_what_cannot_be_delinked_is_said() -> None:
    model = Net()
    _refused("layers 0 and 1 do not share 'norm.weight'", lambda: moe.delink(model.layers, None))
    moe.share(model.layers)
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
    _refused("2 layers are to be delinked, and 3 share", lambda: moe.delink(model.layers[:2], None))
    _refused("9 of the 9 parameters that the layers share", lambda: moe.delink(model.layers, optimizer))
    _refused("optimizer is, or holds, a StepLR", lambda: moe.delink(
        model.layers, torch.optim.lr_scheduler.StepLR(optimizer, 1)  # type: ignore[arg-type]
    ))  # fmt: skip
    _refused("state is 'copied'", lambda: moe.delink(model.layers, optimizer, state="copied"))  # type: ignore[arg-type]
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    _refused(r"SGD was built of named_parameters\(\)", lambda: moe.delink(model.layers, named))
    model(torch.randn(4, 5)).sum().backward()
    _refused("'norm.weight' has a gradient, the sum over 3 layers", lambda: moe.delink(model.layers, None))
    model.zero_grad()
    optimizer = torch.optim.LBFGS(model.layers.parameters())
    for p in model.layers.parameters():
        optimizer.state[p]["old_dirs"] = []
    _refused("LBFGS has state 'old_dirs', of which it is not known", lambda: moe.delink(model.layers, optimizer))
    assert len(list(model.layers.parameters())) == 9, "nothing was changed"
    moe.delink(model.layers, optimizer, state="copy")


SAVED: dict[str, Callable[[Net], dict[str, Tensor]]] = {
    "whole": lambda model: model.state_dict(),
    "once": lambda model: {
        k: v for k, v in model.state_dict().items() if k in dict(model.named_parameters()) or "norm" in k
    },
}


@pytest.mark.parametrize("saved", SAVED)
def test_a_pseudo_checkpoint_loads_into_a_real_model(saved: str) -> None:
    torch.manual_seed(0)
    pseudo, real = Net(), Net()
    moe.share(pseudo.layers)
    _steps(pseudo, OPTIMIZERS["sgd"](pseudo.parameters()), 2, 1)
    moe.load_shared(real, SAVED[saved](pseudo), real.layers)
    _equal(real.state_dict(), pseudo.state_dict())
    assert len({p.data_ptr() for p in real.layers.parameters()}) == LAYERS * 9


def test_one_layers_checkpoint_loads_into_all() -> None:
    one, real = Block(), Net()
    told = moe.load_shared(real, one.state_dict(), real.layers, strict=False)
    assert told.missing_keys == ["first.weight", "first.bias", "last.weight", "last.bias"]
    for layer in real.layers:
        _equal(layer.state_dict(), one.state_dict())


def test_fewer_layers_than_there_are() -> None:
    few, real = Net(layers=2), Net()
    _refused(
        "'layers.0.norm.weight' and the same of other layers differ in this state, and 1 of 3 layers have no value",
        lambda: moe.unshared({**few.state_dict(), "layers.1.norm.weight": torch.zeros(DIM)}, real, real.layers),
        CheckpointError,
    )
    moe.share(few.layers)
    moe.load_shared(real, few.state_dict(), real.layers)
    for layer in real.layers:
        _equal(layer.state_dict(), few.layers[0].state_dict())
    _refused("layer 0 .Block. is no member of this Net", lambda: moe.unshared({}, real, few.layers))
    with pytest.raises(RuntimeError, match=r"Missing key.*layers.2.mix.weight"):
        moe.load_shared(real, {}, real.layers)


# ---- on ranks ----

BAR = 1e-9
SPLITS: dict[str, dict[str, Any] | None] = {
    "replica": None,
    "all": {},
    "pairs": {"size": 2},
    "shared": {"size": 2, "rows": "shared"},
}


class Cut(nn.Module):
    """A layer with whole weights, a pair of cut linears and cut experts."""

    def __init__(self, split: dict[str, Any] | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        with wh.replica() if split is None else wh.split(**split):
            self.mix = nn.Sequential(nn.Linear(DIM, 12), nn.Tanh(), nn.Linear(12, DIM))
            self.ffn = moe.MoELayer(DIM, num_experts=5, top_k=2, hidden=6, aux_loss_coef=0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.mix(self.norm(x))
        out: Tensor = h + self.ffn(h)
        return out


class Tower(Net):
    def __init__(self, split: dict[str, Any] | None, layers: int = LAYERS, repeat: int = 1) -> None:
        super().__init__(0, repeat)
        self.layers = nn.ModuleList(Cut(split) for _ in range(layers))
        self.double()


def _compared(
    model: nn.Module, alone: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int, seed: int
) -> list[float]:
    """Errors of gradients and of parameters of a few steps, beside one process."""
    draw = torch.Generator().manual_seed(seed)
    index, feeds = wh.data_rank(model)
    errors = []
    for _ in range(steps):
        x = torch.randn(4 * feeds, 5, generator=draw, dtype=torch.float64)
        y = torch.randint(7, (4 * feeds,), generator=draw)
        here = slice(4 * index, 4 * index + 4)
        for m, optimizer, part in ((model, optimizers[0], here), (alone, optimizers[1], slice(None))):
            optimizer.zero_grad()
            F.cross_entropy(m(x[part]), y[part]).backward()
        found, expected = gradients_of(model), gradients_of(alone)
        errors.append(relative_error({name: found[name] for name in expected}, expected))
        norms = wh.clip_grad_norm_(model, 0.1), nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        errors.append(abs(float(norms[0] / norms[1]) - 1))
        for optimizer in optimizers:
            optimizer.step()
    state, expected = wh.full_state_dict(model), alone.state_dict()
    errors.append(relative_error({name: state[name] for name in expected}, expected))
    for optimizer in optimizers:
        optimizer.zero_grad()
    return errors


def _pseudo_then_real(rank: int, n: int, layout: str, kind: str) -> list[float]:
    torch.manual_seed(0)
    model, alone = Tower(SPLITS[layout]), Tower(None, layers=1, repeat=LAYERS)
    moe.share(model.layers)
    alone.load_state_dict(model.state_dict(), strict=False)
    wh.parallelize(model)
    optimizers = [OPTIMIZERS[kind](m.parameters()) for m in (model, alone)]
    errors = _compared(model, alone, optimizers, 2, 1)
    torch.manual_seed(0)
    real = Tower(SPLITS[layout])
    assert {p.shape for p in real.parameters()} >= {p.shape for p in alone.parameters()}
    by_hand = OPTIMIZERS[kind](real.parameters())
    for name, p in real.named_parameters():
        key = name.replace(f"layers.{name.split('.')[1]}.", "layers.0.") if name.startswith("layers.") else name
        by = LAYERS if name.startswith("layers.") else 1
        p.data.copy_(alone.get_parameter(key))
        powers = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "momentum_buffer": 1, "step": 0}
        known = optimizers[1].state[alone.get_parameter(key)]
        if known:
            by_hand.state[p] = {k: None if v is None else v / by ** powers[k] for k, v in known.items()}
    x = torch.randn(4, 5, dtype=torch.float64)
    model.eval()
    before = model(x)
    moe.delink(model.layers, optimizers[0])
    assert torch.equal(model(x), before)
    model.train()
    assert len({p.data_ptr() for p in model.parameters() if p.numel()}) == sum(
        p.numel() > 0 for p in model.parameters()
    )
    made = wh.plan(model)
    assert made == wh.plan(real, cluster=made.cluster)
    return errors + _compared(model, real, [optimizers[0], by_hand], 3, 2)


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("layout", SPLITS)
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.matrix(keep=2)
def test_on_ranks_pseudo_then_real_is_one_process(n: int, layout: str, kind: str) -> None:
    if n == 1 and layout in ("pairs", "shared"):
        n = 2
    for errors in world(n, _pseudo_then_real, layout, kind):
        assert max(errors) < BAR, errors


def _loaded(rank: int, n: int) -> bool:
    """A pseudo checkpoint of other ranks into a model built on meta, and into one that runs."""
    torch.manual_seed(0)
    pseudo = Tower({})
    moe.share(pseudo.layers)
    saved = {name: pseudo.state_dict()[name] for name, _ in pseudo.named_parameters()}
    with torch.device("meta"):
        real = Tower({})
    wh.parallelize(real, weights=moe.unshared(saved, real, real.layers))
    _equal(wh.full_state_dict(real), pseudo.state_dict())
    for p in real.parameters():
        p.data.zero_()
    moe.load_shared(real, saved, real.layers)
    _equal(wh.full_state_dict(real), pseudo.state_dict())
    with torch.device("meta"):
        shared = Tower({})
    moe.share(shared.layers)
    wh.parallelize(shared, weights=saved)
    _equal(wh.full_state_dict(shared), pseudo.state_dict())
    return len({p.data_ptr() for p in shared.layers.parameters()}) * LAYERS == len(list(real.layers.parameters()))


def test_a_pseudo_checkpoint_loads_on_ranks() -> None:
    assert world(2, _loaded) == [True, True]


def _average(rank: int, n: int) -> None:
    """A copy of a parallelized model, as an average of weights keeps it, is delinked by itself."""
    torch.manual_seed(0)
    model = Tower({})
    moe.share(model.layers)
    wh.parallelize(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    moe.delink(model.layers, None)
    moe.delink(average.module.layers, None)  # type: ignore[union-attr, arg-type]
    for index, p in enumerate(model.parameters()):
        p.data.fill_(index)
    average.update_parameters(model)
    _equal(wh.full_state_dict(average.module), wh.full_state_dict(model))


def test_an_average_of_weights_is_delinked_by_itself() -> None:
    world(2, _average)


def _alone(rank: int, n: int) -> None:
    model = Tower(None)
    moe.share(model.layers)
    wh.parallelize(model, timeout=20)
    if rank:
        moe.delink(model.layers, None)
    model(torch.randn(2, 5, dtype=torch.float64)).sum().backward()


def test_a_rank_that_delinks_alone_is_told() -> None:
    with pytest.raises(WhaleError, match=r"rank 0 trains 15, rank 1 trains 37"):
        world(2, _alone)


def _late(rank: int, n: int, what: str) -> None:
    model = Tower(None)
    if what == "share":
        wh.parallelize(model)
        moe.share(model.layers)
    moe.share(model.layers)
    wh.parallelize(model)
    layers = list(model.layers)
    del model
    gc.collect()
    moe.delink(layers, None)


def test_after_parallelize_it_is_too_late_to_share() -> None:
    _refused("parallelized already, and their weights are averaged", lambda: world(2, _late, "share"))
    _refused("of which these 3 layers are not all members", lambda: world(2, _late, "gone"))


class Staged(Net):
    """Layers in the stages of a pipeline."""

    def __init__(self, layers: int = 4, repeat: int = 1, split: dict[str, Any] | None = None) -> None:
        nn.Module.__init__(self)
        self.repeat = repeat
        self.first, self.last = nn.Linear(5, DIM), nn.Linear(DIM, 7)
        self.layers = nn.ModuleList(Cut(split) for _ in range(layers))
        self.double()


def _pipelined(rank: int, n: int) -> list[float]:
    torch.manual_seed(0)
    model, alone = Staged(), Staged(layers=1, repeat=4)
    for net in (model, alone):
        for layer in net.layers:
            layer.ffn = nn.Identity()
    moe.share(model.layers)
    alone.load_state_dict(model.state_dict(), strict=False)
    wh.annotate(
        model,
        {r"first|layers\.[01]": wh.stage(), r"layers\.[23]|last": wh.stage()},
        inside=wh.pipeline(num_micro_batches=2),
    )
    x, y = torch.randn(8, 5, dtype=torch.float64), torch.randint(7, (8,))
    wh.parallelize(model, sample_inputs=x)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, alone)]
    for _ in range(3):
        for m, optimizer in zip((model, alone), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(m(x), y).backward()
            optimizer.step()
    state, expected = wh.full_state_dict(model), alone.state_dict()
    for optimizer in optimizers:
        optimizer.zero_grad()
    with pytest.raises(PlanError, match="ties of a pipelined model cannot be undone"):
        moe.delink(model.layers, optimizers[0])
    real = Staged()
    for layer in real.layers:
        layer.ffn = nn.Identity()
    moe.load_shared(real, state, real.layers)
    torch.testing.assert_close(real(x), alone(x))
    return [relative_error({name: state[name] for name in expected}, expected)]


def test_stages_share_and_a_pipeline_is_delinked_by_its_state() -> None:
    for errors in world(2, _pipelined):
        assert max(errors) < BAR


def test_experts_cut_and_shared_between_stages_are_refused() -> None:
    model = Tower({}, layers=2)
    moe.share(model.layers)
    wh.annotate(
        model, {r"first|layers\.0": wh.stage(), r"layers\.1|last": wh.stage()}, inside=wh.pipeline(num_micro_batches=2)
    )
    _refused(
        r"cut by a split and tied between the stages \[0, 1\]", lambda: wh.plan(model, cluster=wh.Cluster.of(1, 4))
    )
