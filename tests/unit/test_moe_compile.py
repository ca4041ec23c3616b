"""torch.compile of a model with layers of experts: what it gave before, in few graphs, whatever goes where."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.parity.metric import relative_error
from whale_torch import moe

BAR = 1e-5
DIM = 8


def counted(backend: str = "aot_eager") -> tuple[Callable[..., Any], list[Any]]:
    """A backend, and the graphs that it was given."""
    graphs: list[Any] = []

    def run(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    return run, graphs


class Net(nn.Module):
    """A layer of experts between whole ones; rows are sequences of 3 tokens."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.masked, self.again = options.pop("masked", True), options.pop("again", False)
        self.first, self.last = nn.Linear(5, DIM), nn.Linear(DIM, 7)
        options = {"num_experts": 4, "aux_loss_coef": 0.1, "z_loss_coef": 0.01} | options
        options |= {} if "expert" in options else {"hidden": 12}
        self.ffn = moe.MoELayer(DIM, **options)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        out: Tensor = self.last(checkpoint(self._block, h, x, use_reentrant=False) if self.again else self._block(h, x))
        return out

    def _block(self, h: Tensor, x: Tensor) -> Tensor:
        ids = (x[..., 1] > 0).long() if isinstance(self.ffn.gate, moe.Hash) else None
        out: Tensor = h + self.ffn(h, mask=x[..., 0] > -1 if self.masked else None, token_ids=ids)
        return out


LAYERS: dict[str, dict[str, Any]] = {
    "top2": {},
    "no mask": {"masked": False},
    "gated, shared": {"gated": True, "activation": "silu", "shared": nn.Linear(DIM, DIM)},
    "prototypes": {"gate": "prototypes", "importance_coef": 0.1},
    "biased": {"gate": moe.TopK(DIM, 4, 2, score="sigmoid", bias_rate=0.3)},
    "experts choose": {"gate": moe.ExpertChoice(DIM, 4)},
    "hash": {"gate": moe.Hash(2, 4, 2), "aux_loss_coef": 0.0, "z_loss_coef": 0.0},
    "own": {"expert": lambda: nn.Sequential(nn.Linear(DIM, 6), nn.ReLU(), nn.Linear(6, DIM))},
    "capacity": {"capacity_factor": 0.6, "min_capacity": 1, "renormalize": "after"},
    "priority": {"capacity_factor": 0.5, "min_capacity": 1, "drop": "priority"},
    "again": {"again": True, "capacity_factor": 0.6},
}


def made(name: str) -> tuple[Net, Net]:
    """Two equal models."""
    torch.manual_seed(0)
    model = Net(**copy.deepcopy(LAYERS[name]))
    for weight in model.ffn.gate.parameters():
        nn.init.normal_(weight)
    return model, copy.deepcopy(model)


def step(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The output; then one step of SGD."""
    model.zero_grad()
    z = run(x)
    F.cross_entropy(z.float().flatten(0, 1), y.flatten()).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return z.detach()


def compared(name: str, backend: str, rows: list[int]) -> tuple[int, int]:
    """(graphs after two steps, after all)"""
    torch._dynamo.reset()
    alone, model = made(name)
    run, graphs = counted(backend)
    compiled = torch.compile(model, backend=run)
    seen = 0
    for number, count in enumerate(rows):
        x, y = torch.randn(count, 3, 5), torch.randint(7, (count, 3))
        expected, found = step(alone, alone, x, y), step(model, compiled, x, y)
        assert relative_error({"": found}, {"": expected}) < BAR
        assert relative_error(*({k: p.grad for k, p in m.named_parameters()} for m in (model, alone))) < BAR
        assert relative_error(model.state_dict(), alone.state_dict()) < BAR
        assert model.ffn.load is not None and alone.ffn.load is not None
        assert torch.equal(model.ffn.load.kept, alone.ffn.load.kept)
        assert torch.allclose(moe.aux_loss(model), moe.aux_loss(alone))
        seen = len(graphs) if number == 1 else seen
    trained = len(graphs)
    for count in rows:
        x = torch.randn(count, 3, 5)
        with torch.no_grad():
            assert relative_error({"": compiled(x)}, {"": alone(x)}) < BAR
    return seen, trained


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.matrix(keep=1)
def test_a_compiled_model_is_what_it_was(name: str) -> None:
    seen, graphs = compared(name, "eager", [4, 5, 7, 3, 9, 8])
    assert graphs == seen <= 12, "sizes become symbols at the second number of tokens; then nothing is compiled again"


@pytest.mark.parametrize("name", ["top2", "capacity", "gated, shared"])
@pytest.mark.matrix(keep=0)
def test_its_backward_is_compiled_too(name: str) -> None:
    seen, graphs = compared(name, "aot_eager", [4, 5, 7, 3, 9, 8])
    assert graphs == seen


def test_under_autocast() -> None:
    torch._dynamo.reset()
    alone, model = made("gated, shared")
    compiled = torch.compile(model, backend="eager")
    for count in (3, 4, 6):
        x, y = torch.randn(count, 3, 5), torch.randint(7, (count, 3))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected, found = alone(x), compiled(x)
        assert found.dtype == expected.dtype == torch.bfloat16
        for m, z in ((alone, expected), (model, found)):
            m.zero_grad()
            F.cross_entropy(z.float().flatten(0, 1), y.flatten()).backward()
        assert torch.equal(found, expected)
        assert relative_error(*({k: p.grad for k, p in m.named_parameters()} for m in (model, alone))) < BAR


def test_compiled_inside_a_checkpoint() -> None:
    torch._dynamo.reset()
    alone, model = made("again")
    run, graphs = counted()
    model._block = torch.compile(model._block, backend=run)  # type: ignore[method-assign]
    for count in (4, 5, 7, 3):
        x, y = torch.randn(count, 3, 5), torch.randint(7, (count, 3))
        step(alone, alone, x, y)
        step(model, model, x, y)
        assert relative_error(model.state_dict(), alone.state_dict()) < BAR
    assert len(graphs) <= 8


def test_one_graph_is_refused_in_words() -> None:
    torch._dynamo.reset()
    model = pickle.loads(pickle.dumps(Net()))
    with pytest.raises(RuntimeError, match="leave out fullgraph=True, or compile the parts around it"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(2, 3, 5))
