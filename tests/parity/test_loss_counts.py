"""Losses inside the model that only some ranks call: gradients are those of one process with the whole batch."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.replica_cases import gradients
from tests.world import outcomes, world
from whale_torch.comm.loss_counts import LossCounts, _check_lines, _same_loss
from whale_torch.errors import CommError, LossError

IGNORED = -100
BAR = 2e-5


def _mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


class Branches(nn.Module):
    """Two heads; each loss is left out where there is nothing to learn from."""

    def __init__(self, form: str):
        super().__init__()
        self.form = form
        self.body, self.words, self.next = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(6, 2)

    def forward(self, x: Tensor, words: Tensor, following: Tensor) -> Tensor:
        h = self.body(x).tanh()
        loss = h.sum() * 0.0
        return getattr(self, f"_{self.form}")(h, loss, words, following)

    def _first(self, h: Tensor, loss: Tensor, words: Tensor, following: Tensor) -> Tensor:
        if (words != IGNORED).any():
            loss = loss + F.cross_entropy(self.words(h), words)
        return loss + F.cross_entropy(self.next(h), following)

    def _last(self, h: Tensor, loss: Tensor, words: Tensor, following: Tensor) -> Tensor:
        loss = loss + F.cross_entropy(self.next(h), following, weight=torch.tensor([0.5, 2.0]))
        if (words != IGNORED).any():
            loss = loss + nn.CrossEntropyLoss()(self.words(h), words)
        return loss

    def _return(self, h: Tensor, loss: Tensor, words: Tensor, following: Tensor) -> Tensor:
        if h.shape[0] == 0 or not (words != IGNORED).any():
            return loss
        return loss + F.cross_entropy(self.words(h), words)

    def _helper(self, h: Tensor, loss: Tensor, words: Tensor, following: Tensor) -> Tensor:
        """Both losses in one line of a helper."""
        if (words != IGNORED).any():
            loss = loss + _mean_loss(self.words(h), words)
        return loss + _mean_loss(self.next(h), following)

    def _in_place(self, h: Tensor, loss: Tensor, words: Tensor, following: Tensor) -> Tensor:
        """More is added to a loss in place."""
        total = F.cross_entropy(self.words(h), words)
        total += 0.1 * h.square().mean() if h.shape[0] else 0.0
        total /= 2
        return total

    def _bytes(self, h: Tensor, loss: Tensor, words: Tensor, following: Tensor) -> Tensor:
        """Labels of 8 bits, none of which is -100."""
        wide = self.words(h) @ torch.ones(5, 200).cumsum(1).sin()
        weight = torch.linspace(0.5, 2.0, 200)
        return F.cross_entropy(wide, words.clamp(min=0).add(153).to(torch.uint8), weight=weight)

    def _chunks(self, h: Tensor, loss: Tensor, words: Tensor, following: Tensor) -> Tensor:
        """Logits are never held."""
        options: Any = nn.LinearCrossEntropyOptions()
        if (words != IGNORED).any():
            loss = loss + F.linear_cross_entropy(
                h, self.words.weight, words, linear_bias=self.words.bias, options=options
            )
        return loss + F.linear_cross_entropy(
            h, self.next.weight, following, linear_bias=self.next.bias, options=options
        )

    def _many(self, h: Tensor, loss: Tensor, words: Tensor, following: Tensor) -> Tensor:
        """One loss for each row that a rank has; more than the first message has room for."""
        for i in range(12):
            here = slice(i, i + 1)
            if (words[here] != IGNORED).any():
                loss = loss + F.nll_loss(self.words(h[here]).log_softmax(-1), words[here])
        return loss


def batch(rows: list[int]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    n = sum(rows)
    x = torch.randn(n, 4, generator=generator)
    words, following = torch.randint(5, (n,), generator=generator), torch.randint(2, (n,), generator=generator)
    words[: rows[0]] = IGNORED
    words[-1] = IGNORED
    return x, words, following


def branches_rank(rank: int, n: int, form: str, rows: list[int]) -> list[dict[str, Tensor | None]]:
    torch.manual_seed(0)
    model = wh.parallelize(Branches(form), timeout=20.0)
    whole = batch(rows)
    found = []
    for step in range(2):
        model.zero_grad()
        here = [t.split(rows)[rank] if step == 0 else t.flip(0).split(rows)[rank] for t in whole]
        model(*here).backward()
        found.append(gradients(model))
    return found


def apart_rank(rank: int, n: int, form: str, rows: list[int]) -> list[dict[str, Tensor | None]]:
    """As on a device whose numbers the host does not read."""
    with mock.patch.object(LossCounts, "_apart", True):
        return branches_rank(rank, n, form, rows)


def test_counts_in_a_message_of_their_own() -> None:
    for form, rows in (("first", [3, 2, 2]), ("many", [2, 5, 9])):
        both = zip(world(3, apart_rank, form, rows), world(3, branches_rank, form, rows), strict=True)
        for apart, together in both:
            for mine, expected in zip(apart, together, strict=True):
                assert relative_error({k: v for k, v in mine.items() if v is not None}, clean(mine, expected)) < BAR


def in_one_process(form: str, rows: list[int]) -> list[dict[str, Tensor | None]]:
    torch.manual_seed(0)
    model, found = Branches(form), []
    for step in range(2):
        model.zero_grad()
        model(*(t if step == 0 else t.flip(0) for t in batch(rows))).backward()
        found.append(gradients(model))
    return found


FORMS = ["first", "last", "helper", "in_place", "bytes", "return"]
if hasattr(F, "linear_cross_entropy"):  # since torch 2.13
    FORMS.append("chunks")


@pytest.mark.matrix(keep=6)
@pytest.mark.parametrize("rows", [[3, 2, 2], [0, 4, 1], [1, 0, 3, 2]], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_loss_that_some_ranks_leave_out(form: str, rows: list[int]) -> None:
    whole = in_one_process(form, rows)
    for found in world(len(rows), branches_rank, form, rows):
        for mine, expected in zip(found, whole, strict=True):
            assert relative_error({k: v for k, v in mine.items() if v is not None}, clean(mine, expected)) < BAR


def clean(mine: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    for name, value in expected.items():
        assert (mine[name] is None) == (value is None) or not value.any(), name
    return {name: value for name, value in expected.items() if value is not None and mine[name] is not None}


@pytest.mark.parametrize("per_node", [4, 2])
def test_more_losses_than_the_first_message_holds(per_node: int) -> None:
    """Ranks call 0 to 11 losses; number k of them is one loss over the ranks that have so many."""
    rows = [2, 5, 11, 7]
    for found in world(4, branches_rank, "many", rows, local_world_size=per_node):
        for step, mine in enumerate(found):
            torch.manual_seed(0)
            model = Branches("many")
            x, words, _ = (t if step == 0 else t.flip(0) for t in batch(rows))
            parts = list(zip(x.split(rows), words.split(rows), strict=True))
            called = [int((w != IGNORED).sum()) for _, w in parts]
            total = torch.zeros(())
            for k in range(12):  # the k-th loss of each rank, a mean over the ranks that have it
                losses = []
                for (a, w), most in zip(parts, called, strict=True):
                    if k < most:
                        row = int((w != IGNORED).nonzero()[k])
                        losses.append(F.cross_entropy(model.words(model.body(a[row]).tanh()), w[row]))
                total = total + (torch.stack(losses).mean() if losses else 0.0)
            total.backward()
            expected = gradients(model)
            assert (
                relative_error({k: v for k, v in mine.items() if expected[k] is not None}, clean(mine, expected)) < BAR
            )


class EitherOr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if (y == 0).any():
            return F.cross_entropy(self.head(x), y, weight=torch.ones(5))
        return F.cross_entropy(self.head(x), y)


def either_or_rank(rank: int, n: int) -> None:
    model = wh.parallelize(EitherOr(), timeout=20.0)
    model(torch.ones(2, 4), torch.tensor([rank, 1])).backward()


def test_different_losses_are_refused_on_every_rank() -> None:
    texts = {str(o.error) for o in outcomes(3, either_or_rank) if isinstance(o.error, LossError)}
    assert len(texts) == 1
    line = EitherOr.forward.__code__.co_firstlineno + 2
    assert f"rank 0 in the lines [{line}], rank 1 in the lines [{line + 1}]" in texts.pop()


class OneWayOrTheOther(EitherOr):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if (y == 0).any():
            return _mean_loss(self.head(x), y)
        return _mean_loss(self.head(x[:1]), y[:1])


def one_way_rank(rank: int, n: int) -> None:
    model = wh.parallelize(OneWayOrTheOther(), timeout=20.0)
    model(torch.ones(2, 4), torch.tensor([rank, 1])).backward()


def test_losses_of_one_line_that_is_called_from_others_are_different() -> None:
    texts = {str(o.error) for o in outcomes(2, one_way_rank) if isinstance(o.error, LossError)}
    assert len(texts) == 1 and "called from other lines" in texts.pop()


class Learner(nn.Module):
    """Takes a step of its own before its loss, as models that learn to learn do."""

    def __init__(self, second: bool) -> None:
        super().__init__()
        self.second, self.head = second, nn.Linear(4, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        inner = F.cross_entropy(self.head(x), y)
        (grad,) = torch.autograd.grad(inner, self.head.weight, create_graph=self.second)
        return F.cross_entropy(F.linear(x, self.head.weight - grad, self.head.bias), y)


def learner_rank(rank: int, n: int, second: bool) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model = wh.parallelize(Learner(second))
    x, y = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank)), torch.tensor([1, IGNORED if rank else 2])
    model(x, y).backward()
    return gradients(model)


@pytest.mark.parametrize("second", [False, True])
def test_a_gradient_taken_inside_the_forward_is_the_ranks_own(second: bool) -> None:
    torch.manual_seed(0)
    alone = Learner(second)
    for rank, labels in enumerate((2, 1)):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
        loss = alone(x, torch.tensor([1, IGNORED if rank else 2]))
        (loss * labels / 3).backward()
    expected = gradients(alone)
    for found in world(2, learner_rank, second):
        assert relative_error(found, expected) < BAR


class Impatient(EitherOr):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        loss.backward()
        return loss.detach()


def impatient_rank(rank: int, n: int) -> None:
    wh.parallelize(Impatient())(torch.ones(2, 4), torch.tensor([1, 2]))


def test_backward_inside_the_forward_is_refused() -> None:
    with pytest.raises(LossError, match=r"backward\(\) inside the model's own forward"):
        world(2, impatient_rank)


def second_derivative_rank(rank: int, n: int) -> None:
    model = wh.parallelize(EitherOr())
    loss = model(torch.ones(2, 4), torch.tensor([1, 2]))
    torch.autograd.grad(loss, model.head.weight, create_graph=True)


def test_a_second_derivative_of_a_loss_inside_says_what_to_do() -> None:
    with pytest.raises(LossError, match=r"a second derivative \(create_graph=True\) of a mean over labels"):
        world(2, second_derivative_rank)


def test_lines_match_in_order_of_calls() -> None:
    _check_lines([[7, 8, 8, 9], [], [8, 8], [7, 9]])
    for wrong in ([8, 7], [8, 8, 8], [7, 6]):
        with pytest.raises(LossError, match=r"rank 0 in the lines .* rank 1 in the lines"):
            _check_lines([[7, 8, 8, 9], wrong])
    assert _same_loss([[7, 8, 8], [8], [7, 8]], 1) == [[(0, 1), (1, 0), (2, 1)]]


def two_models_rank(rank: int, n: int) -> None:
    """Rank 1 goes on after an error in one model's forward, with the other model."""
    judge, plain = wh.parallelize(EitherOr(), timeout=3.0), wh.parallelize(nn.Linear(4, 5), timeout=3.0)
    x = torch.ones(2, 4)
    for step in range(2):
        with contextlib.suppress(IndexError):
            judge(x, torch.tensor([1, 9 if rank and step else 2])).backward()
        plain(x).mean().backward()


def test_models_with_and_without_losses_never_read_each_others_counts() -> None:
    for ended in outcomes(2, two_models_rank, timeout=40):
        assert isinstance(ended.error, CommError), (ended.error, ended.output)
