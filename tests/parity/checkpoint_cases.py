"""Models that are saved in one layout and loaded in another: how each is built and trained, and what it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from whale_torch import moe
from whale_torch.comm.registry import place_of
from whale_torch.planning.layout import balanced
from whale_torch.state import full_tensor
from whale_torch.strategies.runtime import is_parallelized

__all__ = ["LAYOUTS", "OPTIMIZERS", "Layout", "batch", "build", "count", "pairs", "step", "whole"]

WIDTH, WORDS, ROWS, LENGTH = 12, 13, 24, 3
Scopes = dict[str, Any]


class Block(nn.Module):
    """Attention, of a packed projection, and a feed-forward; a scalar, a frozen parameter, a buffer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.norm.bias.requires_grad_(False)
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attention(h, h, h, need_weights=False)[0]
        out: Tensor = self.norm(h + self.scale * self.down(self.dropout(F.gelu(self.up(h + self.shift)))))
        return out


class Words(nn.Module):
    """Two blocks between an embedding and a head that share a weight."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.first, self.second = Block(dropout), Block(dropout)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.second(self.first(self.embed(x)))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Experts(nn.Module):
    """Two layers of experts, one of them in slices."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.dropout = nn.Embedding(WORDS, WIDTH), nn.Dropout(dropout)
        gate = moe.TopK(WIDTH, 4, 2, score="sigmoid", bias_rate=0.1)  # whose bias is a buffer
        self.first = moe.MoELayer(WIDTH, hidden=8, gate=gate)
        self.second = moe.MoELayer(WIDTH, 3, 1, hidden=6, slices=2, gated=True, activation="silu")
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.dropout(self.embed(x))
        h = h + self.first(h)
        h = h + self.second(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


@dataclass(frozen=True)
class Layout:
    """world: its ranks, 0 for a plain process. annotate: puts scopes on the plain model. model: which one."""

    world: int
    annotate: Callable[[nn.Module], object] = lambda model: None
    model: type[Words | Experts] = Words


def _named(**scopes: Callable[[], Any]) -> Callable[[nn.Module], object]:
    """Scopes by a pattern of names; "__" is read as "|"."""
    return lambda model: wh.annotate(model, {key.replace("__", "|"): made() for key, made in scopes.items()})


def _pipeline(*stages: tuple[str, ...], split: str = "", **options: Any) -> Callable[[nn.Module], object]:
    def annotate(model: nn.Module) -> None:
        scopes: Scopes = {}
        for names in stages:
            stage = wh.stage()
            scopes |= {name: (stage, wh.split()) if name in split.split() else stage for name in names}
        wh.annotate(model, scopes, inside=(wh.replica(), wh.pipeline(num_micro_batches=2, **options)))

    return annotate


_ENDS = (("embed", "first"), ("second", "head"))
_EXPERTS: dict[str, Any] = {"model": Experts}

LAYOUTS: dict[str, Layout] = {
    "plain": Layout(0),
    "one rank": Layout(1, _named(first=wh.split)),
    "replica on 2": Layout(2),
    "replica on 3": Layout(3),
    "split on 2": Layout(2, _named(first__second=wh.split)),
    "split on 3": Layout(3, _named(first__second=wh.split)),
    "split on 4": Layout(4, _named(first=wh.split, second=lambda: wh.split(size=2))),
    "words on 3": Layout(3, _named(embed__head=wh.split, second=wh.split)),
    "nested on 4": Layout(4, _named(first__second=lambda: (wh.replica(), wh.split(size=2)))),
    "2 stages": Layout(2, _pipeline(*_ENDS)),
    "2 stages, other cuts": Layout(2, _pipeline(("embed",), ("first", "second", "head"))),
    "4 stages": Layout(4, _pipeline(("embed",), ("first",), ("second",), ("head",))),
    "3 stages": Layout(3, _pipeline(("embed",), ("first",), ("second", "head"))),
    "2 pipelines": Layout(4, _pipeline(*_ENDS, num_ranks=2)),
    "2 stages of 2": Layout(4, _pipeline(*_ENDS, split="first second", num_ranks=4)),
    "split on 5": Layout(5, _named(first__second=wh.split)),  # one rank has no head
    "split on 6": Layout(6, _named(first=lambda: wh.split(size=3), embed__head=wh.split)),
    "replica on 7": Layout(7),
    "nested on 8": Layout(8, _named(first__second=lambda: (wh.replica(), wh.split(size=4)))),
    "experts, plain": Layout(0, **_EXPERTS),
    "experts in replicas": Layout(2, **_EXPERTS),
    "experts on 2": Layout(2, _named(first__second=wh.split), **_EXPERTS),
    "experts on 3": Layout(3, _named(first__second=wh.split), **_EXPERTS),
    "experts on 4": Layout(4, _named(first__second=wh.split), **_EXPERTS),  # one rank has no expert of the second
    "experts on 2 of 4": Layout(4, _named(first=lambda: wh.split(size=2), second=wh.split), **_EXPERTS),
    "experts on 8": Layout(8, _named(first__second=wh.split), **_EXPERTS),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True, foreach=False),
}


def pairs() -> list[tuple[str, str]]:
    """Layouts of one model: what is saved in the first is loaded in the second."""
    return [(a, b) for a in LAYOUTS for b in LAYOUTS if LAYOUTS[a].model is LAYOUTS[b].model]


def _kind(name: str) -> str:
    """Experts first: a layout of theirs is one of replicas or splits too."""
    words = {"experts": "experts", "stages": "pipeline", "pipelines": "pipeline", "nested": "nested", "plain": "plain"}
    of = next((kind for word, kind in words.items() if word in name.replace(",", "").split()), "")
    return of or ("replica" if name.startswith("replica") else "split")


def count() -> str:
    """How many pairs of layouts there are, by kind and by world."""
    found = pairs()
    lines = [f"{len(found)} pairs of {len(LAYOUTS)} layouts, {sum(a != b for a, b in found)} of them of different ones"]
    for title, key in (("kind", _kind), ("ranks", lambda name: str(max(1, LAYOUTS[name].world)))):
        counts = Counter((key(a), key(b)) for a, b in found)
        names = list(dict.fromkeys(key(name) for name in LAYOUTS))
        lines += ["", f"saved by {title} (rows), loaded by {title}:"]
        lines.append(" " * 9 + "".join(f"{name:>9}" for name in names))
        lines += [f"{a:<9}" + "".join(f"{counts[a, b] or '.':>9}" for b in names) for a in names]
    return "\n".join(lines)


def build(name: str, optimizer: str, seed: int = 0, dropout: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in its layout, with fresh values, and its optimizer of two groups."""
    layout = LAYOUTS[name]
    torch.manual_seed(seed)
    model = layout.model(dropout)
    layout.annotate(model)
    if layout.world:
        example = batch(0)
        wh.parallelize(model, sample_inputs={"x": example[0], "y": example[1]} if "stages" in name else None)
    thin = [p for p in model.parameters() if p.dim() < 2 and p.requires_grad]
    others = [p for p in model.parameters() if p.dim() >= 2 or not p.requires_grad]
    return model, OPTIMIZERS[optimizer]([{"params": others}, {"params": thin, "lr": 0.02}])


def batch(number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 + number)
    return tuple(torch.randint(WORDS, (ROWS, LENGTH), generator=draw) for _ in range(2))  # type: ignore[return-value]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """One step on the `number`-th batch; its loss over all ranks."""
    x, y = batch(number)
    index, feeds = wh.data_rank(model) if is_parallelized(model) else (0, 1)
    sizes = balanced(ROWS, feeds)
    x, y = x.split(sizes)[index], y.split(sizes)[index]
    optimizer.zero_grad()
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    if feeds > 1:
        return float(wh.reduce(loss.detach(), weight=len(x), model=model))
    return float(loss.detach())


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's state, and that of its optimizer by names, as one process has them: a collective."""
    state = wh.full_state_dict(model) if is_parallelized(model) else model.state_dict()
    found: dict[str, Any] = {}
    for name, p in model.named_parameters():
        place = place_of(p)
        held = optimizer.state.get(p, {})
        for key in ("step", "momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            value = held.get(key)
            known = value is not None
            if place is not None and place.pipeline is not None:
                known = bool(_from_holder(torch.tensor(float(known)), place))
            if not known:
                continue
            scalar = key == "step"
            mine = torch.zeros(() if scalar else p.shape) if value is None else value
            if scalar:
                found[f"{name}/{key}"] = mine if place is None or place.pipeline is None else _from_holder(mine, place)
            else:
                found[f"{name}/{key}"] = full_tensor(p, mine)
    return {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}, found


def _from_holder(value: Tensor, place: Any) -> Tensor:
    from whale_torch.comm.collectives import broadcast_copy

    return broadcast_copy(value, place.pipeline, place.holder, name="a test's value")


if __name__ == "__main__":
    print(count())
