"""replica: n ranks equal one process, whatever the model uses and however uneven the rows are."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.replica_cases import (
    CASES,
    WIDTH,
    Batch,
    batch_of,
    build,
    gradients,
    mlp,
    one_process,
    outside,
    replica_rank,
    rows_of,
    same_on_all_ranks,
    share,
    summed,
)
from tests.world import world

BAR = 2e-5
WORLDS = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("kind", ["even", "uneven", "empty"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.matrix(keep=4)
def test_ranks_equal_one_process(name: str, kind: str, n: int) -> None:
    rows, steps = rows_of(n, kind), 3
    expected = one_process(name, rows, steps)
    results = world(n, replica_rank, name, rows, steps, {})
    assert same_on_all_ranks([r.gradients for r in results]) and same_on_all_ranks([r.stepped for r in results])
    assert relative_error(results[0].gradients, expected.gradients) <= BAR
    assert relative_error(results[0].stepped, expected.stepped) <= BAR
    torch.testing.assert_close(torch.cat([r.evaluated for r in results]), expected.evaluated)
    if name != "inside":  # a mean over the labels that are left is not the mean of the ranks' means
        losses = sum(r.loss * count for r, count in zip(results, rows, strict=True) if count) / sum(rows)
        assert losses == pytest.approx(expected.loss, rel=1e-5)


# ---- mutations: the comparison above must see each of these ----


def _no_weight(call_module: Any) -> None:
    call_module.Call.weight = lambda self: 1.0


def _no_mean(reduction_module: Any) -> None:
    whole = reduction_module.Reduction.start

    def start(self: Any, buffer: Tensor, packed: Any) -> Any:
        wait = whole(self, buffer, packed)
        return lambda: wait() * self.copies.size

    reduction_module.Reduction.start = start


def _no_flags(reducer_module: Any) -> None:
    """What another rank has a gradient for is of no interest."""
    whole = reducer_module.Reducer._land

    def land(self: Any) -> None:
        before = [(piece.parameter, piece.parameter.grad) for piece in self._in_flight[0][0].pieces]
        whole(self)
        for parameter, grad in before:
            parameter.grad = grad

    reducer_module.Reducer._land = land


def _no_global_count(runtime_module: Any) -> None:
    runtime_module.TrueMeanLoss = lambda *args: contextlib.nullcontext()


# name -> the module it changes, the change, the model, its rows, and the error that it ends in if not in a wrong result
MUTATIONS: dict[str, tuple[str, Callable[[Any], None], str, str, tuple[type[Exception], str] | None]] = {
    "weight": ("whale_torch.comm.call", _no_weight, "mlp", "uneven", None),
    "mean": ("whale_torch.comm.reduction", _no_mean, "mlp", "even", None),
    "flags": (
        "whale_torch.comm.reducer",
        _no_flags,
        "branches",
        "uneven",
        (wh.CommError, "differs between copies .* None on rank"),
    ),
    "global count": ("whale_torch.strategies.runtime", _no_global_count, "inside", "uneven", None),
}


def mutated_rank(rank: int, n: int, mutation: str, rows: list[int]) -> Any:
    module, change, name, _, _ = MUTATIONS[mutation]
    change(importlib.import_module(module))
    return replica_rank(rank, n, name, rows, 1, {})


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_sees_a_mutation(mutation: str) -> None:
    _, _, name, kind, ends = MUTATIONS[mutation]
    rows = rows_of(3, kind)
    with pytest.raises(ends[0], match=ends[1]) if ends else contextlib.nullcontext():
        ranks, expected = world(3, mutated_rank, mutation, rows), one_process(name, rows, 1)
        assert max(relative_error(rank.gradients, expected.gradients) for rank in ranks) > 100 * BAR


# ---- one backward after the other ----


def accumulation_rank(rank: int, n: int, kind: str) -> dict[str, Tensor | None]:
    model = wh.parallelize(build("tied"))
    first, second = (share(batch_of(sum(rows_of(n, "uneven")), seed=s), rows_of(n, "uneven"), rank) for s in (1, 2))
    if kind == "synced twice":
        outside(model, first).backward()
        outside(model, second).backward()
    elif kind == "no_sync":
        with model.no_sync():
            outside(model, first).backward()
        outside(model, second).backward()
    elif kind == "two forwards":
        one, two = outside(model, first), outside(model, second)
        (one + two).backward()
    elif kind == "retained":
        loss = outside(model, first)
        loss.backward(retain_graph=True)
        loss.backward()
    elif kind == "zeroed":
        outside(model, second).backward()
        model.zero_grad(set_to_none=False)
        outside(model, first).backward()
    return gradients(model)


@pytest.mark.parametrize("kind", ["synced twice", "no_sync", "two forwards", "retained", "zeroed"])
def test_accumulation(kind: str) -> None:
    n = 3
    model, num_rows = build("tied"), sum(rows_of(n, "uneven"))
    outside(model, batch_of(num_rows, seed=1)).backward()
    if kind == "retained":
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad * 2
    elif kind != "zeroed":
        outside(model, batch_of(num_rows, seed=2)).backward()
    results = world(n, accumulation_rank, kind)
    assert relative_error(results[0], gradients(model)) <= BAR and same_on_all_ranks(results)


def nothing_left_over_rank(rank: int, n: int) -> list[bool]:
    """A parameter used under no_sync and cleared is unused afterwards, on every rank."""
    model = wh.parallelize(build("branches"))
    x = torch.ones(4, WIDTH)
    with wh.no_sync(model):
        model(-x).sum().backward()
    model.zero_grad()
    model(x).sum().backward()
    return [model.left.weight.grad is not None, model.right.weight.grad is None, model.never.weight.grad is None]


def test_cleared_gradients_are_unused_again() -> None:
    assert all(all(found) for found in world(2, nothing_left_over_rank))


def switched_rank(rank: int, n: int) -> list[dict[str, Tensor | None]]:
    """requires_grad changes after parallelize: what was frozen trains, what trained is frozen."""
    torch.manual_seed(0)
    model = mlp()
    model[0].requires_grad_(False)
    model = wh.parallelize(model)
    found = []
    for first, last in ((False, True), (True, True), (True, False)):
        model[0].requires_grad_(first)
        model[4].requires_grad_(last)
        model.zero_grad()
        outside(model, share(batch_of(8), [4] * n, rank)).backward()
        found.append(gradients(model))
    return found


def test_requires_grad_switched_after_parallelize() -> None:
    torch.manual_seed(0)
    model, results = mlp(), world(2, switched_rank)
    for step, (first, last) in enumerate(((False, True), (True, True), (True, False))):
        model[0].requires_grad_(first)
        model[4].requires_grad_(last)
        model.zero_grad()
        outside(model, batch_of(8)).backward()
        assert all(relative_error(r[step], gradients(model)) <= BAR for r in results)


# ---- what the user may do around it ----


class Signed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, *, scale: float = 1.0, labels: Tensor | None = None) -> dict[str, Any]:
        """As it was written."""
        logits = self.net(x) * scale
        return {"logits": logits, "loss": None if labels is None else F.cross_entropy(logits, labels)}


def _triple(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3.0)


def surface_rank(rank: int, n: int) -> dict[str, Any]:
    torch.manual_seed(0)
    plain = Signed()
    before = (repr(plain), list(plain.state_dict()), inspect.signature(plain.forward), plain.forward.__doc__)
    seen: list[str] = []
    plain.register_forward_pre_hook(lambda m, a: seen.append("pre"))
    plain.register_forward_hook(lambda m, a, out: seen.append("post"))
    plain.net[0].weight.register_hook(lambda g: seen.append("tensor"))
    early = plain.net[0].weight
    early.register_post_accumulate_grad_hook(lambda p: seen.append("early"))
    model = wh.parallelize(plain)
    model.net[0].weight.register_post_accumulate_grad_hook(_triple)
    batch = share(batch_of(8), [4] * n, rank)
    model(x=batch[0], scale=1.0, labels=batch[1])["loss"].backward()
    after = (repr(model), list(model.state_dict()), inspect.signature(model.forward), model.forward.__doc__)
    return {
        "unchanged": before == after
        and isinstance(model, Signed)
        and type(model).__name__ == "Signed"
        and model is plain,
        "same objects": model.net[0].weight is early,
        "seen": seen,
        "gradients": gradients(model),
    }


def test_names_signature_and_hooks_hold() -> None:
    torch.manual_seed(0)
    model = Signed()
    model(*batch_of(8)[:1], labels=batch_of(8)[1])["loss"].backward()
    model.net[0].weight.grad.mul_(3.0)  # type: ignore[union-attr]  # the hook's work, before the mean
    for found in world(2, surface_rank):
        assert found["unchanged"] and found["same objects"] and found["seen"] == ["pre", "post", "tensor", "early"]
        assert relative_error(found["gradients"], gradients(model)) <= BAR


def in_place_rank(rank: int, n: int) -> dict[str, Tensor | None]:
    model = wh.parallelize(build("mlp"))
    out = model(share(batch_of(8), [4] * n, rank)[0])
    out[:, 0] = 0.0
    out *= 2
    out.square().mean().backward()
    return gradients(model)


def test_an_output_may_be_written_to() -> None:
    model = build("mlp")
    out = model(batch_of(8)[0])
    out[:, 0] = 0.0
    out *= 2
    out.square().mean().backward()
    assert relative_error(world(2, in_place_rank)[0], gradients(model)) <= BAR


def autograd_grad_rank(rank: int, n: int) -> list[Any]:
    """torch.autograd.grad is the rank's own affair: no message (rank 0 alone calls it), no weight."""
    model = wh.parallelize(build("mlp"))
    rows = rows_of(n, "uneven")
    x, y = share(batch_of(sum(rows)), rows, rank)
    x.requires_grad_(True)
    loss = outside(model, (x, y))
    own: list[Tensor] = []
    if rank == 0:
        own = list(torch.autograd.grad(loss, [x, model[0].weight], retain_graph=True))
        assert model[0].weight.grad is None
    loss.backward(inputs=[model[4].weight], retain_graph=True)
    partial = model[4].weight.grad.clone()
    model.zero_grad()
    loss.backward()
    return [own, partial, gradients(model)]


def test_autograd_grad_is_untouched() -> None:
    n = 2
    rows, results = rows_of(2, "uneven"), world(n, autograd_grad_rank)
    model, batch = build("mlp"), batch_of(sum(rows))
    outside(model, batch).backward()
    assert relative_error(results[1][2], gradients(model)) <= BAR
    torch.testing.assert_close(results[1][1], model[4].weight.grad)
    x, y = share(batch, rows, 0)
    x.requires_grad_(True)
    expected = torch.autograd.grad(outside(build("mlp"), (x, y)), x)[0]
    torch.testing.assert_close(results[0][0][0], expected)


def penalty_rank(rank: int, n: int, kind: str) -> Any:
    """A penalty on the gradient of the inputs, through torch.autograd.grad(create_graph=True)."""
    model = wh.parallelize(build("mlp"))
    x, _ = share(batch_of(sum(rows_of(n, kind))), rows_of(n, kind), rank)
    return _penalised(model, x)


def _penalised(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    x = x.clone().requires_grad_(True)
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.square().mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
    return gradients(model)


def test_a_gradient_penalty_is_exact_or_refused() -> None:
    expected = _penalised(build("mlp"), batch_of(8)[0])
    assert relative_error(world(2, penalty_rank, "even")[0], expected) <= BAR
    with pytest.raises(wh.LossError, match=r"gradient of a gradient .* they have \[1, 4\] rows"):
        world(2, penalty_rank, "uneven")


# ---- loss="sum" ----


def sum_rank(rank: int, n: int, rows: list[int], loss: str) -> dict[str, Tensor | None]:
    model = wh.parallelize(build("mlp"), default=wh.replica(loss="sum") if loss == "sum" else None)
    summed(model, share(batch_of(sum(rows)), rows, rank)).backward()
    return gradients(model)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("kind", ["even", "empty"])
def test_a_sum_of_samples_is_summed_over_ranks(kind: str, n: int) -> None:
    rows, model = rows_of(n, kind), build("mlp")
    summed(model, batch_of(sum(rows))).backward()
    assert relative_error(world(n, sum_rank, rows, "sum")[-1], gradients(model)) <= BAR


def test_without_loss_sum_it_is_a_mean() -> None:
    model = build("mlp")
    summed(model, batch_of(8)).backward()
    assert relative_error(world(2, sum_rank, [4, 4], "mean")[0], gradients(model)) > 0.1


def mean_inside_rank(rank: int, n: int, rows: list[int]) -> dict[str, Tensor | None]:
    """A mean loss inside a model whose loss is declared a sum: labels are counted, so the mean stays the true one."""
    model = wh.parallelize(build("inside"), default=wh.replica(loss="sum"))
    x, y = share(batch_of(sum(rows), ignored=True), rows, rank)
    model(x, labels=y)[0].backward()
    return gradients(model)


def test_a_counted_mean_inside_stays_a_mean() -> None:
    rows, model = rows_of(3, "uneven"), build("inside")
    x, y = batch_of(sum(rows), ignored=True)
    model(x, labels=y)[0].backward()
    assert relative_error(world(3, mean_inside_rank, rows)[0], gradients(model)) <= BAR


class Headed(nn.Module):
    """Replicated features and a split classifier, under one kind of loss."""

    def __init__(self) -> None:
        super().__init__()
        with wh.replica(loss="sum"):
            self.features = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh())
        with wh.split():
            self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def headed_rank(rank: int, n: int, rows: list[int]) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model = wh.parallelize(Headed(), default=wh.replica(loss="sum"))
    summed(model, share(batch_of(sum(rows)), rows, rank)).backward()
    return gradients(model)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_sum_with_a_split_beside(n: int) -> None:
    rows = rows_of(n, "uneven")
    torch.manual_seed(0)
    model = Headed()
    summed(model, batch_of(sum(rows))).backward()
    assert relative_error(world(n, headed_rank, rows)[0], gradients(model)) <= BAR


# ---- where the samples are counted ----


class Sequence(nn.Module):
    """(L, N, E) sequences, beside a (L, L) mask and (1, N) weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 1)

    def forward(self, mask: Tensor, x: Tensor, offset: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.inner(torch.einsum("kl,lne->kne", mask, x)))
        out = self.last(h).mean(0)[:, 0]  # a value for each sample
        return out if offset is None else out + offset


def sequence_inputs(num_rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(4, 4, generator=generator).tril(), torch.randn(4, num_rows, WIDTH, generator=generator)


def sequence_rank(rank: int, n: int, batch_dim: Any, rows: list[int], how: str) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model = wh.parallelize(Sequence(), default=wh.replica(batch_dim=batch_dim))
    mask, x = sequence_inputs(sum(rows))
    mine = x.split(rows, 1)[rank]
    out = model(mask, mine) if how == "places" else model(x=mine, mask=mask) if how == "names" else model(mask, x=mine)
    out.square().mean().backward()
    return gradients(model)


@pytest.mark.parametrize("how", ["places", "names", "both"])
def test_samples_are_counted_at_the_input_named(how: str) -> None:
    rows = [1, 4, 2]
    torch.manual_seed(0)
    model = Sequence()
    model(*sequence_inputs(sum(rows))).square().mean().backward()
    results = world(3, sequence_rank, {"x": 1, "mask": None}, rows, how)
    assert relative_error(results[0], gradients(model)) <= BAR
    assert (
        relative_error(world(3, sequence_rank, 0, [3, 3, 3], how)[0], gradients(model)) > BAR
    )  # other rows, so another result


def test_the_first_tensor_counts_along_batch_dim() -> None:
    rows = [1, 4]
    torch.manual_seed(0)
    model = Sequence()
    model(*sequence_inputs(sum(rows))).square().mean().backward()
    assert relative_error(world(2, sequence_rank, 1, rows, "names")[0], gradients(model)) <= BAR


@pytest.mark.parametrize(
    ("batch_dim", "kind", "text"),
    [
        ({"y": 0}, wh.PlanError, r"names \['y'\], but Sequence.forward takes \['mask', 'x', 'offset'\]"),
        ({"x": None}, wh.PlanError, r"gives none of them a dim"),
        ({"offset": 0}, wh.LayoutError, r"without a tensor for any of \['offset'\]"),
        ({"x": 1, "mask": 0}, wh.LayoutError, r"disagree: \{'mask': 4, 'x': [13]\}"),
    ],
)
def test_what_does_not_count_samples_raises(batch_dim: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        world(2, sequence_rank, batch_dim, [1, 3], "places")


class Masked(nn.Module):
    """A mask comes first; the samples come second."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, mask: Tensor, x: Tensor) -> Tensor:
        return self.inner(x @ mask)


def ambiguous_rank(rank: int, n: int, rows: list[int]) -> None:
    wh.parallelize(Masked())(torch.eye(4), torch.randn(rows[rank], 4)).mean().backward()


def test_uneven_samples_behind_a_mask_raise() -> None:
    world(2, ambiguous_rank, [3, 3])
    with pytest.raises(wh.LayoutError, match=r"first has \[4, 4\] along dim 0 on the 2 feeds, another has \[2, 3\]"):
        world(2, ambiguous_rank, [2, 3])


# ---- equal starts, dropout ----


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(3))
        self.register_buffer("flags", torch.rand(4) > 0.5)
        self.register_buffer("wide", torch.randn(1).expand(5))
        self.inner, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(x))


def start_rank(rank: int, n: int) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(rank)
    model = wh.parallelize(Noisy())
    return {k: v.clone() for k, v in model.state_dict().items()}, model(torch.ones(8, WIDTH)) == 0


def test_ranks_start_equal_and_drop_differently() -> None:
    results = world(3, start_rank)
    assert same_on_all_ranks([state for state, _ in results])
    assert not torch.equal(results[0][1], results[1][1]) and not torch.equal(results[1][1], results[2][1])


class SharedNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with wh.replica():
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
            with wh.split(size=2):
                self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.inner(x)
        return h, self.head(h)


def shared_noise_rank(rank: int, n: int) -> Tensor:
    model = wh.parallelize(SharedNoise())
    return model(torch.ones(8, WIDTH))[0] == 0


def test_one_replica_drops_alike() -> None:
    a, b, c, d = world(4, shared_noise_rank)
    assert torch.equal(a, b) and torch.equal(c, d) and not torch.equal(a, c)


# ---- one replica is fed one batch ----


def fed_rank(rank: int, n: int, change: str, training: bool) -> str:
    torch.manual_seed(0)
    model = wh.parallelize(SharedNoise()).train(training)
    batch: list[Batch] = [batch_of(6, seed=rank // 2 + step) for step in range(3)]
    with torch.set_grad_enabled(training):
        model(batch[0][0])
        x = batch[1][0]
        if rank == 1:
            x = {"order": x.flip(0), "bit": x + torch.eye(6)[:, :WIDTH] * 1e-7, "rows": x[:-1], "pairs": x}[change]
        if change == "pairs":  # equal up to an exclusive or of all bits
            x = torch.ones(6, WIDTH) * (rank + 1 if rank < 2 else 1)
        try:
            model(x)
        except wh.LayoutError as caught:
            return str(caught)
    return ""


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", ["order", "bit", "rows", "pairs"])
@pytest.mark.matrix(keep=2)
def test_ranks_of_one_replica_fed_differently_raise(change: str, training: bool) -> None:
    texts = world(4, fed_rank, change, training)
    assert len(set(texts)) == 1, "every rank raises, with one text"
    rows = r"\[6, 5\]" if change == "rows" else r"\[6, 6\]"
    assert re.search(
        rf"ranks \[0, 1\] are one replica but were fed different batches \(rows {rows}, input hashes", texts[0]
    )


def drawn_rank(rank: int, n: int, dropout: float, reseed: bool) -> str:
    torch.manual_seed(0)
    model = wh.parallelize(SharedNoise())
    model.inner[1].p = dropout
    x = batch_of(6, seed=rank // 2)[0]
    model(x)
    if rank == 2:
        torch.randn(1)
    model.eval()(x)
    if reseed:
        torch.manual_seed(7 + rank // 2)
    try:
        model.train()(x)
    except wh.LayoutError as caught:
        return str(caught)
    return ""


def test_ranks_of_one_replica_that_drew_differently_raise() -> None:
    texts = world(4, drawn_rank, 0.5, False)
    assert len(set(texts)) == 1, "every rank raises, with one text"
    text = r"ranks \[2, 3\] are one replica and were fed the same batch, but their random states differ \(hashes"
    assert re.search(text, texts[0])


@pytest.mark.parametrize(("dropout", "reseed"), [(0.0, False), (0.5, True)])
def test_random_states_may_differ_where_no_mask_does(dropout: float, reseed: bool) -> None:
    assert world(4, drawn_rank, dropout, reseed) == [""] * 4


# ---- BatchNorm stays local unless asked ----


def local_buffers_rank(rank: int, n: int) -> tuple[Tensor, Tensor]:
    model = wh.parallelize(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)))
    model(batch_of(4, seed=rank)[0])
    return model[0].running_mean.clone(), wh.full_state_dict(model)["0.running_mean"]


def test_full_state_dict_has_the_buffers_of_rank_0() -> None:
    results = world(3, local_buffers_rank)
    assert not torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(whole, results[0][0]) for _, whole in results)
