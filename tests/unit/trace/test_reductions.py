"""Losses of micro-batches that add up to the whole batch's: a recorded forward's reductions, rewritten and run."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whale_torch.errors import LossError
from whale_torch.trace.graph import Graph, Node, map_nodes, nodes_in, tensors_in
from whale_torch.trace.reductions import Reductions, rewrite
from whale_torch.trace.tracer import Leaf, record
from whale_torch.trace.twin import Twin

SIZES = (3, 1, 2, 3, 1, 2)  # two replicas of three micro-batches
ROWS, FEATURES, CLASSES, LENGTH = sum(SIZES), 5, 4, 3
OTHER = 5  # rows of the second recording

LossFunction = Callable[["Net", Tensor, dict[str, Tensor]], Any]


class Net(nn.Module):
    """A body, and a loss of its output and its batch in the glue."""

    def __init__(self, loss: LossFunction):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES))
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("class_weight", torch.tensor([0.5, 1.0, 2.0, 0.25]))
        self.loss = loss

    def forward(self, **batch: Any) -> Any:
        return self.loss(self, self.body(batch["x"]), batch)


def layers(name: str, module: nn.Module) -> int | None:
    """A cut by layers: members of a ModuleList, and what else has parameters of its own."""
    return 0 if name.rpartition(".")[2].isdigit() else owns_parameters(name, module)


def owns_parameters(name: str, module: nn.Module) -> int | None:
    """The finest cut: everything but the layers with parameters is glue."""
    return 0 if next(module.parameters(recurse=False), None) is not None and module.__class__ is not Net else None


def a_batch(**more: Any) -> dict[str, Any]:
    y = torch.randint(0, CLASSES, (ROWS, LENGTH))
    y[torch.rand(ROWS, LENGTH) < 0.4] = -100
    y[3:4] = -100  # the second micro-batch has no valid label
    x = torch.randn(ROWS, LENGTH, FEATURES)
    m = (torch.rand(ROWS, LENGTH) < 0.6).float()
    return {"x": x, "y": y, "m": m, "t": torch.randn(ROWS, LENGTH, CLASSES), **more}


def part_of(batch: dict[str, Any], start: int, size: int) -> dict[str, Any]:
    return {
        name: x[start : start + size] if isinstance(x, Tensor) and x.shape[:1] == (ROWS,) else x
        for name, x in batch.items()
    }


def parts_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    starts = [sum(SIZES[:number]) for number in range(len(SIZES))]
    return [part_of(batch, start, size) for start, size in zip(starts, SIZES, strict=True)]


def run(graph: Graph | Any, model: nn.Module, batch: dict[str, Any], totals: dict[Any, Any]) -> dict[Node, Any]:
    """The values of a graph's Nodes on the live model."""
    inputs, values = list(tensors_in(batch)), {}
    for node in graph.nodes:
        args, kwargs = map_nodes((node.args, node.kwargs), values.__getitem__)
        match node.kind:
            case "input":
                values[node] = inputs[node.target]
            case "parameter":
                values[node] = model.get_parameter(node.target)
            case "buffer":
                values[node] = model.get_buffer(node.target)
            case "constant":
                values[node] = node.target
            case "count":
                values[node] = totals[node.target]
            case "call":
                values[node] = node.run(args, kwargs, node.target)
            case "module":
                values[node] = node.run(args, kwargs, model.get_submodule(node.target))
    return values


def scalars_of(out: Any) -> list[Tensor]:
    return [x for x in tensors_in(out) if x.dim() == 0]


def scalar_nodes(graph: Graph) -> list[Node]:
    return [node for node in nodes_in(graph.output) if node.value.dim() == 0]


def recorded(model: nn.Module, batch: dict[str, Any], leaf: Leaf = owns_parameters) -> Graph:
    return record(Twin.of(model, torch.device("cpu")), (), batch, leaf)


def reductions_of(model: nn.Module, batch: dict[str, Any], **options: Any) -> Reductions:
    """Of a micro-batch, with a second recording of other size."""
    whole, leaf = options.pop("whole", batch), options.pop("leaf", owns_parameters)
    graph = recorded(model, batch, leaf)
    before = [(node, node.target, node.args, dict(node.kwargs)) for node in graph.nodes]
    other = recorded(model, part_of(whole, 0, OTHER), leaf)
    found = rewrite(graph, scalar_nodes(graph), other=other, **options)
    assert before == [(node, node.target, node.args, dict(node.kwargs)) for node in graph.nodes]
    return found


def summed(
    model: nn.Module,
    batch: dict[str, Any],
    *,
    tensors: bool = False,
    share: float = 1 / len(SIZES),
    of_counts: Callable[[list[float]], float] = sum,
    **options: Any,
) -> list[Tensor]:
    """The output's scalars as micro-batches and replicas give them."""
    parts = parts_of(batch)
    by_size = {
        size: reductions_of(model, part, whole=batch, **options) for size, part in zip(SIZES, parts, strict=True)
    }
    rewritten = [by_size[size] for size in SIZES]
    totals: dict[Any, Any] = {"share": share}
    for number in range(len(rewritten[0].counts)):
        counts = [r.counts[number] for r in rewritten]
        each = [float(run(c, model, part, {})[c.result]) for c, part in zip(counts, parts, strict=True)]
        totals[number] = torch.tensor(of_counts(each), dtype=torch.float64) if tensors else of_counts(each)
    found: list[Any] = [0.0] * len(rewritten[0].losses)
    for r, part, size in zip(rewritten, parts, SIZES, strict=True):
        assert len(r.counts) == len(rewritten[0].counts)
        values = run(r.graph, model, part, totals)
        assert scalars_of(map_nodes(r.graph.output, values.__getitem__)) == [values[loss.node] for loss in r.losses]
        for number, loss in enumerate(r.losses):
            found[number] = found[number] + values[loss.node] * (size / ROWS if loss.combine == "rows" else 1)
    return found


def worst(model: nn.Module, losses: list[Tensor], expected: list[Tensor]) -> float:
    """Largest error of losses and of gradients of their sum, each relative to the largest of its kind."""
    assert len(losses) == len(expected) > 0
    for mine, theirs in zip(losses, expected, strict=True):
        assert mine.shape == theirs.shape and (mine.dtype == theirs.dtype or not theirs.is_floating_point())
    pairs = [(float(a.detach()), float(b.detach())) for a, b in zip(losses, expected, strict=True)]
    values = [abs(mine - theirs) / max(abs(theirs), 1e-3) for mine, theirs in pairs]
    gradients = [_gradients(model, values) for values in (losses, expected)]
    top = max((float(g.abs().max()) for g in gradients[1]), default=0.0)
    for mine, theirs in zip(*gradients, strict=True):
        values.append(float((mine - theirs).abs().max()) / max(float(theirs.abs().max()), 0.01 * top, 1e-12))
    return max(values)


def _gradients(model: nn.Module, losses: list[Tensor]) -> list[Tensor]:
    model.zero_grad()
    if any(loss.requires_grad for loss in losses):
        sum(loss for loss in losses if loss.requires_grad).backward()  # type: ignore[union-attr]
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def case(loss: LossFunction, **more: Any) -> tuple[Net, dict[str, Any]]:
    torch.manual_seed(1)
    model, batch = Net(loss).double(), a_batch(**more)
    return model, {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in batch.items()
    }


def check(loss: LossFunction, *, bar: float = 1e-9, more: dict[str, Any] | None = None, **options: Any) -> None:
    model, batch = case(loss, **more or {})
    assert worst(model, summed(model, batch, **options), scalars_of(model(**batch))) < bar


# ---- cross entropy


def _tokens(h: Tensor, b: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return h.reshape(-1, CLASSES), b["y"].reshape(-1)


def _probabilities(b: dict[str, Tensor]) -> Tensor:
    return b["t"].softmax(-1)


LABELS: dict[str, LossFunction] = {
    "tokens": lambda net, h, b: F.cross_entropy(*_tokens(h, b)),
    "channels": lambda net, h, b: F.cross_entropy(h.transpose(1, 2), b["y"]),
    "keywords": lambda net, h, b: F.cross_entropy(target=b["y"].reshape(-1), input=h.reshape(-1, CLASSES)),
    "module": lambda net, h, b: nn.CrossEntropyLoss()(*_tokens(h, b)),
    "class weights": lambda net, h, b: F.cross_entropy(*_tokens(h, b), weight=net.class_weight),
    "constant weights": lambda net, h, b: F.cross_entropy(
        *_tokens(h, b), weight=torch.tensor([1.0, 2.0, 0.5, 0.0], dtype=torch.float64)
    ),
    "smoothing": lambda net, h, b: F.cross_entropy(*_tokens(h, b), label_smoothing=0.1),
    "smoothing and weights": lambda net, h, b: F.cross_entropy(
        *_tokens(h, b), weight=net.class_weight, label_smoothing=0.2
    ),
    "ignored 255": lambda net, h, b: F.cross_entropy(
        h.reshape(-1, CLASSES),
        torch.where(b["y"] < 0, 255, b["y"]).reshape(-1),
        weight=net.class_weight,
        ignore_index=255,
    ),
    "ignored class": lambda net, h, b: F.cross_entropy(
        h.reshape(-1, CLASSES), b["y"].clamp(0).reshape(-1), ignore_index=0
    ),
    "probabilities": lambda net, h, b: F.cross_entropy(h.transpose(1, 2), _probabilities(b).transpose(1, 2)),
    "probabilities and weights": lambda net, h, b: F.cross_entropy(
        h.reshape(-1, CLASSES), _probabilities(b).reshape(-1, CLASSES), weight=net.class_weight, label_smoothing=0.1
    ),
    "distilled": lambda net, h, b: F.cross_entropy(
        h.reshape(-1, CLASSES), net.body(b["x"].flip(-1)).softmax(-1).detach().reshape(-1, CLASSES)
    ),
    "nll": lambda net, h, b: F.nll_loss(h.log_softmax(-1).reshape(-1, CLASSES), b["y"].reshape(-1)),
    "nll module with weights": lambda net, h, b: nn.NLLLoss(net.class_weight)(
        h.log_softmax(-1).transpose(1, 2), b["y"]
    ),
    "sum over given items": lambda net, h, b: F.cross_entropy(*_tokens(h, b), reduction="sum") / b["items"],
    "sum of none": lambda net, h, b: F.cross_entropy(*_tokens(h, b), reduction="none").sum() / (b["y"] != -100).sum(),
    "summed": lambda net, h, b: F.cross_entropy(*_tokens(h, b), reduction="sum"),
}


@pytest.mark.parametrize("name", LABELS)
def test_cross_entropy(name):
    check(LABELS[name], more={"items": 19})


def test_given_items_as_a_tensor():
    check(LABELS["sum over given items"], more={"items": torch.tensor(19)})


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_deprecated_arguments():
    check(lambda net, h, b: F.cross_entropy(*_tokens(h, b), size_average=True))
    check(lambda net, h, b: F.mse_loss(h, b["t"], size_average=False))
    check(lambda net, h, b: F.mse_loss(h, b["t"], reduce=False).mean())


def test_no_label_in_the_whole_batch_is_torchs_nan():
    model, batch = Net(LABELS["tokens"]), a_batch()
    batch["y"].fill_(-100)
    assert torch.isnan(model(**batch)) and torch.isnan(summed(model, batch)[0])


def test_totals_may_be_double_tensors_and_the_loss_keeps_its_dtype():
    model, batch = Net(LABELS["sum of none"]), a_batch()
    (loss,) = summed(model, batch, tensors=True)
    assert loss.dtype == torch.float32
    (loss,) = summed(Net(LABELS["class weights"]), batch, tensors=True)
    assert loss.dtype == torch.float32


# ---- elementwise losses and means


def _unit(h: Tensor) -> Tensor:
    return h.sigmoid()


LOSSES: dict[str, LossFunction] = {
    "mse": lambda net, h, b: F.mse_loss(h, b["t"]),
    "mse with weights": lambda net, h, b: F.mse_loss(h, b["t"], weight=b["t"].abs()),
    "mse module": lambda net, h, b: nn.MSELoss()(h, b["t"]),
    "l1": lambda net, h, b: F.l1_loss(h, b["t"]),
    "smooth l1": lambda net, h, b: F.smooth_l1_loss(h, b["t"], beta=0.5),
    "huber": lambda net, h, b: F.huber_loss(h, b["t"], delta=0.3),
    "huber with weights": lambda net, h, b: F.huber_loss(h, b["t"], weight=b["t"].abs()),
    "bce": lambda net, h, b: F.binary_cross_entropy(_unit(h), _unit(b["t"])),
    "bce with logits": lambda net, h, b: F.binary_cross_entropy_with_logits(
        h, _unit(b["t"]), pos_weight=net.class_weight
    ),
    "bce with weights": lambda net, h, b: F.binary_cross_entropy_with_logits(
        h, _unit(b["t"]), weight=b["m"][..., None]
    ),
    "soft margin": lambda net, h, b: F.soft_margin_loss(h, b["t"].sign()),
    "poisson": lambda net, h, b: F.poisson_nll_loss(h, b["t"].abs()),
    "kl mean": lambda net, h, b: F.kl_div(h.log_softmax(-1), _probabilities(b), reduction="mean"),
    "kl batchmean": lambda net, h, b: F.kl_div(h.log_softmax(-1), _probabilities(b), reduction="batchmean"),
    "hinge": lambda net, h, b: F.hinge_embedding_loss(h, b["t"].sign()),
    "ranking": lambda net, h, b: F.margin_ranking_loss(h[..., 0], h[..., 1], b["t"][..., 0].sign(), margin=0.1),
    "cosine": lambda net, h, b: F.cosine_embedding_loss(h[:, 0], h[:, 1], b["t"][:, 0, 0].sign()),
    "triplet": lambda net, h, b: F.triplet_margin_loss(h[:, 0], h[:, 1], h[:, 2], swap=True),
    "multi margin": lambda net, h, b: F.multi_margin_loss(h[:, 0], b["y"][:, 0].clamp(0), weight=net.class_weight),
    "multilabel soft": lambda net, h, b: F.multilabel_soft_margin_loss(h[:, 0], b["t"][:, 0].gt(0).double()),
    "mean": lambda net, h, b: torch.mean((h - b["t"]) ** 2),
    "method mean": lambda net, h, b: (h - b["t"]).abs().mean(),
    "mean over named dimensions": lambda net, h, b: (h * b["t"]).mean(dim=(0, 1, 2)),
    "mean of means": lambda net, h, b: (h * b["t"]).mean(-1).sum(1).mean(),
    "sum": lambda net, h, b: (h * b["t"]).sum(),
    "none then mean": lambda net, h, b: F.smooth_l1_loss(h, b["t"], reduction="none").mean(),
    "dot": lambda net, h, b: torch.dot(h.flatten(), b["t"].flatten()) / b["m"].sum(),
    "negation, casts and views": lambda net, h, b: (
        -(F.mse_loss(h, b["t"]).float().double().unsqueeze(0).view(1, 1)[0, 0])
    ),
    "squeezed": lambda net, h, b: F.mse_loss(h[..., 0].mean(1).squeeze(), b["t"][:, 0, 0].squeeze()),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_means(name):
    check(LOSSES[name], bar=1e-7 if "cast" in name else 1e-9)


# ---- hand-written


def _each(h: Tensor, b: dict[str, Tensor]) -> Tensor:
    return (h - b["t"]).square().mean(-1)


def _regulariser(net: Net) -> Tensor:
    return sum(p.pow(2).sum() for p in net.parameters())  # type: ignore[return-value]


def _two(net: Net, h: Tensor, b: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(*_tokens(h, b)), F.mse_loss(h, b["t"])


def _in_place(net: Net, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    loss = torch.zeros((), dtype=h.dtype)
    loss += _each(h, b).mean()
    loss += 0.1 * net.scale
    loss -= F.l1_loss(h, b["t"])
    loss *= 2
    return loss


def _written(net: Net, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    losses = torch.ones(3, dtype=h.dtype)
    losses[0] = _two(net, h, b)[0]
    losses[2] = net.scale
    return losses.sum()


def _two_uncertain(net: Net, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    first, second = _two(net, h, b)
    return torch.exp(-net.scale) * first + net.scale + second / (2 * net.scale**2) + torch.log(net.scale)


WRITTEN: dict[str, LossFunction] = {
    "masked mean": lambda net, h, b: (_each(h, b) * b["m"]).sum() / b["m"].sum(),
    "masked mean, clamped": lambda net, h, b: (_each(h, b) * b["m"]).sum() / b["m"].sum().clamp_(min=1),
    "masked mean by weights": lambda net, h, b: (_each(h, b) * (b["m"] / b["m"].sum())).sum(),
    "masked mean of rows": lambda net, h, b: ((_each(h, b) * b["m"]).sum(1) / b["m"].sum(1).clamp(min=1)).mean(),
    "counted labels": lambda net, h, b: (_each(h, b) * (b["y"] >= 0)).sum() / torch.count_nonzero(b["y"] >= 0),
    "a constant mask": lambda net, h, b: _each(h, b).sum() / torch.ones(len(h), 2).sum(),
    "normalised by the labels' mean": lambda net, h, b: F.mse_loss(h, b["t"]) / b["t"].abs().mean(),
    "balanced by the batch": lambda net, h, b: F.binary_cross_entropy_with_logits(
        h[..., 0], b["m"], pos_weight=(1 - b["m"]).sum() / b["m"].sum()
    ),
    "over numel": lambda net, h, b: _each(h, b).sum() / b["y"].numel(),
    "over rows": lambda net, h, b: F.cross_entropy(*_tokens(h, b), reduction="sum") / h.shape[0],
    "times the inverse": lambda net, h, b: _each(h, b).sum() * (0.5 / len(h)),
    "each over numel": lambda net, h, b: (_each(h, b) / b["y"].numel()).sum(),
    "over a tensor of rows": lambda net, h, b: _each(h, b).sum() / torch.tensor(float(len(h))),
    "over a new tensor of rows": lambda net, h, b: _each(h, b).sum() / h.new_tensor(len(h)),
    "over a full tensor": lambda net, h, b: _each(h, b).sum() / torch.full((), len(h)),
    "over a constant": lambda net, h, b: _each(h, b).sum() / 7 + 2 * _each(h, b).sum() / LENGTH,
    "rows in the count": lambda net, h, b: net.scale * len(h) + _each(h, b).sum(),
    "two terms": lambda net, h, b: _two(net, h, b)[0] + 0.3 * _two(net, h, b)[1],
    "two terms, alpha": lambda net, h, b: torch.add(*_two(net, h, b), alpha=-0.3),
    "a constant minus a loss": lambda net, h, b: 1 - _two(net, h, b)[1],
    "stacked sum": lambda net, h, b: torch.stack(_two(net, h, b)).sum(),
    "stacked mean": lambda net, h, b: torch.stack([*_two(net, h, b), net.scale]).mean(),
    "stacked and weighted": lambda net, h, b: torch.dot(torch.stack(_two(net, h, b)), net.class_weight[:2]),
    "chosen from a stack": lambda net, h, b: torch.stack(_two(net, h, b))[1] + torch.stack(_two(net, h, b)).unbind()[0],
    "per task": lambda net, h, b: (((h - b["t"]) ** 2).mean(0).sum(0) * net.class_weight).sum(),
    "per task, kept": lambda net, h, b: ((h - b["t"]) ** 2).mean((0, 1), keepdim=True).squeeze() @ net.class_weight,
    "a regulariser": lambda net, h, b: F.mse_loss(h, b["t"]) + 0.01 * _regulariser(net),
    "a regulariser first": lambda net, h, b: 0.01 * _regulariser(net) - F.mse_loss(h, b["t"]),
    "only a regulariser": lambda net, h, b: _regulariser(net).sqrt(),
    "uncertain weights": _two_uncertain,
    "in place": _in_place,
    "in place, of another dtype": lambda net, h, b: torch.zeros(()).add_(0.5).add_(F.mse_loss(h, b["t"])),
    "written into": _written,
    "where": lambda net, h, b: torch.where(net.scale > 0, F.mse_loss(h, b["t"]), net.scale * 2),
    "zeros like": lambda net, h, b: torch.zeros_like(F.mse_loss(h, b["t"])) + h.new_zeros(()) + F.l1_loss(h, b["t"]),
    "like the logits": lambda net, h, b: F.mse_loss(h.float(), b["t"].float()).to(h.dtype).type_as(h),
    "no gradient": lambda net, h, b: F.mse_loss(h, b["t"]).detach() + F.l1_loss(h, b["t"]),
    "metrics": lambda net, h, b: {
        "loss": F.cross_entropy(*_tokens(h, b)),
        "correct": (h.argmax(-1) == b["y"]).double().mean(),
        "valid": (b["y"] >= 0).sum(),
        "norm": _regulariser(net),
        "logits": h,
        "none": None,
        "spread": b["t"].abs().mean(),
    },
}


@pytest.mark.parametrize("name", WRITTEN)
def test_written_by_hand(name):
    check(
        WRITTEN[name],
        bar=1e-5 if "tensor of rows" in name or name in ("like the logits", "in place, of another dtype") else 1e-9,
    )


# ---- at random


ROWS_AT_RANDOM: list[LossFunction] = [
    lambda net, h, b: h,
    lambda net, h, b: b["t"],
    lambda net, h, b: h * b["t"],
    lambda net, h, b: h.sigmoid() / len(h),
    lambda net, h, b: net.class_weight * h * b["m"][..., None],
    lambda net, h, b: (h - b["t"].mean()).square(),
    lambda net, h, b: b["t"] / b["m"].sum() + torch.ones_like(h),
]
SCALARS_AT_RANDOM: list[Callable[[Tensor, Tensor, Net, dict[str, Tensor]], Tensor]] = [
    lambda x, y, net, b: (x * y).mean(),
    lambda x, y, net, b: (x + y).sum(),
    lambda x, y, net, b: F.mse_loss(x, y),
    lambda x, y, net, b: F.l1_loss(x, y, reduction="sum"),
    lambda x, y, net, b: F.kl_div(x, y.sigmoid(), reduction="batchmean"),
    lambda x, y, net, b: (x.mean((0, 1)) * net.class_weight).sum(),
    lambda x, y, net, b: F.cross_entropy(x.reshape(-1, CLASSES), b["y"].reshape(-1), weight=net.class_weight),
    lambda x, y, net, b: net.body[0].weight.square().mean() + net.scale,
    lambda x, y, net, b: b["m"].sum(),
    lambda x, y, net, b: b["t"].abs().mean().sqrt(),
    lambda x, y, net, b: torch.tensor(float(len(x)), dtype=x.dtype),
]
COMBINED_AT_RANDOM: list[Callable[[Tensor, Tensor, int], Tensor]] = [
    lambda a, b, n: a + b,
    lambda a, b, n: a - 0.5 * b,
    lambda a, b, n: a * b,
    lambda a, b, n: a / b,
    lambda a, b, n: a / n - b * n,
    lambda a, b, n: torch.stack([a.double(), b.double()]).mean(),
    lambda a, b, n: torch.add(a, b, alpha=0.3) + 1,
    lambda a, b, n: 1 / a - b.detach(),
    lambda a, b, n: -a.clamp(min=0.1) + b,
]


def _at_random(chooser: random.Random, depth: int = 0) -> LossFunction:
    if depth == 2 or chooser.random() < 0.25:
        make, first, second = chooser.choice(SCALARS_AT_RANDOM), *chooser.choices(ROWS_AT_RANDOM, k=2)
        return lambda net, h, b: make(first(net, h, b), second(net, h, b), net, b)
    join = chooser.choice(COMBINED_AT_RANDOM)
    left, right = _at_random(chooser, depth + 1), _at_random(chooser, depth + 1)
    return lambda net, h, b: join(left(net, h, b), right(net, h, b), len(h))


@pytest.mark.parametrize("seed", range(8))
def test_a_random_loss_is_exact_or_refused(seed):
    chooser, accepted = random.Random(seed), 0
    for _ in range(10):
        loss = _at_random(chooser)
        model, batch = case(loss)
        try:
            losses = summed(model, batch)
        except LossError:
            continue
        accepted += 1
        assert worst(model, losses, [model(**batch)]) < 1e-6
    assert accepted >= 3


# ---- Hugging Face


def _bert(**more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return {"vocab_size": 37, "max_position_embeddings": 16, **sizes, **dropout, **more}


def _masked(low: float, shape: tuple[int, ...] = (ROWS, 6), classes: int = 37) -> Tensor:
    labels = torch.randint(1, classes, shape)
    labels[torch.rand(shape) < low] = -100
    labels[3] = -100
    return labels


def _attended() -> Tensor:
    attended = torch.ones(ROWS, 6, dtype=torch.long)
    for row in range(ROWS):
        attended[row, 6 - row % 3 :] = 0
    return attended


def _hugging_face(name: str) -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(1, 37, (ROWS, 6))
    made: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
        "BertForMaskedLM": lambda: (transformers.BertConfig(**_bert()), {"labels": _masked(0.7)}),
        "BertForPreTraining": lambda: (
            transformers.BertConfig(**_bert()),
            {"labels": _masked(0.7), "next_sentence_label": torch.randint(0, 2, (ROWS,))},
        ),
        "BertForSequenceClassification": lambda: (
            transformers.BertConfig(**_bert(num_labels=1)),
            {"labels": torch.randn(ROWS, dtype=torch.float64)},
        ),
        "BertForTokenClassification": lambda: (
            transformers.BertConfig(**_bert(num_labels=5)),
            {"labels": _masked(0.5, classes=5)},
        ),
        "BertForQuestionAnswering": lambda: (
            transformers.BertConfig(**_bert()),
            {"start_positions": torch.randint(0, 8, (ROWS,)), "end_positions": torch.randint(0, 6, (ROWS,))},
        ),
        "GPT2LMHeadModel": lambda: (
            transformers.GPT2Config(
                vocab_size=37, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
            ),
            {"labels": _masked(0.3)},
        ),
        "LlamaForCausalLM": lambda: (
            transformers.LlamaConfig(
                vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
            ),
            {"labels": _masked(0.3), "num_items_in_batch": 41},
        ),
        "T5ForConditionalGeneration": lambda: (
            transformers.T5Config(
                vocab_size=37, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0,
                decoder_start_token_id=0,
            ),
            {"labels": _masked(0.3, (ROWS, 4))},
        ),
    }  # fmt: skip
    config, more = made[name]()
    return getattr(transformers, name)(config), {"input_ids": ids, "attention_mask": _attended(), **more}


HUGGING_FACE = [
    *("BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification", "BertForTokenClassification"),
    *("BertForQuestionAnswering", "GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration"),
]


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_faces_own_losses(name):
    torch.manual_seed(2)
    model, batch = _hugging_face(name)
    model = model.double()
    assert worst(model, summed(model, batch), [model(**batch).loss]) < 1e-6
    assert worst(model, summed(model, batch, leaf=layers), [model(**batch).loss]) < 1e-6


# ---- what the bar must catch


@pytest.mark.parametrize(
    "loss", [LABELS["tokens"], LABELS["class weights"], WRITTEN["masked mean"], WRITTEN["two terms"], LOSSES["mse"]]
)
def test_the_mean_of_micro_batches_means_fails_the_bar(loss):
    model, batch = case(loss)
    batch["y"][3:4, 0] = 1  # else NaN
    parts = parts_of(batch)
    mean = [sum(scalars_of(model(**part))[0] for part in parts) / len(parts)]
    assert worst(model, mean, scalars_of(model(**batch))) > 1e-2
    if loss is not LOSSES["mse"]:  # whose count is the rows'
        weighted = [sum(scalars_of(model(**part))[0] * size / ROWS for part, size in zip(parts, SIZES, strict=True))]
        assert worst(model, weighted, scalars_of(model(**batch))) > 1e-2


@pytest.mark.parametrize("loss", [LABELS["tokens"], LOSSES["mse"], WRITTEN["masked mean"], WRITTEN["over rows"]])
def test_a_wrong_count_fails_the_bar(loss):
    model, batch = case(loss)
    for of_counts in (max, lambda each: sum(each) * 1.001, lambda each: sum(each) - each[-1]):
        assert worst(model, summed(model, batch, of_counts=of_counts), scalars_of(model(**batch))) > 5e-4


def test_a_regulariser_counted_for_each_micro_batch_fails_the_bar():
    model, batch = case(WRITTEN["a regulariser"])
    assert worst(model, summed(model, batch, share=1.0), scalars_of(model(**batch))) > 1e-2


# ---- what is told


def test_counts_are_functions_of_inputs_buffers_and_constants():
    model, batch = case(LABELS["class weights"])
    found = reductions_of(model, part_of(batch, 0, 3), whole=batch)
    (count,), (loss,) = found.counts, found.losses
    assert {node.kind for node in count.nodes} == {"input", "buffer", "call"}
    assert count.nodes[-1] is count.result
    assert [node.target for node in found.graph.nodes if node.kind == "count"] == [0]
    assert loss.combine == "sum"


def test_each_term_has_a_count_of_its_own_and_a_scalar_its_way_to_combine():
    model, batch = case(WRITTEN["metrics"])
    found = reductions_of(model, part_of(batch, 0, 3), whole=batch)
    assert [loss.combine for loss in found.losses] == ["sum", "sum", "sum", "same", "same"]
    assert [node.target for node in found.graph.nodes if node.kind == "count"] == [0, 1, 2, 3, "share"]


def test_modules_and_draws_that_nobody_reads_stay():
    def loss(net: Net, h: Tensor, b: dict[str, Tensor]) -> Tensor:
        net.body[0](b["x"])
        torch.rand(2)
        return F.mse_loss(h, b["t"])

    model, batch = case(loss)
    found = reductions_of(model, part_of(batch, 0, 3), whole=batch)
    assert [node.target for node in found.graph.nodes if node.kind == "module"] == ["body.0", "body.2", "body.0"]
    assert torch.rand in [node.target for node in found.graph.nodes]


@pytest.mark.parametrize("mean", [lambda h, t: F.mse_loss(30 * h, t), lambda h, t: (30 * h - t).square().mean()])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_do_not_overflow(mean, dtype):
    torch.manual_seed(1)
    model, batch = Net(lambda net, h, b: mean(h, b["t"])).to(dtype), a_batch()
    batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
    batch["t"] = batch["t"] * 20 + 60
    (loss,), (expected,) = summed(model, batch), scalars_of(model(**batch))
    assert loss.dtype == dtype and float(expected.detach()) * batch["t"].numel() > torch.finfo(torch.float16).max
    assert worst(model, [loss], [expected]) < 0.05


def test_contexts_are_kept():
    def loss(net: Net, h: Tensor, b: dict[str, Tensor]) -> Any:
        with torch.no_grad():
            metric = (h - b["t"]).abs().mean()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            loss = F.mse_loss(h.float(), b["t"])
        return {"loss": loss, "metric": metric, "half": (h @ h.transpose(1, 2)).mean()}

    torch.manual_seed(1)
    model, batch = Net(loss), a_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses, expected = summed(model, batch), scalars_of(model(**batch))
    assert [x.dtype for x in losses] == [x.dtype for x in expected]
    assert [x.requires_grad for x in losses] == [True, False, True]
    assert worst(model, losses, expected) < 0.05


class Head(nn.Module):
    """A stage's module that gives the loss."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.out, self.criterion = nn.Linear(CLASSES, CLASSES), nn.CrossEntropyLoss(weight)

    def forward(self, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.out(h)
        return self.criterion(logits.transpose(1, 2), y), logits


def test_a_loss_inside_a_stages_module_is_rewritten_there():
    model, batch = case(lambda net, h, b: net.head(h, b["y"])[0] * 2)
    model.head = Head(torch.tensor([0.5, 1.0, 2.0, 0.25])).double()

    def leaf(name: str, module: nn.Module) -> int | None:
        return {"body": 0, "head": 1}.get(name)

    assert worst(model, summed(model, batch, leaf=leaf), [model(**batch)]) < 1e-9
    found = reductions_of(model, part_of(batch, 0, 3), whole=batch, leaf=leaf)
    stages = {node.target.__name__: node.stage for node in found.graph.nodes if node.kind == "call"}
    assert stages["cross_entropy"] == stages["over"] == 1 and stages["mul"] is None


def test_an_input_that_all_micro_batches_get_whole_is_no_count():
    loss: LossFunction = lambda net, h, b: F.mse_loss(h, b["t"]) * b["w"].sum() / b["w"].max() + b["w"].mean()  # noqa: E731
    check(loss, more={"w": torch.tensor([1.0, 3.0, 2.0])})


def test_a_loss_that_reads_values_is_rewritten():
    """The recorder cannot run F.gaussian_nll_loss, which looks whether a variance is negative."""
    model, batch = case(lambda net, h, b: F.gaussian_nll_loss(h, b["t"], b["v"]))
    batch["v"] = batch["t"][..., :1] ** 2 + 0.1

    def graph_of(size: int) -> tuple[Graph, Node]:
        part = {name: x.to("meta") for name, x in part_of(batch, 0, size).items()}
        inputs = [Node("input", number, value=x) for number, x in enumerate(part.values())]
        h = torch.empty(size, LENGTH, CLASSES, device="meta", dtype=torch.float64)
        body = Node("module", "body", (inputs[0],), value=h)
        loss = Node("call", F.gaussian_nll_loss, (body, inputs[3], inputs[4]), value=h.sum())
        return Graph([*inputs, body, loss], loss), loss

    losses, parts = [], parts_of(batch)
    for part, size in zip(parts, SIZES, strict=True):
        graph, loss = graph_of(size)
        found = rewrite(graph, [loss], other=graph_of(OTHER)[0])
        assert run(found.counts[0], model, part, {})[found.counts[0].result] == size * LENGTH * CLASSES
        losses.append(run(found.graph, model, part, {0: ROWS * LENGTH * CLASSES})[found.losses[0].node])
    assert worst(model, [sum(losses)], [model(**batch)]) < 1e-9


# ---- what is refused


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Refused:
    """Losses that are not linear in sums over the batch; `# here` marks the line that is named."""

    def sqrt(net, h, b):
        return F.mse_loss(h, b["t"]).sqrt()  # here

    def perplexity(net, h, b):
        return torch.exp(F.mse_loss(h, b["t"]))  # here

    def largest(net, h, b):
        losses = torch.stack(_two(net, h, b))
        return losses.max()  # here

    def square(net, h, b):
        return F.mse_loss(h, b["t"]) ** 2  # here

    def inverse(net, h, b):
        return 1 / F.mse_loss(h, b["t"])  # here

    def product(net, h, b):
        first, second = _two(net, h, b)
        return first * second  # here

    def floor(net, h, b):
        return torch.div(F.mse_loss(h, b["t"]), 2, rounding_mode="floor")  # here

    def counted_activations(net, h, b):
        keep = (h[..., 0] > 0).double()
        return (_each(h, b) * keep).sum() / keep.sum()  # here

    def pseudo_labels(net, h, b):
        pseudo = h.argmax(-1).reshape(-1)
        return F.cross_entropy(h.reshape(-1, CLASSES), pseudo)  # here

    def random_mask(net, h, b):
        keep = torch.rand(len(h), LENGTH) < 0.5
        return (_each(h, b) * keep).sum() / keep.sum()  # here

    def learned_weights(net, h, b):
        return F.cross_entropy(*_tokens(h, b), weight=net.scale.detach().expand(CLASSES).exp())  # here

    def counted_weights(net, h, b):
        weight = net.class_weight / b["m"].sum()
        return F.cross_entropy(*_tokens(h, b), weight=weight)  # here

    def class_frequencies(net, h, b):
        frequency = F.one_hot(b["y"].clamp(0), CLASSES).sum((0, 1))
        return (_each(h, b).sum() / frequency).sum()  # here

    def maximum(net, h, b):
        return h.max()  # here

    def norm(net, h, b):
        return torch.norm(h - b["t"])  # here

    def largest_input(net, h, b):
        return F.mse_loss(h, b["t"]) / b["t"].max()  # here

    def variance(net, h, b):
        spread = h.var(0)  # here
        return spread.mean()

    def one_sample(net, h, b):
        first = h[0]  # here
        return first.mean() + F.mse_loss(h, b["t"])

    def best(net, h, b):
        values, _ = h.max(0)  # here
        return values.sum()

    def root_of_rows(net, h, b):
        return _each(h, b).sum() / len(h) ** 0.5  # here

    def unbiased(net, h, b):
        return _each(h, b).sum() / (len(h) - 1)  # here

    def clamped_number(net, h, b):
        return torch.clamp(net.scale, max=len(h)) + F.mse_loss(h, b["t"])  # here

    def contrastive(net, h, b):
        u = h.mean(1)
        return F.cross_entropy(u @ u.T, torch.arange(len(u)))  # here

    def pairs(net, h, b):
        u = h.mean(1)
        return (u @ u.T).square().sum()  # here

    def centred(net, h, b):
        middle = h.mean(0)
        return (h - middle).square().mean()  # here

    def weighted_by_the_loss(net, h, b):
        return (h * F.mse_loss(h, b["t"])).mean()  # here

    def in_whole_numbers(net, h, b):
        return F.mse_loss(h, b["t"]).long() + F.mse_loss(h, b["t"])  # here

    def without_the_first(net, h, b):
        rest = h[1:]
        return rest.mean()  # here

    def with_a_memory(net, h, b):
        old = net.class_weight.expand(2, LENGTH, CLASSES)
        return F.mse_loss(torch.cat([h, old]), torch.cat([b["t"], old]))  # here

    def kept_by_a_function(net, h, b):
        return Through.apply(F.mse_loss(h, b["t"]))  # here

    def a_modules_value(net, h, b):
        middle = net.body[2](net.body[1](net.body[0](b["x"][0])))  # here
        return (middle * 2).mean() + F.mse_loss(h, b["t"])

    def through_a_module(net, h, b):
        loss = F.mse_loss(h, b["t"])
        return net.body[0](loss.expand(FEATURES)).sum()  # here

    def soft_maximum(net, h, b):
        return h.logsumexp((0, 1, 2))  # here


REFUSED = {
    "sqrt": "goes through sqrt(), which is not linear",
    "perplexity": "goes through exp(), which is not linear",
    "largest": "goes through max(), which is not linear",
    "square": "goes through pow(), which is not linear",
    "inverse": "goes through rdiv(), which is not linear",
    "product": "goes through mul(), which is not linear",
    "floor": "goes through div(), which is not linear",
    "counted_activations": "div() divides by a sum over the batch that depends on activations, so it is not known",
    "pseudo_labels": "the count that cross_entropy() divides by depends on activations",
    "random_mask": "div() divides by a sum over the batch that depends on random numbers",
    "learned_weights": "the count that cross_entropy() divides by depends on parameters",
    "counted_weights": "the count that cross_entropy() divides by depends on another count",
    "class_frequencies": "div() divides by a sum over the batch that has shape (4,)",
    "maximum": "max() makes a value of the whole batch that is not a sum or a mean over its samples",
    "norm": "norm() makes a value of the whole batch",
    "largest_input": "max() makes a value of the whole batch",
    "variance": "var() makes a value of the whole batch",
    "one_sample": "getitem() makes a value of the whole batch",
    "best": "max() makes a value of the whole batch",
    "root_of_rows": "div() takes the number 1.73205, which is 2.23607 with 1.66667 times the samples",
    "unbiased": "div() takes the number 2, which is 4 with 1.66667 times the samples: neither a constant nor a count",
    "clamped_number": "clamp() takes the number 3, which is 5 with 1.66667 times the samples",
    "contrastive": "cross_entropy() is over 9 entries, but over 25 with 5/3 of the samples",
    "pairs": "sum() is over 9 entries, but over 25 with 5/3 of the samples: not so many for each sample",
    "centred": "sub() combines a sum over the batch with values of single samples",
    "weighted_by_the_loss": "mul() combines a sum over the batch with values of single samples",
    "in_whole_numbers": "goes through long(), which is not linear",
    "without_the_first": "mean() is over 24 entries, but over 48 with 5/3 of the samples",
    "with_a_memory": "mse_loss() is over 60 entries, but over 84 with 5/3 of the samples",
    "kept_by_a_function": "goes through Through.apply(), which is not linear",
    "a_modules_value": "getitem() makes a value of the whole batch",
    "through_a_module": "goes through module 'body.0', which is not linear",
    "soft_maximum": "logsumexp() makes a value of the whole batch",
}


def refusal(loss: LossFunction, **options: Any) -> LossError:
    model, batch = case(loss)
    with pytest.raises(LossError) as caught:
        reductions_of(model, part_of(batch, 0, 3), whole=batch, **options)
    assert 'wh.pipeline(micro_batch_loss="mean")' in str(caught.value.fix)
    return caught.value


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_linear_is_refused(name):
    loss = vars(Refused)[name]
    error = refusal(loss)
    lines, first = inspect.getsourcelines(loss)
    line = first + next(number for number, text in enumerate(lines) if "# here" in text)
    assert REFUSED[name] in error.what
    assert error.where == f"tests/unit/trace/test_reductions.py:{line}"


def test_every_refused_loss_is_tried():
    assert {name for name in vars(Refused) if not name.startswith("_")} == set(REFUSED)


@pytest.mark.parametrize("name", ["sqrt", "product", "pseudo_labels", "contrastive", "unbiased"])
def test_a_mean_over_rows_is_taken_where_it_is_asked_for(name):
    model, batch = case(vars(Refused)[name])
    batch["y"][3:4, 0] = 1  # else NaN
    losses = summed(model, batch, micro_batch_loss="mean") if name != "unbiased" else None
    parts = parts_of(batch)
    if losses is None:  # a micro-batch of one row has no unbiased mean
        parts = parts[:1]
        found = reductions_of(model, parts[0], whole=batch, micro_batch_loss="mean")
        assert [loss.combine for loss in found.losses] == ["rows"] and found.losses[0].node in found.graph.nodes
        return
    mean = sum(model(**part) * size / ROWS for part, size in zip(parts, SIZES, strict=True))
    assert worst(model, losses, [mean]) < 1e-9


def test_only_the_scalar_that_is_not_linear_is_a_mean_over_rows():
    def loss(net: Net, h: Tensor, b: dict[str, Tensor]) -> dict[str, Tensor]:
        loss = F.cross_entropy(*_tokens(h, b))
        return {"loss": loss, "perplexity": loss.exp()}

    model, batch = case(loss)
    batch["y"][3:4, 0] = 1
    found = reductions_of(model, part_of(batch, 0, 3), whole=batch, micro_batch_loss="mean")
    assert [loss.combine for loss in found.losses] == ["sum", "rows"]
    losses = summed(model, batch, micro_batch_loss="mean")
    assert worst(model, losses[:1], [model(**batch)["loss"]]) < 1e-9


def test_the_scalar_as_it_was_and_the_rewritten_one_change_no_tensor_of_each_other():
    def loss(net: Net, h: Tensor, b: dict[str, Tensor]) -> dict[str, Tensor]:
        loss = (h * b["t"]).sum()
        loss *= 3
        loss += F.mse_loss(h, b["t"])
        return {"loss": loss, "shown": loss.square()}

    model, batch = case(loss)
    losses = summed(model, batch, micro_batch_loss="mean")
    shown = sum(model(**part)["shown"] * size / ROWS for part, size in zip(parts_of(batch), SIZES, strict=True))
    assert worst(model, losses, [model(**batch)["loss"], shown]) < 1e-9


def _other_calls(net: Net, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    h = h.abs() if len(h) > 3 else h.sin()
    return h.mean()


def _more_calls(net: Net, h: Tensor, b: dict[str, Tensor]) -> Tensor:
    loss = h.mean()
    return loss if len(h) == 3 else loss + 1


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (_other_calls, "calls sin() at one batch size and abs() at another"),
        (_more_calls, "8 calls at one batch size and 9 at another"),
    ],
)
def test_a_forward_that_depends_on_the_number_of_samples_is_refused(loss, what):
    model, batch = case(loss)
    part = part_of(batch, 0, 3)
    with pytest.raises(LossError, match=r"make the same calls whatever the number of samples") as caught:
        reductions_of(model, part, whole=batch)
    assert what in caught.value.what and "test_reductions.py:" in str(caught.value.where)
    found = reductions_of(model, part, whole=batch, micro_batch_loss="mean")
    assert [loss.combine for loss in found.losses] == ["rows"]


def test_a_second_recording_of_the_same_size_is_refused():
    model, batch = case(LOSSES["mse"])
    with pytest.raises(ValueError, match="same batch size"):
        reductions_of(model, part_of(batch, 0, OTHER), whole=batch)
