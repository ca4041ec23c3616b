"""The gradient reducer: what travels, in what precision, in how much memory, and how a failed backward ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.replica_cases import (
    WIDTH,
    Result,
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
)
from tests.world import outcomes, world
from whale_torch.comm import reduction
from whale_torch.comm.reducer import Reducer
from whale_torch.strategies.runtime import runtime_of

# of single elements, which a ring of 8 rounds eight times; above 16 ranks twice
BARS = {None: 2e-5, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


# ---- precision, and two levels ----


def precise_rank(rank: int, n: int, dtype: torch.dtype | None, options: dict[str, Any]) -> Result:
    return replica_rank(rank, n, "mlp", rows_of(n, "uneven"), 1, {"reduce_dtype": dtype, **options})


@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize(("n", "local"), [(2, 2), (4, 4), (8, 8), (4, 2), (8, 4), (8, 2)])
@pytest.mark.matrix(keep=2)
def test_every_dtype_flat_and_hierarchical(n: int, local: int, dtype: torch.dtype | None) -> None:
    results = world(n, precise_rank, dtype, {"all_reduce": "auto" if local < n else "flat"}, local_world_size=local)
    expected = one_process("mlp", rows_of(n, "uneven"), 1)
    assert same_on_all_ranks([r.gradients for r in results])
    assert relative_error(results[0].gradients, expected.gradients) <= BARS[dtype]


def wide_rank(rank: int, n: int, dtype: torch.dtype, options: dict[str, Any]) -> Result:
    """As with more ranks than a ring is good for."""
    reduction._RING_RANKS = 1
    return precise_rank(rank, n, dtype, options)


@pytest.mark.parametrize(("dtype", "bar"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)], ids=str)
@pytest.mark.parametrize(("n", "local"), [(3, 3), (4, 2)])
def test_many_ranks_round_twice(n: int, local: int, dtype: torch.dtype, bar: float) -> None:
    results = world(n, wide_rank, dtype, {"all_reduce": "auto" if local < n else "flat"}, local_world_size=local)
    expected = one_process("mlp", rows_of(n, "uneven"), 1)
    assert same_on_all_ranks([r.gradients for r in results])
    assert relative_error(results[0].gradients, expected.gradients) <= bar


class Given(nn.Module):
    """A parameter whose gradient on this rank is what the input says."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(num))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


Values = list[list[float]]


def given_rank(rank: int, n: int, dtype: torch.dtype, batches: list[Values], hierarchical: bool) -> list[Tensor]:
    """The averaged gradients of one backward for each batch; a batch has the gradients of each rank."""
    how = "hierarchical" if hierarchical else "flat"
    model = wh.parallelize(Given(4), default=wh.replica(reduce_dtype=dtype, all_reduce=how))  # type: ignore[arg-type]
    found = []
    for values in batches:
        model.zero_grad()
        model(torch.tensor(values[rank]).unsqueeze(0)).sum().backward()
        found.append(model.w.grad.clone())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("local", [None, 2])
def test_large_tiny_and_not_finite_gradients(dtype: torch.dtype, local: int | None) -> None:
    large = [[6e4, -6e4, 6e4 - r, 1e3] for r in range(4)]
    tiny = [[1e-7 * (r + 1), -1e-7, 3e-9, 0.0] for r in range(4)]
    broken = [[1.0, float("inf") if r == 1 else 2.0, float("nan") if r == 2 else 3.0, 4.0] for r in range(4)]
    results = world(4, given_rank, dtype, [large, tiny, broken, large], bool(local), local_world_size=local)
    for found in results:
        assert all(torch.equal(a, b) for a, b in zip(found[:2], results[0][:2], strict=True))
        torch.testing.assert_close(found[0], torch.tensor(large).mean(0), rtol=BARS[dtype], atol=0.0)
        torch.testing.assert_close(found[1], torch.tensor(tiny).mean(0), rtol=BARS[dtype] * 2, atol=0.0)
        assert found[2].isfinite().tolist() == [True, False, False, True], "a GradScaler on any rank sees it"
        assert torch.equal(found[3], found[0]), "nothing of it stays in the buffers"


def test_scaling_is_needed_for_fp16() -> None:
    values = [[6e4, 1e-7, 1.0, 1.0] for _ in range(4)]
    (found,) = world(4, unscaled_rank, values)[0]
    assert not bool(found[0].isfinite())


def unscaled_rank(rank: int, n: int, values: Values) -> list[Tensor]:
    from whale_torch.comm.reduction import Reduction

    Reduction._shared_scale = lambda *args: 1.0  # type: ignore[method-assign]
    return given_rank(rank, n, torch.float16, [values], False)


def dtypes_rank(rank: int, n: int, kind: str) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model = mlp().to(torch.bfloat16 if kind == "bf16" else torch.float64)
    if kind == "mixed":
        model[0].float()
        model[0].register_forward_pre_hook(lambda m, a: (a[0].float(),))
        model[0].register_forward_hook(lambda m, a, out: out.double())
    model = wh.parallelize(model)
    x, y = share(batch_of(8), [8 // n] * n, rank)
    outside(model, (x.to(torch.bfloat16 if kind == "bf16" else torch.float64), y)).backward()
    return gradients(model)


@pytest.mark.parametrize("kind", ["bf16", "mixed"])
def test_parameters_of_any_dtype(kind: str) -> None:
    results = world(2, dtypes_rank, kind)
    assert same_on_all_ranks(results)
    assert relative_error(results[0], dtypes_rank(0, 1, kind)) <= (2e-2 if kind == "bf16" else 2e-6)


class Conjugated(nn.Module):
    """Its gradient is one that torch has only noted as conjugated, and not written so."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(4) + 1j)

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real((self.w.conj() * x).resolve_conj())


def conjugated_rank(rank: int, n: int) -> Tensor:
    model = wh.parallelize(Conjugated()) if n > 1 else Conjugated()
    x = torch.complex(torch.arange(8.0).view(2, 4), torch.ones(2, 4))
    model(x[rank : rank + 1] if n > 1 else x).square().mean().backward()
    return model.w.grad.resolve_conj()


def test_conjugated_gradients() -> None:
    expected = conjugated_rank(0, 1)
    for found in world(2, conjugated_rank):
        torch.testing.assert_close(found, expected)


# ---- buckets ----


class Large(nn.Module):
    """A parameter larger than a bucket, one that is one long row, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.row = nn.Linear(WIDTH, 500), nn.Parameter(torch.randn(1, 3000))
        self.last = nn.Sequential(nn.Linear(500, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))) * self.row.mean()


def staged_rank(rank: int, n: int, dtype: torch.dtype | None, in_flight: int) -> dict[str, Any]:
    torch.manual_seed(0)
    most = 0
    start = Reducer._launch

    def launch(self: Reducer, **options: bool) -> None:
        nonlocal most
        start(self, **options)
        most = max(most, len(self._in_flight))

    Reducer._launch = launch  # type: ignore[method-assign]
    model = wh.parallelize(Large(), default=wh.replica(bucket_bytes=2000, max_in_flight=in_flight, reduce_dtype=dtype))
    for _ in range(3):
        model.zero_grad()
        outside(model, share(batch_of(8), [4] * n, rank)).backward()
    (reducer,) = runtime_of(model, "").gradients.reducers
    assert isinstance(reducer, Reducer)
    buffers = [reducer.staging.take() for _ in range(reducer.staging.allocated)]
    return {
        "gradients": gradients(model),
        "most": most,
        "allocated": len(buffers),
        "bytes": [b.numel() * b.element_size() for b in buffers],
        "buckets": [b.num_bytes for b in reducer.buckets],
    }


@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_staging_memory_is_bounded(in_flight: int, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = Large()
    outside(model, batch_of(8)).backward()
    for found in world(2, staged_rank, dtype, in_flight):
        assert relative_error(found["gradients"], gradients(model)) <= BARS[dtype]
        assert found["most"] <= in_flight and found["allocated"] == in_flight, "buffers are used again"
        assert sum(size > 2000 for size in found["buckets"]) == 1, "one row alone may be larger"
        assert len(found["buckets"]) > 20 and max(found["bytes"]) <= 3000 * 4 + 100


def many_rank(rank: int, n: int) -> int:
    model = wh.parallelize(build("empty"))
    outside(model, share(batch_of(8), [4] * n, rank)).backward()
    (reducer,) = runtime_of(model, "").gradients.reducers
    assert isinstance(reducer, Reducer)
    return len(reducer.buckets)


def test_small_parameters_share_a_message() -> None:
    assert world(2, many_rank) == [1, 1]


# ---- recomputation ----


class Reentrant(nn.Module):
    """A module used twice, in reentrant checkpoints: its gradient comes twice."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.twice = twice
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.body, self.first(x), use_reentrant=True)
        return self.last(checkpoint(self.body, h, use_reentrant=True) if self.twice else h)


def reentrant_rank(rank: int, n: int, twice: bool, bucket_bytes: int) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model = wh.parallelize(Reentrant(twice), default=wh.replica(bucket_bytes=bucket_bytes))
    outside(model, share(batch_of(8), [4] * n, rank)).backward()
    return gradients(model)


@pytest.mark.parametrize(("twice", "bucket_bytes"), [(False, 1), (True, 1 << 20)])
def test_a_reentrant_checkpoint_is_right(twice: bool, bucket_bytes: int) -> None:
    torch.manual_seed(0)
    model = Reentrant(twice)
    outside(model, batch_of(8)).backward()
    assert relative_error(world(2, reentrant_rank, twice, bucket_bytes)[0], gradients(model)) <= BARS[None]


def test_a_gradient_that_comes_after_it_left_raises() -> None:
    with pytest.raises(wh.LossError, match=r"second gradient of 'body.0.(weight|bias)' came after the first had left"):
        world(2, reentrant_rank, True, 1)


# ---- failures ----


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.fail = mlp(), False
        self.net[2].weight.register_hook(self._hook)

    def _hook(self, grad: Tensor) -> None:
        if self.fail:
            raise ZeroDivisionError("in backward")

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def failing_rank(rank: int, n: int, who: list[int], bucket_bytes: int, retry: str) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model = wh.parallelize(Failing(), default=wh.replica(bucket_bytes=bucket_bytes))
    batch = share(batch_of(4 * n), [4] * n, rank)
    kept = outside(model, batch)
    model.fail = rank in who
    try:
        outside(model, batch).backward()
    except ZeroDivisionError:
        pass
    model.fail = False
    model.zero_grad()
    (kept if retry == "an earlier forward" else outside(model, batch)).backward()
    return gradients(model)


@pytest.mark.parametrize("retry", ["a new forward", "an earlier forward"])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_training_goes_on_after_a_backward_that_failed_everywhere(bucket_bytes: int, retry: str) -> None:
    torch.manual_seed(0)
    model = Failing()
    outside(model, batch_of(8)).backward()
    results = world(2, failing_rank, [0, 1], bucket_bytes, retry)
    assert relative_error(results[0], gradients(model)) <= BARS[None] and same_on_all_ranks(results)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_a_backward_that_failed_on_one_rank_raises_on_the_others(bucket_bytes: int) -> None:
    ended = outcomes(3, failing_rank, [1], bucket_bytes, "a new forward", timeout=30)
    for rank in (0, 2):
        assert isinstance(ended[rank].error, wh.CommError)
        assert "a backward ended with an error on another rank" in str(ended[rank].error)


def unread_rank(rank: int, n: int, dtype: torch.dtype) -> bool:
    """As on a GPU, where nobody waits for the flags: whether all gradients of a rank that did not fail are NaN."""
    torch.manual_seed(0)
    model = wh.parallelize(Failing(), default=wh.replica(reduce_dtype=dtype))
    for reducer in runtime_of(model, "the test").gradients.reducers:
        reducer._reads_flags = False  # type: ignore[attr-defined]
    batch, model.fail = share(batch_of(4 * n), [4] * n, rank), rank == 1
    try:
        outside(model, batch).backward()
    except ZeroDivisionError:
        model(batch[0])
        return True
    return all(bool(p.grad.isnan().all()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_where_nobody_reads_the_flags_a_failed_backward_gives_nan(dtype: torch.dtype) -> None:
    assert all(world(2, unread_rank, dtype))


def _step_at_once(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad)
    parameter.grad = None


def refused_rank(rank: int, n: int, what: str) -> None:
    model = wh.parallelize(build("mlp"))
    if what == "taken":
        model[0].weight.register_post_accumulate_grad_hook(_step_at_once)
    loss = outside(model, share(batch_of(8), [4] * n, rank))
    loss.backward(create_graph=what == "graph")


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("taken", r"gradient of '0.weight' was taken away by a hook"),
        ("graph", r"create_graph=True\): the gradient of '\S+' is part of a graph"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_what_cannot_be_averaged_raises(what: str, text: str) -> None:
    with pytest.raises(wh.LossError, match=text):
        world(2, refused_rank, what)


def frozen_between_rank(rank: int, n: int) -> list[bool]:
    """Frozen between forward and backward: torch gives such a parameter no gradient."""
    model = wh.parallelize(build("mlp"))
    loss = outside(model, share(batch_of(8), [4] * n, rank))
    model[0].requires_grad_(False)
    loss.backward()
    return [p.grad is None for p in model.parameters()]


def test_what_is_frozen_after_the_forward_gets_no_gradient() -> None:
    assert world(2, frozen_between_rank) == [[True] * 2 + [False] * 3] * 2


def disagreeing_rank(rank: int, n: int) -> None:
    model = wh.parallelize(build("mlp"))
    model[0].requires_grad_(rank == 0)
    outside(model, share(batch_of(8), [4] * n, rank)).backward()


def test_ranks_that_train_different_parameters_raise() -> None:
    with pytest.raises(
        wh.CommError, match=r"ranks train different parameters, or in other dtypes: rank 0 trains 5, rank 1 trains 3"
    ):
        world(2, disagreeing_rank)


# ---- sparse embeddings ----


class Words(nn.Module):
    def __init__(self, sparse: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(12, 4, sparse=sparse), nn.EmbeddingBag(7, 4, sparse=sparse, mode="sum")
        self.spare, self.last = nn.Embedding(3, 4, sparse=sparse), nn.Linear(4, 12, bias=False)
        if tied:
            self.last.weight = self.table.weight

    def forward(self, ids: Tensor, bag: Tensor | None) -> Tensor:
        h = self.table(ids)
        return self.last(torch.tanh(h if bag is None else h + self.bag(bag)))


def words(feed: int, n: int) -> tuple[Tensor, Tensor | None]:
    """The last rank uses no bag; ids repeat."""
    rows = [3, 1, 4, 2][:n]
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 12, (sum(rows),), generator=generator)
    bag = torch.randint(0, 7, (sum(rows), 2), generator=generator)
    return ids.split(rows)[feed], bag.split(rows)[feed] if feed < n - 1 else None


def words_rank(rank: int, n: int, sparse: bool, tied: bool, twice: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = wh.parallelize(Words(sparse, tied))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(1 + twice):
            model(*words(rank, n)).square().mean().backward()
        found = gradients(model)
        optimizer.step()
    return {"gradients": found, "stepped": {k: v.detach() for k, v in model.named_parameters()}}


def words_in_one_process(n: int, tied: bool, twice: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Words(True, tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(1 + twice):
            torch.cat([model(*words(feed, n)) for feed in range(n)]).square().mean().backward()
        found = gradients(model)
        optimizer.step()
    return {"gradients": found, "stepped": {k: v.detach() for k, v in model.named_parameters()}}


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(("tied", "twice"), [(False, False), (False, True), (True, False)])
def test_sparse_embeddings(n: int, tied: bool, twice: bool) -> None:
    results, expected = world(n, words_rank, True, tied, twice), words_in_one_process(n, tied, twice)
    for found in results:
        assert relative_error(found["gradients"], expected["gradients"]) <= BARS[None]
        assert relative_error(found["stepped"], expected["stepped"]) <= BARS[None]
        if not tied:
            assert all(
                found["gradients"][name].is_sparse for name in ("table.weight", "bag.weight")[: 2 if n > 1 else 1]
            )
            assert found["gradients"]["spare.weight"] is None
            if n > 1:
                assert found["gradients"]["table.weight"].is_coalesced()
    for name, value in results[0]["stepped"].items():
        assert all(torch.equal(value, other["stepped"][name]) for other in results)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(5, 3))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.rows, sparse=True)


def lookup_rank(rank: int, n: int) -> None:
    wh.parallelize(Lookup())(torch.tensor([1, 2])).sum().backward()


def test_a_sparse_gradient_of_no_embedding_raises() -> None:
    with pytest.raises(
        wh.LossError, match=r"gradient of 'rows' is torch.sparse_coo, but it belongs to no nn.Embedding"
    ):
        world(2, lookup_rank)
