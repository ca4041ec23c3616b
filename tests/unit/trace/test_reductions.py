"""Losses of micro-batches that add up to the whole batch's: a recorded forward's reductions, rewritten and run."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whale_torch.errors import LossError
from whale_torch.trace.graph import Graph, Node, map_nodes, nodes_in, tensors_in
from whale_torch.trace.reductions import Reductions, rewrite
from whale_torch.trace.tracer import record
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


def recorded(model: nn.Module, batch: dict[str, Any]) -> Graph:
    return record(Twin.of(model, torch.device("cpu")), (), batch, owns_parameters)


def reductions_of(model: nn.Module, batch: dict[str, Any], two: bool = True, **options: Any) -> Reductions:
    """Of a micro-batch, with a second recording of other size."""
    whole = options.pop("whole", batch)
    graph = recorded(model, batch)
    before = [(node, node.target, node.args, dict(node.kwargs)) for node in graph.nodes]
    other = recorded(model, part_of(whole, 0, OTHER)) if two else None
    found = rewrite(graph, scalar_nodes(graph), other=other, **options)
    assert before == [(node, node.target, node.args, dict(node.kwargs)) for node in graph.nodes]
    return found


def summed(model: nn.Module, batch: dict[str, Any], *, tensors: bool = False, **options: Any) -> list[Tensor]:
    """The output's scalars as micro-batches and replicas give them."""
    parts = parts_of(batch)
    rewritten = [reductions_of(model, part, whole=batch, **options) for part in parts]
    totals: dict[Any, Any] = {"share": 1 / len(parts)}
    for number in range(len(rewritten[0].counts)):
        each = [float(run(r.counts[number], model, part, {})[r.counts[number].result]) for r, part in zip(rewritten, parts)]
        totals[number] = torch.tensor(sum(each), dtype=torch.float64) if tensors else sum(each)
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
        assert mine.shape == theirs.shape
    values = [abs(float(a) - float(b)) / max(abs(float(b)), 1e-3) for a, b in zip(losses, expected, strict=True)]
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


def check(loss: LossFunction, *, bar: float = 1e-9, **options: Any) -> None:
    torch.manual_seed(1)
    model, batch = Net(loss).double(), a_batch(**options.pop("more", {}))
    batch = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in batch.items()}
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
    "bce with weights": lambda net, h, b: F.binary_cross_entropy_with_logits(h, _unit(b["t"]), weight=b["m"][..., None]),
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
    "negation, casts and views": lambda net, h, b: -(F.mse_loss(h, b["t"]).float().double().unsqueeze(0).view(1, 1)[0, 0]),
    "squeezed": lambda net, h, b: F.mse_loss(h[..., 0].mean(1).squeeze(), b["t"][:, 0, 0].squeeze()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_means(name):
    check(LOSSES[name], bar=1e-7 if "cast" in name else 1e-9)


@pytest.mark.parametrize("name", ["mse", "bce", "kl batchmean", "mean", "mean of means", "none then mean", "squeezed"])
def test_losses_from_one_recording(name):
    check(LOSSES[name], two=False)


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
    check(WRITTEN[name], bar=1e-5 if "tensor of rows" in name or name == "like the logits" else 1e-9)
