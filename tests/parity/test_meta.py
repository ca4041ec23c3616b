"""Models built on the meta device: one start for every layout, one module whole at a time, errors before changes."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.layouts import LAYOUTS, Net, backward, batch, build, mine, step
from tests.parity.metric import relative_error
from tests.world import outcomes, world
from whale_torch.errors import CheckpointError, PlanError

BAR = 2e-5


class Zoo(nn.Module):
    """Buffers, a container that resets its member (attention), tied weights with a bias on one side."""

    def __init__(self, rows: str = "columns"):
        super().__init__()
        with wh.replica():
            self.norm, self.attention = nn.BatchNorm1d(8), nn.MultiheadAttention(8, 2)
            self.scale = Scale(8)
        with wh.split(cut=rows):
            self.head, self.words = nn.Linear(8, 11), nn.Embedding(11, 8)
            self.lower = nn.Linear(8, 5)
        if rows == "columns":
            self.words.weight = self.head.weight


class Scale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("angles", torch.arange(width) / width, persistent=False)
        self.register_buffer("mask", torch.ones(width, dtype=torch.bool))
        self.weight.tag = "kept"
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight)
        self.steps.data.zero_()
        self.angles.copy_(torch.arange(len(self.angles)) / len(self.angles))
        self.mask.fill_(True)


def made(kind: str, seed: int = 0) -> nn.Module:
    with torch.device("meta"):
        model = Zoo(kind.partition(" ")[2]) if kind.startswith("zoo") else Net(kind)
    assert all(p.is_meta for p in model.parameters())
    return wh.parallelize(model, seed=seed)


def start(rank: int, n: int, kind: str, seed: int = 0) -> dict[str, Tensor]:
    return wh.full_state_dict(made(kind, seed))


KINDS = ["zoo columns", "zoo rows", *LAYOUTS]


def starts(rank: int, n: int) -> dict[str, dict[str, Tensor]]:
    nested = ("shared", "mixed", "two sizes")
    return {kind: start(rank, n, kind) for kind in KINDS if n % 2 == 0 or kind not in nested}


def test_every_layout_starts_as_one_process() -> None:
    one, two, four = (world(n, starts) for n in (1, 2, 4))
    three = world(3, starts)
    reference = one[0] | {kind: two[0][kind] for kind in two[0] if kind not in one[0]}
    for found in (*one, *two, *three, *four):
        for kind, state in found.items():
            assert state.keys() == reference[kind].keys()
            assert all(torch.equal(v, reference[kind][k]) for k, v in state.items()), kind
    nets = [reference[kind] for kind in LAYOUTS]
    assert all(torch.equal(net[k], v) for net in nets for k, v in nets[0].items()), "a scope changes no value"
    zoo = reference["zoo columns"]
    assert float(zoo["head.weight"].std()) == pytest.approx(1 / math.sqrt(3 * 8), rel=0.25), (
        "the tied weight's own reset"
    )
    assert torch.equal(zoo["words.weight"], zoo["head.weight"])
    assert float(zoo["attention.out_proj.bias"].abs().max()) == 0.0
    assert int(zoo["norm.num_batches_tracked"]) == 0
    assert relative_error(world(2, start, "own", 1)[0], reference["own"]) > 0.1, "another seed is another start"


def reseeded_by_rank(rank: int, n: int) -> dict[str, Tensor]:
    """The mutation: parts are drawn, not cut."""
    from whale_torch.strategies import materialize

    shards = materialize.Shard.cut
    materialize.Shard.cut = lambda self, full, index: shards(self, nn.init.normal_(full.clone()), index)
    return start(rank, n, "own")


def test_the_suite_catches_parts_that_are_drawn() -> None:
    assert relative_error(world(2, reseeded_by_rank)[0], world(1, start, "own")[0]) > 0.1


def trains(rank: int, n: int) -> float:
    """An optimizer built before, on meta; Adam for three steps against the world of one."""
    with torch.device("meta"):
        model = Net("own")
    model.features[0].weight.tag = "kept"
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    wh.parallelize(model)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert model.features[0].weight.tag == "kept"
    plain = build("own")
    plain.load_state_dict(wh.full_state_dict(model))
    theirs = torch.optim.Adam(plain.parameters(), lr=0.01)
    for _ in range(3):
        step(model, optimizer, *mine(model, *batch()))
        step(plain, theirs, *batch())
    error = relative_error(wh.full_state_dict(model), plain.state_dict())
    with torch.device("meta"):
        model = Net("own")
    early = torch.optim.Adagrad(model.parameters())
    wh.parallelize(model)
    backward(model, *mine(model, *batch()))
    with pytest.raises(PlanError, match=r"Adagrad has state 'sum' on the meta device for 'head.weight'"):
        early.step()
    return error


def test_an_optimizer_built_on_meta_trains() -> None:
    assert max(world(2, trains)) < BAR


def own_initialiser(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.LayerNorm)):
        nn.init.normal_(module.weight.data, std=0.02)
        if module.bias is not None:
            module.bias.data.fill_(0.5)


def half_initialiser(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        own_initialiser(module)


def rescales(module: nn.Module) -> None:
    """What some models do: a block draws one of its members' weights anew and scales another's."""
    own_initialiser(module)
    if hasattr(module, "down"):
        module.down.weight.data.normal_(std=0.001)
        module.up.weight.data.div_(4)


def with_init_fn(rank: int, n: int, layout: str) -> dict[str, Tensor]:
    out = {}
    for name, init_fn in (("own", own_initialiser), ("rescales", rescales)):
        with torch.device("meta"):
            model = Net(layout)
        wh.parallelize(model, init_fn=init_fn)
        out |= {f"{name} {k}": v for k, v in wh.full_state_dict(model).items()}
    return out


def test_init_fn_replaces_reset_parameters() -> None:
    (one,) = world(1, with_init_fn, "replica")
    assert float(one["own head.weight"].std()) == pytest.approx(0.02, rel=0.25)
    assert float(one["rescales block.down.weight"].std()) == pytest.approx(0.001, rel=0.3)
    assert float(one["rescales block.up.weight"].std()) == pytest.approx(0.005, rel=0.3)
    for layout in ("replica", "own", "shared"):
        for found in world(2, with_init_fn, layout):
            assert found.keys() == one.keys()
            assert all(torch.equal(v, one[k]) for k, v in found.items()), layout


def draws_elsewhere(rank: int, n: int) -> str:
    """A container that draws what a member had before."""
    with torch.device("meta"):
        model = Net("own")
    model.block.down = nn.Linear(9, 8)
    kept = model.block.down.weight.detach().clone()
    with pytest.raises(PlanError) as caught:
        wh.parallelize(model, init_fn=rescales)
    assert model.block.up.weight.is_meta
    assert not torch.equal(model.block.down.weight, kept)
    return str(caught.value)


def test_a_container_may_not_draw_what_had_values() -> None:
    for text in world(2, draws_elsewhere):
        assert "init_fn of module 'block' (Block) changes 'block.down.weight' of a member, which had values" in text


def drawn_from_parts(rank: int, n: int) -> dict[str, Tensor]:
    """The mutation: a container draws values of members that are cut already."""
    from whale_torch.strategies import materialize

    materialize._Materialize._draws_parts = lambda self, how, changed: False
    return with_init_fn(rank, n, "shared")


def test_the_suite_catches_draws_of_parts() -> None:
    (one,) = world(1, with_init_fn, "replica")
    assert relative_error(world(2, drawn_from_parts)[0], one) > 0.01


class Mask(nn.Module):
    """A buffer that only __init__ fills."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.ones(3, 3).tril())

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Replaces(Mask):
    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(torch.ones(3))
        self.mask.fill_(1.0)


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))


def refused(kind: type[nn.Module], **options: Any) -> tuple[str, nn.Module]:
    with torch.device("meta"):
        model = nn.Sequential(kind(), nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = [(id(t), t.is_meta, t.shape) for t in [*model.parameters(), *model.buffers()]]
    with pytest.raises(PlanError) as caught:
        wh.parallelize(model, **options)
    assert [(id(t), t.is_meta, t.shape) for t in [*model.parameters(), *model.buffers()]] == before
    assert type(model) is nn.Sequential
    return str(caught.value), model


def test_what_nothing_initialises_is_refused_and_nothing_changed() -> None:
    text, model = refused(Silent)
    assert "module '0' (Silent) was built on the meta device with gain, and has no reset_parameters()" in text
    assert "init_fn" in text
    wh.parallelize(
        model,
        init_fn=lambda m: (
            [nn.init.ones_(t) for t in m._parameters.values() if t is not None]
            + [b.zero_() for b in m.buffers(recurse=False)]
        ),
    )
    assert "reset_parameters() leaves '0.mask' of Mask unset" in refused(Mask)[0]
    assert "reset_parameters() replaces parameter '0.weight'" in refused(Replaces)[0]
    assert "init_fn leaves '2.weight' of BatchNorm1d unset" in refused(nn.Identity, init_fn=half_initialiser)[0]


def test_an_error_in_an_initialiser_changes_nothing() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def fails(module: nn.Module) -> None:
        own_initialiser(module)
        if module is model[0]:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        wh.parallelize(model, init_fn=fails)
    assert all(p.is_meta for p in model.parameters())
    wh.parallelize(model)
    assert torch.isfinite(model(torch.ones(2, 3))).all()


def test_a_weak_reference_is_told() -> None:
    import weakref

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    keeper = weakref.ref(model[0].weight)
    with pytest.raises(PlanError, match=r"parameter '0.weight' on the meta device cannot be given memory: .*weakref"):
        wh.parallelize(model)
    assert keeper() is model[0].weight
    assert all(p.is_meta for p in model.parameters())


def mixed(rank: int, n: int) -> dict[str, Tensor]:
    torch.manual_seed(rank)  # different on each rank: the first holder's values win
    model = build("own", seed=rank)
    with torch.device("meta"):
        fresh = Net("own")
    model.block = fresh.block
    kept = model.head.weight.detach().clone()
    model.head.bias = nn.Parameter(torch.empty(11, device="meta"))
    wh.parallelize(model)
    if rank == 0:
        assert torch.equal(model.head.weight, kept[: len(model.head.weight)]), "values with memory stay"
    return wh.full_state_dict(model)


def test_partly_meta_models() -> None:
    (one,) = world(1, mixed)
    found = world(2, mixed)
    fresh = world(1, start, "own")[0]
    for state in found:
        assert relative_error(state, found[0]) == 0.0
        for key in ("block.up.weight", "block.down.bias", "head.bias"):
            assert torch.equal(state[key], one[key])
            assert torch.equal(state[key], fresh[key]), "each module draws by its own name"
        assert torch.equal(state["features.0.weight"], one["features.0.weight"])


def given(rank: int, n: int, path: str, layout: str) -> dict[str, Tensor]:
    state = build(layout, seed=9).state_dict()
    out = {}
    for name, weights, meta in (("dict", state, True), ("file", path, True), ("real", state, False)):
        if meta:
            with torch.device("meta"):
                model = Net(layout)
        else:
            model = build(layout)
        wh.parallelize(model, weights=weights)
        out |= {f"{name} {k}": v for k, v in wh.full_state_dict(model).items()}
    for fault, text in (
        ({"head.weight": torch.zeros(2, 8)}, r"head.weight has shape \(2, 8\), the model \(11, 8\)"),
        ({"tail": torch.zeros(1)}, "unexpected tail"),
        ({3: torch.zeros(1)}, "unexpected 3"),
        ({"head.weight": None}, "head.weight is a NoneType, not a tensor"),
        ({"head.weight": state["head.weight"].to("meta")}, "head.weight is on the meta device, without values"),
        ({"head.weight": state["head.weight"].to_sparse()}, "head.weight is torch.sparse_coo"),
    ):
        with torch.device("meta"):
            model = Net(layout)
        with pytest.raises(CheckpointError, match=f"weights given do not fit Net: {text}"):
            wh.parallelize(model, weights={**state, **fault})
        with pytest.raises(CheckpointError, match=r"missing features.0.weight, .*and 5 more"):
            wh.parallelize(model, weights={})
        assert all(p.is_meta for p in model.parameters())
        assert type(model) is Net
    return out


@pytest.mark.parametrize(("layout", "n"), [("own", 2), ("mixed", 4)])
def test_plain_weights_at_build(layout: str, n: int, tmp_path: Path) -> None:
    path, expected = str(tmp_path / "plain.pt"), build(layout, seed=9).state_dict()
    torch.save(expected, path)
    for found in world(n, given, path, layout):
        for key, value in found.items():
            assert torch.equal(value, expected[key.partition(" ")[2]]), key


def _differently(rank: int, n: int, options: dict[str, Any]) -> None:
    """The second rank is given other arguments, or another scope."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if "balance" in options:
        wh.parallelize(
            wh.pipeline(model, num_stages=2, **options if rank else {}), sample_inputs=torch.zeros(4, 4), timeout=10.0
        )
    wh.parallelize(model.to("meta"), timeout=10.0, **options if rank else {})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weights": {}}, "ranks disagree on weights: some on rank 1, none on rank 0"),
        ({"init_fn": nn.Linear.reset_parameters}, "ranks disagree on init_fn: some on rank 1, none on rank 0"),
        ({"seed": 1}, "ranks disagree on seed: 1 on rank 1, 0 on rank 0"),
        ({"balance": "measured"}, "ranks disagree on balance: measured on rank 1, modelled on rank 0"),
    ],
    ids=["weights", "init_fn", "seed", "balance"],
)
@pytest.mark.matrix(keep=1)
def test_ranks_that_are_given_other_arguments(options: dict[str, Any], text: str) -> None:
    for found in outcomes(2, _differently, options):
        assert isinstance(found.error, PlanError) and text in str(found.error), found


def test_weights_leave_what_no_checkpoint_holds_to_the_initialiser() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Scale(4))
    plain = nn.Sequential(Scale(4))
    wh.parallelize(model, weights=plain.state_dict())
    assert torch.equal(model[0].weight, plain[0].weight)
    assert torch.equal(model[0].angles, plain[0].angles), "not in the state dict"
    text, _ = refused(Hidden, weights=nn.Sequential(Hidden(), nn.Linear(3, 3), nn.BatchNorm1d(3)).state_dict())
    assert "module '0' (Hidden) was built on the meta device with angles" in text


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("angles", torch.ones(3), persistent=False)


def held_whole(rank: int, n: int) -> tuple[int, int]:
    """(most elements alive at any reset, elements of this rank's parts): 8 layers of 64 x 64 split over n."""
    most = 0

    def init_fn(module: nn.Module) -> None:
        nonlocal most
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)
            most = max(most, _alive() - before)

    before = _alive()
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
    wh.split(model)
    wh.parallelize(model, init_fn=init_fn)
    return most, sum(p.numel() for p in model.parameters())


def _alive() -> int:
    return sum({t.untyped_storage().data_ptr(): t.numel() for t in gc.get_objects() if _is_tensor(t)}.values())


def _is_tensor(value: object) -> bool:
    return type(value) in (Tensor, nn.Parameter) and not value.is_meta and value.dim() == 2


def test_at_most_one_module_is_whole() -> None:
    for most, parts in world(4, held_whole):
        assert parts == 8 * 64 * 16
        assert 64 * 64 < most <= parts + 64 * 64


def real(rank: int, n: int, layout: str) -> dict[str, Tensor]:
    torch.manual_seed(100 + rank)
    return wh.full_state_dict(wh.parallelize(Net(layout)))


@pytest.mark.parametrize(("layout", "n"), [("replica", 2), ("shared", 4), ("mixed", 4)])
def test_models_built_with_different_seeds_end_equal(layout: str, n: int) -> None:
    found = world(n, real, layout)
    assert all(torch.equal(v, found[0][k]) for state in found for k, v in state.items())


def attention(rank: int, n: int) -> dict[str, Tensor]:
    """Three blocks in one weight, cut by heads."""
    with torch.device("meta"):
        model = nn.TransformerEncoderLayer(12, 4, 20, batch_first=True)
    return wh.full_state_dict(wh.parallelize(wh.split(model)))


def test_attention_starts_as_one_process() -> None:
    (one,) = world(1, attention)
    for n in (2, 3):
        for found in world(n, attention):
            assert all(torch.equal(v, one[k]) for k, v in found.items())


def library(rank: int, n: int) -> dict[str, Tensor]:
    import transformers

    out = {}
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 32,
        "vocab_size": 50,
    }
    bert = transformers.BertConfig(**sizes)
    gpt = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=4, vocab_size=50, n_positions=20, bos_token_id=0, eos_token_id=0
    )
    for kind, config, pattern in (
        (transformers.BertForMaskedLM, bert, r"bert\.encoder"),
        (transformers.GPT2LMHeadModel, gpt, r"transformer\.h"),
    ):
        with torch.device("meta"):
            model = kind(config)
        wh.annotate(model, {pattern: wh.split()})
        wh.parallelize(model, init_fn=model._init_weights)
        out |= wh.full_state_dict(model)
        out |= dict(model.named_buffers())
    return out


def test_a_model_library_initialises_with_its_own_function() -> None:
    pytest.importorskip("transformers", reason="the transformers package is not installed")
    (one,) = world(1, library, timeout=120)
    assert torch.equal(one["bert.embeddings.position_ids"], torch.arange(512)[None])
    assert float(one["bert.embeddings.word_embeddings.weight"].std()) == pytest.approx(0.02, rel=0.1)
    assert float(one["transformer.h.0.mlp.c_proj.weight"].std()) == pytest.approx(0.02 / math.sqrt(2), rel=0.1)
    for found in world(2, library, timeout=120):
        assert all(torch.equal(v, one[k]) for k, v in found.items())
