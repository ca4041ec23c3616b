"""A rank of a pipeline makes, loads and keeps the tensors of its own stages, with the values of one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from benchmarks.live_bytes import LiveBytes
from tests.parity.metric import relative_error
from tests.parity.pipeline_cases import CASES, WIDTH
from tests.parity.split_case import gradients_of
from tests.world import world
from whale_torch.checkpoint.plain import read_weights
from whale_torch.strategies.materialize import materialize

BAR = 1e-5
WIDE = 1448  # 8.4 MB a layer


def scopes(model: nn.Module, stages: tuple[str, ...], inside: Any = None, **options: Any) -> Any:
    named = {pattern: wh.stage() for pattern in stages}
    return wh.annotate(model, named, inside=inside or (wh.replica(), wh.pipeline(**options)))  # type: ignore[call-overload]


def on_meta(make: Any) -> Any:
    with torch.device("meta"):
        return make()


def one_process(make: Any, init_fn: Any = None) -> Any:
    """The plain model with the values that meta-built ones get."""
    model = on_meta(make)
    materialize(model, {}, seed=0, init_fn=init_fn)
    return model


# ---- memory


def _wide() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(6))) for _ in range(4)))


def _bytes(rank: int, n: int, how: str, path: str) -> tuple[int, int, int]:
    """Bytes alive at most during wh.parallelize, of this rank's stages, of one module."""
    samples = torch.zeros(4, WIDE) if how == "recorded" else None
    options: dict[str, Any] = {"weights": path} if how == "weights" else {}
    if how == "init_fn":
        options["init_fn"] = lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None
        options["init_fn"] = _drawn
    if how == "memory":
        model = _wide()
    else:
        model = on_meta(_wide)
    scopes(model, ("0", "1", "2", "3"), num_micro_batches=2)
    with LiveBytes() as live:
        wh.parallelize(model, sample_inputs=samples, **options)
    kept = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in held(model)}
    assert sum(live_bytes(p) for p in model.parameters()) < sum(kept.values()) + 1000
    return live.most, sum(kept.values()), sum(p.nbytes for p in model[0][0].parameters())


def _drawn(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter)


def held(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p._whale_place.held]


def live_bytes(p: Tensor) -> int:
    return torch.Tensor.untyped_storage(p.detach().as_subclass(Tensor)).nbytes()


@pytest.mark.parametrize("how", ["reset", "init_fn", "recorded", "weights"])
@pytest.mark.matrix(keep=1)
def test_a_rank_never_has_more_than_its_stages_and_one_module(how: str, tmp_path: Path) -> None:
    path = str(tmp_path / "wide.safetensors")
    if how == "weights":
        safetensors.save_file(_wide().state_dict(), path)
    for most, own, module in world(4, _bytes, how, path):
        assert own == 6 * module
        assert own <= most <= own + module + 10_000


def _let_go(rank: int, n: int) -> tuple[int, int]:
    """Bytes of parameters and buffers after wh.parallelize of a model built with memory, and of its own stages."""
    torch.manual_seed(0)
    model = scopes(CASES["normalized"].make(), ("a", "b", "c", "d"), num_micro_batches=2)
    batch = CASES["normalized"].batch(4)
    wh.parallelize(model, sample_inputs=batch)
    mine = sum(p.nbytes for p in held(model)) + (sum(b.nbytes for b in model.buffers()) if rank == 1 else 0)
    return sum(live_bytes(t) for t in [*model.parameters(), *model.buffers()]), mine


def test_where_sample_inputs_are_given_memory_is_let_go_inside_parallelize() -> None:
    for found, own in world(4, _let_go):
        assert own <= found <= own + 80  # and one element for each tensor of the others


# ---- values


class Shared(nn.Module):
    """Four stages: the first and the last are tied, one is a container with values of its own, two have buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(11, WIDTH), Block()
        self.norm, self.c = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.c(self.norm(self.block(self.words(x)))).tanh()), y)


class Block(nn.Module):
    """A container with values of its own whose initialiser overwrites those of a member."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.gain = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("steps", torch.zeros(3))

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.gain, 0.5, 1.5)
        nn.init.zeros_(self.down.bias)
        self.steps.fill_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).tanh()) * self.gain
        return out


SHARED = ("words", "block", "norm|c", "head")


def _words(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randint(11, (rows,)), "y": torch.randint(11, (rows,))}


def own_initialiser(module: nn.Module) -> None:
    """Each module's values; at the root, members of all stages are drawn and read, in one order."""
    if isinstance(module, Block):
        module.steps.fill_(2.0)
        nn.init.uniform_(module.gain)
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.3)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.bias)
    if isinstance(module, nn.BatchNorm1d):
        module.reset_parameters()


def draws_at_the_root(module: nn.Module) -> None:
    own_initialiser(module)
    if isinstance(module, Shared):
        nn.init.normal_(module.block.up.bias, std=2.0)
        module.c.weight.data.div_(module.c.weight.norm())
        module.head.bias.data.copy_(module.c.weight.sum() + torch.randn(11))


def zeros_at_the_root(module: nn.Module) -> None:
    own_initialiser(module)
    if isinstance(module, Shared):
        for member in module.modules():
            if isinstance(member, nn.Linear):
                nn.init.zeros_(member.bias)


INITIALISERS = {"own": own_initialiser, "draws": draws_at_the_root, "zeros": zeros_at_the_root, "reset": None}


def _starts(rank: int, n: int, options: dict[str, Any]) -> list[str]:
    """Names whose first values are not those of one process."""
    wrong = []
    for name, init_fn in INITIALISERS.items():
        expected = one_process(Shared, init_fn).state_dict()
        for samples in (None, _words(4)):
            model = scopes(on_meta(Shared), SHARED, num_micro_batches=2, **options)
            wh.parallelize(model, init_fn=init_fn, sample_inputs=samples)
            found = wh.full_state_dict(model)
            assert list(found) == list(expected)
            wrong += [f"{name}: {key}" for key, value in expected.items() if not torch.equal(found[key], value)]
            here = dict(model.named_parameters())
            wrong += [
                f"{name}: {key} of rank {rank}"
                for key, value in here.items()
                if value._whale_place.held and not torch.equal(value, expected[key])
            ]
    return wrong


@pytest.mark.parametrize(("n", "options"), [(4, {}), (1, {}), (2, {}), (3, {"num_ranks": 3}), (4, {"num_ranks": 2})])
@pytest.mark.matrix(keep=1)
def test_first_values_are_those_of_one_process(n: int, options: dict[str, Any]) -> None:
    for wrong in world(n, _starts, options):
        assert wrong == []


def _called(rank: int, n: int) -> tuple[list[str], int]:
    """Modules that were initialised, in order, and the most bytes that were alive."""
    names: list[str] = []
    model = scopes(on_meta(_wide), ("0", "1", "2", "3"), num_micro_batches=2)
    known = {id(module): name for name, module in model.named_modules()}

    def init_fn(module: nn.Module) -> None:
        names.append(known[id(module)])
        _drawn(module)
        for member in module.modules():
            if isinstance(member, nn.Linear):
                nn.init.zeros_(member.bias)

    with LiveBytes() as live:
        wh.parallelize(model, init_fn=init_fn)
    return names, live.most


@pytest.mark.matrix(keep=0)
@pytest.mark.parametrize("n", [4])
def test_modules_of_other_stages_are_not_initialised(n: int) -> None:
    for rank, (names, most) in enumerate(world(n, _called)):
        assert sorted(names) == sorted(["", str(rank), *(f"{rank}.{layer}" for layer in range(6))])
        assert most < 7.1 * WIDE * WIDE * 4


# ---- training


def _trained(rank: int, n: int, name: str, recorded: bool, options: dict[str, Any]) -> list[float]:
    """Errors of losses, gradients and parameters after two SGD steps beside one process."""
    case = CASES[name]
    alone = one_process(case.make, _default)
    model = scopes(on_meta(case.make), case.stages, num_micro_batches=3, **options)
    torch.manual_seed(1)
    wh.parallelize(model, init_fn=_default, sample_inputs=case.batch(4) if recorded else None)
    index, count = wh.data_rank(model)
    counts = [5, 4, 3, 2][:count]
    here = slice(sum(counts[:index]), sum(counts[: index + 1]))
    torch.manual_seed(1)
    errors = []
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    for _ in range(2):
        batch = case.batch(sum(counts))
        losses = []
        for m, rows in ((model, here), (alone, slice(None))):
            m.zero_grad()
            given = {key: value[rows] for key, value in batch.items()}
            out = m(**given)
            loss = out["loss"] if isinstance(out, dict) else out
            loss = loss if case.outside is None else case.outside(out, given)
            loss.backward()
            losses.append(loss.detach())
        errors += [float((losses[0] - losses[1]).abs())] if case.outside is None else []
        errors.append(relative_error(gradients_of(model), gradients_of(alone)))
        for optimizer in optimizers:
            optimizer.step()
    return [*errors, relative_error(wh.full_state_dict(model), alone.state_dict())]


def _default(module: nn.Module) -> None:
    """reset_parameters() where there is one, and weight_norm's members, and a buffer that only __init__ fills."""
    if hasattr(module, "weights"):
        module.weights.copy_(torch.linspace(0.5, 2.0, 5))
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None and not hasattr(module, "parametrizations"):
        reset()
    else:
        for parameter in module.parameters(recurse=False):
            nn.init.uniform_(parameter, -0.3, 0.3)


ELSEWHERE = {"twice": "b.0.weight", "losses": "a.weight"}  # used by stages that their names do not say
RANKS: list[tuple[int, dict[str, Any]]] = [(4, {}), (2, {}), (2, {"schedule": "gpipe"}), (4, {"num_ranks": 2})]
MATRIX = [
    (name, recorded, n, options)
    for name, case in CASES.items()
    for recorded in (False, True)
    for n, options in RANKS
    if not case.updates and name != "recurrent" and options.get("num_ranks", 1) <= len(case.stages)
    if recorded or name not in ELSEWHERE
]


@pytest.mark.parametrize(("name", "recorded", "n", "options"), MATRIX)
@pytest.mark.matrix(keep=2)
def test_a_model_built_on_meta_trains_as_one_process(
    name: str, recorded: bool, n: int, options: dict[str, Any]
) -> None:
    for errors in world(n, _trained, name, recorded, options):
        assert max(errors) < BAR


def _elsewhere(rank: int, n: int, name: str) -> str:
    case = CASES[name]
    model = scopes(on_meta(case.make), case.stages, num_micro_batches=2)
    wh.parallelize(model, init_fn=_default)
    try:
        model(**case.batch(4))
    except wh.LayoutError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.matrix(keep=1)
def test_a_first_call_that_needs_what_is_elsewhere_names_sample_inputs(name: str, n: int) -> None:
    found = world(n, _elsewhere, name)
    assert len(set(found)) == 1
    if n == 1:
        assert found == [""]  # one rank holds all
    else:
        assert f"this call uses '{ELSEWHERE[name]}' on stage" in found[0]
        assert "each rank made what is its own" in found[0] and "sample_inputs=" in found[0]


class Split(nn.Module):
    """Two stages; in each a layer is cut over the ranks of the stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.b(self.a(x)), y)


def _split(rank: int, n: int, init_fn: Any) -> list[float]:
    alone, model = one_process(Split, init_fn), on_meta(Split)
    wh.annotate(
        model,
        {"a": (wh.stage(), wh.split()), "b": (wh.stage(), wh.split())},
        inside=wh.pipeline(num_micro_batches=2, num_ranks=2),
    )
    wh.parallelize(model, init_fn=init_fn)
    start = relative_error(wh.full_state_dict(model), alone.state_dict())
    torch.manual_seed(1)
    batch = {"x": torch.randn(6, WIDTH), "y": torch.randint(5, (6,))}
    for m in (model, alone):
        m(**batch).backward()
        torch.optim.SGD(m.parameters(), lr=0.1).step()
    return [start, relative_error(wh.full_state_dict(model), alone.state_dict())]


def rescales_at_the_root(module: nn.Module) -> None:
    _default(module)
    if isinstance(module, Split):
        nn.init.normal_(module.a[0].bias)
        nn.init.normal_(module.b[0].weight)


@pytest.mark.parametrize("init_fn", [None, rescales_at_the_root])
@pytest.mark.matrix(keep=1)
def test_a_split_inside_a_stage(init_fn: Any) -> None:
    for start, end in world(4, _split, init_fn):
        assert start == 0.0 and end < BAR


# ---- weights


class Recording(Mapping[str, Tensor]):
    """A state dict that notes what was read last of each name."""

    def __init__(self, state: Mapping[str, Tensor]):
        self.state, self.read = state, []

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return self.state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


def _given(rank: int, n: int, path: str, samples: bool) -> None:
    expected = one_process(Shared, own_initialiser).state_dict()
    recording = Recording(expected)
    for weights in (path + ".pt", path + ".safetensors", recording):
        for make in (lambda: on_meta(Shared), Shared):
            model = scopes(make(), SHARED, num_micro_batches=2)
            recording.read.clear()
            wh.parallelize(model, weights=weights, sample_inputs=_words(4) if samples else None)
            if weights is recording and make is not Shared:  # names and shapes are checked of all, values read of some
                checked = Recording(expected)
                read_weights(checked, Shared())
                read = Counter(recording.read) - Counter(checked.read)
                here = {name for name, p in model.named_parameters(remove_duplicate=False) if p._whale_place.held}
                buffers = {name for name, b in model.named_buffers() if type(b) is Tensor}
                assert set(read.elements()) == here | buffers
            found = wh.full_state_dict(model)
            wrong = [key for key, value in expected.items() if not torch.equal(found[key], value)]
            assert wrong == [], (weights, make)
            loss = model(**_words(4))
            loss.backward()


@pytest.mark.parametrize(("n", "samples"), [(4, False), (4, True), (2, False)])
@pytest.mark.matrix(keep=1)
def test_weights_are_read_where_they_are_held(n: int, samples: bool, tmp_path: Path) -> None:
    model = one_process(Shared, own_initialiser)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    state = {key: value for key, value in model.state_dict().items() if key != "head.weight"}  # ties are written once
    safetensors.save_file(state, tmp_path / "w.safetensors")
    world(n, _given, str(tmp_path / "w"), samples)
