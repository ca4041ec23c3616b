"""torch.compile: replicated parts compile beside splits, splits are refused in words, models of replicas run right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.split_case import BAR, Case, build, compare, gradients_of, number
from tests.world import world
from whale_torch.errors import PlanError


def _marked(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y.masked_fill(y % 3 == 1, -100))


def _counted() -> tuple[Callable[..., Any], list[int]]:
    """A backend that runs what it is given, and a list with one entry for each graph it was given."""
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return graph.forward

    return backend, graphs


def _parts(rank: int, n: int, layout: str, when: str) -> tuple[list[float], int, float]:
    """Gradient errors of steps with a compiled part, the graphs made, and the error of the output in eval mode."""
    backend, graphs = _counted()
    case = build(rank, n, layout, 10, [3, 1], compiled=("features" if when == "before" else "", backend))
    if when == "after":
        case.model.features = torch.compile(case.model.features, backend=backend)  # type: ignore[arg-type]
    errors = [compare(case, _marked, whole_batch=True, inside=inside) for inside in (True, True, False, False, True)]
    seen = len(graphs)
    errors += [compare(case, _marked, whole_batch=True, inside=inside) for inside in (True, False) * 3]
    assert len(graphs) == seen, "compiled again for inputs it knows"
    case.model.eval()
    with torch.no_grad():
        out = case.model(case.x[case.here])
    return errors, seen, number((out - case.alone(case.x)[case.here]).abs().max())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("layout", ["own", "mixed", "replica"])
def test_replicated_parts_compile(layout: str, when: str) -> None:
    for errors, graphs, output in world(2, _parts, layout, when, timeout=120):
        assert max(errors) < BAR and output < 1e-5
        assert 1 <= graphs <= 4, "one with the loss inside and one outside, each for its gradients"


def _aot(rank: int, n: int) -> list[float]:
    case = build(rank, n, "own", 10, [3, 1])
    case.model.features = torch.compile(case.model.features, backend="aot_eager")  # type: ignore[arg-type]
    return [compare(case, _marked, whole_batch=True, inside=inside) for inside in (True, False)]


def test_replicated_parts_compile_with_their_backward() -> None:
    assert max(max(errors) for errors in world(2, _aot, timeout=120)) < BAR


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        with wh.replica(), wh.split(size=2):
            self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.first(x)).relu())


def _whole(case: Case) -> Any:
    return torch.compile(case.model, backend="eager")


def _in_place(case: Case) -> Any:
    case.model.compile(backend="eager")
    return case.model


def _function(case: Case) -> Any:
    return torch.compile(lambda x: case.model(x) * 2, backend="eager")


def _full_graph(case: Case) -> Any:
    return torch.compile(case.model, backend="eager", fullgraph=True)


def _leaf(case: Case) -> Any:
    case.model.fc = torch.compile(case.model.fc, backend="eager")  # type: ignore[arg-type]
    return case.model


WAYS = {f.__name__.lstrip("_"): f for f in (_whole, _in_place, _function, _full_graph, _leaf)}


def _refused(rank: int, n: int, way: str) -> str:
    case = build(rank, n, "own", 10, [2])
    with pytest.raises(PlanError) as caught:
        WAYS[way](case)(case.x[case.here])
    return str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_a_split_is_refused(way: str) -> None:
    for text in world(2, _refused, way, timeout=120):
        assert "torch.compile over a split: TaskGraph" in text and "of 'fc')" in text and "split_case.py" in text
        assert "model.features.compile()" in text


def _refused_inside(rank: int, n: int) -> list[str]:
    """A part that holds splits of shared rows, whose input needs no message at all."""
    model = nn.Sequential(_Tower(), nn.Linear(6, 3))
    wh.parallelize(model, timeout=20)
    texts = []
    for part in (model[0], model[0].up, model[0].down):
        with pytest.raises(PlanError) as caught:
            torch.compile(part, backend="eager")(
                torch.ones(2, 12 if part is model[0].down else 5 + (part is not model[0]))
            )
        texts.append(str(caught.value))
        torch._dynamo.reset()
    return texts


def test_a_part_with_splits_is_refused() -> None:
    for texts in world(2, _refused_inside, timeout=120):
        assert all("torch.compile over a split" in text for text in texts)


def _replicas(rank: int, n: int) -> tuple[float, str]:
    """The error of three steps of a compiled model, one after another, and what fullgraph=True says."""
    case = build(rank, n, "replica", 10, [3, 1])
    compiled = torch.compile(case.model, backend="eager")
    worst = 0.0
    for _ in range(3):
        case.model.zero_grad()
        case.alone.zero_grad()
        case.model.use = _marked  # type: ignore[assignment]
        compiled(case.x[case.here], case.y[case.here]).backward()
        _marked(case.alone(case.x), case.y).backward()
        worst = max(worst, relative_error(gradients_of(case.model), gradients_of(case.alone)))
    with pytest.raises(RuntimeError) as caught:
        torch.compile(case.model, backend="eager", fullgraph=True)(case.x[case.here])
    return worst, str(caught.value)


def test_a_model_of_replicas_runs_as_it_is() -> None:
    for error, text in world(2, _replicas, timeout=120):
        assert error < BAR
        assert "compile its parts: m.part.compile()" in text


def _alone(rank: int, n: int) -> tuple[int, float]:
    """One process: the whole model is one graph."""
    backend, graphs = _counted()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    expected = model(torch.ones(2, 4))
    wh.parallelize(model)
    out = torch.compile(model, backend=backend, fullgraph=True)(torch.ones(2, 4))
    return len(graphs), number((out - expected).abs().max())


def test_one_process_compiles_the_whole_model() -> None:
    assert world(1, _alone, timeout=120) == [(1, 0.0)]
