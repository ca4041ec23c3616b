"""n ranks against one process: loss, every gradient, weights after a step, and the output in eval mode.

A model under test is a class whose first argument is a scope factory, so that one definition gives the reference (no
scope) and the annotated model. It has `batch(rows)` (inputs; tensors are cut along `dims`, None is not cut) and
`objective(out, *inputs)` (a mean over the rows).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.metric import relative_errors
from tests.world import world
from whale_torch.state import full_tensor
from whale_torch.strategies.runtime import runtime_of

TOLERANCE = 2e-5
RATE = 0.2


@contextlib.contextmanager
def no_scope(**_: Any) -> Iterator[None]:
    yield


@contextlib.contextmanager
def own(**options: Any) -> Iterator[None]:
    """Every rank has its own rows."""
    with wh.split(**options):
        yield


@contextlib.contextmanager
def shared(**options: Any) -> Iterator[None]:
    """Ranks 2k and 2k + 1 are one replica and share their rows."""
    with wh.replica(), wh.split(**{"size": 2, **options}):
        yield


@contextlib.contextmanager
def pairs(**options: Any) -> Iterator[None]:
    """Groups of two ranks, each rank with its own rows."""
    with wh.split(**{"size": 2, **options}):
        yield


SCOPES = {"own": own, "shared": shared, "pairs": pairs}


class Model(nn.Module):
    """What the models under test have in common."""

    dims: tuple[int | None, ...] = (0,)
    output_dim = 0
    rows = 12

    @staticmethod
    def batch(rows: int) -> tuple[Any, ...]:
        raise NotImplementedError

    @staticmethod
    def objective(out: Any, *inputs: Any) -> Tensor:
        return out if out.dim() == 0 else (out.square().mean() + out.tanh().mean())


@dataclass
class Run:
    """What one run of a model gave: losses of two steps, gradients of the first, state and eval output after it."""

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    output: list[Tensor]
    gathered: list[tuple[str, str]] = field(default_factory=list)


def take(value: Any, dim: int | None, start: int, length: int) -> Any:
    return value.narrow(dim, start, length).clone() if isinstance(value, Tensor) and dim is not None else value


def outputs(out: Any) -> list[Tensor]:
    return [t.detach().clone() for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor)]


def train(
    model: Any, inputs: tuple[Any, ...], gradient: Callable[[nn.Parameter], Tensor], *, evaluate: bool = True
) -> Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, gradients = [], {}
    for step in range(2):
        optimizer.zero_grad()
        loss = model.objective(model(*inputs), *inputs)
        loss.backward()
        if step == 0:
            gradients = {name: gradient(p) for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        out = outputs(model(*inputs)) if evaluate else []
    return Run(losses, gradients, {}, out)


def reference(cls: type[Model], options: dict[str, Any], rows: int) -> Run:
    torch.manual_seed(0)
    model = cls(no_scope, **options)
    run = train(model, cls.batch(rows), lambda p: p.grad.clone())  # type: ignore[union-attr]
    run.state = {name: value.clone() for name, value in model.state_dict().items()}
    return run


def on_rank(
    rank: int,
    n: int,
    cls: type[Model],
    options: dict[str, Any],
    sizes: Sequence[int],
    mode: str,
    mutate: Callable[[], None] | None,
) -> Run:
    torch.manual_seed(0)
    model: Any = wh.parallelize(cls(SCOPES[mode], **options))
    if mutate is not None:
        mutate()
    runtime = runtime_of(model, "a test")
    feed = rank // runtime.plan.feed_size
    start = sum(sizes[:feed])
    inputs = tuple(
        take(x, d, start, sizes[feed])
        for x, d in zip(cls.batch(sum(sizes)), spread(cls.dims, cls.batch(1)), strict=True)
    )
    run = train(model, inputs, lambda p: full_tensor(p, p.grad))
    run.state = wh.full_state_dict(model)
    run.gathered = [key for region in runtime.regions for key in region.gathered]
    return run


def spread(dims: tuple[int | None, ...], inputs: tuple[Any, ...]) -> tuple[int | None, ...]:
    return dims if len(dims) == len(inputs) else dims * len(inputs)


def uneven(rows: int, feeds: int) -> list[int]:
    """Rows of each feed: from many to few, at least one."""
    weights = [feeds - i + (i == 0) for i in range(feeds)]
    cut = [max(1, rows * weight // sum(weights)) for weight in weights]
    return [cut[0] + rows - sum(cut), *cut[1:]]


def even(rows: int, feeds: int) -> list[int]:
    return [rows // feeds] * feeds


def differences(
    ranks: list[Run], whole: Run, sizes: Sequence[int], feed_size: int, output_dim: int
) -> dict[str, float]:
    """How far the ranks are from one process, by what was compared."""
    rows = sum(sizes)
    feeds = ranks[::feed_size]
    found: dict[str, float] = {}
    for step, expected in enumerate(whole.losses):
        mean = sum(run.losses[step] * size for run, size in zip(feeds, sizes, strict=True) if size) / rows
        found[f"loss {step}"] = abs(mean - expected) / max(abs(expected), 1e-3)
    for run in ranks:
        _note(found, "grad", run.gradients, whole.gradients)
        _note(found, "state", run.state, whole.state)
    for i, expected_output in enumerate(whole.output):
        dim = output_dim if expected_output.dim() > output_dim else 0
        joined = torch.cat([run.output[i] for run in feeds], dim)
        assert joined.shape == expected_output.shape, (joined.shape, expected_output.shape)
        nan = expected_output.isnan()
        assert torch.equal(joined.isnan(), nan)
        _note(found, "output", {str(i): joined[~nan]}, {str(i): expected_output[~nan]})
    return found


def _note(found: dict[str, float], what: str, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, error in relative_errors(ours, theirs).items():
        key = f"{what} {name}"
        found[key] = max(found.get(key, 0.0), error)


Case = tuple[type[Model], dict[str, Any]]


def on_rank_all(
    rank: int, n: int, cases: list[Case], cuts: list[list[int]], mode: str, mutate: Callable[[], None] | None
) -> list[Run]:
    return [on_rank(rank, n, cls, options, cut, mode, mutate) for (cls, options), cut in zip(cases, cuts, strict=True)]


def check_all(
    cases: Sequence[Case],
    n: int,
    mode: str = "own",
    sizes: Callable[[int, int], list[int]] = even,
    tolerance: float = TOLERANCE,
    mutate: Callable[[], None] | None = None,
    timeout: float = 300.0,
) -> list[list[Run]]:
    """Asserts for each case that n ranks, of one world, train and evaluate as one process; gives their runs."""
    feed_size = 2 if mode == "shared" else 1
    cuts = [sizes(cls.rows, n // feed_size) for cls, _ in cases]
    results = world(n, on_rank_all, list(cases), cuts, mode, mutate, timeout=timeout)
    by_case = [list(runs) for runs in zip(*results, strict=True)]
    wrong = []
    for (cls, options), cut, ranks in zip(cases, cuts, by_case, strict=True):
        found = differences(ranks, reference(cls, options, sum(cut)), cut, feed_size, cls.output_dim)
        worst = max(found, key=lambda key: found[key])
        if not found[worst] < tolerance:
            bad = {key: f"{value:.1e}" for key, value in found.items() if not value < tolerance}
            wrong.append(f"{cls.__name__} {options} on {n} ({mode}, {cut}) is off: {bad}")
    assert not wrong, "\n".join(wrong)
    return by_case


def check(
    cls: type[Model],
    n: int,
    mode: str = "own",
    sizes: Callable[[int, int], list[int]] = even,
    tolerance: float = TOLERANCE,
    mutate: Callable[[], None] | None = None,
    **options: Any,
) -> list[Run]:
    """As check_all, for one case."""
    return check_all([(cls, options)], n, mode, sizes, tolerance, mutate)[0]
