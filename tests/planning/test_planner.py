"""The planner: pure, quick, equal on all ranks, and readable."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import whale_torch as wh
from tests.world import world
from whale_torch.planning.placement import VirtualDevice
from whale_torch.planning.plan import Plan
from whale_torch.planning.render import amount, fold_names


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(dim), nn.Linear(dim, dim)
        with wh.replica(), wh.split():
            self.ffn = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.norm(x))
        return x + self.ffn(x)


class Transformer(nn.Module):
    def __init__(self, layers: int = 24, dim: int = 64, words: int = 50_000):
        super().__init__()
        self.words = nn.Embedding(words, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        with wh.split():
            self.head = nn.Linear(dim, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def transformer(layers: int = 24) -> Transformer:
    with torch.device("meta"):
        return Transformer(layers)


def seconds_of(call: object) -> float:
    times = []
    for _ in range(5):
        start = time.process_time()
        call()  # type: ignore[operator]
        times.append(time.process_time() - start)
    return min(times)


def test_512_ranks_are_planned_in_milliseconds() -> None:
    model, cluster = transformer(), wh.Cluster.of(64, 8)
    assert seconds_of(lambda: wh.plan(model, cluster=cluster)) < 0.1
    plan = wh.plan(model, cluster=cluster)
    assert seconds_of(plan.to_json) < 0.05
    assert seconds_of(lambda: str(plan)) < 0.05


def test_a_rehearsal_on_512_ranks_takes_no_memory_and_less_than_two_seconds() -> None:
    model, cluster = transformer(), wh.Cluster.of(64, 8)
    start = time.process_time()
    plan = wh.plan(model, cluster=cluster, sample_inputs=torch.zeros(32, 512, dtype=torch.int64))
    assert time.process_time() - start < 2
    assert plan.assumption == "counted on a step of 32 rows a rank"


def test_a_pipeline_on_512_ranks_is_planned_in_milliseconds() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(64)])
    wh.pipeline(model, num_stages=16, num_micro_batches=64)
    cluster = wh.Cluster.of(64, 8)
    assert seconds_of(lambda: wh.plan(model, cluster=cluster)) < 0.15
    plan = wh.plan(model, cluster=cluster, sample_inputs=torch.zeros(64, 64))
    assert seconds_of(lambda: str(plan)) < 0.1
    lines = str(plan).splitlines()
    assert len(lines) < 60 and max(map(len, lines)) < 150


def test_a_large_plan_prints_on_one_page() -> None:
    lines = str(wh.plan(transformer(), cluster=wh.Cluster.of(64, 8))).splitlines()
    assert len(lines) < 40 and max(map(len, lines)) < 140
    text = "\n".join(lines)
    for expected in (
        "Plan for 64 nodes x 8 ranks, cpu",
        "Data parallel x 64 (DP), tensor-split x 8 and x 512 (TP): "
        "the global batch is 64 x the batch you feed a replica.",
        "Ranks 0-7, 8-15, ... are one replica each: feed its ranks the same batch.",
        "1-24",
        "blocks.0-23.ffn",
        "64 groups of 8 ranks",
        "shared",
        "24 x 33,088",
        "wh.replica() > wh.split()",
        "all 512 ranks",
        "mixed",
        "97 to 98 of 50000",
        "shared: the ranks of a replica are fed the same batch; mixed: the batches of several replicas meet",
        "columns (outputs)",
        "the 64 ranks that hold one part of a split over 8",
        "hierarchical",
        "8 of 4.19 MB",
        "inputs of split modules, and their gradients",
        "in all",
        "estimated at 32 rows a rank",
    ):
        assert expected in text, (expected, text)


def test_a_plan_says_what_counts_the_samples() -> None:
    cluster = wh.Cluster.of(1, 2)
    assert "Samples are counted along dimension 0 of the first tensor that the model is called with." in str(
        wh.plan(nn.Linear(2, 2), cluster=cluster)
    )
    assert "along dimension 1 of 'input' (not in 'mask')." in str(wh.plan(NamedInputs(), cluster=cluster))


def test_a_plan_of_a_replica_alone_reads_as_data_parallelism() -> None:
    text = str(wh.plan(nn.Linear(2, 2), cluster=wh.Cluster.of(1, 2)))
    assert "Data parallel x 2 (DP): the global batch is 2 x the batch you feed a rank." in text
    assert "none: replicated" in text and "own: each rank brings a batch of its own" in text
    assert "(whatever the batch)" in text, "gradients and counts are all that is sent"
    assert "split" not in text and "TP" not in text


def test_every_table_of_a_plan_has_a_title() -> None:
    tables = str(wh.plan(transformer(), cluster=wh.Cluster.of(64, 8))).split("\n\n")[1:]
    assert [table.splitlines()[0][-1] for table in tables] == [":"] * 4


def test_long_scopes_stand_below_their_table() -> None:
    plan = wh.plan(EveryOption(), cluster=wh.Cluster(ranks_of_nodes=(4, 2, 2)))
    lines = str(plan).splitlines()
    assert any("wh.replica(...) > wh.split(...)" in line and "inner" in line for line in lines)
    (told,) = [line for line in lines if line.startswith("  wh.split(chunked_loss=True")]
    assert "size=2) at " in told and "test_planner.py:" in told


def test_what_is_counted_and_what_is_estimated_have_the_same_words() -> None:
    cluster, ids = wh.Cluster.of(2, 4), torch.zeros(4, 5, dtype=torch.int64)
    for plan in (wh.plan(transformer(1), cluster=cluster), wh.plan(transformer(1), cluster=cluster, sample_inputs=ids)):
        table = str(plan).partition("What a rank sends")[2]
        for purpose in ("inputs of split modules", "outputs of split modules", "losses over split classes"):
            assert purpose in table
        assert not any(word in table for word in ("enter", "leave", "seed", "cross_entropy"))


def test_a_plan_of_unlike_modules_is_cut_short() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with wh.split():
                for i in range(200):
                    setattr(self, f"head{'abcdefghij'[i % 10]}{i}", nn.Linear(8, 8 + i))

    lines = str(wh.plan(Many(), cluster=wh.Cluster.of(1, 4))).splitlines()
    assert len(lines) < 60 and any("more" in line for line in lines)


def test_one_rank_prints_without_odd_plurals() -> None:
    text = str(wh.plan(nn.Linear(2, 2)))
    assert "1 node x 1 rank" in text and "One rank: nothing is sent." in text
    assert "One rank: the global batch is the batch you feed." in text


def test_names_fold() -> None:
    assert fold_names(["blocks.0.fc", "blocks.1.fc", "blocks.2.fc"]) == ["blocks.0-2.fc"]
    assert fold_names(["a.0", "a.1", "a.3", "b"]) == ["a.0-1,3", "b"]
    assert fold_names(["", "fc1"]) == ["(root)", "fc1"]
    assert fold_names(["x.0.1", "x.1.2"]) == ["x.0.1", "x.1.2"]
    assert fold_names([f"l.{2 * i}" for i in range(9)]) == ["l.0,2,4,6,...,16"]


def test_amounts_have_three_digits() -> None:
    assert [amount(n) for n in (0, 999, 999.7, 1000, 12_345_678, 5e12, 5e16)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1 kB",
        "12.3 MB",
        "5 TB",
        "50,000 TB",
    ]


# ---- purity ----


def _digest(rank: int, n: int, folder: str) -> tuple[str, str]:
    """Ranks that built different things before, from different directories, at different times."""
    os.chdir(Path(folder) if rank else "/")
    for _ in range(3 * rank):
        with wh.replica():
            nn.Linear(2, 2)
    plan = wh.plan(transformer(2), cluster=wh.Cluster.of(2, 4))
    return plan.digest(), plan.to_json()


def test_ranks_plan_alike_whatever_they_did_before(tmp_path: Path) -> None:
    results = world(3, _digest, str(tmp_path))
    assert len({digest for digest, _ in results}) == 1
    here = wh.plan(transformer(2), cluster=wh.Cluster.of(2, 4))
    assert here.digest() == results[0][0]


def test_equal_inputs_give_equal_plans_and_other_inputs_other_digests() -> None:
    cluster = wh.Cluster.of(2, 4)
    a, b = (wh.plan(transformer(2), cluster=cluster) for _ in range(2))
    assert a == b and a.digest() == b.digest() and str(a) == str(b)
    assert wh.plan(transformer(3), cluster=cluster).digest() != a.digest()
    assert wh.plan(transformer(2), cluster=wh.Cluster.of(1, 8)).digest() != a.digest()
    fewer = wh.plan(transformer(2), cluster=cluster, sample_inputs=torch.zeros(3, 5, dtype=torch.int64))
    assert fewer.digest() == a.digest(), "what a rank is fed is no part of the decision"


def test_planning_touches_neither_model_nor_process_group() -> None:
    model = transformer(2)
    before = {name: (type(m), dict(m.__dict__)) for name, m in model.named_modules()}
    wh.plan(model, cluster=wh.Cluster.of(2, 4))
    assert {name: (type(m), dict(m.__dict__)) for name, m in model.named_modules()} == before
    assert not torch.distributed.is_initialized()


# ---- JSON ----


class EveryOption(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with wh.replica(
            reduce_dtype=torch.bfloat16,
            bucket_bytes=1000,
            max_in_flight=2,
            all_reduce="flat",
            sync_batch_norm=True,
            loss="sum",
            batch_dim=1,
        ):
            self.features = nn.Linear(4, 6)
            with wh.split(size=2, rows="shared", cut="columns", output="columns", gather="error", chunked_loss=True):
                self.inner = nn.Linear(6, 8)
        with wh.split(size=4, rows="own"):
            self.head = nn.Linear(8, 10)


class NamedInputs(nn.Linear):
    """batch_dim by input."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        wh.replica(batch_dim={"input": 1, "mask": None})(self)


@pytest.mark.parametrize("make", [EveryOption, lambda: transformer(3), NamedInputs])
def test_json_round_trips(make: object, tmp_path: Path) -> None:
    plan = wh.plan(
        make(),
        cluster=wh.Cluster(ranks_of_nodes=(4, 2, 2), flops_per_s=1e12, device="cuda")
        if make is EveryOption
        else wh.Cluster.of(2, 4),
    )  # type: ignore[operator]
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.digest() == plan.digest() and str(again) == str(plan)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.from_json(plan.to_json(indent=2)) == plan


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "not a saved plan"),
        ("{}", "KeyError: 'format'"),
        ('{"format": 99}', "format 99, this version reads 2"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, said: str) -> None:
    with pytest.raises(wh.PlanError, match=said):
        Plan.from_json(text)


# ---- the cluster ----


def test_a_cluster_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    for cluster in (wh.Cluster.of(8, 8), wh.Cluster(ranks_of_nodes=(8, 4), device="cuda", memory_bytes=80 << 30)):
        cluster.save(path)
        assert wh.Cluster.load(path) == cluster
    path.write_text('{"ranks_of_nodes": [2, 2]}')
    assert wh.Cluster.load(path) == wh.Cluster.of(2, 2)
    assert wh.Cluster.load(path).nodes == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes: 2", "is not JSON"),
        ('{"nodes": 2}', r"\['nodes'\]"),
        ('{"ranks_of_nodes": [2], "speed": 3}', r"\['speed'\]"),
        ('{"ranks_of_nodes": [2, 0]}', r"ranks_of_nodes=\(2, 0\)"),
        ('{"ranks_of_nodes": [2], "inter_node_bytes_per_s": -1}', "inter_node_bytes_per_s .*-1"),
        ("{}", "no ranks_of_nodes"),
    ],
)
def test_a_file_that_describes_no_cluster(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(text)
    with pytest.raises(wh.PlanError, match=said):
        wh.Cluster.load(path)


def test_what_is_known_of_a_cluster_is_printed_and_nothing_else() -> None:
    assert str(wh.Cluster.of(2, 4)) == "2 nodes x 4 ranks, cpu"
    described = wh.Cluster.of(
        1,
        4,
        device="cuda",
        inter_node_bytes_per_s=35e9 / 8,
        intra_node_bytes_per_s=300e9,
        latency_s=5e-6,
        flops_per_s=15e12,
        memory_bytes=32_000_000_000,
    )
    assert str(described) == (
        "1 node x 4 ranks, cuda, 35 Gbit/s between nodes, 2.4e+03 Gbit/s inside a node, 5 us a message, "
        "15 Tflop/s a rank, 32 GB a rank"
    )


def test_the_two_levels_of_blocks() -> None:
    cluster = wh.Cluster(ranks_of_nodes=(2, 2))
    assert cluster.levels_of(((0, 1, 2, 3),)) == (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    assert cluster.levels_of(((0, 1), (2, 3))) is None, "no block leaves its node"
    assert cluster.levels_of(((0, 2), (1, 3))) is None, "one rank on each node"
    assert wh.Cluster(ranks_of_nodes=(2, 3)).levels_of(((0, 1, 2, 3, 4),)) is None, "uneven nodes"
    assert wh.Cluster.of(2, 4).levels_of(((0, 2, 4, 6), (1, 3, 5, 7))) == (
        ((0, 2), (4, 6), (1, 3), (5, 7)),
        ((0, 4), (2, 6), (1, 5), (3, 7)),
    )


def test_uneven_nodes_need_a_size_for_nested_splits() -> None:
    uneven = wh.Cluster(ranks_of_nodes=(4, 2, 2))
    with pytest.raises(wh.PlanError, match=r"nodes have \[4, 2, 2\] ranks"):
        wh.plan(transformer(1), cluster=uneven)
    text = str(wh.plan(EveryOption(), cluster=uneven))
    assert "8 ranks on nodes of [4, 2, 2]" in text


# ---- VirtualDevices ----


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@pytest.mark.parametrize("n", range(1, 65))
def test_the_blocks_of_every_device_of_1_to_64_ranks(n: int) -> None:
    for size in divisors(n):
        for feed in divisors(n):
            if size % feed and feed % size:
                continue
            device = VirtualDevice("d", n, size, feed)
            assert device.num_twins * device.num_rows == size and device.num_copies * size == n
            for blocks, width in (
                (device.columns, size),
                (device.twins, device.num_twins),
                (device.rows, device.num_rows),
                (device.copies, device.num_copies),
            ):
                assert sorted(rank for block in blocks for rank in block) == list(range(n))
                assert all(len(block) == width and list(block) == sorted(block) for block in blocks)
            of = {
                name: {rank: set(block) for block in getattr(device, name) for rank in block}
                for name in ("columns", "twins", "rows", "copies")
            }
            for rank in range(n):
                assert of["rows"][rank] & of["twins"][rank] == {rank} and of["columns"][rank] & of["copies"][rank] == {
                    rank
                }
                assert len({other // feed for other in of["rows"][rank]}) == device.num_rows, (
                    "the rows group has one rank of each feed"
                )
                assert len({other // feed for other in of["twins"][rank]}) == 1, "twins are fed alike"
                assert of["rows"][rank] | of["twins"][rank] <= of["columns"][rank]
            assert device.row_mode == (
                "own" if device.num_twins == 1 else "shared" if device.num_rows == 1 else "mixed"
            )


def test_a_plan_says_what_modules_share() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    wh.annotate(layers, {"0": wh.split(), "1": wh.split()})
    cluster = wh.Cluster.of(1, 2)
    said = "\n  (parameters that modules share are counted with each; 35 are different ones)\n"
    assert said not in str(wh.plan(layers, cluster=cluster))
    wh.moe.share([layers[0], layers[1]])
    text = str(wh.plan(layers, cluster=cluster))
    assert said in text, text
