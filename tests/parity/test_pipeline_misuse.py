"""What a loop does past a pipelined model is right, or every rank says why not; nothing is silently another result."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.pipeline_cases import WIDTH, Chain
from tests.parity.split_case import gradients_of
from tests.world import outcomes, world


def _parallel(model: Any, stages: tuple[str, ...] = ("a", "b", "c", "d"), **options: Any) -> Any:
    scopes = {name: wh.stage() for name in stages}
    wh.annotate(model, scopes, inside=wh.pipeline(**{"num_micro_batches": 2, **options}))  # type: ignore[call-overload]
    return wh.parallelize(model, timeout=8.0)


def _features(rows: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH), torch.randint(5, (rows,))


def _clipped(rank: int, n: int) -> None:
    torch.manual_seed(0)
    model = _parallel(Chain())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        torch.manual_seed(1)
        model(*_features()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


def test_torchs_clip_is_noticed() -> None:
    with pytest.raises(
        wh.CommError, match=r"gradients of a pipeline's stages were multiplied by \S+ on rank \d and by \S+ on rank \d"
    ):
        world(2, _clipped)


def _equally(rank: int, n: int) -> None:
    """Stages' gradients times one number, and wh.clip_grad_norm_, are no reason to complain."""
    model = _parallel(Chain())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        torch.manual_seed(1)
        model(*_features()).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= 3
        wh.clip_grad_norm_(model, 0.01)
        optimizer.step()


def test_gradients_may_be_scaled_alike() -> None:
    world(2, _equally)


class _Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.on = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: Tensor) -> Tensor:
        if self.on:
            raise ValueError("a bad sample")
        out: Tensor = self.layer(x)
        return out


class _Breakable(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.c = _Breaks()  # type: ignore[assignment]


def _goes_on(rank: int, n: int) -> str:
    """Every rank catches what ended its step, and calls the model again."""
    model = _parallel(_Breakable())
    x, y = _features()
    model(x, y).backward()
    model.c.on = True
    with pytest.raises(ValueError, match="a bad sample") if rank == 0 else pytest.raises(wh.CommError):
        model(x, y)
    model.c.on = False
    with pytest.raises(wh.CommError) as caught:
        model(x, y)
    return str(caught.value)


def test_after_an_error_inside_a_step_the_ranks_do_not_go_on() -> None:
    first = outcomes(2, _goes_on, timeout=60.0)[0]
    assert "an earlier step of this pipeline ended in the middle: ValueError: a bad sample" in str(first.value), first


def _penalty(rank: int, n: int) -> None:
    model = _parallel(Chain())
    loss = model(*_features())
    (loss + 0.1 * sum(p.square().sum() for p in model.parameters())).backward()


def test_a_penalty_on_what_other_ranks_hold_says_so() -> None:
    with pytest.raises(wh.LayoutError, match=r"a number was asked for of '\S+', which belongs to a stage of rank"):
        world(2, _penalty)


class _Listed(nn.Linear):
    """Runs with its weight out of a list."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kept = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.kept[0], self.bias)


def _listed(rank: int, n: int) -> None:
    model = Chain()
    model.b = _Listed()
    _parallel(model)
    model(*_features()).backward()


def test_a_parameter_out_of_a_list_is_noticed() -> None:
    with pytest.raises(wh.LossError, match=r"'b\.weight' was used past its module's attribute"):
        world(2, _listed)


class _Kept(Chain):
    """A module of a stage keeps a tensor that the loop adds to the loss."""

    class _Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.penalty = nn.Linear(WIDTH, WIDTH), torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.penalty = self.layer.weight.square().mean()
            out: Tensor = self.layer(x)
            return out

    def __init__(self) -> None:
        super().__init__()
        self.c = self._Layer()  # type: ignore[assignment]


def _kept(rank: int, n: int) -> None:
    model = _parallel(_Kept())
    for _ in range(2):
        (model(*_features()) + model.c.penalty).backward()


def test_a_loss_of_what_a_stage_kept_is_not_lost_silently() -> None:
    with pytest.raises(wh.LossError, match=r"a backward past the model's output came to 'c\.layer\.weight'"):
        world(1, _kept)


class _Words(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(11, WIDTH)  # type: ignore[assignment]


def _converted(rank: int, n: int) -> float:
    """Inputs of the same form before and after: what goes from stage to stage has another dtype."""
    torch.manual_seed(0)
    alone: Any = _Words()
    model = _parallel(copy.deepcopy(alone))
    x, y = torch.randint(11, (4,)), torch.randint(5, (4,))
    model(x, y).backward()
    for m in (model, alone):
        m.zero_grad()
        m.double()
        m(x, y).backward()
    return relative_error(gradients_of(model), gradients_of(alone))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.matrix(keep=1)
def test_a_model_that_is_converted(n: int) -> None:
    assert max(world(n, _converted)) < 1e-12


def _replaced(rank: int, n: int) -> None:
    model = Chain()
    model.act = nn.ReLU()
    _parallel(model)
    x, y = _features()
    model(x, y).backward()
    model.act = nn.Tanh()
    model(x, y)


def test_a_module_that_is_replaced_is_refused() -> None:
    with pytest.raises(wh.PlanError, match=r"module 'act' was replaced after wh\.parallelize"):
        world(2, _replaced)


class _State(nn.Module):
    """Gives what its own state says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(WIDTH, WIDTH), ""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out.double() if self.change == "dtype" else out[:, :-1] if self.change == "shape" else out


def _changed(rank: int, n: int, change: str) -> None:
    model = Chain()
    model.b = _State()  # type: ignore[assignment]
    _parallel(model)
    x, y = _features()
    model(x, y).backward()
    model.b.change = change  # type: ignore[assignment]
    model(x, y)


@pytest.mark.parametrize("change", ["dtype", "shape"])
@pytest.mark.matrix(keep=1)
def test_a_stage_that_gives_something_else_later_says_so(change: str) -> None:
    ended = outcomes(2, _changed, change, timeout=60.0)
    assert "stage 1 gave a tensor of (2, " in str(ended[1].error) and "and (2, 8) torch.float32 when" in str(
        ended[1].error
    )
    assert isinstance(ended[0].error, wh.CommError)


class _Normalized(nn.Module):
    """One BatchNorm in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.c(self.b(self.a(self.b(x)))), y)


def _shared_statistics(rank: int, n: int) -> None:
    _parallel(_Normalized(), ("b", "a", "c"))(*_features())


def test_a_buffer_that_two_ranks_would_change_is_refused() -> None:
    with pytest.raises(wh.LayoutError, match=r"the buffer 'b\.\w+' is changed by its module in the forward, and used"):
        world(3, _shared_statistics)


def _factors(rank: int, n: int, by_place: bool) -> tuple[int, str]:
    """In which step, and how, ranks that multiply their loss by different numbers are told."""
    model = _parallel(Chain(), num_ranks=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    index, _ = wh.data_rank(model)
    step = 0
    try:
        for step in range(8):
            optimizer.zero_grad()
            factor = (rank != 0 if by_place else index) if step == 5 else 0.0
            (model(*_features()) * (0.5 + factor)).backward()
            optimizer.step()
    except wh.CommError as error:
        return step, str(error)
    return step, ""


@pytest.mark.parametrize(("n", "by_place"), [(4, False), (2, True)])
@pytest.mark.matrix(keep=1)
def test_losses_that_ranks_multiply_by_different_numbers_are_told(n: int, by_place: bool) -> None:
    for step, text in world(n, _factors, by_place):
        assert step == 6 and "multiplied by 0.5 on rank 0 and by 1.5 on rank" in text


class _ByRank(Chain):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.b(self.a(x))
        loss = F.cross_entropy(self.d(self.c(h)), y)
        return {"loss": loss, "mean": h.mean()} if os.environ["RANK"] == "1" else {"loss": loss}


def _by_rank(rank: int, n: int) -> None:
    _parallel(_ByRank())(*_features())


def test_ranks_that_record_different_forwards_say_so() -> None:
    with pytest.raises(wh.LayoutError, match=r"ranks \[0, 1\] are one pipeline, and recorded different forwards"):
        world(2, _by_rank)


class _Held:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class _Takes(Chain):
    def forward(self, x: Any, y: Tensor, more: Any = None) -> Tensor:
        return F.cross_entropy(self.features(x), y) * (more.x if more is not None else 1.0)


def _inputs(rank: int, n: int) -> tuple[list[str], list[float]]:
    """What is said of inputs that cannot be cut, and losses with an object whose number changes."""
    torch.manual_seed(0)
    model = _parallel(_Takes())
    x, y = _features()
    said = []
    for more in (_Held(torch.ones(())), x.numpy()):
        with pytest.raises(wh.LayoutError) as caught:
            model(x, y, more)
        said.append(str(caught.value))
    return said, [float(model(x, y, _Held(number)).detach()) for number in (1.0, 2.0, 3.0)]


def test_inputs_that_cannot_be_cut_say_so() -> None:
    for (held, array), (one, two, three) in world(2, _inputs):
        assert "called with a _Held that holds tensors" in held and "an array of numpy's" in array
        assert two == pytest.approx(2 * one) and three == pytest.approx(3 * one)


class _Nothing(Chain):
    def forward(self, scale: Tensor) -> Tensor:  # type: ignore[override]
        return self.features(torch.ones(3, WIDTH)).mean() * scale


def _nothing(rank: int, n: int) -> None:
    _parallel(_Nothing())(torch.ones(()))


def test_a_call_without_samples_says_so() -> None:
    with pytest.raises(wh.LayoutError, match="called without a tensor that has samples: there is"):
        world(1, _nothing)


def _inferred(rank: int, n: int) -> float:
    torch.manual_seed(0)
    alone = Chain()
    model = _parallel(copy.deepcopy(alone)).eval()
    x, y = _features(5)
    with torch.inference_mode():
        error = float((model(x, y) - alone.eval()(x, y)).abs())
    model.train()
    alone.train()
    model(x, y).backward()
    alone(x, y).backward()
    return max(error, relative_error(gradients_of(model), gradients_of(alone)))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.matrix(keep=1)
def test_inference_mode(n: int) -> None:
    assert max(world(n, _inferred)) < 1e-5


def _many(rank: int, n: int) -> int:
    model = _parallel(_Takes(), num_micro_batches=1)
    x, y = _features()
    for number in range(70):
        model(x, y, _Held(float(number)))
    return len(model._whale_runtime.programs)


def test_programs_do_not_pile_up() -> None:
    assert world(1, _many) == [64]


def _whole_model(rank: int, n: int) -> float:
    torch.manual_seed(0)
    alone = Chain()
    model: Any = copy.deepcopy(alone)
    wh.annotate(model, {"": wh.stage()}, inside=wh.pipeline(num_micro_batches=2))
    wh.parallelize(model)
    x, y = _features()
    model(x, y).backward()
    alone(x, y).backward()
    with torch.no_grad():
        error = float((model.eval()(x, y) - alone.eval()(x, y)).abs())
    return max(error, relative_error(gradients_of(model), gradients_of(alone)))


def test_a_whole_model_may_be_one_stage() -> None:
    assert max(world(1, _whole_model)) < 1e-6


class _Outside(Chain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.features(x)


def _differentiated_twice(rank: int, n: int, make: Any) -> None:
    """A penalty on one loss's gradients, added to another loss."""
    model = _parallel(make())
    first, second = model(*_features()).mean(), model(*_features()).mean()
    own = [p for p in model.parameters() if p._whale_place.held]
    slopes = torch.autograd.grad(first, own, create_graph=True)
    (second + sum(slope.square().sum() for slope in slopes)).backward()


@pytest.mark.parametrize("make", [Chain, _Outside])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.matrix(keep=0)
def test_a_penalty_on_gradients_is_not_lost_silently(n: int, make: Any) -> None:
    with pytest.raises(wh.LossError, match="with create_graph=True"):
        world(n, _differentiated_twice, make)
