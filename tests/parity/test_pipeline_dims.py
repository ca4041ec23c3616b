"""Inputs whose samples lie elsewhere than along dim 0, or that have none: said by name, cut so, joined so."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.split_case import gradients_of
from tests.world import world

STEPS, WIDTH = 4, 6
NAMES = {"x": 1, "tables": 0, "mask": None, "y": 1}


class Mixer(nn.Module):
    """Time first: x (T, B, W), one mask (T, T) for all samples, and tables, each (B, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, *, mask: Tensor, tables: list[Tensor], y: Tensor | None = None) -> Any:
        h = self.a(x).tanh()
        h = self.b(torch.einsum("st,tbw->sbw", mask, h)) + sum(tables)
        logits = self.c(h.relu())
        return {"logits": logits} if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())


def _batch(rows: int) -> dict[str, Any]:
    return {
        "x": torch.randn(STEPS, rows, WIDTH),
        "mask": torch.rand(STEPS, STEPS),
        "tables": [torch.randn(rows, WIDTH) for _ in range(2)],
        "y": torch.randint(3, (STEPS, rows)),
    }


def _mine(whole: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    cut = slice(first, last)
    return {
        "x": whole["x"][:, cut],
        "mask": whole["mask"],
        "tables": [t[cut] for t in whole["tables"]],
        "y": whole["y"][:, cut],
    }


def _annotated(names: Any = NAMES, by: str = "pipeline") -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {"batch_dim": names}
    inside = (wh.replica(**options if by == "replica" else {}), wh.pipeline(**options if by == "pipeline" else {}))
    return wh.annotate(Mixer(), {name: wh.stage() for name in "abc"}, inside=inside)


def _errors(rank: int, n: int, rows: list[int], by: str, planned: bool) -> list[float]:
    """(of the loss, of gradients after two steps, of what evaluation gives) against one process."""
    model = _annotated(by=by)
    alone = copy.deepcopy(model)
    wh.parallelize(model, sample_inputs=_batch(rows[0]) if planned else None)
    index, count = wh.data_rank(model)
    ends = [0, *itertools.accumulate(rows[:count])]
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        whole = _batch(ends[-1])
        loss, expected = model(**_mine(whole, ends[index], ends[index + 1])), alone(**whole)
        loss.backward()
        expected.backward()
        found += [abs(loss.item() - expected.item()), relative_error(gradients_of(model), gradients_of(alone))]
        for own in (model, alone):
            with torch.no_grad():
                for p in own.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad
            own.zero_grad()
    inputs = _mine(whole, ends[index], ends[index + 1]) | {"y": None}
    model.eval()
    with torch.no_grad():
        given, expected = model(**inputs)["logits"], alone(**inputs)["logits"]
    assert given.shape == expected.shape == (STEPS, rows[index], 3)
    return [*found, float((given - expected).abs().max())]


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("by", ["pipeline", "replica"])
@pytest.mark.parametrize("rows", [[4, 4], [7, 5], [2, 3]])  # 4 rows: the mask, too, is as long as the batch
@pytest.mark.parametrize("n", [1, 3, 6])
def test_samples_along_the_dims_that_names_say(n: int, rows: list[int], by: str, planned: bool) -> None:
    assert max(max(errors) for errors in world(n, _errors, rows, by, planned)) < 2e-5


def _call(rank: int, n: int, names: Any, rows: int = 3) -> None:
    model = _annotated(names)
    wh.parallelize(model)
    model(**_batch(rows))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"x": 1, "y": 1}, r"the input 'mask', of shape \(4, 4\), is not among those that batch_dim names \(x, y\)"),
        (NAMES | {"tables": 1}, "the inputs that count samples disagree: {'tables': 6, 'x': 3, 'y': 3}"),
        (NAMES | {"mask": 0}, "the inputs that count samples disagree"),
    ],
)
def test_what_names_leave_open_or_say_wrongly_raises(names: Any, said: str) -> None:
    with pytest.raises(wh.LayoutError, match=said):
        world(2, _call, names)


def test_two_scopes_that_say_otherwise() -> None:
    model = wh.annotate(
        Mixer(),
        {name: wh.stage() for name in "abc"},
        inside=(wh.replica(batch_dim=1), wh.pipeline(batch_dim=NAMES)),
    )
    with pytest.raises(wh.PlanError, match="say otherwise where inputs have samples"):
        wh.plan(model)


def _by_accident(rank: int, n: int) -> None:
    """A mask that is as long as the batch, and nobody says that it has no samples."""
    model = wh.annotate(
        First(), {name: wh.stage() for name in "ab"}, inside=(wh.replica(), wh.pipeline(num_micro_batches=2))
    )
    wh.parallelize(model)
    model(torch.randn(4, 4, WIDTH), torch.rand(4, 4)).sum().backward()


class First(nn.Module):
    """Batch first, one mask (T, T) for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.softmax(h @ h.transpose(1, 2) + mask, -1) @ h)


def test_a_mask_as_long_as_the_batch_by_accident_is_found() -> None:
    with pytest.raises(wh.TraceError, match="the forward fails on a micro-batch of 2 samples of 4: ") as caught:
        world(2, _by_accident)
    assert "batch_dim" in str(caught.value.fix)
    model = wh.annotate(First(), {name: wh.stage() for name in "ab"}, inside=wh.pipeline(num_micro_batches=2))
    with pytest.raises(wh.PlanError, match=r"fails on these sample_inputs: .* \(on 2 of 4 samples\)") as planned:
        wh.plan(model, sample_inputs=(torch.randn(4, 4, WIDTH), torch.rand(4, 4)))
    assert "batch_dim" in str(planned.value.fix)


class Free(nn.Module):
    """Any number of tables (T, B), and a keyword behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *tables: Tensor, scale: Tensor | None = None) -> Tensor:
        h = self.b(self.a(x) + sum(table.sum(0).unsqueeze(1) for table in tables))
        return h.square().mean() if scale is None else (h * scale).square().mean()


def _free(rank: int, n: int, names: Any, by: str) -> float:
    torch.manual_seed(0)
    alone, model = Free(), Free()
    model.load_state_dict(alone.state_dict())
    inside = (
        wh.replica(**{"batch_dim": names} if by == "replica" else {}),
        wh.pipeline(**{} if by == "replica" else {"batch_dim": names}),
    )
    wh.annotate(model, {name: wh.stage() for name in "ab"}, inside=inside)
    wh.parallelize(model)
    torch.manual_seed(1)
    batch = torch.randn(5, WIDTH), torch.randn(2, 5), torch.randn(3, 5), torch.randn(4, 5)
    return abs(model(*batch, scale=torch.ones(WIDTH)).item() - alone(*batch, scale=torch.ones(WIDTH)).item())


@pytest.mark.parametrize("by", ["pipeline", "replica"])
def test_all_that_a_star_takes_has_its_name(by: str) -> None:
    assert world(1, _free, {"x": 0, "tables": 1, "scale": None}, by)[0] < 2e-5


def test_a_forward_that_fails_on_a_part_says_so_whatever_it_raises() -> None:
    with pytest.raises(
        wh.TraceError, match="the forward fails on a micro-batch of 1 samples of 4: Expected input batch"
    ):
        world(1, _call, NAMES | {"x": None, "tables": None, "mask": None}, 4)
