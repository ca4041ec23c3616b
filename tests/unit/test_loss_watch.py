"""Which losses are caught while a model's forward runs, however they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale_torch.comm.loss_watch import Loss, watch

X = torch.tensor([[0.5, -1.0, 2.0], [0.1, 0.2, 0.3]], requires_grad=True)
Y = torch.tensor([2, 0])
WEIGHT = torch.tensor([1.0, 2.0, 3.0])


def _seen(call: Callable[[], Tensor]) -> tuple[Tensor, list[Loss]]:
    found: list[Loss] = []

    def note(out: Tensor, loss: Loss) -> Tensor:
        found.append(loss)
        return out * 2

    with watch(note):
        return call(), found


CAUGHT: dict[str, Callable[[], Tensor]] = {
    "cross_entropy": lambda: F.cross_entropy(X, Y),
    "by keyword": lambda: F.cross_entropy(input=X, target=Y, reduction="mean"),
    "module": lambda: nn.CrossEntropyLoss()(X, Y),
    "smoothed": lambda: F.cross_entropy(X, Y, label_smoothing=0.1),
    "nll_loss": lambda: F.nll_loss(X.log_softmax(1), Y),
    "nll module": lambda: nn.NLLLoss()(X.log_softmax(1), Y),
    "pixels": lambda: F.nll_loss(X[:, :, None, None], Y[:, None, None]),
}
if hasattr(F, "linear_cross_entropy"):  # since torch 2.13
    CAUGHT["linear"] = lambda: F.linear_cross_entropy(X, torch.eye(3), Y)
    CAUGHT["linear in chunks"] = lambda: F.linear_cross_entropy(X, torch.eye(3), Y, options=_in_chunks())
    CAUGHT["linear of one row"] = lambda: F.linear_cross_entropy(X[0], torch.eye(3), Y[0], options=_in_chunks())


def _in_chunks() -> Any:
    return nn.LinearCrossEntropyOptions()


@pytest.mark.parametrize("name", CAUGHT)
def test_means_over_labels_are_caught(name: str) -> None:
    value = CAUGHT[name]()
    answer, found = _seen(CAUGHT[name])
    assert len(found) == 1 and found[0].target.flatten().tolist() in ([2, 0], [2])
    torch.testing.assert_close(answer, value * 2)


def test_what_decides_the_divisor_is_handed_on() -> None:
    _, (loss,) = _seen(lambda: F.cross_entropy(X, Y, WEIGHT, ignore_index=2))
    assert loss.weight is WEIGHT and loss.ignore_index == 2 and loss.target is Y


PASSED: dict[str, Callable[[], Tensor]] = {
    "sum": lambda: F.cross_entropy(X, Y, reduction="sum"),
    "none": lambda: F.cross_entropy(X, Y, reduction="none"),
    "probabilities": lambda: F.cross_entropy(X, X.detach().softmax(1)),
    "no gradient": lambda: F.cross_entropy(X.detach(), Y),
    "another loss": lambda: F.mse_loss(X, X.detach() + 1),
}


@pytest.mark.parametrize("name", PASSED)
def test_other_losses_pass(name: str) -> None:
    answer, found = _seen(PASSED[name])
    assert not found
    torch.testing.assert_close(answer, PASSED[name]())


def test_nothing_is_caught_outside_and_watches_nest() -> None:
    inner, (loss,) = _seen(lambda: _seen(CAUGHT["cross_entropy"])[0] + CAUGHT["nll_loss"]())
    value = CAUGHT["cross_entropy"]()
    torch.testing.assert_close(inner, value * 4)
    assert isinstance(loss, Loss)


def test_a_compiled_loss_is_refused() -> None:
    @torch.compile(backend="eager")
    def compiled(x: Tensor) -> Tensor:
        return F.cross_entropy(x, Y)

    with pytest.raises(Exception, match="a mean over labels inside a compiled part"):
        _seen(lambda: compiled(X))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_torchs_losses_are_as_before_outside() -> None:
    before = torch._C._nn.cross_entropy_loss
    _seen(lambda: _seen(CAUGHT["cross_entropy"])[0])
    assert torch._C._nn.cross_entropy_loss is before
    torch.jit.script(nn.CrossEntropyLoss())
