"""Operations on a split's output: values and gradients are those of one process, inside the model and outside."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import einops
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.split_case import BAR, Use, build, compare, gradients_of
from tests.world import world
from whale_torch.comm import columns as columns_module
from whale_torch.comm import columnwise
from whale_torch.comm.columns import Columns, ColumnsPlace
from whale_torch.comm.region import Region
from whale_torch.errors import LayoutError, LossError
from whale_torch.mesh import start
from whale_torch.state import full_tensor
from whale_torch.strategies.runtime import runtime_of

LAYOUTS = [
    (1, "own", 7, [4]),
    (2, "own", 7, [3, 2]),
    (3, "own", 7, [2, 0, 3]),
    (4, "own", 10, [1, 4, 2, 3]),
    (4, "own", 3, [2]),
    (4, "groups", 5, [3, 1, 2, 2]),
    (4, "shared", 5, [3, 2]),
    (4, "mixed", 10, [3, 1]),
    (8, "mixed", 10, [2, 1, 0, 3]),
]


def _weights(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Equal on all ranks, different for every column, whatever the number of rows."""
    generator = torch.Generator().manual_seed(3)
    last = torch.rand(shape[-1], generator=generator).to(dtype) + 0.5
    return last.expand(shape)


def _total(value: Tensor) -> Tensor:
    """The mean over rows of a weighed sum: a loss with a gradient of its own for every element."""
    flat = value.flatten(1) if value.dim() > 1 else value.unsqueeze(1)
    return (flat * _weights(tuple(flat.shape), flat.dtype)).sum() / max(flat.shape[0], 1)


KEEPS: dict[str, Use] = {  # what leaves Columns as they are
    "relu": lambda z, y: _total(F.relu(z)),
    "gelu": lambda z, y: _total(F.gelu(z, approximate="tanh")),
    "numbers": lambda z, y: _total((2 * z - 1) / 3 + z**2 + (1 - z) + 1 / (z * z + 1)),
    "number in a tensor": lambda z, y: _total(z * torch.tensor(0.3)),
    "clamp": lambda z, y: _total(z.clamp(-0.5, 0.7)),
    "two": lambda z, y: _total(F.silu(z) * z + torch.maximum(z, -z)),
    "reshape": lambda z, y: _total(
        z.view(z.shape[0], 1, z.shape[1]).reshape(-1, z.shape[-1]).unsqueeze(1).flatten(0, 1)
    ),
    "copies": lambda z, y: _total(z.clone().double().float().contiguous().to(torch.float32)),
}

GATHERS: dict[str, Use] = {
    "softmax": lambda z, y: _total(F.softmax(z, -1) * F.log_softmax(z, dim=-1)),
    "reductions": lambda z, y: _total(
        z.mean(-1) + z.sum(1) * 0.1 + z.logsumexp(-1) + z.norm(dim=-1) + z.min(-1).values
    ),
    "matmul": lambda z, y: _total(z @ _weights((2, z.shape[1])).t()),
    "linear": lambda z, y: _total(F.linear(z, _weights((3, z.shape[1])))),
    "indexing": lambda z, y: _total(z[:, 1:]) + _total(z[..., 0]),
    "where": lambda z, y: _total(torch.where(z > 0, z, z * 0.1)) + _total(z.masked_fill(z < 0.2, 0.0)),
    "per row": lambda z, y: _total(z * torch.arange(1.0, z.shape[0] + 1).unsqueeze(1)),
    "own number": lambda z, y: (
        _total(z.rows() / max(z.shape[0], 1)) if isinstance(z, Columns) else _total(z / max(z.shape[0], 1))
    ),
    "cat": lambda z, y: _total(torch.cat([z, 2 * z], 1)) + _total(torch.stack([z, z.exp()], 1)),
    "transpose": lambda z, y: _total((z.t() @ z)[None].expand(z.shape[0], -1, -1) / max(z.shape[0], 1)),
    "einops": lambda z, y: _total(einops.reduce(einops.rearrange(z, "b (c k) -> b k c", k=1), "b k c -> b c", "mean")),
    "einsum": lambda z, y: _total(torch.einsum("bc,bd->bcd", z, z)) + _total(einops.einsum(z, z, "b c, b d -> b c d")),
    "repeat": lambda z, y: _total(einops.repeat(z, "b c -> b r c", r=2)),
    "into a plain tensor": lambda z, y: _total(torch.zeros(z.shape).add_(z) + torch.ones(z.shape).mul(z)),
    "hinge": lambda z, y: F.multi_margin_loss(z, y, reduction="none").sum() / max(z.shape[0], 1),
    "bce": lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, z.shape[1]).float()),
    "nll": lambda z, y: F.nll_loss(F.log_softmax(z, -1), y),
    "none": lambda z, y: F.cross_entropy(z, y, reduction="none").square().sum() / max(z.shape[0], 1),
    "rows twice": lambda z, y: _total(z.sin().exp()) + _total(z.softmax(-1)) + _total(z.max(-1).values),
    "topk": lambda z, y: _total(z.topk(2, -1).values) + _total(z.max(-1, keepdim=True)[0]),
}


WRITES: dict[str, Use] = {  # in-place forms that modules of a model have
    "relu": lambda z, y: _total(F.relu(z, inplace=True) + 0),
    "both see it": lambda z, y: (F.leaky_relu(z, 0.1, inplace=True), _total(z))[1],
    "dropout": lambda z, y: (F.dropout(z, 1.0, True, True), _total(z) + _total(z.exp()))[1],
}


def _uses(rank: int, n: int, layout: str, num_classes: int, counts: list[int], inside: bool) -> dict[str, float]:
    case = build(rank, n, layout, num_classes, counts)
    uses = KEEPS | GATHERS | {f"{name} in place": use for name, use in WRITES.items()}
    return {name: compare(case, use, whole_batch=False, inside=inside) for name, use in uses.items()}


@pytest.mark.matrix(keep=5)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("n", "layout", "num_classes", "counts"), LAYOUTS)
def test_gradients(n: int, layout: str, num_classes: int, counts: list[int], inside: bool) -> None:
    for errors in world(n, _uses, layout, num_classes, counts, inside):
        assert {name: error for name, error in errors.items() if not error < BAR} == {}


def _plain_values(z: Any) -> dict[str, Any]:
    """What metrics code does with logits: everything that gives numbers, in a form that compares."""
    z = z.detach()
    buffer = io.BytesIO()
    torch.save(z, buffer)
    return {
        "iteration": torch.stack(list(z)) if len(z) else torch.zeros(()),
        "numpy": torch.from_numpy(z.numpy() + 0),
        "array": torch.from_numpy(np.asarray(z) + 0),
        "isfinite": torch.isfinite(z),
        "comparison": (z > 0) & (z <= 1) & (z != 2),
        "allclose": torch.tensor(torch.allclose(z, z)),
        "save": torch.load(io.BytesIO(buffer.getvalue())),
        "pickle": pickle.loads(pickle.dumps(z)),
        "deepcopy": copy.deepcopy(z),
        "list": torch.tensor(z.tolist()),
        "sort": z.sort(-1).values,
        "min": z.min(1).values,
        "max": z.max(1)[0],
        "index of max": z.max(1).indices,
        "argmax": z.argmax(-1),
        "argmax, kept": torch.argmax(input=z, dim=1, keepdim=True),
        "argmax of all": z.argmax() if len(z) else torch.zeros(()),
        "argmin": z.argmin(-1),
        "topk": z.topk(3).values,
        "topk, all": torch.topk(z, z.shape[-1], dim=-1)[0],
        "topk, none": z.topk(0).values,
        "smallest": z.topk(2, largest=False).values,
        "down the rows": z.topk(min(1, len(z)), 0).values,
        "indices of topk": z.topk(3).indices,
        "any": (z > 1).any(-1),
        "norm": torch.linalg.vector_norm(z, dim=-1),
        "where": torch.where(z > 0),
        "mask": z[z > 0],
        "chunk": torch.cat(z.chunk(2, -1), -1),
        "one column": z[..., 1],
    }


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(_same(a, b) for a, b in zip(ours, theirs, strict=True))
    alike = type(ours) is Tensor and ours.shape == theirs.shape and ours.dtype == theirs.dtype
    return alike and torch.allclose(ours.double(), theirs.double(), atol=1e-6)


def _values(rank: int, n: int, layout: str, num_classes: int, counts: list[int]) -> list[str]:
    case = build(rank, n, layout, num_classes, counts)
    z = case.model(case.x[case.here])
    assert isinstance(z, Columns)
    alone = z.rows().detach()
    expected = _plain_values(alone)
    wrong = [name for name, value in _plain_values(z).items() if not _same(value, expected[name])]
    return wrong if torch.allclose(alone, case.alone(case.x)[case.here], atol=1e-6) else ["rows", *wrong]


@pytest.mark.parametrize(("n", "layout", "num_classes", "counts"), LAYOUTS[1:])
def test_values(n: int, layout: str, num_classes: int, counts: list[int]) -> None:
    assert world(n, _values, layout, num_classes, counts) == [[]] * n


def _ranking(rank: int, n: int, widths: list[int], seed: int) -> list[str]:
    """argmax, max and topk on logits full of ties, infinities and NaN, over uneven and empty shards."""
    mesh = start()
    everyone, alone = mesh.everyone(), mesh.group("alone", tuple((r,) for r in range(n)))
    region = Region("a split", everyone, everyone, alone, alone)
    generator = torch.Generator().manual_seed(seed)
    full = torch.randint(-2, 3, (3 * n, sum(widths)), generator=generator).float()
    full[torch.rand(full.shape, generator=generator) < 0.3] = -torch.inf
    full[0] = -torch.inf
    full[1, -1] = torch.nan
    full[2, 0] = torch.inf
    wrong = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        exact = full.to(dtype)
        if dtype is torch.float64:
            exact = exact + torch.arange(sum(widths)) * 1e-12  # equal as float32
        first = sum(widths[:rank])
        place = ColumnsPlace(region, (3,) * n, tuple(widths), (3,))
        z = Columns.of(exact[:, first : first + widths[rank]].contiguous(), place)
        own = exact[3 * rank : 3 * rank + 3]
        if not torch.equal(z.argmax(-1), own.argmax(-1)):
            wrong.append(f"argmax {dtype}")
        if not torch.equal(z.max(-1).values.nan_to_num(9), own.max(-1).values.nan_to_num(9)):
            wrong.append(f"max {dtype}")
        for k in (1, 2, sum(widths) - 1, sum(widths)):
            values, indices = z.topk(k)
            expected = own.topk(k).values
            here = own.gather(1, indices)
            distinct = all(len(set(row.tolist())) == k for row in indices)
            if not (torch.equal(values.nan_to_num(9), expected.nan_to_num(9)) and distinct):
                wrong.append(f"topk {k} {dtype}")
            if not torch.equal(values.nan_to_num(9), here.nan_to_num(9)):
                wrong.append(f"indices of topk {k} {dtype}")
        with pytest.raises(RuntimeError, match="selected index k out of range"):
            z.topk(sum(widths) + 1)
    return wrong


@pytest.mark.parametrize(("widths", "seed"), [([3, 2], 0), ([1, 0, 2], 1), ([0, 4, 1], 2), ([2, 2, 2, 1], 3)])
def test_ranking_with_ties_and_empty_shards(widths: list[int], seed: int) -> None:
    assert world(len(widths), _ranking, widths, seed) == [[]] * len(widths)


class _Gated(nn.Module):
    """A split pair with dropout between, and a head whose output the caller sees."""

    def __init__(self, p: float, recompute: bool, rows: Literal["own", "shared"]) -> None:
        super().__init__()
        self.recompute = recompute
        with wh.split(cut="columns", rows=rows):
            self.gate, self.up = nn.Linear(4, 12), nn.Linear(4, 12)
        self.drop = nn.Dropout(p)

    def branch(self, x: Tensor) -> Tensor:
        return self.drop(F.silu(self.gate(x)) * self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.branch, x, use_reentrant=False) if self.recompute else self.branch(x)


def _dropout(
    rank: int, n: int, recompute: bool, rows: Literal["own", "shared"], mutate: bool = False
) -> tuple[float, list[list[float]], float]:
    """(how far gradients are from those of the mask seen in forward, that mask, the share of elements kept)"""
    torch.manual_seed(3)
    model = wh.parallelize(_Gated(0.5, recompute, rows))
    if mutate:  # one stream and no place in the region
        columnwise.dropout = lambda x, p, training, region, inplace: F.dropout(x, p, training)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(rank if rows == "own" else 0), requires_grad=True)
    out = model(x).rows()
    mask = (out.detach() != 0).float() * 2
    weights = [full_tensor(p) for layer in (model.gate, model.up) for p in (layer.weight, layer.bias)]
    (out * _weights((64, 12))).sum().backward()
    gate, up = F.linear(x, weights[0], weights[1]), F.linear(x, weights[2], weights[3])
    expected = torch.autograd.grad((F.silu(gate) * up * mask * _weights((64, 12))).sum(), x)[0]
    assert x.grad is not None
    return float((x.grad - expected).abs().max()), mask.tolist(), float((mask > 0).float().mean())


def _masks_differ(mask: list[list[float]]) -> bool:
    parts = torch.tensor(mask).split(4, 1)
    return not (torch.equal(parts[0], parts[1]) or torch.equal(parts[1], parts[2]))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rows", ["own", "shared"])
def test_dropout_differs_between_columns_and_is_replayed(rows: str, recompute: bool) -> None:
    results = world(3, _dropout, recompute, rows)
    for error, mask, kept in results:
        assert error < 1e-5
        assert 0.4 < kept < 0.6
        assert _masks_differ(mask)
    assert (results[0][1] == results[1][1]) == (rows == "shared")
    assert not _masks_differ(world(3, _dropout, recompute, "shared", True)[0][1])


def _gathers(rank: int, n: int, strict: bool) -> tuple[int, list[tuple[str, str, int, float]], str]:
    case = build(rank, n, "own", 10, [3, 2], **({"gather": "error"} if strict else {}))
    z = case.model(case.x[case.here])
    calls = everyone_calls(case.model)
    if strict:
        with pytest.raises(LayoutError) as caught:
            z.softmax(-1)
        assert z.rows().shape == z.shape
        z.softmax(-1)  # they are there now
        return 0, [], str(caught.value)
    z.softmax(-1)
    once = everyone_calls(case.model) - calls
    z.sum(), z @ torch.ones(10, 2), z[0]
    with torch.no_grad():
        z.mean()
    assert everyone_calls(case.model) - calls == once, "a second reader gathered again"
    F.relu(z).sum()
    plan = wh.plan(case.model)
    return once, [(g.operation, g.site, g.count, g.num_bytes) for g in plan.gathers], str(plan)


def everyone_calls(model: nn.Module) -> int:
    """Collectives of the split's region so far."""
    region = runtime_of(model, "test").regions[0]
    return region.columns.num_calls + region.headers.num_calls


def test_gathers_are_cached_and_listed() -> None:
    for once, gathers, text in world(2, _gathers, False):
        assert once == 2  # the header and the columns
        assert [(name, count) for name, _, count, _ in gathers] == [("softmax", 1), ("sum", 1)]
        assert all(Path(site.partition(":")[0]).name == Path(__file__).name for _, site, _, _ in gathers)
        assert gathers[0][3] in (3 * 10 * 4, 2 * 10 * 4)
        assert "were gathered because" in text and Path(gathers[0][1]).name in text


def test_a_strict_scope_refuses_gathers() -> None:
    for _, _, text in world(2, _gathers, True):
        assert "softmax would gather (" in text and ", 10) of TaskGraph" in text
        assert Path(__file__).name in text and "z.rows()" in text


def _kinds(rank: int, n: int, keep: bool) -> dict[str, type]:
    case = build(rank, n, "own", 10, [3, 0], **({"output": "columns"} if keep else {}))
    x = case.x[case.here]
    found = {"train": type(case.model(x))}
    with torch.no_grad():
        found["no grad"] = type(case.model.train()(x))
    case.model.eval()
    found["eval"] = type(case.model(x))
    with torch.inference_mode():
        out = case.model(x)
        found["inference"] = type(out)
        assert torch.allclose(out + 0, case.alone(x), atol=1e-6)
        if keep:
            assert torch.allclose(out.softmax(-1), case.alone(x).softmax(-1), atol=1e-6)
    return found


def test_outputs_are_plain_where_nothing_is_trained() -> None:
    for found in world(2, _kinds, False):
        assert found == {"train": Columns, "no grad": Tensor, "eval": Tensor, "inference": Tensor}
    for found in world(2, _kinds, True):
        assert set(found.values()) == {Columns}


def _eval_with_gradients(rank: int, n: int) -> float:
    """A model in eval mode may still be trained, as with frozen normalisation."""
    case = build(rank, n, "own", 10, [3, 1])
    case.model.eval()
    return compare(case, lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1), whole_batch=True)


def test_training_in_eval_mode() -> None:
    assert max(world(2, _eval_with_gradients)) < BAR


def _metric_first(rank: int, n: int, write: bool = True) -> dict[str, float]:
    """Rows gathered for a metric under no_grad serve a loss later; rows that somebody wrote to are gathered again."""

    def metric(z: Any, y: Tensor) -> Tensor:
        with torch.no_grad():
            assert not (z.softmax(-1)).requires_grad
            rows = z.rows() if isinstance(z, Columns) else z
            if isinstance(z, Columns):
                assert not rows.requires_grad
            if isinstance(z, Columns) and write:
                rows.mul_(0)
        return _total(z.softmax(-1))

    case = build(rank, n, "own", 10, [3, 2])
    errors = {"metric": compare(case, metric, whole_batch=False)}
    case.model.zero_grad()
    case.alone.zero_grad()
    case.model(case.x[case.here]).backward(_weights((case.counts[case.feed], 10)) / case.counts[case.feed])
    for here in case.slices():
        z = case.alone(case.x[here])
        z.backward(_weights(tuple(z.shape)) / len(case.x))
    errors["backward"] = relative_error(gradients_of(case.model), gradients_of(case.alone))
    return errors


def test_rows_gathered_for_a_metric_keep_their_graph() -> None:
    for errors in world(2, _metric_first):
        assert {name: error for name, error in errors.items() if not error < BAR} == {}


def _own_numbers(rank: int, n: int) -> list[str]:
    case = build(rank, n, "own", 10, [3, 2])
    x, y = case.x[case.here], case.y[case.here]
    found = []
    for use in (lambda z: F.cross_entropy(z / len(y), y), lambda z: (z * torch.tensor(float(rank))).sum()):
        with pytest.raises(LayoutError) as caught:
            use(case.model(x))
        found.append(str(caught.value))
    z = case.model(x)
    assert torch.allclose((z.rows() / len(y)).detach(), case.alone(x) / len(y), atol=1e-6)
    return found


def test_numbers_that_differ_between_ranks_are_refused() -> None:
    for first, second in world(2, _own_numbers):
        assert "come with different numbers" in first
        assert "rank 0: div [3]" in first and "rank 1: div [2]" in first and "z.rows()" in first
        assert "rank 0: mul [0.0]" in second and "rank 1: mul [1.0]" in second


def _autocast(rank: int, n: int) -> tuple[torch.dtype, float]:
    case = build(rank, n, "own", 10, [3, 2])
    with torch.autocast("cpu", torch.bfloat16):
        dtype = case.model(case.x[case.here]).dtype
        return dtype, compare(case, lambda z, y: _total(F.gelu(z).float().softmax(-1) * 3), whole_batch=False)


def test_autocast() -> None:
    for dtype, error in world(2, _autocast):
        assert dtype is torch.bfloat16 and error < 2e-2


def _second_order(rank: int, n: int, how: str) -> str:
    case = build(rank, n, "own", 10, [2])
    x = case.x[case.here].requires_grad_()
    z = case.model(x)
    value = F.cross_entropy(z, case.y[case.here]) if how == "loss" else z.softmax(-1).square().sum()
    with pytest.raises(LossError) as caught:
        torch.autograd.grad(value, x, create_graph=True)
    return str(caught.value)


@pytest.mark.parametrize("how", ["loss", "rows"])
def test_second_derivatives_are_refused(how: str) -> None:
    for text in world(2, _second_order, how):
        assert "second derivative (create_graph=True)" in text and "without wh.split" in text


def _two_splits(rank: int, n: int) -> dict[str, float]:
    """Two heads of one model: their outputs lie differently, so operations on both gather both."""
    torch.manual_seed(5)
    model = _TwoHeads()
    alone = copy.deepcopy(model)
    model = wh.parallelize(model)
    x = torch.randn(2 * n, 4, generator=torch.Generator().manual_seed(1))
    here = slice(2 * rank, 2 * rank + 2)
    (a, b), (c, d) = model(x[here]), alone(x)
    ours = _total(a * b) + _total(torch.maximum(a, b)) + _total((a == a).float() + a) + _total(torch.cat([a, b], 1))
    theirs = _total(c * d) + _total(torch.maximum(c, d)) + _total((c == c).float() + c) + _total(torch.cat([c, d], 1))
    ours.backward()
    theirs.backward()
    return {"all": relative_error(gradients_of(model), gradients_of(alone))}


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with wh.split(cut="columns"):
            self.a = nn.Linear(4, 6)
        with wh.split(size=2, cut="columns"):
            self.b = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def test_outputs_of_two_splits() -> None:
    for errors in world(4, _two_splits):
        assert errors["all"] < BAR


# ---- what these tests must see


def _no_weights(x: Any) -> None:
    columns_module.deliver = lambda out, call: out  # type: ignore[assignment]


def _columns_backwards(x: Any) -> None:
    original = columns_module.ColumnsToRows.backward
    columns_module.ColumnsToRows.backward = staticmethod(  # type: ignore[method-assign]
        lambda ctx, grad: original(ctx, grad.flip(1))
    )


def _graph_of_no_grad(x: Any) -> None:
    columns_module.torch = _WithoutGradMode(torch)  # type: ignore[assignment]


class _WithoutGradMode:
    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return (lambda mode: contextlib.nullcontext()) if name == "set_grad_enabled" else getattr(self._module, name)


def _mutated(rank: int, n: int, mutation: str) -> float:
    MUTATIONS[mutation][0](None)
    if mutation == "graph of no_grad":
        return max(_metric_first(rank, n, write=False).values())
    case = build(rank, n, "own", 10, [3, 1])
    return compare(case, GATHERS["softmax"], whole_batch=False)


# name -> the fault, and the error that it ends in if not in a wrong result
MUTATIONS: dict[str, tuple[Callable[[Any], None], str | None]] = {
    "no weights of rows": (_no_weights, None),
    "columns in another order": (_columns_backwards, None),
    "graph of no_grad": (_graph_of_no_grad, "does not require grad and does not have a grad_fn"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_seen(mutation: str) -> None:
    _, ends = MUTATIONS[mutation]
    with pytest.raises(RuntimeError, match=ends) if ends else contextlib.nullcontext():
        assert max(world(2, _mutated, mutation)) > 1e-2


class _TwoHeads(nn.Module):
    """Two splits, of which one says that its output stays columns."""

    def __init__(self) -> None:
        super().__init__()
        with wh.split():
            self.plain = nn.Linear(4, 6)
        with wh.split(output="columns"):
            self.kept = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.plain(x), self.kept(x)


def _two_heads(rank: int, n: int) -> list[type]:
    model = wh.parallelize(_TwoHeads()).eval()
    with torch.no_grad():
        return [type(out) for out in model(torch.ones(2, 4))]


@pytest.mark.parametrize("n", [1, 2])
def test_columns_are_kept_of_the_split_that_says_so(n: int) -> None:
    assert world(n, _two_heads) == [[Tensor, Columns]] * n
