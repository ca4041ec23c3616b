"""What a dense feed-forward computes: weights and activation, read from modules of the usual forms and tried out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whale_torch.errors import PlanError
from whale_torch.moe.experts import Experts, FeedForward, Stacked
from whale_torch.ops.activation import FUNCTIONS, activated

__all__ = ["Dense", "experts_of", "feed_forward_of", "name_of", "read_dense", "spread_feed_forward", "width_of"]

# names of members: (activated, multiplied or None, output)
_FORMS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("wi_0", "wi_1", "wo"),
    ("up_proj", None, "down_proj"),
    ("w1", None, "w2"),
    ("wi", None, "wo"),
    ("c_fc", None, "c_proj"),
    ("fc1", None, "fc2"),
    ("fc_in", None, "fc_out"),
    ("lin1", None, "lin2"),
    ("linear1", None, "linear2"),
    ("dense_h_to_4h", None, "dense_4h_to_h"),
)
_ACTIVATION_NAMES = ("act_fn", "act", "activation", "activation_fn")


@dataclass(frozen=True)
class Dense:
    """activation(x W1 + b1) [* (x W3 + b3)] W2 + b2, W1, W3 [hidden, dim], W2 [dim, hidden].

    frozen: names of weights that are not trained.
    """

    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    w3: Tensor | None
    b3: Tensor | None
    activation: str
    frozen: frozenset[str] = frozenset()

    @property
    def dim(self) -> int:
        return self.w1.shape[1]

    @property
    def hidden(self) -> int:
        return self.w1.shape[0]

    def slices(self, number: int) -> list[Dense]:
        """Cut along hidden into equal ones, views, of which each has the whole of b2."""
        parts: dict[str, tuple[Tensor | None, ...]] = {}
        for name in ("w1", "b1", "w2", "w3", "b3"):
            whole = getattr(self, name)
            cut = None if whole is None else whole.split(self.hidden // number, 1 if name == "w2" else 0)
            parts[name] = (None,) * number if cut is None else cut
        return [replace(self, **{name: of[index] for name, of in parts.items()}) for index in range(number)]  # type: ignore[arg-type]

    def __call__(self, x: Tensor) -> Tensor:
        """In evaluation."""
        hidden = activated(F.linear(x, self.w1, self.b1), self.activation)
        if self.w3 is not None:
            hidden = hidden * F.linear(x, self.w3, self.b3)
        return F.linear(hidden, self.w2, self.b2)


def read_dense(module: nn.Module) -> Dense | None:
    """A module's weights, as views; None where it has no known form, or gives something else than its form says."""
    layers = _layers(module)
    if layers is None or any(m.p for m in module.modules() if isinstance(m, nn.Dropout)):
        return None
    given: dict[str, Any] = {"1": layers.first, "2": layers.last, "3": layers.times}
    if sum(1 for _ in module.parameters()) != sum(1 for m in given.values() if m is not None for _ in m.parameters()):
        return None
    (w1, b1), (w2, b2), (w3, b3) = (_weights(layer) for layer in given.values())
    assert w1 is not None
    assert w2 is not None
    if w1.shape != w2.t().shape or (w3 is not None and w3.shape != w1.shape):
        return None
    kinds = {"w": "weight", "b": "bias"}
    frozen = frozenset(
        f"{letter}{number}"
        for number, layer in given.items()
        for letter, kind in kinds.items()
        if not getattr(getattr(layer, kind, None), "requires_grad", True)
    )
    named = None if layers.activation is None else name_of(layers.activation)
    names = list(FUNCTIONS) if layers.activation is None else [named] if named else []
    read = [Dense(w1, b1, w2, b2, w3, b3, name, frozen) for name in names]
    fitting = [dense for dense in read if _agrees(module, dense)]
    return fitting[0] if len(fitting) == 1 else None  # two activations that bfloat16 cannot tell apart are a guess


def feed_forward_of(read: Sequence[Dense]) -> FeedForward:
    """Experts with the weights of dense feed-forwards of one form and shape, copied."""
    first = read[0]
    with torch.device("meta"):
        experts = FeedForward(
            len(read),
            first.dim,
            first.hidden,
            activation=first.activation,
            gated=first.w3 is not None,
        )
    for name in ("w1", "b1", "w2", "b2", "w3", "b3"):
        each = [getattr(dense, name) for dense in read]
        stack = None if each[0] is None else nn.Parameter(torch.stack(each), requires_grad=name not in first.frozen)
        setattr(experts, name, stack)
    return experts


def experts_of(modules: Sequence[nn.Module]) -> Experts:
    """Experts that are these modules, with their weights copied. Raises PlanError as Stacked."""
    read = [read_dense(module) for module in modules]
    known = [dense for dense in read if dense is not None]
    forms = {(d.w1.shape, *(t is None for t in (d.b1, d.b2, d.w3, d.b3)), d.activation, d.frozen) for d in known}
    return feed_forward_of(known) if len(known) == len(read) and len(forms) == 1 else Stacked(modules)


def spread_feed_forward(module: nn.Module) -> tuple[str, str, nn.Sequential] | None:
    """Of a layer as BERT's, whose feed-forward lies in two members: (member to run it all, the second linear layer's
    name, the feed-forward); None for any other module."""
    first: Any = getattr(getattr(module, "intermediate", None), "dense", None)
    activation: Any = getattr(getattr(module, "intermediate", None), "intermediate_act_fn", None)
    last: Any = getattr(getattr(module, "output", None), "dense", None)
    if not (_is_linear(first) and _is_linear(last) and callable(activation)):
        return None
    between = activation if isinstance(activation, nn.Module) else _Function(activation)
    return "intermediate", "output.dense", nn.Sequential(first, between, last)


class _Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def width_of(module: nn.Module) -> int:
    """dim of a module from [n, dim] to [n, dim], as its first linear layer says. Raises PlanError for any other one."""
    first = next((m for m in module.modules() if _is_linear(m)), None)
    kind = type(module).__name__
    if first is None:
        raise PlanError(
            f"{kind} holds no linear layer, which would say how wide tokens are.",
            fix="build moe.MoELayer(dim, expert=...) from it",
        )
    weight, _ = _weights(first)
    assert weight is not None
    dim = weight.shape[1]
    try:
        out = _evaluated(module, _like(first, torch.zeros(2, dim)))
    except Exception as error:  # whatever a forward of theirs raises
        raise PlanError(
            f"{kind} is no feed-forward: called with [2, {dim}] it raises {type(error).__name__}: {error}",
            fix="give a module that is called with tokens alone",
        ) from error
    shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
    if shape != (2, dim):
        raise PlanError(
            f"{kind} is no feed-forward: from [2, {dim}] it makes {shape}.",
            fix=f"give a module from [n, {dim}] to [n, {dim}]",
        )
    return dim


@dataclass(frozen=True)
class _Layers:
    first: nn.Module
    times: nn.Module | None
    last: nn.Module
    activation: Callable[[Tensor], Tensor] | None


def _layers(module: nn.Module) -> _Layers | None:
    if isinstance(module, nn.Sequential):
        return _of_sequence(list(module))
    for first, times, last in _FORMS:
        members: list[Any] = [None if name is None else getattr(module, name, None) for name in (first, times, last)]
        if all(name is None or _is_linear(m) for name, m in zip((first, times, last), members, strict=True)):
            found = (getattr(module, name, None) for name in _ACTIVATION_NAMES)
            return _Layers(members[0], members[1], members[2], next((a for a in found if callable(a)), None))
    return None


def _of_sequence(modules: list[nn.Module]) -> _Layers | None:
    """Linear, activation, Linear."""
    modules = [m for m in modules if not isinstance(m, (nn.Identity, nn.Dropout))]
    if len(modules) != 3 or not (_is_linear(modules[0]) and _is_linear(modules[2])):
        return None
    return _Layers(modules[0], None, modules[2], modules[1])


def _is_linear(module: Any) -> bool:
    return type(module) is nn.Linear or _is_transposed(module)


def _is_transposed(module: Any) -> bool:
    """transformers' Conv1D: a linear layer with weight [in, out]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def _weights(layer: Any) -> tuple[Tensor | None, Tensor | None]:
    if layer is None:
        return None, None
    weight = layer.weight.detach()
    return weight.t() if _is_transposed(layer) else weight, None if layer.bias is None else layer.bias.detach()


def name_of(activation: Callable[[Tensor], Tensor]) -> str | None:
    """Which of the known activations a function is, tried out on a grid."""
    if isinstance(activation, nn.Module) and next(activation.parameters(), None) is not None:
        return None
    grid = torch.cat([torch.linspace(-12, 12, 241), torch.tensor([-1e3, 1e3])]).double()
    try:
        found = activation(grid.clone())
    except Exception:  # no function of one tensor
        return None
    if not isinstance(found, Tensor) or found.shape != grid.shape:
        return None
    return next((name for name in FUNCTIONS if torch.allclose(found, activated(grid, name), atol=1e-6)), None)


def _agrees(module: nn.Module, dense: Dense) -> bool:
    """Whether a module gives what was read from it, on tokens that use all of the activation's range."""
    x = torch.randn(8, dense.dim, generator=torch.Generator().manual_seed(0))
    x = _like(dense.w1, x)
    with torch.no_grad():
        x = x * (3 / F.linear(x, dense.w1).float().std().clamp(min=1e-6)).to(x.dtype)
        expected = dense(x)
    try:
        found = _evaluated(module, x)
    except Exception:  # it takes more than tokens
        return False
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    bar = 20 * torch.finfo(x.dtype).eps * float(expected.abs().max().clamp(min=1e-30))
    return bool((found - expected).abs().max() <= bar)


def _like(of: Any, x: Tensor) -> Tensor:
    weight = of if isinstance(of, Tensor) else of.weight
    return x.to(weight.device, weight.dtype)


@torch.no_grad()
def _evaluated(module: nn.Module, x: Tensor) -> Any:
    with _in_evaluation(module):
        return module(x)


@contextmanager
def _in_evaluation(module: nn.Module) -> Iterator[None]:
    modes = {m: m.training for m in module.modules()}
    try:
        module.eval()
        yield
    finally:
        for m, mode in modes.items():
            m.training = mode
