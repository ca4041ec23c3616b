"""wh.replica(sync_batch_norm=True): forward, backward and running statistics are those of one process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.replica_cases import Result, gradients, same_on_all_ranks
from tests.world import world

BAR = 2e-5
CHANNELS = 3
KINDS: dict[str, Any] = {
    "1d": lambda **o: nn.BatchNorm1d(CHANNELS, **o),
    "1d long": lambda **o: nn.BatchNorm1d(CHANNELS, **o),
    "2d": lambda **o: nn.BatchNorm2d(CHANNELS, **o),
    "3d": lambda **o: nn.BatchNorm3d(CHANNELS, **o),
}
TAIL = {"1d": (), "1d long": (4,), "2d": (4, 2), "3d": (2, 2, 2)}


class Normed(nn.Module):
    def __init__(self, kind: str, options: dict[str, Any]):
        super().__init__()
        self.first = nn.Parameter(torch.randn(CHANNELS, CHANNELS))
        self.norm = KINDS[kind](**options)
        self.last = nn.Parameter(torch.randn(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("nc...,cd->nd...", x, self.first)
        out = torch.einsum("nc...,c->n...", torch.tanh(self.norm(h)), self.last)
        return out.flatten(1).sum(1) if out.dim() > 1 else out


def inputs(kind: str, num_rows: int) -> Tensor:
    return torch.randn(num_rows, CHANNELS, *TAIL[kind], generator=torch.Generator().manual_seed(5)) * 2 + 1


def run(model: nn.Module, x: Tensor) -> Result:
    """Two training steps and an evaluation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        out = model(x)
        loss = out.square().mean() if x.shape[0] else out.sum()
        loss.backward()
        found = gradients(model)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        evaluated = model(x)
    return Result(
        float(loss.detach()), found, {k: v.clone().double() for k, v in model.state_dict().items()}, evaluated
    )


def synced_rank(rank: int, n: int, kind: str, options: dict[str, Any], rows: list[int], wrong: bool = False) -> Result:
    torch.manual_seed(0)
    model = Normed(kind, options)
    before = repr(model)
    model = wh.parallelize(model, default=wh.replica(sync_batch_norm=not wrong))
    assert repr(model) == before and isinstance(model.norm, KINDS[kind]().__class__)
    assert type(copy.deepcopy(model).norm) is type(model.norm)
    x = inputs(kind, sum(rows)).split(rows)[rank]
    return run(model, x)


def expected(kind: str, options: dict[str, Any], rows: list[int]) -> Result:
    torch.manual_seed(0)
    return run(Normed(kind, options), inputs(kind, sum(rows)))


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "cumulative": {"momentum": None},
    "not affine": {"affine": False},
    "untracked": {"track_running_stats": False},
}


def double_rank(rank: int, n: int, kind: str, options: dict[str, Any], rows: list[int]) -> Result:
    torch.set_default_dtype(torch.float64)
    return synced_rank(rank, n, kind, options, rows)


@pytest.fixture
def in_double() -> Iterator[None]:
    """torch's own float32 sums differ by up to 1e-4 from its float64 ones here."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("rows", [[4], [3, 3], [5, 1, 2], [0, 4, 1, 2]], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.matrix(keep=3)
def test_ranks_equal_one_process(kind: str, options: str, rows: list[int], in_double: None) -> None:
    results = world(len(rows), double_rank, kind, OPTIONS[options], rows)
    one = expected(kind, OPTIONS[options], rows)
    assert same_on_all_ranks([r.gradients for r in results]) and same_on_all_ranks([r.stepped for r in results])
    assert relative_error(results[0].gradients, one.gradients) <= 1e-10
    for name, value in one.stepped.items():  # running statistics and the number of batches among them
        torch.testing.assert_close(results[0].stepped[name], value)
    torch.testing.assert_close(torch.cat([r.evaluated for r in results]), one.evaluated)


def test_single_precision() -> None:
    rows = [5, 1, 2]
    results, one = world(3, synced_rank, "2d", {}, rows), expected("2d", {}, rows)
    found, exact = results[0].gradients, one.gradients
    assert (
        relative_error(
            {k: v for k, v in found.items() if k != "norm.bias"}, {k: v for k, v in exact.items() if k != "norm.bias"}
        )
        <= BAR
    )
    assert relative_error(found, exact) <= 2e-4, "torch's own sum for the bias is this far from its float64 one"
    torch.testing.assert_close(results[2].stepped, one.stepped, rtol=1e-5, atol=1e-6)


def test_the_comparison_sees_local_statistics() -> None:
    rows = [5, 2, 3]
    results, one = world(3, synced_rank, "1d", {}, rows, True), expected("1d", {}, rows)
    assert relative_error(results[0].gradients, one.gradients) > 1000 * BAR
    assert not same_on_all_ranks([r.stepped for r in results]), "each rank has the running statistics of its own rows"


def local_gradient_rank(rank: int, n: int, rows: list[int]) -> Result:
    """A mutation: the gradient through the statistics stays on its rank."""
    from whale_torch.strategies import batch_norm

    gather = batch_norm.gather_equal
    batch_norm.gather_equal = lambda x, group, *, name: (  # type: ignore[attr-defined]
        x.unsqueeze(0) if name == "batch norm's backward" else gather(x, group, name=name)
    )
    return synced_rank(rank, n, "2d", {}, rows)


def test_the_comparison_sees_a_local_gradient() -> None:
    results, one = world(2, local_gradient_rank, [4, 3]), expected("2d", {}, [4, 3])
    assert relative_error(results[0].gradients, one.gradients) > 100 * BAR


class Shared(nn.Module):
    """Ranks two by two are fed the same rows: each row counts once."""

    def __init__(self) -> None:
        super().__init__()
        with wh.replica(sync_batch_norm=True):
            self.first, self.norm = nn.Linear(4, CHANNELS), nn.BatchNorm1d(CHANNELS)
            with wh.split(size=2):
                self.head = nn.Linear(CHANNELS, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.first(x))))


def shared_rank(rank: int, n: int, rows: list[int]) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = wh.parallelize(Shared(), default=wh.replica(sync_batch_norm=True))
    x = torch.randn(sum(rows), 4, generator=torch.Generator().manual_seed(2)).split(rows)[rank // 2]
    out = model(x)
    out.rows().square().mean().backward()
    return gradients(model), wh.full_state_dict(model)


def test_shared_rows_count_once() -> None:
    rows = [4, 3]
    torch.manual_seed(0)
    model = Shared()
    model(torch.randn(sum(rows), 4, generator=torch.Generator().manual_seed(2))).square().mean().backward()
    for found, state in world(4, shared_rank, rows):
        assert relative_error(found, gradients(model)) <= BAR
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


class Inside(nn.Module):
    """BatchNorms in splits inside the replica that asks for all feeds, of columns and of rows."""

    def __init__(self, scopes: str, images: bool, options: dict[str, Any]) -> None:
        super().__init__()
        with contextlib.ExitStack() as stack:
            if scopes != "plain":
                stack.enter_context(wh.replica(sync_batch_norm=True))
                stack.enter_context(wh.split(size=2, rows="own" if scopes == "own" else "shared"))
            layer = nn.Conv2d if images else nn.Linear
            norm = nn.BatchNorm2d if images else nn.BatchNorm1d
            size: tuple[int, ...] = (3,) if images else ()
            self.first, self.norm = layer(4, 7, *size), norm(7, **options)
            self.second, self.last = layer(7, 5, *size), norm(5, **options)
            self.third = layer(5, 3, *size)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        return self.third(torch.tanh(self.last(self.second(h))))


def of_images(images: bool, rows: int) -> Tensor:
    shape = (rows, 4, *((8, 7) if images else ()))
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 2 + 1


def inside_rank(
    rank: int, n: int, scopes: str, images: bool, options: dict[str, Any], rows: list[int], mutation: str = ""
) -> tuple[dict[str, Tensor | None], dict[str, Tensor], Tensor]:
    from whale_torch.strategies import batch_norm

    torch.set_default_dtype(torch.float64)
    if mutation == "rows and columns":
        batch_norm._asked = lambda model, plan: []
    torch.manual_seed(0)
    model = wh.parallelize(Inside(scopes, images, options))
    if mutation == "columns":
        assert model.norm._regions.size == 2
        model.norm.__dict__["_regions"] = None
    feed = wh.data_rank(model)[0]
    x = of_images(images, sum(rows)).split(rows)[feed]
    out = model(x)
    out = out.rows() if hasattr(out, "rows") else out
    (out.square().mean() if len(x) else out.sum()).backward()
    found = gradients(model)
    with torch.no_grad():
        evaluated = model.eval()(x)
    return found, wh.full_state_dict(model), evaluated


INSIDE = [
    ("shared", False, {}, [4, 3]),
    ("shared", False, {"momentum": None}, [0, 5]),
    ("shared", True, {"affine": False}, [1, 3]),
    ("own", False, {}, [2, 1, 3, 4]),
    ("own", True, {"track_running_stats": False}, [2, 0, 1, 1]),
]


@pytest.mark.parametrize(("scopes", "images", "options", "rows"), INSIDE)
def test_inside_a_split_statistics_are_those_of_all_feeds(
    scopes: str, images: bool, options: dict[str, Any], rows: list[int], in_double: None
) -> None:
    torch.manual_seed(0)
    model, x = Inside("plain", images, options), of_images(images, sum(rows))
    model(x).square().mean().backward()
    results = world(4, inside_rank, scopes, images, options, rows)
    for found, state, _ in results:
        assert relative_error(found, gradients(model)) <= 1e-10
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value)
    with torch.no_grad():
        expected_out = model.eval()(x)
    if options.get("track_running_stats", True):
        found_out = torch.cat([out for _, _, out in results[:: 4 // len(rows)]])
        torch.testing.assert_close(found_out, expected_out)


@pytest.mark.parametrize("mutation", ["columns", "rows and columns"])
def test_the_comparison_sees_statistics_of_one_region(mutation: str, in_double: None) -> None:
    torch.manual_seed(0)
    model, x = Inside("plain", False, {}), of_images(False, 7)
    model(x).square().mean().backward()
    found, _, _ = world(4, inside_rank, "shared", False, {}, [4, 3], mutation)[0]
    assert relative_error(found, gradients(model)) > 1e-3


def half_rank(rank: int, n: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model = wh.parallelize(nn.Sequential(nn.BatchNorm2d(CHANNELS)), default=wh.replica(sync_batch_norm=True))
    x = inputs("2d", 6).split(3)[rank].bfloat16().requires_grad_(True)
    out = model(x)
    out.square().sum().backward()
    return out.detach(), x.grad


def test_half_precision_inputs_have_statistics_in_single() -> None:
    torch.manual_seed(0)
    x = inputs("2d", 6).bfloat16()
    expected_out = nn.BatchNorm2d(CHANNELS)(x)
    found = torch.cat([out for out, _ in world(2, half_rank)])
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected_out, rtol=2e-2, atol=2e-2)


def one_value_rank(rank: int, n: int) -> None:
    model = wh.parallelize(nn.Sequential(nn.BatchNorm1d(CHANNELS)), default=wh.replica(sync_batch_norm=True))
    model(torch.ones(1 - rank, CHANNELS))


def test_one_value_a_channel_raises_as_in_torch() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        world(2, one_value_rank)


class Odd(nn.BatchNorm1d):
    """A BatchNorm of the user's own."""


@pytest.mark.parametrize(
    ("module", "text"),
    [(Odd(3), r"no form of Odd '0'"), (nn.Linear(2, 2), r"sync_batch_norm=True, but it holds no BatchNorm")],
)
def test_what_cannot_be_synced_raises(module: nn.Module, text: str) -> None:
    with pytest.raises(wh.PlanError, match=text):
        wh.parallelize(nn.Sequential(module), default=wh.replica(sync_batch_norm=True))
