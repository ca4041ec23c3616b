"""Cross entropy of a split's output: one loss of the whole batch, in every form of F.cross_entropy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.split_case import BAR, Case, Use, build, compare, gradients_of, number
from tests.world import outcomes, world
from whale_torch.comm import loss as loss_module
from whale_torch.comm.columns import Columns, Deferred, Hold
from whale_torch.comm.region import MOST_NUMBERS
from whale_torch.errors import LossError

IGNORED = -100

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


def _class_weights(num_classes: int) -> Tensor:
    return torch.linspace(0.5, 2.0, num_classes)


def _marked(y: Tensor) -> Tensor:
    """Ignores labels by their own value, so that a slice of the batch knows as much as the whole."""
    return y.masked_fill(y % 3 == 1, IGNORED)


def _same_logits_twice(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y) + 0.5 * F.cross_entropy(z, _marked(y), label_smoothing=0.1)


def _sum(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="sum")


LOSSES: dict[str, Use] = {
    "mean": lambda z, y: F.cross_entropy(z, y),
    "module": lambda z, y: nn.CrossEntropyLoss(label_smoothing=0.1)(z, y),
    "keywords": lambda z, y: F.cross_entropy(input=z, target=y),
    "smooth": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.2),
    "ignored": lambda z, y: F.cross_entropy(z, _marked(y)),
    "ignored, a class": lambda z, y: F.cross_entropy(z, y, ignore_index=2),
    "weights": lambda z, y: F.cross_entropy(z, y, _class_weights(z.shape[1])),
    "everything": lambda z, y: F.cross_entropy(
        z, _marked(y), _class_weights(z.shape[1]), ignore_index=IGNORED, label_smoothing=0.2
    ),
    "two losses": _same_logits_twice,
    "a multiple": lambda z, y: 0.25 * F.cross_entropy(z, y) / 3,
    "a view": lambda z, y: F.cross_entropy(z.unsqueeze(1).view(-1, z.shape[-1]), y.view(-1)),
    "float": lambda z, y: F.cross_entropy(z.float(), y.to(torch.uint8)),
    "relu": lambda z, y: F.cross_entropy(F.relu(z) * 2, y),
    "gathered beside": lambda z, y: F.cross_entropy(z, y) + F.cross_entropy(z, y, reduction="none").mean(),
}


def _num_regions(n: int, layout: str) -> int:
    return n // 2 if layout in ("groups", "shared") else 1


def _losses(
    rank: int, n: int, layout: str, num_classes: int, counts: list[int], inside: bool, options: dict[str, Any]
) -> dict[str, float]:
    case = build(rank, n, layout, num_classes, counts, **options)
    errors = {
        name: compare(case, use, whole_batch=name != "gathered beside", inside=inside) for name, use in LOSSES.items()
    }
    if _num_regions(n, layout) == 1:
        errors["sum"] = compare(
            case, lambda z, y: F.cross_entropy(z, y, reduction="sum"), whole_batch=True, inside=inside
        )
    return errors


@pytest.mark.matrix(keep=5)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("n", "layout", "num_classes", "counts"), LAYOUTS)
def test_gradients(n: int, layout: str, num_classes: int, counts: list[int], inside: bool) -> None:
    for errors in world(n, _losses, layout, num_classes, counts, inside, {}):
        assert {name: error for name, error in errors.items() if not error < BAR} == {}


MANY = 100_003  # a prime: no number of ranks divides it


def _many_classes(rank: int, n: int, chunked: bool) -> tuple[tuple[int, ...], dict[str, float], float]:
    case = build(rank, n, "own", MANY, [4, 1, 2], chunked_loss=chunked)
    widths = wh.plan(case.model).cuts[0].widths
    starts = [sum(widths[:i]) for i in range(n)]
    # every rank's first and last class, on rows of all feeds
    case.y = torch.tensor([c for start, width in zip(starts, widths, strict=True) for c in (start, start + width - 1)])
    case.y = case.y.repeat(2)[: len(case.x)]
    errors = {name: compare(case, LOSSES[name], whole_batch=True) for name in ("mean", "everything")}
    with torch.no_grad():
        best = case.model(case.x[case.here]).argmax(1)
        wrong = number((best != case.alone(case.x[case.here]).argmax(1)).float().sum())
    return widths, errors, wrong


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_a_hundred_thousand_classes_cut_unevenly(n: int, chunked: bool) -> None:
    for widths, errors, wrong in world(n, _many_classes, chunked):
        assert sum(widths) == MANY and max(widths) - min(widths) == 1
        assert {name: error for name, error in errors.items() if not error < BAR} == {} and wrong == 0


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("n", "layout", "num_classes", "counts"), [LAYOUTS[0], LAYOUTS[3], LAYOUTS[4], LAYOUTS[7]])
def test_chunked(n: int, layout: str, num_classes: int, counts: list[int], bias: bool) -> None:
    for errors in world(n, _losses, layout, num_classes, counts, not bias, {"bias": bias, "chunked_loss": True}):
        assert {name: error for name, error in errors.items() if not error < BAR} == {}


def _region_rows(case: Case, rank: int, n: int, layout: str) -> Tensor:
    """Numbers of the rows whose loss the ranks of this rank's region see."""
    regions = _num_regions(n, layout)
    feeds = len(case.counts) // regions
    first = rank // (n // regions) * feeds
    starts = [sum(case.counts[:k]) for k in range(len(case.counts) + 1)]
    return torch.arange(starts[first], starts[first + feeds])


def _values(rank: int, n: int, layout: str, num_classes: int, counts: list[int]) -> dict[str, float]:
    case = build(rank, n, layout, num_classes, counts)
    rows = _region_rows(case, rank, n, layout)
    errors = {}
    z, alone, y = case.model(case.x[case.here]), case.alone(case.x), case.y[case.here]
    for name, use in LOSSES.items():
        ours, theirs = number(use(z, y)), number(use(alone[rows], case.y[rows]))
        errors[name] = abs(ours - theirs)
    ours, theirs = F.cross_entropy(z, y, reduction="none"), F.cross_entropy(alone, case.y, reduction="none")[case.here]
    errors["none"] = number((ours - theirs).abs().sum())
    errors["gathered beside"] = 0.0  # a mean of the own rows beside one of all rows
    with torch.no_grad():
        errors["no grad"] = abs(number(F.cross_entropy(z, y)) - number(F.cross_entropy(alone[rows], case.y[rows])))
    return errors


@pytest.mark.parametrize(("n", "layout", "num_classes", "counts"), LAYOUTS[2:])
def test_values_are_those_of_the_rows_of_the_group(n: int, layout: str, num_classes: int, counts: list[int]) -> None:
    for errors in world(n, _values, layout, num_classes, counts):
        assert {name: error for name, error in errors.items() if not error < 1e-5} == {}


def _all_ignored(rank: int, n: int, layout: str, who: str) -> tuple[float, float, float]:
    """(value, gradient error, value of the ignored rows in one process) where some or all labels are ignored."""
    case = build(rank, n, layout, 5, [3, 2])
    starts = {"rank": slice(0, 3), "group": slice(0, 5), "all": slice(0, None)}
    case.y[starts[who]] = IGNORED
    error = compare(case, lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1), whole_batch=who != "all")
    value = F.cross_entropy(case.model(case.x[case.here]), case.y[case.here])
    if who == "all":
        error = max(float(g.abs().max()) for g in gradients_of(case.model).values())
    return number(value), error, number(F.cross_entropy(case.alone(case.x), case.y))


@pytest.mark.parametrize("layout", ["own", "groups", "mixed"])
@pytest.mark.parametrize("who", ["rank", "group", "all"])
def test_all_labels_ignored(layout: str, who: str) -> None:
    results = world(4, _all_ignored, layout, who)
    for rank, (value, error, alone) in enumerate(results):
        assert error < BAR
        nothing_left = who == "all" or (who == "group" and (layout == "mixed" or (layout == "groups" and rank < 2)))
        assert (value != value) == nothing_left, (rank, value)
        assert alone == alone or nothing_left


def _errors_of_torch(rank: int, n: int) -> list[tuple[str, str, str, str]]:
    case = build(rank, n, "own", 5, [2])
    found = []
    z, alone = case.model(case.x[case.here]), case.alone(case.x[case.here])
    wrong = torch.tensor([1, 5]) if rank == 1 else torch.tensor([1, 2])  # seen by all
    arguments: list[tuple[Tensor, dict[str, Any]]] = [
        (wrong, {}),
        (torch.tensor([1, -3]), {}),
        (torch.tensor([1, 2], dtype=torch.int32), {}),
        (torch.tensor([1, 2, 3]), {}),
        (torch.tensor([1, 2]), {"weight": torch.ones(4)}),
        (torch.tensor([1, 2]), {"label_smoothing": 2.0}),
        (torch.tensor([1, 2]), {"reduction": "most"}),
    ]
    for target, options in arguments:
        pair = []
        for logits, labels in ((z, target), (alone, torch.tensor([1, 5]) if target is wrong else target)):
            with pytest.raises(Exception) as caught:
                F.cross_entropy(logits, labels, **options)
            pair += [type(caught.value).__name__, str(caught.value)]
        found.append(tuple(pair))
    return found  # type: ignore[return-value]


def test_errors_are_those_of_torch_on_every_rank() -> None:
    for found in world(2, _errors_of_torch):
        assert len(found) == 7
        for ours, our_text, theirs, their_text in found:
            assert (ours, our_text) == (theirs, their_text)


def _dtypes(rank: int, n: int, dtype: torch.dtype, autocast: bool) -> tuple[torch.dtype, torch.dtype, float, float]:
    """dtype of the loss here and alone, gradient error and value error."""
    case = build(rank, n, "own", 10, [3, 2], dtype=torch.float32 if autocast else dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        error = compare(case, lambda z, y: F.cross_entropy(z, _marked(y), label_smoothing=0.1), whole_batch=True)
        ours = F.cross_entropy(case.model(case.x[case.here]), case.y[case.here])
        theirs = F.cross_entropy(case.alone(case.x), case.y)
    return ours.dtype, theirs.dtype, error, abs(number(ours) - number(theirs)) / number(theirs)


@pytest.mark.parametrize(
    ("dtype", "autocast", "bar"),
    [
        (torch.float64, False, 1e-12),
        (torch.bfloat16, False, 4e-2),
        (torch.float16, False, 5e-3),
        (torch.bfloat16, True, 2e-2),
    ],
)
def test_dtypes(dtype: torch.dtype, autocast: bool, bar: float) -> None:
    for ours, theirs, error, value_error in world(2, _dtypes, dtype, autocast):
        assert ours is theirs
        assert error < bar
        assert value_error < bar


def _chunked_autocast(rank: int, n: int) -> float:
    case = build(rank, n, "own", 10, [3, 2], chunked_loss=True)
    with torch.autocast("cpu", torch.bfloat16):
        return compare(case, lambda z, y: F.cross_entropy(z, y), whole_batch=True)


def test_chunked_under_autocast() -> None:
    assert max(world(2, _chunked_autocast)) < 2e-2


def _gathered_forms(rank: int, n: int, layout: str, inside: bool) -> dict[str, float]:
    """Forms without a rule: float targets, classes in the second of three dimensions, the old arguments."""
    case = build(rank, n, layout, 6, [3, 2], lead=(2,))
    weights = _class_weights(6)

    def soft(z: Tensor, y: Tensor) -> Tensor:
        targets = F.one_hot(y, 6).float() * 0.8 + 0.2 / 6
        return F.cross_entropy(z.flatten(0, 1), targets.flatten(0, 1), weights)

    def transposed(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z.transpose(1, 2), _marked(y) if inside else y)

    def old(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z.flatten(0, 1), _marked(y).flatten() if inside else y.flatten(), size_average=True)

    uses = {"soft": soft, "transposed": transposed}
    return {name: compare(case, use, whole_batch=True, inside=inside) for name, use in uses.items()}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("layout", ["own", "groups", "mixed"])
def test_gathered_forms(layout: str, inside: bool) -> None:
    for errors in world(4, _gathered_forms, layout, inside):
        assert {name: error for name, error in errors.items() if not error < BAR} == {}


def _summed(rank: int, n: int, layout: str, inside: bool) -> dict[str, float]:
    """wh.replica(loss="sum"): the losses of the feeds are added up, and a loss that a group shares counts once."""
    case = build(rank, n, layout, 6, [3, 2], summed=True)
    uses: dict[str, Use] = {
        "sum": _sum,
        "none": lambda z, y: F.cross_entropy(z, y, reduction="none").sum(),
        "gathered": lambda z, y: F.nll_loss(F.log_softmax(z, -1), y, reduction="sum"),
        "mean": lambda z, y: F.cross_entropy(z, _marked(y)),
    }
    return {name: compare(case, use, whole_batch=True, inside=inside) for name, use in uses.items()}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("layout", ["own", "groups", "shared"])
def test_losses_of_a_sum(layout: str, inside: bool) -> None:
    for errors in world(4, _summed, layout, inside):
        assert {name: error for name, error in errors.items() if not error < BAR} == {}


# ---- memory: the gradient is written over logits that nobody holds


def _metrics_after_backward(rank: int, n: int) -> dict[str, bool]:
    case = build(rank, n, "own", 10, [2])
    x, y, expected = case.x[case.here], case.y[case.here], case.alone(case.x)[case.here].detach()

    def kept(look: Callable[[Columns], Any], read: Callable[[Any], Tensor]) -> bool:
        z = case.model(x)
        held = look(z)
        loss = F.cross_entropy(z, y)
        del z
        loss.backward()
        return bool(torch.allclose(read(held), expected, atol=1e-5))

    def first_rows(z: Columns) -> Tensor:
        return z.rows()

    return {
        "itself": kept(lambda z: z, first_rows),
        "a view": kept(lambda z: z.view(-1, 10), first_rows),
        "detached": kept(lambda z: z.detach(), first_rows),
        "the shard": kept(lambda z: (z.local, z.place), lambda held: Columns.of(held[0].detach(), held[1]).rows()),
        "rows": kept(lambda z: z.rows(), lambda rows: rows),
        "detached rows": kept(lambda z: z.detach().rows(), lambda rows: rows),
        "float": kept(lambda z: z.float(), first_rows),
        "in a list": kept(lambda z: [z], lambda held: held[0].rows()),
    }


def test_logits_read_after_backward_are_logits() -> None:
    for found in world(2, _metrics_after_backward):
        assert all(found.values()), found


def _memory_of_logits(rank: int, n: int, hold: bool) -> bool:
    """Whether backward wrote its gradient over the logits."""
    case = build(rank, n, "own", 10, [2])
    z = case.model(case.x[case.here])
    with torch._C.DisableTorchFunctionSubclass():
        pointer = z.untyped_storage()
    before = torch.tensor(pointer.tolist())
    loss = F.cross_entropy(z, case.y[case.here])
    if not hold:
        del z
    loss.backward()
    return not torch.equal(before, torch.tensor(pointer.tolist()))


@pytest.mark.parametrize("hold", [False, True])
def test_the_gradient_overwrites_logits_that_nobody_holds(hold: bool) -> None:
    assert world(2, _memory_of_logits, hold) == [not hold] * 2


def _backward_twice(rank: int, n: int, chunked: bool, inside: bool, first: str) -> float:
    """Nobody holds the logits, and the graph is kept: the second run finds what the first one read."""
    case = build(rank, n, "own", 10, [2, 3], chunked_loss=chunked)
    case.model.use = F.cross_entropy if inside else None  # type: ignore[assignment]
    x, y = case.x[case.here], case.y[case.here]
    loss = case.model(x, y) if inside else F.cross_entropy(case.model(x), y)
    if first == "grad":
        torch.autograd.grad(loss, [case.model.features.weight], retain_graph=True)
    else:
        loss.backward(retain_graph=True)
    loss.backward()
    expected = F.cross_entropy(case.alone(case.x), case.y)
    ((1 if first == "grad" else 2) * expected).backward()
    return relative_error(gradients_of(case.model), gradients_of(case.alone))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("first", ["backward", "grad"])
def test_backward_twice(chunked: bool, inside: bool, first: str) -> None:
    assert max(world(2, _backward_twice, chunked, inside, first)) < BAR


class _Reentrant(nn.Module):
    """A split head, and its loss, in or outside of a reentrant checkpoint."""

    def __init__(self, *, split: bool, chunked: bool) -> None:
        super().__init__()
        self.features = nn.Linear(5, 6)
        with wh.split(chunked_loss=chunked) if split else wh.replica():
            self.head = nn.Linear(6, 7)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = self.features(x)
        if y is None:
            out: Tensor = checkpoint(self.head, h, use_reentrant=True)
        else:
            out = checkpoint(lambda h: F.cross_entropy(self.head(h), y), h, use_reentrant=True)
        return out


def _reentrant_head(rank: int, n: int, chunked: bool) -> float:
    torch.manual_seed(7)
    alone = _Reentrant(split=True, chunked=chunked)
    x, y = torch.randn(5, 5), torch.randint(7, (5,))
    model = wh.parallelize(copy.deepcopy(alone))
    here = slice(2) if rank == 0 else slice(2, 5)
    F.cross_entropy(model(x[here]), y[here]).backward()
    F.cross_entropy(alone(x), y).backward()
    return relative_error(gradients_of(model), gradients_of(alone))


@pytest.mark.parametrize("chunked", [False, True])
def test_a_split_head_in_a_reentrant_checkpoint_is_right(chunked: bool) -> None:
    assert max(world(2, _reentrant_head, chunked)) < BAR


def _reentrant_loss(rank: int, n: int, split: bool) -> str:
    model = wh.parallelize(_Reentrant(split=split, chunked=False))
    with pytest.raises(LossError) as caught:
        model(torch.ones(2, 5), torch.ones(2, dtype=torch.int64))
    with torch.no_grad():  # no checkpoint there, and nothing to weigh
        F.cross_entropy(model.head(torch.ones(2, 6)), torch.ones(2, dtype=torch.int64))
    return str(caught.value)


@pytest.mark.parametrize("split", [False, True])
def test_a_loss_in_a_reentrant_checkpoint_raises(split: bool) -> None:
    for text in world(2, _reentrant_loss, split):
        assert "a loss inside a checkpoint with use_reentrant=True" in text
        assert "test_loss.py:" in text and "use_reentrant=False" in text


def _two_forwards(rank: int, n: int, layout: str, inside: bool) -> float:
    """Two batches of different sizes, one backward of the sum of their losses."""
    case = build(rank, n, layout, 10, [3, 1])
    other = build_batch(case)
    use: Use = lambda z, y: F.cross_entropy(z, _marked(y))  # noqa: E731
    case.model.use = use if inside else None  # type: ignore[assignment]
    here, there = case.here, other.here
    if inside:
        loss = case.model(case.x[here], case.y[here]) + case.model(other.x[there], other.y[there])
    else:
        first, second = case.model(case.x[here]), case.model(other.x[there])
        loss = use(first, case.y[here]) + use(second, other.y[there])
    loss.backward()
    (use(case.alone(case.x), case.y) + use(case.alone(other.x), other.y)).backward()
    return relative_error(gradients_of(case.model), gradients_of(case.alone))


def build_batch(case: Case) -> Case:
    """Another batch for the same model, with other numbers of rows."""
    counts = [count + 1 + k % 2 for k, count in enumerate(case.counts)]
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(sum(counts), 5, generator=generator)
    y = torch.randint(10, (sum(counts),), generator=generator)
    return Case(case.model, case.alone, counts, case.feed, x, y)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("layout", ["own", "groups", "mixed"])
def test_two_forwards_one_backward(layout: str, inside: bool) -> None:
    assert max(world(4, _two_forwards, layout, inside)) < BAR


# ---- the chunked loss


def _chunked_makes_nothing(rank: int, n: int) -> dict[str, Any]:
    case = build(rank, n, "own", 10, [2, 3], chunked_loss=True)
    made = []
    original = Deferred.make

    def make(self: Deferred) -> Tensor:
        made.append(1)
        return original(self)

    Deferred.make = make  # type: ignore[method-assign]
    loss_module.CHUNK = 3  # several chunks a rank
    uses: dict[str, Use] = {
        "alone": lambda z, y: F.cross_entropy(z.float().view(-1, 10), y),
        "beside": lambda z, y: F.cross_entropy(z, y) + F.cross_entropy(z.softmax(-1), y),
        "after a metric": _after_a_metric,
    }
    found: dict[str, Any] = {}
    for name, use in uses.items():
        made.clear()
        found[name] = compare(case, use, whole_batch=name != "beside"), len(made)
    case.model.eval()
    found["eval"] = number((case.model(case.x[case.here]) - case.alone(case.x)[case.here]).abs().max()), 0
    return found


def _after_a_metric(z: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        z.argmax(-1)
        z.softmax(-1)
    return F.cross_entropy(z, y)


def _chunked_frozen(rank: int, n: int, frozen: str) -> float:
    case = build(rank, n, "own", 10, [2, 3], chunked_loss=True, frozen=frozen)
    return compare(case, lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1), whole_batch=True)


@pytest.mark.parametrize("frozen", [r"fc\.weight", r"fc\..*", r"features.*", r"features.*|fc\.weight"])
def test_chunked_loss_with_frozen_parameters(frozen: str) -> None:
    assert max(world(2, _chunked_frozen, frozen)) < BAR


def test_chunked_loss_holds_no_logits() -> None:
    for found in world(2, _chunked_makes_nothing):
        assert {name: error for name, (error, _) in found.items() if not error < BAR} == {}
        assert found["alone"][1] == 0
        assert found["beside"][1] > 0


def _as_on_a_device(rank: int, n: int) -> list[tuple[bool, bool]]:
    """(loss is NaN, every gradient of the head is) for labels that are right and wrong, with the CPU's check off."""
    from unittest import mock

    found = []
    with (
        mock.patch.object(loss_module, "_check_targets"),
        mock.patch.object(loss_module, "_wrong", loss_module._no_class),
    ):
        for label, options in ((2, {}), (7, {}), (-3, {}), (7, {"weight": _class_weights(7)}), (IGNORED, {})):
            case = build(rank, n, "own", 7, [3, 2])
            y = case.y.clone()
            y[0] = label
            loss = F.cross_entropy(case.model(case.x[case.here]), y[case.here], **options)  # type: ignore[arg-type]
            loss.backward()
            gradient = case.model.fc.weight.grad
            found.append((bool(loss.isnan()), bool(gradient.isnan().all())))
    return found


def test_labels_that_are_no_class_make_a_loss_nan_where_they_cannot_raise() -> None:
    right, wrong = (False, False), (True, True)
    assert world(2, _as_on_a_device) == [[right, wrong, wrong, wrong, right]] * 2


def test_rows_of_no_word_are_nan_where_they_cannot_raise() -> None:
    from whale_torch.strategies.split_embedding import _nan_for_no_word

    found = _nan_for_no_word(torch.ones(4, 2), torch.tensor([0, -1, 4, 5]), 5)
    assert found.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2, [True] * 2]


# ---- losses of the model itself, over rows that are not split


def _own_mean(rank: int, n: int, who: str, form: str) -> tuple[float, float, float]:
    """(gradient error, value, mean of the own rows in one process): the model returns its own loss."""
    case = build(rank, n, "replica", 5, [3, 0, 1, 2] if who == "no rows" else [3, 1, 2])
    case.y[::3] = IGNORED
    if who == "rank 0":
        case.y[:3] = IGNORED
    elif who == "all":
        case.y[:] = IGNORED
    uses: dict[str, Use] = {
        "cross entropy": lambda z, y: F.cross_entropy(z, y),
        "everything": lambda z, y: F.cross_entropy(z, y, _class_weights(5), label_smoothing=0.1),
        "nll": lambda z, y: F.nll_loss(F.log_softmax(z, -1), y, weight=_class_weights(5)),
        "module": lambda z, y: nn.NLLLoss()(F.log_softmax(z, -1), y),
        "two": lambda z, y: F.cross_entropy(z, y) + 0.3 * F.cross_entropy(z, y, ignore_index=1),
    }
    if form == "two":
        case.y[case.y == IGNORED] = 1
    use = uses[form]
    error = compare(case, use, whole_batch=True, inside=True)
    if who == "all":
        error = max(float(g.abs().max()) for g in gradients_of(case.model).values())
    x, y = case.x[case.here], case.y[case.here]
    return error, number(case.model(x, y)), number(use(case.alone(x), y))


@pytest.mark.parametrize(
    ("who", "form"),
    [
        *((("some", form)) for form in ("cross entropy", "everything", "nll", "module", "two")),
        *((("rank 0", form)) for form in ("cross entropy", "everything")),
        ("no rows", "everything"),
        ("all", "cross entropy"),
    ],
)
def test_a_mean_inside_a_replica_is_that_of_the_whole_batch(who: str, form: str) -> None:
    for error, value, own in world(4 if who == "no rows" else 3, _own_mean, who, form):
        assert error < BAR
        assert value == pytest.approx(own, abs=1e-6, nan_ok=True)


def _other_losses(rank: int, n: int) -> float:
    case = build(rank, n, "replica", 5, [3, 1, 2])
    use: Use = lambda z, y: (  # noqa: E731
        F.binary_cross_entropy_with_logits(z, F.one_hot(y, 5).float(), pos_weight=_class_weights(5))
        + F.mse_loss(z, torch.ones_like(z))
        + F.cross_entropy(z, F.one_hot(y, 5).float())
        + F.cross_entropy(z, y, reduction="none").mean()
    )
    return compare(case, use, whole_batch=True, inside=True)


def test_other_means_are_weighed_by_rows() -> None:
    assert max(world(3, _other_losses)) < BAR


# ---- what these tests must see


def _no_global_count(x: Any) -> None:
    original = loss_module._Divisor.__init__

    def init(self: Any, mine: Tensor, copies: Any, share: Any) -> None:
        original(self, mine, copies, share)
        if self._wait is not None:
            self._wait()
        self._wait, self._sum = None, mine * copies.size

    loss_module._Divisor.__init__ = init  # type: ignore[method-assign]


def _always_overwrite(x: Any) -> None:
    Hold.release = lambda self: lambda: True  # type: ignore[method-assign]


def _own_seed(x: Any) -> None:
    loss_module.mean_of_seeds = lambda grad, region: grad  # type: ignore[assignment]


def _no_delivery(x: Any) -> None:
    loss_module.deliver = lambda out, call, weigh: out  # type: ignore[assignment]


def _unscaled(x: Any) -> None:
    loss_module.gather_feeds_original = loss_module.gather_feeds  # type: ignore[attr-defined]

    def doubled(t: Tensor, counts: Any, region: Any, name: str) -> Tensor:
        out: Tensor = loss_module.gather_feeds_original(t, counts, region, name)  # type: ignore[attr-defined]
        return out * 2 if "backward" in name else out

    loss_module.gather_feeds = doubled


MUTATIONS = {
    "no global count": _no_global_count,
    "own seed": _own_seed,
    "no delivery": _no_delivery,
    "scale": _unscaled,
}


def _mutated(rank: int, n: int, mutation: str) -> float:
    MUTATIONS[mutation](None)
    worst = 0.0
    for inside in (False, True):
        for layout in ("groups", "mixed"):
            case = build(rank, n, layout, 10, [3, 1, 2, 2])
            for name in ("everything", "gathered beside"):
                error = compare(case, LOSSES[name], whole_batch=name == "everything", inside=inside)
                worst = max(worst, error)
    return worst


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_seen(mutation: str) -> None:
    assert max(world(4, _mutated, mutation)) > 1e-2


def _corrupted(rank: int, n: int) -> bool:
    _always_overwrite(None)
    try:
        return all(_metrics_after_backward(rank, n).values())
    except RuntimeError as error:  # autograd itself sees some of it
        return "modified" not in str(error)


def test_corrupted_logits_are_seen() -> None:
    assert not any(world(2, _corrupted))


# ---- a loss for every pixel


class _Pixels(nn.Module):
    """A convolution cut by output channels, whose channels are classes."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.first = nn.Conv2d(2, 3, 1)
        with wh.split(cut="columns"):
            self.head = nn.Conv2d(3, 7, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.head(self.first(x).tanh())
        return _pixel_loss(z, y) if self.inside else z


def _pixel_loss(z: Tensor, y: Tensor) -> Tensor:
    own = F.cross_entropy(z, y, reduction="none")
    assert own.shape == y.shape
    everything = F.cross_entropy(z, _marked(y), _class_weights(7), label_smoothing=0.1)
    return everything + own.mean()


def _pixels(rank: int, n: int, inside: bool) -> tuple[float, bool]:
    torch.manual_seed(1)
    model = _Pixels(inside)
    alone = copy.deepcopy(model)
    wh.parallelize(model)
    counts = [2, 1, 3][:n]
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(sum(counts), 2, 3, 4, generator=generator)
    y = torch.randint(7, (sum(counts), 3, 4), generator=generator)
    here = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    out = model(x[here], y[here])
    stays = isinstance(out, Columns) or inside
    gathers = wh.plan(model).gathers
    (out if inside else _pixel_loss(out, y[here])).backward()
    alone.inside = True
    alone(x, y).backward()
    return relative_error(gradients_of(model), gradients_of(alone)), stays and not gathers


@pytest.mark.parametrize("inside", [False, True])
def test_pixels(inside: bool) -> None:
    for error, stays in world(3, _pixels, inside):
        assert error < BAR and stays


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with wh.replica(), wh.split():
            self.fc = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def _labels_of_one_replica(rank: int, n: int, differ: bool) -> float:
    model = wh.parallelize(_Nested(), default=wh.replica())
    labels = torch.tensor([0, 5, 1, 5, rank if differ else 2, 5])[::2]  # not contiguous
    return float(F.cross_entropy(model(torch.ones(3, 4)), labels).detach())


def test_ranks_of_one_replica_have_the_same_labels() -> None:
    first, second = world(2, _labels_of_one_replica, False)
    assert first == second
    with pytest.raises(wh.LayoutError, match=r"cross_entropy: the ranks of .* come with different numbers"):
        world(2, _labels_of_one_replica, True)


class _Beside(nn.Module):
    """A split over pairs that share rows, and a head split over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        with wh.replica(), wh.split(size=2):
            self.pair = nn.Linear(4, 4)
        with wh.split():
            self.fc = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pair(x))


def _labels_of_a_pair(rank: int, n: int, rows: int, odd: int) -> None:
    model = wh.parallelize(_Beside())
    labels = torch.full((rows,), 2 + rank // 2)
    if rank == odd:
        labels[-1] = 5
    F.cross_entropy(model(torch.full((rows, 4), 1.0 + rank // 2)), labels).backward()


@pytest.mark.parametrize("rows", [3, 70])
def test_ranks_of_one_of_several_replicas_have_the_same_labels(rows: int) -> None:
    world(4, _labels_of_a_pair, rows, -1)
    ended = outcomes(4, _labels_of_a_pair, rows, 2)
    assert {type(o.error) for o in ended} == {wh.LayoutError}, [o.error for o in ended]
    assert len({str(o.error) for o in ended}) == 1


def _weights_of_own_rows(rank: int, n: int) -> None:
    model = wh.parallelize(nn.Linear(4, 6), default=wh.split())
    F.cross_entropy(model(torch.ones(2, 4)), torch.tensor([rank, 3]), _class_weights(6) + rank)


def test_class_weights_that_differ_are_refused() -> None:
    ended = outcomes(2, _weights_of_own_rows)
    assert {type(o.error) for o in ended} == {wh.LayoutError}, [o.error for o in ended]


def _many_labels(rank: int, n: int, rows: int, ignore_index: int) -> float:
    case = build(rank, n, "own", 10, [rows, rows - 1])
    case.y[::3] = ignore_index

    def use(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, ignore_index=ignore_index)

    return compare(case, use, whole_batch=True)


@pytest.mark.parametrize("rows", [MOST_NUMBERS - 1, MOST_NUMBERS, MOST_NUMBERS + 1])
@pytest.mark.parametrize("ignore_index", [-100, 7, 1 << 40])
def test_labels_travel_with_what_the_ranks_agree_on_or_after_it(rows: int, ignore_index: int) -> None:
    assert max(world(2, _many_labels, rows, ignore_index)) < BAR
