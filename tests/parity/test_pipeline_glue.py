"""Code between stages: it gives what one process gives, or says why a recording cannot."""

from __future__ import annotations

import collections
import copy
import enum
import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.pipeline_cases import WIDTH, Chain
from tests.parity.split_case import gradients_of
from tests.world import world

BAR = 1e-5
ROWS = [5, 4]


class _Annealed(Chain):
    """A number, a module's option and a list of tensors that the loop changes."""

    def __init__(self) -> None:
        super().__init__()
        self.beta, self.act, self.shifts = 0.0, nn.LeakyReLU(0.5), [torch.ones(WIDTH)]

    def before(self, step: int) -> None:
        self.beta, self.act.negative_slope, self.shifts[0] = 0.5 * step, 0.1 * step, torch.ones(WIDTH) * step

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.b(self.act(self.a(x) + self.shifts[0]))
        return F.cross_entropy(self.d(self.c(h)), y) + self.beta * h.square().mean()


def _halved(module: nn.Module, args: Any, kwargs: dict[str, Tensor]) -> Any:
    return args, {**kwargs, "x": kwargs["x"] * 0.5}


class _Hooked(Chain):
    """Hooks of the model itself run once, around the pipeline; one of a container in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(self.b, self.c)
        del self.b, self.c
        self.register_forward_pre_hook(_halved, with_kwargs=True)
        self.register_forward_hook(lambda module, args, out: out * 0.5)
        self.inner.register_forward_hook(lambda module, args, out: out * 0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.d(self.inner(self.a(x))), y)


class _Before(Chain):
    """A value is read by a later stage as it was before it is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        i = self.b(h)
        h *= 2
        return F.cross_entropy(self.d(self.c(i + h)), y)


class _InPlaceModules(Chain):
    """Modules that write into the model's input, and into what a later stage read before."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
        self.b = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
        self.c = nn.Sequential(nn.Softplus(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale = x.mean(1, keepdim=True)
        h = self.a(x)
        early = self.c(h.detach())
        return F.cross_entropy(self.d(self.b(h) + early * scale), y)


class _Ordered(Chain):
    """Dicts of other kinds between stages and as output; whole numbers that count samples."""

    class _One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
            return collections.OrderedDict(h=self.layer(given["h"]))

    def __init__(self) -> None:
        super().__init__()
        self.b, self.c = self._One(), self._One()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        h = self.c(self.b(collections.OrderedDict(h=self.a(x))))["h"]
        z = self.d(h)
        return collections.OrderedDict(loss=F.cross_entropy(z, y), num=len(x), entries=2 * y.numel(), logits=z)


class _Tracked(Chain):
    """A module whose output nobody reads keeps statistics; sums do not depend on the order."""

    class _Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

        def forward(self, h: Tensor) -> None:
            self.total += h.sum()

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Sequential(self.b, self._Seen())
        self.seen = self.b[1]
        self.b = self.b[0]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        self.seen(h.detach())
        return F.cross_entropy(self.d(self.c(self.b(h))), y)


class _Own(Chain):
    """Parameters of the model itself, in glue of several stages, in a penalty, and unused."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.c(self.b(self.a(x) * self.scale))
        return F.cross_entropy(self.d(z * self.scale), y) + self.scale.square().sum()


class _Short(Chain):
    """An input that is as long as a micro-batch and has no samples."""

    def forward(self, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(self.features(x), y % 2, weight=torch.cat([w, w, w[:1]])) + w.sum() * self.a.bias.sum()


class _Weighted(nn.Module):
    """The old weight_norm, called before: its weight is a part of a graph, which torch does not copy."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c, self.d = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.b = nn.BatchNorm1d(WIDTH, momentum=None)
        self.kept = [self.a(torch.zeros(1, WIDTH))]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.d(self.c(self.b(self.a(x)).detach() + self.a(x))), y)


RIGHT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "annealed": (_Annealed, {}),
    "hooked": (_Hooked, {}),
    "before": (_Before, {}),
    "in place": (_InPlaceModules, {}),
    "ordered": (_Ordered, {}),
    "tracked": (_Tracked, {}),
    "own": (_Own, {}),
    "short": (_Short, {"w": torch.tensor([1.0, 3.0])}),
}
_STAGES = {"hooked": ("a", "inner.0", "inner.1", "d"), "tracked": ("a|seen", "b", "c", "d")}


def _parallel(model: Any, stages: tuple[str, ...], **options: Any) -> Any:
    scopes = {name: wh.stage() for name in stages}
    return wh.parallelize(wh.annotate(model, scopes, inside=(wh.replica(), wh.pipeline(**options))))  # type: ignore[call-overload]


def _compared(rank: int, n: int, names: list[str]) -> dict[str, list[float]]:
    """Errors of the loss and of gradients in three steps, then of the state and of evaluation."""
    found = {}
    for name in names:
        make, more = RIGHT[name]
        torch.manual_seed(0)
        alone: Any = make()
        model = _parallel(copy.deepcopy(alone), _STAGES.get(name, ("a", "b", "c", "d")), num_micro_batches=3)
        index, count = wh.data_rank(model)
        counts = [6, 6][:count] if more else ROWS[:count]
        here = slice(sum(counts[:index]), sum(counts[: index + 1]))
        torch.manual_seed(1)
        errors = []
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
        for step in range(3):
            x, y = torch.randn(sum(counts), WIDTH), torch.randint(5, (sum(counts),))
            values = []
            for m, rows in ((model, here), (alone, slice(None))):
                if hasattr(m, "before"):
                    m.before(step)
                m.zero_grad()
                out = m(x=x[rows].clone(), y=y[rows].clone(), **more)
                if isinstance(out, dict):
                    assert out["num"] == len(y[rows]) and out["entries"] == 2 * out["num"], dict(out)
                    assert type(out) is collections.OrderedDict
                    out = out["loss"]
                out.backward()
                values.append(out.detach())
            errors += [
                float((values[0] - values[1]).abs()),
                relative_error(gradients_of(model), gradients_of(alone)),
            ]
            for optimizer in optimizers:
                optimizer.step()
        if count == 1:  # what a rank saw of others' samples is its own affair
            errors.append(relative_error(wh.full_state_dict(model), alone.state_dict()))
        found[name] = errors
    return found


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.matrix(keep=1)
def test_glue_is_that_of_one_process(n: int) -> None:
    for found in world(n, _compared, list(RIGHT)):
        assert max(max(errors) for errors in found.values()) < BAR, found


class _Counts(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x, y) / self.calls


class _Remembers(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return F.cross_entropy(self.d(self.c(self.b(h))), y)


class _Keeps(_Remembers):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        self.kept.append(h)
        return F.cross_entropy(self.d(self.c(self.b(h))), y)


class _Alias(Chain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x.to(torch.float32)
        h += 1
        return super().forward(h, y)


class _GradientHook(Chain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        h.register_hook(lambda grad: grad.clamp(-1, 1))
        return F.cross_entropy(self.d(self.c(self.b(h))), y)


class _Data(Chain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        h.data = h.data * 2
        return F.cross_entropy(self.d(self.c(self.b(h))), y)


class _Chance(Chain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) * (2.0 if random.random() < 2 else 1.0)


class _Deque(Chain):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        loss = super().forward(x, y)
        return loss, collections.deque([loss.detach()])


class _Borrows(Chain):
    class _Head(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weights, self.layer = [weight], nn.Linear(WIDTH, 5)

        def forward(self, h: Tensor) -> Tensor:
            out: Tensor = self.layer(F.linear(h, self.weights[0]))
            return out

    def __init__(self) -> None:
        super().__init__()
        self.d = self._Head(self.a.weight)  # type: ignore[assignment]


class _Pairs(Chain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x).view(len(x) // 2, 2, WIDTH).flatten(0, 1)
        return F.cross_entropy(self.d(self.c(self.b(h))), y)


class _BackwardHook(_Hooked):
    def __init__(self) -> None:
        super().__init__()
        self.inner.register_full_backward_hook(lambda module, grads, given: None)


class _Marks(Chain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        self.b.seen = True
        return F.cross_entropy(self.d(self.c(self.b(h))), y)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "counts": (_Counts, "the forward changes the attribute 'calls' of the model between stages"),
    "remembers": (_Remembers, "the forward changes the attribute 'mean' of the model between stages"),
    "keeps": (_Keeps, "the forward changes the attribute 'kept' of the model between stages"),
    "alias": (_Alias, "add_() changes an input of the model in place between stages"),
    "gradient hook": (_GradientHook, "register_hook() is called between stages, where it would be lost"),
    "data": (_Data, "a tensor's .data is set between stages, where it would be lost"),
    "marks": (_Marks, "the forward changes the attribute 'seen' of module 'b' between stages"),
    "chance": (_Chance, "the forward draws random numbers of Python's or numpy's between stages"),
    "deque": (_Deque, "a deque that holds tensors"),
    "borrows": (_Borrows, "module 'd' uses the parameter 'a.weight', which is none of its own"),
    "pairs": (_Pairs, "the forward runs on 2 samples and fails on 1009: RuntimeError: shape '[504, 2, 8]'"),
    "backward hook": (_BackwardHook, "module 'inner' has a backward hook, and is taken apart"),
}


def _refused(rank: int, n: int) -> dict[str, str]:
    said = {}
    for name, (make, _) in REFUSED.items():
        stages = ("a", "inner.0", "inner.1", "d") if name == "backward hook" else ("a", "b", "c", "d")
        model = _parallel(make(), stages, num_micro_batches=2)
        with pytest.raises(wh.TraceError) as caught:
            model(x=torch.randn(4, WIDTH), y=torch.zeros(4, dtype=torch.int64))
        said[name] = str(caught.value)
    return said


def test_what_a_recording_would_lose_is_refused() -> None:
    for said in world(2, _refused):
        for name, (_, text) in REFUSED.items():
            assert text in said[name], (name, said[name])
            assert "fix:" in said[name]


class _Flat(Chain):
    """Outputs without a plain row for each sample: flattened, transposed, of one entry, of the whole batch."""

    class _Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(h), h.detach().mean((0, 1))

    def __init__(self) -> None:
        super().__init__()
        self.c, self.scale = self._Mean(), nn.Parameter(torch.ones(4))  # type: ignore[assignment]

    def forward(self, x: Tensor, what: str) -> Any:
        h, mean = self.c(self.b(self.a(x)))
        z = self.d(h)
        outputs = {"flat": z.flatten(0, 1), "turned": z.transpose(0, 1), "mean": (z, mean), "one": z.mean()[None]}
        return {**outputs, "own": (z, self.scale * 2)}[what]


def _given(rank: int, n: int) -> dict[str, float]:
    torch.manual_seed(0)
    alone = _Flat()
    model = _parallel(copy.deepcopy(alone), ("a", "b", "c", "d"), num_micro_batches=3, num_ranks=n)
    found = {}
    for what in ("own", "flat", "turned", "mean", "one"):
        x = torch.randn(4, 3, WIDTH)
        grads = []
        for m in (model, alone):
            m.zero_grad()
            out = m(x, what)
            parts = out if isinstance(out, tuple) else (out,)
            sum(part.square().sum() for part in parts if part.requires_grad).backward()
            grads.append((dict(enumerate(part.detach() for part in parts)), gradients_of(m)))
        found[what] = max(relative_error(ours, theirs) for ours, theirs in zip(*grads, strict=True))
    return found


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.matrix(keep=1)
def test_outputs_of_any_form_are_those_of_the_whole_batch(n: int) -> None:
    for found in world(n, _given):
        assert max(found.values()) < BAR, found


class _Slots:
    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value


class _Times(_Slots):
    """A function with a state."""

    def __call__(self, h: Tensor) -> Tensor:
        return h * self.value


class _Mode(enum.Enum):
    ONE = 1
    TWO = 2


class _Reads(Chain):
    """Glue that reads settings of all kinds, each in its turn."""

    shared = 1.0

    def __init__(self, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        inner = SimpleNamespace(value=1.0)
        self.config = SimpleNamespace(value=1.0, inner=SimpleNamespace(inner=SimpleNamespace(inner=inner)))
        self.slots, self.times, self.mode = _Slots(1.0), _Times(1.0), _Mode.ONE
        self.leaky: Any = functools.partial(F.leaky_relu, negative_slope=0.5)
        self.array, self.numbers, self.last = numpy.ones(3000), {1, 2}, collections.deque([1.0])
        self.gone, self.a.gain, self.read = 3.0, 1.0, read

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.read(self, self.a(x))
        return F.cross_entropy(self.d(self.c(self.b(h))), y)


READ: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], object]]] = {
    "a configuration": (lambda m, h: h * m.config.value, lambda m: setattr(m.config, "value", 2.0)),
    "deep in it": (
        lambda m, h: h * m.config.inner.inner.inner.value,
        lambda m: setattr(m.config.inner.inner.inner, "value", 2.0),
    ),
    "slots": (lambda m, h: h * m.slots.value, lambda m: setattr(m.slots, "value", 2.0)),
    "a callable": (lambda m, h: m.times(h), lambda m: setattr(m.times, "value", 2.0)),
    "another callable": (lambda m, h: m.times(h), lambda m: setattr(m, "times", _Times(2.0))),
    "a method": (lambda m, h: m.bound(h), lambda m: setattr(m, "bound", _Times(2.0).__call__)),
    "a partial": (
        lambda m, h: m.leaky(h),
        lambda m: setattr(m, "leaky", functools.partial(F.leaky_relu, negative_slope=0.1)),
    ),
    "an enum": (lambda m, h: h * m.mode.value, lambda m: setattr(m, "mode", _Mode.TWO)),
    "an array": (lambda m, h: h * float(m.array[1500]), lambda m: m.array.__setitem__(1500, 2.0)),
    "a set": (lambda m, h: h * len(m.numbers), lambda m: m.numbers.add(3)),
    "a deque": (lambda m, h: h * m.last[0], lambda m: m.last.appendleft(2.0)),
    "of a stage's module": (lambda m, h: h * m.a.gain, lambda m: setattr(m.a, "gain", 2.0)),
    "a class's": (lambda m, h: h * m.shared, lambda m: setattr(_Reads, "shared", _Reads.shared + 1)),
    "none before": (lambda m, h: h * getattr(m, "new", 1.0), lambda m: setattr(m, "new", 2.0)),
    "none after": (lambda m, h: h * getattr(m, "gone", 1.0), lambda m: delattr(m, "gone")),
}


def _read(rank: int, n: int) -> dict[str, float]:
    """The largest error of a loss after each setting was changed."""
    found = {}
    for name, (read, change) in READ.items():
        torch.manual_seed(0)
        alone = _Reads(read)
        alone.bound = _Times(1.0).__call__
        model = _parallel(copy.deepcopy(alone), ("a", "b", "c", "d"), num_micro_batches=2)
        batch = torch.randn(4, WIDTH), torch.zeros(4, dtype=torch.int64)
        found[name] = 0.0
        for step in range(3):
            difference = model(*batch) - alone(*batch)
            found[name] = max(found[name], float(difference.detach().abs()))
            if step == 0:
                for changed in (model, alone)[: 1 if name == "a class's" else 2]:
                    change(changed)
    assert _Mode.ONE.value == 1 and _Mode.TWO.value == 2
    return found


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.matrix(keep=1)
def test_settings_that_glue_reads_may_change(n: int) -> None:
    for found in world(n, _read):
        assert max(found.values()) < BAR, found
