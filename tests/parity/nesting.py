"""A network described by data, with scopes on its parts, trained by n ranks and by one process: are they the same?"""

from __future__ import annotations

import contextlib
import random
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.metric import relative_error
from whale_torch.state import full_tensor

__all__ = [
    "BAR",
    "MUTATIONS",
    "Case",
    "Net",
    "Part",
    "annotate",
    "batches",
    "compare",
    "difference",
    "loss_of",
    "nested",
    "own",
    "random_case",
    "replica",
    "train_all",
]

BAR = 2e-5
Options = tuple[tuple[str, Any], ...]
Scopes = tuple[tuple[str, Options], ...]


def replica(**options: Any) -> Scopes:
    return (("replica", tuple(options.items())),)


def own(size: int | None = None, **options: Any) -> Scopes:
    return (("split", tuple({"size": size, **options}.items())),)


def nested(size: int | None = None, **options: Any) -> Scopes:
    return (*replica(), *own(size, **options))


@dataclass(frozen=True)
class Part:
    """One part of the network: what it computes (see _PARTS), its inner width, the scopes around it, outer to inner."""

    kind: str
    width: int
    scopes: Scopes = ()


@dataclass(frozen=True)
class Case:
    """A network, where its parts run, and what each feed brings.

    rows: samples of each feed; its length is the number of feeds. world: ranks. length: tokens of a sample, 0 for none.
    vocabulary: the input is ids of so many words, and the first part's width is that of their embedding.
    heads: classes and scopes of each output layer. loss: "outside", "inside" the model, or "gathered": on plain rows.
    before: every parameter has a gradient when the model is parallelized. ignored: labels that are ignored, a fraction.
    frozen: a regular expression of parameter names.
    """

    world: int
    parts: tuple[Part, ...]
    heads: tuple[tuple[int, Scopes], ...]
    rows: tuple[int, ...]
    length: int = 0
    vocabulary: int = 0
    loss: str = "outside"
    ignored: float = 0.0
    accumulate: int = 1
    no_sync: bool = False
    tied: bool = False
    frozen: str = "-"
    default: Scopes = ()
    seed: int = 0
    input_width: int = 6
    before: bool = False

    @property
    def feed_size(self) -> int:
        return self.world // len(self.rows)


class _Glu(nn.Module):
    def __init__(self, dim: int, width: int):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(dim, width), nn.Linear(dim, width), nn.Linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class _Ffn(nn.Module):
    def __init__(self, dim: int, width: int):
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(dim),
            nn.Linear(dim, width),
            nn.GELU(),
            nn.Linear(width, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class _Twice(nn.Module):
    """One layer read twice, and one input read by two layers."""

    def __init__(self, dim: int, width: int):
        super().__init__()
        self.a, self.b = nn.Linear(dim, width), nn.Linear(dim, width)
        self.out = nn.Linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.a(x) + self.b(x)) + self.a(torch.tanh(x)))


class _Softmax(nn.Module):
    """A softmax over a split's columns: gathered without being asked to."""

    def __init__(self, dim: int, width: int):
        super().__init__()
        self.scores, self.out = nn.Linear(dim, width), nn.Linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.scores(x).softmax(-1) * 3)


class _Linear(nn.Module):
    def __init__(self, dim: int, width: int):
        super().__init__()
        self.layer = nn.Linear(dim, dim, bias=width % 2 == 0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


_PARTS = {"glu": _Glu, "ffn": _Ffn, "twice": _Twice, "softmax": _Softmax, "linear": _Linear}
DIM = 8


class Net(nn.Module):
    """The network of a case, without any scope."""

    def __init__(self, case: Case):
        super().__init__()
        self.inputs: nn.Module = (
            nn.Embedding(case.vocabulary, DIM) if case.vocabulary else nn.Linear(case.input_width, DIM)
        )
        self.parts = nn.ModuleList(_PARTS[part.kind](DIM, part.width) for part in case.parts)
        self.heads = nn.ModuleList(nn.Linear(DIM, classes, bias=not case.tied) for classes, _ in case.heads)
        if case.tied:
            self.heads[0].weight = self.inputs.weight
        self.loss = nn.CrossEntropyLoss()
        self.loss_inside = case.loss == "inside"

    def forward(self, x: Tensor, *targets: Tensor) -> Any:
        x = self.inputs(x)
        for part in self.parts:
            x = part(x)
        out = [head(x) for head in self.heads]
        if targets and self.loss_inside:
            return sum(self.loss(z.reshape(-1, z.shape[-1]), y.reshape(-1)) for z, y in zip(out, targets, strict=True))
        return tuple(out)


def annotate(model: nn.Module, case: Case) -> None:
    patterns: dict[str, Scopes] = {rf"parts\.{i}": part.scopes for i, part in enumerate(case.parts)}
    patterns |= {rf"heads\.{i}": scopes for i, (_, scopes) in enumerate(case.heads)}
    if case.tied:  # one scope holds both ends of a tie
        patterns = {r"heads\.0|inputs": patterns.pop(r"heads\.0")} | patterns
    found = {name: tuple(_scope(s) for s in scopes) for name, scopes in patterns.items() if scopes}
    if found:
        wh.annotate(model, found)


def _scope(scope: tuple[str, Options]) -> Any:
    kind, options = scope
    return getattr(wh, kind)(**dict(options))


def batches(case: Case, steps: int) -> list[tuple[Tensor, ...]]:
    """Whole batches: inputs, then the labels of each head."""
    draw = torch.Generator().manual_seed(case.seed + 1)
    rows = sum(case.rows)
    lead = (rows, case.length) if case.length else (rows,)
    out = []
    for _ in range(steps):
        x = (
            torch.randint(case.vocabulary, lead, generator=draw)
            if case.vocabulary
            else torch.randn(*lead, case.input_width, generator=draw)
        )
        labels = []
        for classes, _ in case.heads:
            y = torch.randint(classes, lead, generator=draw)
            labels.append(y.masked_fill(torch.rand(lead, generator=draw) < case.ignored, -100))
        out.append((x, *labels))
    return out


def loss_of(model: nn.Module, batch: tuple[Tensor, ...], case: Case) -> Tensor:
    x, *targets = batch
    if case.loss == "inside":
        return model(x, *targets)
    total = torch.zeros(())
    for z, y in zip(model(x), targets, strict=True):
        if case.loss == "gathered" and hasattr(z, "rows"):
            z = z.rows()
        total = total + F.cross_entropy(z.reshape(-1, z.shape[-1]), y.reshape(-1))
    return total


def _state(model: nn.Module, grad: bool) -> dict[str, Tensor | None]:
    """Whole parameters or gradients; a collective on ranks."""
    found: dict[str, Tensor | None] = {}
    for name, p in model.named_parameters():
        if not grad:
            found[name] = full_tensor(p)
            continue
        whole = full_tensor(p, torch.zeros_like(p) if p.grad is None else p.grad)
        found[name] = None if p.grad is None and (p.numel() or not p.requires_grad) else whole
    return found


def train(rank: int, n: int, case: Case, mutation: str | None = None, steps: int = 3) -> dict[str, Any]:
    """`steps` of SGD, then of Adam; n is 0 for one process with the whole batch."""
    with MUTATIONS[mutation]() if mutation else contextlib.nullcontext():
        torch.manual_seed(case.seed)
        model = Net(case)
        for name, p in model.named_parameters():
            p.requires_grad_(not re.fullmatch(case.frozen, name))
            p.grad = p.detach().clone() if case.before else None
        start, stop = 0, sum(case.rows)
        if n:
            annotate(model, case)
            default = _scope(case.default[0]) if case.default else None
            wh.parallelize(model, default=default, timeout=30)
            assert wh.plan(model).feed_size == case.feed_size, (wh.plan(model).feed_size, case.feed_size)
            feed = rank // case.feed_size
            start, stop = sum(case.rows[:feed]), sum(case.rows[: feed + 1])
        return _steps(model, case, slice(start, stop), steps, n)


def _steps(model: nn.Module, case: Case, mine: slice, steps: int, n: int) -> dict[str, Any]:
    found: dict[str, Any] = {"loss": [], "grad": [], "rows": mine.stop - mine.start}
    stream = iter(batches(case, 2 * steps * case.accumulate + 1))
    optimizers = [lambda p: torch.optim.SGD(p, 0.2, momentum=0.5), lambda p: torch.optim.Adam(p, 0.02, eps=1e-3)]
    for make in optimizers:
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        for _ in range(steps):
            if not case.before or found["grad"]:
                optimizer.zero_grad()
            for i in range(case.accumulate):
                quiet = n and case.no_sync and i + 1 < case.accumulate
                with wh.no_sync(model) if quiet else contextlib.nullcontext():
                    loss = loss_of(model, tuple(t[mine] for t in next(stream)), case)
                    loss.backward()
                    found["loss"].append(float(loss.detach()))
            found["grad"].append(_state(model, grad=True))
            optimizer.step()
    model.eval()
    with torch.no_grad():
        found["out"] = model(next(stream)[0][mine])
    found["parameters"] = _state(model, grad=False)
    return found


def difference(case: Case, ranks: list[dict[str, Any]], one: dict[str, Any]) -> dict[str, float]:
    """Largest relative error of losses, gradients, final parameters and eval outputs over all ranks."""
    worst = {"loss": 0.0, "grad": 0.0, "parameters": 0.0, "out": 0.0}

    def note(what: str, ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> None:
        worst[what] = max(worst[what], relative_error(ours, theirs))

    for rank, found in enumerate(ranks):
        for mine, theirs in zip(found["grad"], one["grad"], strict=True):
            note("grad", mine, theirs)
        note("parameters", found["parameters"], one["parameters"])
        feed = rank // case.feed_size
        mine_rows = slice(sum(case.rows[:feed]), sum(case.rows[: feed + 1]))
        for got, whole in zip(found["out"], one["out"], strict=True):
            assert type(got) is Tensor, type(got)
            note("out", {"out": got}, {"out": whole[mine_rows]})
    if not case.ignored:
        feeds = ranks[:: case.feed_size]
        for step, whole in enumerate(one["loss"]):
            mean = sum(f["loss"][step] * f["rows"] for f in feeds if f["rows"]) / sum(case.rows)
            note("loss", {"loss": torch.tensor(mean)}, {"loss": torch.tensor(whole)})
    return worst


def train_all(rank: int, n: int, cases: list[tuple[Case, str | None, int]]) -> list[dict[str, Any] | str]:
    """Trains several cases, each (case, mutation, steps), one after the other; an error ends its case only."""
    found: list[dict[str, Any] | str] = []
    for case, mutation, steps in cases:
        try:
            found.append(train(rank, n, case, mutation, steps))
        except Exception:  # whatever it is, the case's own test shows it
            found.append(traceback.format_exc())
    return found


def compare(case: Case, ranks: list[dict[str, Any] | str], steps: int = 3) -> dict[str, float]:
    """The differences of a case trained by ranks from one process. Raises AssertionError where a rank failed."""
    failed = [f"rank {rank}: {found}" for rank, found in enumerate(ranks) if isinstance(found, str)]
    assert not failed, "\n".join(failed)
    return difference(case, ranks, train(0, 0, case, None, steps))  # type: ignore[arg-type]


# ---- faults that the comparison must find ----


@contextlib.contextmanager
def _bridge(name: str, factor: Any) -> Iterator[None]:
    """One bridge's backward off by its scale."""
    from whale_torch.comm import bridge

    function = getattr(bridge, name)
    backward = function.backward

    def off(ctx: Any, grad: Tensor) -> Any:
        first, *rest = backward(ctx, grad)
        return first * factor(ctx.region.rows.size), *rest

    with mock.patch.object(function, "backward", staticmethod(off)):
        yield


@contextlib.contextmanager
def _reducer_sum() -> Iterator[None]:
    from whale_torch.comm.reduction import Reduction

    start = Reduction.start

    def summed(self: Reduction, *args: Any) -> Any:
        wait = start(self, *args)
        return lambda: wait() * self.copies.size

    with mock.patch.object(Reduction, "start", summed):
        yield


@contextlib.contextmanager
def _no_weight() -> Iterator[None]:
    from whale_torch.comm.call import Call

    with (
        mock.patch.object(Call, "weight", lambda self: 1.0),
        mock.patch.object(Call, "share", lambda self, region: 1.0),
    ):
        yield


@contextlib.contextmanager
def _own_count() -> Iterator[None]:
    """Means over ignored labels divided by the region's own count."""
    from whale_torch.comm import loss

    def mine(self: Any, mine: Tensor, *_: Any) -> None:
        self.mine = mine

    with (
        mock.patch.object(loss._Divisor, "__init__", mine),
        mock.patch.object(loss._Divisor, "__call__", lambda self: self.mine),
    ):
        yield


@contextlib.contextmanager
def _own_seed() -> Iterator[None]:
    """Each rank's own loss gradient instead of the mean over the ranks that computed the loss."""
    from whale_torch.comm import loss

    with mock.patch.object(loss, "mean_of_seeds", lambda grad, region: grad * (1 + region.columns.index)):
        yield


@contextlib.contextmanager
def _twins_kept_apart() -> Iterator[None]:
    from whale_torch.comm import bridge

    with mock.patch.object(bridge, "all_reduce", lambda x, group, name: x):
        yield


MUTATIONS: dict[str, Any] = {
    "enter not times |R|": lambda: _bridge("Enter", lambda r: 1 / r),
    "leave not divided by |R|": lambda: _bridge("Leave", lambda r: r),
    "columns to rows not divided by |R|": lambda: _bridge("ColumnsToRows", lambda r: r),
    "rows to columns not times |R|": lambda: _bridge("RowsToColumns", lambda r: 1 / r),
    "reducer sums": _reducer_sum,
    "rows have no weight": _no_weight,
    "own count of labels": _own_count,
    "own seed": _own_seed,
    "twins are not summed": _twins_kept_apart,
}


# ---- cases drawn by chance ----

_ROLES = ("columns", "rows", None, None, None)


def random_case(n: int, seed: int) -> Case:
    """A network of one to three parts under legal scopes of random sizes, rows and cuts, for a world of n ranks."""
    draw = random.Random(f"{n} {seed}")
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    feed_size = draw.choice(divisors) if draw.random() < 0.6 else 1
    shared = [d for d in divisors if feed_size % d == 0]
    any_size = [d for d in divisors if feed_size % d == 0 or d % feed_size == 0]

    def scopes() -> Scopes:
        form = draw.choice(["none", "replica", "own", "own", "nested", "nested own", "shared"])
        options = {"cut": draw.choice(_ROLES)}
        if form in ("none", "replica"):
            return replica() if form == "replica" else ()
        if form == "own":
            return own(draw.choice(any_size), **options)
        if form == "nested own":
            return nested(draw.choice(any_size), rows="own", **options)
        if form == "nested":
            return nested(draw.choice(shared), **options)
        return own(draw.choice(shared), rows="shared", **options)

    tied = draw.random() < 0.2
    vocabulary = draw.choice([11, 13]) if tied or draw.random() < 0.3 else 0
    parts = tuple(Part(draw.choice(list(_PARTS)), draw.choice([3, 8, 10]), scopes()) for _ in range(draw.randint(1, 3)))
    heads = tuple((draw.choice([5, 11, 16]), scopes()) for _ in range(draw.choice([1, 1, 2])))
    if tied:
        heads = ((vocabulary, heads[0][1]), *heads[1:])
    if feed_size > 1:  # one split that makes the feed as large as drawn
        parts = (*parts, Part("ffn", 8, nested(feed_size) if draw.random() < 0.5 else own(feed_size, rows="shared")))
    num_feeds = n // feed_size
    rows = tuple(draw.choice([0, 1, 2, 3, 5]) for _ in range(num_feeds))
    rows = rows if sum(rows) else (2, *rows[1:])
    inside = draw.random() < 0.4
    case = Case(
        world=n,
        parts=parts,
        heads=heads,
        rows=rows,
        length=draw.choice([0, 0, 3]),
        vocabulary=vocabulary,
        tied=tied,
        loss="inside" if inside else draw.choice(["outside", "gathered"]),
        ignored=draw.choice([0.0, 0.4]) if inside else 0.0,
        accumulate=draw.choice([1, 1, 2]),
        no_sync=draw.random() < 0.5,
        seed=seed,
        frozen=draw.choice(["-", "-", r"inputs\..*", r".*bias", r"heads\.0\..*"]),
    )
    return replace(case, frozen="-") if tied or not _trains(case) else case


def _trains(case: Case) -> bool:
    return case.frozen != r"heads\.0\..*" or bool(case.parts)
