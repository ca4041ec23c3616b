"""torch.compile over layers of experts on several ranks: n ranks are one process, for any numbers of tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.split_case import gradients_of
from tests.parity.test_moe import BAR, DIM, EXPERTS, INSIDE, SPLITS, by_micro_batches, in_stages
from tests.unit.test_moe_compile import counted
from tests.world import world
from whale_torch import moe


class Block(nn.Module):
    """Whole layers around experts."""

    def __init__(self, split: dict[str, Any] | None, **options: Any) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 10), nn.Linear(10, DIM)
        options = {"aux_loss_coef": 0.1, "z_loss_coef": 0.01} | options
        options |= {} if "expert" in options else {"hidden": 12}
        options["gate"] = made() if callable(made := options.get("gate", "softmax")) else made
        with wh.replica() if split is None else wh.split(**split):
            self.ffn = moe.MoELayer(DIM, **options)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        h = h + self.down(self.up(self.norm(h)).relu())
        out: Tensor = h + self.ffn(h, mask=mask)
        return out


class Net(nn.Module):
    def __init__(self, split: dict[str, Any] | None, **options: Any) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(5, DIM), Block(split, **options), nn.Linear(DIM, 7)

        self.again = False

    def forward(self, x: Tensor) -> Tensor:
        given = self.first(x).tanh(), x[..., 0] > -1
        h = checkpoint(self.block, *given, use_reentrant=False) if self.again else self.block(*given)
        out: Tensor = self.last(h)
        return out


def _whole(model: Any, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def _in_place(model: Any, backend: Any) -> Any:
    model.compile(backend=backend)
    return model


def _block(model: Any, backend: Any) -> Any:
    model.block.compile(backend=backend)
    return model


def _again(model: Any, backend: Any) -> Any:
    model.again = True
    return _block(model, backend)


def _layer(model: Any, backend: Any) -> Any:
    model.block.ffn.compile(backend=backend)
    return model


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "whole": _whole,
    "in place": _in_place,
    "block": _block,
    "layer": _layer,
    "again": _again,
}
SIZES = [[4, 2], [3, 4], [5, 5], [2, 7], [6, 6]]  # a size of 1 would be a constant of a graph


def _trained(rank: int, n: int, name: str, layout: str, way: str) -> tuple[list[float], list[int]]:
    """(errors over steps of SGD and in evaluation; graphs after three steps, in all)"""
    torch.manual_seed(0)
    model: Any = Net(SPLITS[layout], **EXPERTS[name])
    model.block.ffn.gate.weight.data.normal_()
    alone: Any = copy.deepcopy(model)
    wh.parallelize(model)
    backend, graphs = counted()
    compiled = WAYS[way](model, backend)
    index, feeds = wh.data_rank(model)
    torch.manual_seed(1)
    errors: list[float] = []
    seen: list[int] = []
    for number, sizes in enumerate(SIZES):
        counts = sizes if feeds == 2 else [sum(sizes)]
        here = slice(sum(counts[:index]), sum(counts[: index + 1]))
        x, y = torch.randn(sum(counts), 3, 5), torch.randint(7, (sum(counts), 3))
        outputs = []
        for m, run, part in ((model, compiled, here), (alone, alone, slice(None))):
            m.zero_grad()
            z = run(x[part])
            F.cross_entropy(z.flatten(0, 1), y[part].flatten()).backward()
            outputs.append(z.detach())
        errors.append(relative_error({"": outputs[0]}, {"": outputs[1][here]}))
        errors.append(relative_error(gradients_of(model), gradients_of(alone)))
        for m in (model, alone):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
        seen += [len(graphs)] if number == 2 else []
    errors.append(relative_error(wh.full_state_dict(model), alone.state_dict()))
    errors.append(float((moe.aux_loss(model) - moe.aux_loss(alone)).abs()))
    seen.append(len(graphs))
    with torch.no_grad():
        found, expected = (m.eval()(part) for m, part in ((model, x[here]), (alone, x)))
    errors.append(relative_error({"": found}, {"": expected[here]}))
    return errors, seen


CASES = [
    ("top2", "all", "block"),
    *(("top2", layout, "block") for layout in SPLITS if layout != "all"),
    *((name, "all", "block") for name in ("own", "biased", "capacity", "gated", "in chunks")),
    *(("top2", layout, way) for layout in ("all", "replica") for way in WAYS if way != "block"),
]


@pytest.mark.parametrize(("name", "layout", "way"), CASES)
@pytest.mark.matrix(keep=0)
def test_compiled_experts_on_ranks_are_one_process(name: str, layout: str, way: str) -> None:
    for errors, (seen, graphs) in world(2, _trained, name, layout, way, timeout=120):
        assert max(errors) < BAR, errors
        assert seen == graphs, "compiled again for numbers of tokens"
        assert bool(graphs) == (way not in ("whole", "in place")), "a whole model of ranks runs as it is"


def _beside_a_split(rank: int, n: int) -> tuple[str, str]:
    """(what is said of a model that splits another layer as well, what of one graph for a block of experts)"""
    model = wh.parallelize(wh.annotate(Net({}, **EXPERTS["top2"]), {"last": wh.split()}), timeout=20)
    with pytest.raises(wh.PlanError) as of_all:
        torch.compile(model, backend="eager")(torch.ones(2, 3, 5))
    model.block.compile(backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError) as of_block:
        model(torch.ones(2, 3, 5))
    return str(of_all.value), str(of_block.value)


def test_beside_another_split_it_is_refused() -> None:
    for of_all, of_block in world(2, _beside_a_split):
        assert "torch.compile over a split: TaskGraph" in of_all and "of 'last')" in of_all
        assert "leave out fullgraph=True, or compile the parts around it" in of_block


def _staged(rank: int, n: int) -> tuple[float, float, int]:
    """(errors of losses and gradients, graphs) of a pipeline whose layers of experts are compiled"""
    torch.manual_seed(0)
    model: Any = in_stages(INSIDE["experts on ranks"])
    alone: Any = copy.deepcopy(model)
    wh.parallelize(model)
    backend, graphs = counted("eager")
    for layer in (model.first, model.a, model.b):
        layer.compile(backend=backend)
    index, feeds = wh.data_rank(model)
    here = slice(4 * index, 4 * index + 4)
    torch.manual_seed(1)
    losses, gradients = [], []
    for _ in range(2):
        x, y = torch.randn(4 * feeds, 3, 5), torch.randint(7, (4 * feeds, 3))
        model.zero_grad()
        alone.zero_grad()
        loss = model(x[here], y[here])
        loss.backward()
        losses.append(float((loss.detach() - by_micro_batches(alone, x, y, [4] * feeds)).abs()))
        gradients.append(relative_error(gradients_of(model), gradients_of(alone)))
    return max(losses), max(gradients), len(graphs)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.matrix(keep=0)
def test_compiled_experts_in_stages(n: int) -> None:
    for *errors, graphs in world(n, _staged, timeout=120):
        assert max(errors) < BAR
        assert graphs


@pytest.mark.parametrize("layout", ["all", "replica"])
@pytest.mark.matrix(keep=0)
def test_one_rank_compiles_the_whole_model(layout: str) -> None:
    ((errors, (seen, graphs)),) = world(1, _trained, "top2", layout, "whole", timeout=120)
    assert max(errors) < BAR
    assert 0 < seen == graphs
