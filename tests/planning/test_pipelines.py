"""Pipelines in a plan: what it says, what it stores, what an edit may change, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale_torch as wh
from tests.parity.metric import relative_error
from tests.parity.pipeline_cases import CASES, Chain, annotated
from tests.parity.split_case import gradients_of
from tests.world import world
from whale_torch.planning import flops
from whale_torch.planning.balance import partition
from whale_torch.planning.fit import check_fit
from whale_torch.planning.placement import VirtualDevice
from whale_torch.planning.plan import Plan
from whale_torch.planning.schedules import make
from whale_torch.rehearsal import rehearse
from whale_torch.strategies.runtime import runtime_of

EIGHT = wh.Cluster.of(1, 8)


def chain(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return annotated(CASES["chain"], **options)


def batch(rows: int, name: str = "chain") -> dict[str, Tensor]:
    torch.manual_seed(1)
    return CASES[name].batch(rows)


# ---- what it says


def test_a_pipeline_reads_like_one() -> None:
    text = str(wh.plan(chain(num_micro_batches=8), cluster=EIGHT))
    for expected in (
        "Data parallel x 2 (DP), pipeline x 4 (PP): the global batch is 2 x the batch you feed a pipeline.",
        "Ranks 0, 2, 4, 6; 1, 3, 5, 7 are one pipeline each: feed its ranks the same batch.",
        "A rank holds at most 288 B of parameters and 288 B of gradients.",
        "The pipeline, 4 stages on 2 pipelines of 4 ranks (tests/parity/pipeline_cases.py:",
        "schedule 1f1b, 8 micro-batches:",
        "a rank is idle 27.3% of a step, by formula",
        "its stage's 2 ranks",
        "all 2 ranks of a stage",
        "pipeline's: the ranks of a pipeline are fed the same batch",
        "without what stages hand each other, which depends on the batch",
    ):
        assert expected in text, (expected, text)
    rows = [line.split() for line in text.splitlines() if re.match(r"  \d +[abcd] +\d", line)]
    assert rows == [
        ["0", "a", "72", "288", "B", "0-1", "4"],
        ["1", "b", "72", "288", "B", "2-3", "3"],
        ["2", "c", "72", "288", "B", "4-5", "2"],
        ["3", "d", "45", "180", "B", "6-7", "1"],
    ]
    assert max(map(len, text.splitlines())) < 150


def test_the_batch_of_one_pipeline_is_the_global_one() -> None:
    text = str(wh.plan(chain(), cluster=wh.Cluster.of(1, 4)))
    assert "pipeline x 4 (PP): the global batch is the batch you feed." in text
    assert "Ranks 0-3 are one pipeline: feed all of them the same batch." in text


def test_a_pipeline_on_one_rank_reads_as_one_rank() -> None:
    text = str(wh.plan(chain()))
    assert "One rank: the global batch is the batch you feed." in text and "PP" not in text
    assert "4 stages on 1 pipeline of 1 rank" in text and "schedule interleaved" in text


def test_an_idle_share_without_a_formula_is_simulated() -> None:
    text = str(wh.plan(chain(schedule="gpipe", num_ranks=2), cluster=wh.Cluster.of(1, 2)))
    assert re.search(r"idle [\d.]+% of a step, simulated", text)


def test_ranks_of_one_replica() -> None:
    plan = wh.plan(chain(num_ranks=2), cluster=EIGHT)
    assert plan.feeds == (0, 1, 2, 3, 0, 1, 2, 3) and plan.num_feeds == 4


# ---- placement


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize(
    ("world_size", "places", "size", "feed"), [(8, 4, 1, 1), (8, 2, 2, 2), (12, 3, 2, 2), (8, 8, 1, 1)]
)
def test_blocks_lie_inside_places(world_size: int, places: int, size: int, feed: int, inner: bool) -> None:
    device = VirtualDevice("d", world_size, size, feed, places, inner)
    ranks = set(range(world_size))
    for blocks in (device.columns, device.rows, device.twins, device.copies, device.pipelines):
        assert sorted(rank for block in blocks for rank in block) == sorted(ranks)
    for blocks in (device.columns, device.rows, device.twins, device.copies):
        assert all(len({device.place_of(rank) for rank in block}) == 1 for block in blocks)
    for block in device.pipelines:
        assert [device.place_of(rank) for rank in block] == list(range(places))
        assert len({device.index_of(rank) for rank in block}) == 1
        neighbours = block == tuple(range(block[0], block[0] + places))
        assert neighbours == (inner or places == world_size)
    assert len(device.copies[0]) == device.num_copies == world_size // places // size


class Wide(nn.Module):
    """Four layers whose weights are many and whose outputs are few, or the reverse."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def placed(width: int, rows: int) -> Plan:
    model = Wide(width)
    wh.annotate(model, {rf"layers\.{i}": wh.stage() for i in range(4)}, inside=wh.pipeline(num_micro_batches=4))
    return wh.plan(model, cluster=wh.Cluster.of(4, 4), sample_inputs=torch.zeros(rows, width))


def test_stages_lie_where_fewer_bytes_leave_a_node() -> None:
    weights, outputs = placed(256, 8), placed(16, 4096)
    assert weights.pipeline is not None and outputs.pipeline is not None
    assert not weights.pipeline.inner and outputs.pipeline.inner
    assert all(device.inner for device in outputs.devices)
    assert outputs.device("replica").pipelines[0] == (0, 1, 2, 3)
    for plan in (weights, outputs):
        outer, inner = (links.between_bytes for links in plan.pipeline.links)  # type: ignore[union-attr]
        assert (inner < outer) == plan.pipeline.inner  # type: ignore[union-attr]
    # outer: stages 1 and 2 send a node's 4 pipelines 8 x 256 outputs and as many gradients
    chosen, other = weights.pipeline.links
    assert (chosen.inner, other.inner) == (False, True)
    assert chosen.between_bytes == 4 * 2 * 8 * 256 * 4
    # inner: each node's 4 ranks are in a ring with one rank of each other node, of their own stage's gradients
    assert other.between_bytes == 4 * 2 * (256 * 256 + 256) * 4 * 3 / 4
    text = str(weights)
    assert "The ranks of one stage are neighbours" in text and "65.5 kB leave a node in a step" in text
    assert "with the ranks of one pipeline as neighbours: at most 1.58 MB leave a node" in text.replace("\n   ", " ")


def test_without_inputs_the_ranks_of_a_stage_are_neighbours() -> None:
    plan = wh.plan(chain(), cluster=wh.Cluster.of(2, 4))
    assert plan.pipeline is not None and not plan.pipeline.inner and plan.pipeline.links == ()
    assert "The ranks of one stage are neighbours: outputs of stages travel between nodes" in str(plan)


# ---- bytes


def _step(rank: int, n: int, name: str, local: int) -> tuple[str, dict[str, float]]:
    case = CASES[name]
    model: Any = annotated(case, num_micro_batches=3)
    inputs = batch(6, name)
    wh.parallelize(model, sample_inputs=inputs, timeout=30)
    mesh = runtime_of(model, "the test").mesh

    def sent() -> dict[str, float]:
        total: dict[str, float] = {}
        for group in mesh.groups():
            for operation, size in group.sent_by.items():
                total[operation] = total.get(operation, 0.0) + size
        return total

    before = sent()
    out = model(**inputs)
    loss = out["loss"] if isinstance(out, dict) else out if case.outside is None else case.outside(out, inputs)
    loss.backward()
    return wh.plan(model).to_json(), {what: size - before.get(what, 0.0) for what, size in sent().items()}


@pytest.mark.parametrize("name", ["chain", "skips", "nests", "tied", "outputs", "twice"])
@pytest.mark.parametrize(("n", "local"), [(4, 4), (4, 2), (8, 4)])
@pytest.mark.matrix(keep=2)
def test_a_plan_with_sample_inputs_counts_the_step_of_the_busiest_rank(name: str, n: int, local: int) -> None:
    found = world(n, _step, name, local, local_world_size=local)
    plan = Plan.from_json(found[0][0])
    stages = max(sent.get("stages", 0.0) for _, sent in found)
    predicted: dict[str, float] = {}
    for traffic in plan.traffic:
        predicted[traffic.what] = predicted.get(traffic.what, 0.0) + traffic.sent_bytes
    assert predicted["stage outputs"] <= stages
    busiest = max(sum(sent.values()) for _, sent in found)
    assert plan.sent_bytes == pytest.approx(busiest, rel=0.05)
    if name == "outputs":
        assert predicted["outputs of a pipeline"] == 6 * 5 * 4


def split_inside() -> nn.Module:
    """Three stages on pipelines of two places; the last one is split, so that the first place sends more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    scopes = {"0": wh.stage(), "1": wh.stage(), "2|3|4": (wh.stage(), wh.split(size=2))}
    return annotate(model, scopes, (wh.replica(), wh.pipeline(num_ranks=2, num_micro_batches=2)))


def _split_step(rank: int, n: int) -> tuple[str, float]:
    model, x = split_inside(), torch.ones(4, 8)
    wh.parallelize(model, sample_inputs=x, timeout=30)
    mesh = runtime_of(model, "the test").mesh
    before = sum(group.sent_bytes for group in mesh.groups())
    model(x).square().mean().backward()
    return wh.plan(model).to_json(), sum(group.sent_bytes for group in mesh.groups()) - before


def test_the_bytes_of_a_split_inside_a_stage() -> None:
    found = world(8, _split_step)
    plan = Plan.from_json(found[0][0])
    assert plan.sent_bytes == pytest.approx(max(sent for _, sent in found), rel=0.05)
    assert plan.parameter_bytes == (288 + (552 - 8) // 2 + 8) * 4
    text = str(plan)
    assert "pipeline x 2 (PP), tensor-split x 2 (TP)" in text and "its stage's 2 groups of 2 ranks" in text
    assert "Ranks 0, 1, 4, 5; 2, 3, 6, 7 are one pipeline each" in text


def test_a_rank_holds_its_stages_only() -> None:
    plan = wh.plan(annotated(CASES["tied"]), cluster=wh.Cluster.of(1, 4))
    assert plan.pipeline is not None
    assert plan.pipeline.stage_parameters == (88, 72, 72, 88)
    assert plan.parameter_bytes == 88 * 4 == plan.gradient_bytes
    assert not plan.reduces, "no parameter has a copy but the tied one, of which the stages themselves take care"
    two = wh.plan(annotated(CASES["tied"], num_ranks=2), cluster=wh.Cluster.of(1, 2))
    assert two.parameter_bytes == (88 + 72) * 4


class Loose(Chain):
    """`c` is under no stage and runs where its input is: on the second of two stages."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        return F.cross_entropy(self.d(self.c(self.b(h))), y)


def test_a_recording_says_where_loose_modules_run() -> None:
    model = Loose()
    wh.annotate(model, {"a": wh.stage(), "d": wh.stage()}, inside=wh.pipeline())
    plan = wh.plan(model, cluster=wh.Cluster.of(1, 2))
    assert plan.pipeline is not None and plan.pipeline.users(model)["c.weight"] == (0,)
    other = Loose()
    wh.annotate(other, {"a|d": wh.stage(), "b": wh.stage()}, inside=wh.pipeline())
    seen = wh.plan(other, cluster=wh.Cluster.of(1, 2), sample_inputs=batch(8))
    assert seen.pipeline is not None and seen.pipeline.users(other)["c.weight"] == (1,)
    assert dict(seen.pipeline.elsewhere) == {"d.weight": (1,), "d.bias": (1,)}, "it runs where its input is"
    assert seen.pipeline.stage_parameters == (72, 72 + 72 + 45)
    assert Plan.from_json(seen.to_json()) == seen


def test_a_stage_without_work_is_told() -> None:
    model = Loose()
    wh.annotate(model, {"d": wh.stage(), "a": wh.stage()}, inside=wh.pipeline())  # in reverse
    with pytest.raises(wh.PlanError, match=r"stage 0 of 2 \('d'\) has nothing to run") as caught:
        wh.plan(model, cluster=wh.Cluster.of(1, 2), sample_inputs=batch(8))
    assert "in the order in which the forward calls" in str(caught.value.fix)
    unused = Loose()
    unused.e = nn.Linear(2, 2)  # type: ignore[assignment]
    wh.annotate(unused, {"a": wh.stage(), "b|c|d": wh.stage(), "e": wh.stage()}, inside=wh.pipeline())
    with pytest.raises(wh.PlanError, match=r"stage 2 of 3 \('e'\) has nothing to run"):
        wh.plan(unused, cluster=wh.Cluster.of(1, 2), sample_inputs=batch(8))


# ---- stored, edited, refused


def saved(edit: Callable[[dict[str, Any]], None], **options: Any) -> Plan:
    data = json.loads(wh.plan(chain(**options), cluster=EIGHT).to_json())
    edit(data)
    return Plan.from_json(json.dumps(data))


def pipeline_of(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["pipeline"].update(changes)


def digest_of(data: dict[str, Any]) -> str:
    found = Plan.from_json(json.dumps(data)).pipeline
    assert found is not None
    return found.digest


def test_json_keeps_all_of_a_pipeline() -> None:
    cluster = wh.Cluster.of(2, 2)
    for num_ranks in (1, 2, 4):
        for inputs in (None, batch(8)):
            plan = wh.plan(chain(num_ranks=num_ranks), cluster=cluster, sample_inputs=inputs)
            assert Plan.from_json(plan.to_json()) == plan
            assert check_fit(plan, chain(num_ranks=num_ranks), cluster) == plan


def test_the_digest_is_that_of_the_decision() -> None:
    model, cluster = chain(num_ranks=2), wh.Cluster.of(1, 4)
    plan = wh.plan(model, cluster=cluster)
    assert plan.digest() == wh.plan(model, cluster=cluster, sample_inputs=batch(8)).digest()
    assert plan.pipeline is not None
    for change in ({"num_micro_batches": 5}, {"schedule": "gpipe"}, {"stages": (("a",), ("b", "c"), ("d",))}):
        assert replace(plan, pipeline=replace(plan.pipeline, **change)).digest() != plan.digest()  # type: ignore[arg-type]


def inner(data: dict[str, Any]) -> None:
    """The other placement: the ranks of a pipeline are neighbours."""
    data["pipeline"]["inner"] = True
    for device in data["devices"]:
        device["inner"] = True


def test_what_was_recorded_of_other_stages_is_left_out() -> None:
    cluster, inputs = wh.Cluster.of(2, 2), batch(8)
    plan = wh.plan(chain(num_ranks=2), cluster=cluster, sample_inputs=inputs)
    assert plan.pipeline is not None and len(plan.pipeline.moved) == 3 and len(plan.pipeline.links) == 2
    other = replace(plan.pipeline, stages=(("a",), ("b", "c"), ("d",)))
    fitted = check_fit(replace(plan, pipeline=other), chain(num_ranks=2), cluster)
    assert fitted.pipeline is not None and fitted.pipeline.stage_parameters == (72, 144, 45)
    assert not fitted.pipeline.moved and not fitted.pipeline.links
    again = rehearse(fitted, chain(num_ranks=2), inputs)
    assert again.pipeline is not None and len(again.pipeline.moved) == 2 and again.digest() == fitted.digest()


TABLE = ("F0.0 F0.1 F3.0 B3.0 F3.1 B3.1 B0.0 B0.1", "F1.0 F2.0 F1.1 F2.1 B2.0 B1.0 B2.1 B1.1")


def test_a_table_is_planned_as_it_is_written() -> None:
    cluster, model = wh.Cluster.of(1, 4), chain(schedule=[row.split() for row in TABLE])
    plan = wh.plan(model, cluster=cluster, sample_inputs=batch(8))
    pipeline = plan.pipeline
    assert pipeline is not None and pipeline.table == TABLE and pipeline.schedule == "table"
    assert (pipeline.num_ranks, pipeline.num_micro_batches) == (2, 2)
    assert [pipeline.place_of(stage) for stage in range(4)] == [0, 1, 1, 0]
    assert pipeline.stages_at(0) == (0, 3) and pipeline.order(1).rows == (
        "F0.0 F3.0 B3.0 B0.0",
        "F1.0 F2.0 B2.0 B1.0",
    )
    text = str(plan)
    assert "schedule table, 2 micro-batches" in text and "simulated" in text
    assert "schedule=Schedule(table: 4 stages on 2 ranks, 2 micro-batches)" in text
    rows = [line.split() for line in text.splitlines() if re.match(r"  \d +[abcd] +\d", line)]
    assert [row[5:] for row in rows] == [["0-1", "3"], ["2-3", "4"], ["2-3", "4"], ["0-1", "3"]]
    assert Plan.from_json(plan.to_json()) == plan and check_fit(Plan.from_json(plan.to_json()), model, cluster) == plan
    with pytest.raises(wh.PlanError, match=r"with another table in the saved plan"):
        check_fit(plan, chain(schedule=[TABLE[1].replace("F1.0 F2.0 F1.1", "F1.0 F1.1 F2.0"), TABLE[0]]), cluster)
    copied = wh.plan(copy.deepcopy(model), cluster=cluster, sample_inputs=batch(8))
    assert copied == plan and pickle.loads(pickle.dumps(plan)) == plan and hash(copied.pipeline) == hash(pipeline)


def test_a_table_says_how_many_stages_there_are() -> None:
    plan = wh.plan(wh.pipeline(Chain(), schedule=make("1f1b", 2, 3)), cluster=wh.Cluster.of(1, 2))
    assert plan.pipeline is not None and plan.pipeline.stages == (("a", "b"), ("c", "d"))
    assert plan.pipeline.schedule == "table" and plan.pipeline.num_micro_batches == 3


def tabled(data: dict[str, Any]) -> None:
    data["pipeline"].update(schedule="mine", table=list(TABLE), num_micro_batches=2)


EDITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "micro-batches": pipeline_of(num_micro_batches=2),
    "schedule": pipeline_of(schedule="gpipe"),
    "stages": pipeline_of(stages=[["a", "b"], ["c"], ["d"]]),
    "placement": inner,
    "table": tabled,
}


def _edited(rank: int, n: int, path: str) -> tuple[float, int, str]:
    torch.manual_seed(0)
    alone: Any = Chain()
    torch.manual_seed(0)
    model: Any = Chain()  # without scopes: the plan has them
    wh.parallelize(model, plan=Plan.load(path), timeout=30)
    whole = batch(8)
    index, count = wh.data_rank(model)
    model(**{key: value.tensor_split(count)[index] for key, value in whole.items()}).backward()
    alone(**whole).backward()
    plan = wh.plan(model)
    assert plan.pipeline is not None
    return (
        relative_error(gradients_of(model), gradients_of(alone)),
        plan.pipeline.num_micro_batches,
        plan.pipeline.schedule,
    )


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.matrix(keep=1)
def test_an_edited_pipeline_is_run_as_it_reads(name: str, tmp_path: Path) -> None:
    data = json.loads(wh.plan(chain(num_ranks=2), cluster=wh.Cluster.of(1, 4)).to_json())
    EDITS[name](data)
    (tmp_path / "plan.json").write_text(json.dumps(data))
    for error, batches, schedule in world(4, _edited, str(tmp_path / "plan.json")):
        assert error < 1e-5
        assert (batches, schedule) == (data["pipeline"]["num_micro_batches"], data["pipeline"]["schedule"])


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no micro-batches": (pipeline_of(num_micro_batches=0), r"has 0 micro-batches"),
    "schedule": (
        pipeline_of(schedule="dualpipe"),
        r"schedule is 'dualpipe'.*\n.*gpipe, 1f1b, interleaved, zero_bubble",
    ),
    "a name that has no table": (pipeline_of(schedule="mine"), r"or the name of the rows in its `table`"),
    "a table under another's name": (pipeline_of(table=list(TABLE)), r"is '1f1b', and it has a table, which is run"),
    "ranks of a table": (
        pipeline_of(schedule="mine", table=list(TABLE)),
        r"table has actions of 2 ranks, and its pipeline has 4",
    ),
    "a table that stops": (
        pipeline_of(schedule="mine", table=["B0.0 F0.0"]),
        r"schedule 'mine': it cannot run to its end",
    ),
    "ranks": (pipeline_of(num_ranks=3), r"have 3 ranks, 4 stages and 8 ranks to run on"),
    "more ranks than stages": (pipeline_of(num_ranks=8), r"have 8 ranks, 4 stages and 8 ranks to run on"),
    "places": (pipeline_of(num_ranks=2), r"'replica' has 4 places \(inner: False\), but .* have 2 ranks"),
    "inner": (pipeline_of(inner=True), r"'replica' has 4 places \(inner: False\), but .* have 4 ranks \(inner: True\)"),
    "empty stage": (pipeline_of(stages=[["a"], [], ["c"], ["d"]]), r"stage 1 of the plan's 4 has no modules"),
    "unknown module": (pipeline_of(stages=[["a"], ["b"], ["c"], ["e"]]), r"stage 3 has 'e', which is not in the model"),
    "twice": (pipeline_of(stages=[["a"], ["b"], ["c"], ["d", "a"]]), r"stage 3 has 'a', and its stage 0 has 'a'"),
    "inside": (pipeline_of(stages=[["a"], ["b"], ["b.0"], ["d"]]), r"stage 2 has 'b.0', and its stage 1 has 'b'"),
    "loss": (pipeline_of(micro_batch_loss="sum"), r"micro_batch_loss is 'sum'"),
    "users": (
        lambda data: data["pipeline"].update(elsewhere=[["a.weight", [7]]], recorded=digest_of(data)),
        r"stages \[7\] of 4 use the parameter 'a.weight'",
    ),
    "format": (lambda data: data.update(format=1), r"the plan has format 1, this version reads 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_impossible_edit_is_refused(name: str) -> None:
    edit, said = REFUSED[name]
    with pytest.raises(wh.PlanError, match=said) as caught:
        check_fit(saved(edit), chain(), EIGHT)
    assert caught.value.fix


def annotate(model: nn.Module, scopes: dict[str, Any], inside: Any = None) -> nn.Module:
    return wh.annotate(model, scopes, inside=wh.pipeline() if inside is None else inside)


def stages(**options: Any) -> dict[str, Any]:
    return {name: wh.stage() for name in "abcd"} | options


def tied(scopes: dict[str, Any]) -> nn.Module:
    model = Chain()
    model.c.weight = model.a.weight
    return annotate(model, scopes)


def tied_and_cut() -> nn.Module:
    return tied(stages(a=(wh.stage(), wh.split(cut="columns")), c=(wh.stage(), wh.split(cut="columns"))))


UNRUN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "own rows inside a stage": (
        lambda: annotate(Chain(), stages(b=(wh.stage(), wh.split(rows="own")))),
        r"wh\.split\(rows='own'\) of 'b' is inside a stage, whose ranks all get the same micro-batch",
    ),
    "a dim inside a stage": (
        lambda: annotate(Chain(), stages(b=(wh.stage(), wh.replica(batch_dim=1)))),
        r"wh\.replica\(batch_dim=1\) of 'b' is inside a stage, where no batch is cut",
    ),
    "BatchNorm over the ranks of a stage": (
        lambda: annotate(Chain(), stages(b=(wh.stage(), wh.replica(sync_batch_norm=True)))),
        r"sync_batch_norm=True\) holds for wh\.pipeline\(\) too",
    ),
    "a sum inside a stage": (
        lambda: annotate(Chain(), stages(b=(wh.stage(), wh.replica(loss="sum")))),
        r"wh\.replica\(loss='sum'\): a pipeline averages over replicas",
    ),
    "a tie of two options": (
        lambda: tied(stages(a=(wh.stage(), wh.replica(reduce_dtype=torch.bfloat16)))),
        r"'a\.weight' is tied to 'c\.weight', .* says reduce_dtype=torch\.bfloat16 for the first and None for",
    ),
    "a split beside the pipeline": (
        lambda: wh.annotate(annotate(Chain(), {"a": wh.stage(), "b": wh.stage()}), {"d": wh.split()}),
        r"wh\.split\(\) of 'd' is outside the pipeline of its model",
    ),
    "a shared split beside the pipeline": (
        lambda: wh.annotate(
            annotate(Chain(), {"a": wh.stage(), "b": wh.stage()}), {"d": (wh.replica(), wh.split(size=2))}
        ),
        r"wh\.split\(size=2\) of 'd' is outside the pipeline of its model",
    ),
    "BatchNorm over all ranks": (
        lambda: annotate(Chain(), stages(), (wh.replica(sync_batch_norm=True), wh.pipeline())),
        r"sync_batch_norm=True\) holds for wh\.pipeline\(\) too",
    ),
    "a sum": (
        lambda: annotate(Chain(), stages(), (wh.replica(loss="sum"), wh.pipeline())),
        r"wh\.replica\(loss='sum'\): a pipeline averages over replicas",
    ),
    "ranks that do not divide": (
        lambda: chain(num_ranks=3),
        r"num_ranks=3\): 8 ranks cannot be cut into pipelines of 3 with 4 stages",
    ),
    "more ranks than stages": (
        lambda: chain(num_ranks=8),
        r"num_ranks=8\): 8 ranks cannot be cut into pipelines of 8 with 4 stages",
    ),
    "other than so many stages": (
        lambda: chain(num_stages=3),
        r"num_stages=3\) asks for 3 stages, and 4 wh\.stage\(\) scopes are inside",
    ),
    "a table for other stages": (
        lambda: chain(schedule=make("1f1b", 2, 2)),
        r"the table has actions of 2 stages, and 4 of them are inside",
    ),
    "a table and another number of micro-batches": (
        lambda: chain(schedule=TABLE, num_micro_batches=8),
        r"num_micro_batches is 8, and the table has 2 micro-batches",
    ),
    "a table and another number of ranks": (
        lambda: chain(schedule=TABLE, num_ranks=4),
        r"num_ranks is 4, and the table has 2 rows, one a rank",
    ),
    "a table and another number of stages": (
        lambda: wh.pipeline(Chain(), schedule=TABLE, num_stages=2),
        r"num_stages is 2, and the table has 4 stages",
    ),
    "a table for ranks that do not divide": (
        lambda: chain(schedule=("F0.0 B0.0", "F1.0 B1.0", "F2.0 F3.0 B3.0 B2.0")),
        r"the table has 3 rows, one for each rank of a pipeline, and 8 ranks are no multiple of it",
    ),
    "no stages": (lambda: wh.pipeline(Chain()), r"wh\.pipeline\(\) holds no wh\.stage\(\)"),
    "two pipelines": (
        lambda: annotate(annotate(Chain(), {"a": wh.stage()}), {"b": wh.stage()}),
        r"a model has one pipeline, and two scopes ask for one",
    ),
    "a cut tie": (
        tied_and_cut,
        r"parameter 'a\.weight' is cut by a split and tied between the stages \[0, 2\]",
    ),
}


@pytest.mark.parametrize("name", UNRUN)
def test_what_a_pipeline_does_not_run_is_refused_by_the_plan(name: str) -> None:
    make, said = UNRUN[name]
    model = make()
    before = {key: id(value) for key, value in model.named_parameters()}
    with pytest.raises(wh.PlanError, match=said) as caught:
        wh.plan(model, cluster=EIGHT)
    assert caught.value.where and caught.value.fix
    assert {key: id(value) for key, value in model.named_parameters()} == before


def _refused(rank: int, n: int, name: str) -> str:
    with pytest.raises(wh.PlanError) as caught:
        wh.parallelize(UNRUN[name][0](), timeout=30)
    return str(caught.value)


def test_all_ranks_read_the_same() -> None:
    for name in ("own rows inside a stage", "ranks that do not divide", "no stages"):
        assert len(set(world(2, _refused, name))) == 1


class Reads(Chain):
    """Its glue reads a value."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        return super().forward(x, y) if h.sum() > 0 else h.sum()


def test_glue_that_cannot_be_recorded_is_told_where_inputs_are_given() -> None:
    model = annotate(Reads(), stages())
    wh.plan(model, cluster=EIGHT)
    with pytest.raises(wh.TraceError, match=r"reads a tensor's value") as caught:
        wh.plan(model, cluster=EIGHT, sample_inputs=batch(8))
    assert "test_pipelines.py:" in str(caught.value.where)
    counted_model = wh.pipeline(Reads(), num_stages=2)
    with pytest.raises(wh.TraceError):
        wh.plan(counted_model, cluster=EIGHT, sample_inputs=batch(8))


# ---- stages by count


def test_a_partition_is_the_best_one() -> None:
    costs = [3, 1, 4, 1, 5, 9, 2, 6]

    def every(parts: int, rest: list[int]) -> int:
        if parts == 1:
            return sum(rest)
        return min(max(sum(rest[:i]), every(parts - 1, rest[i:])) for i in range(1, len(rest) - parts + 2))

    for parts in range(1, 9):
        found = partition(costs, parts)
        assert found is not None
        largest, ends = found
        starts = [0, *ends[:-1]]
        assert len(ends) == parts and ends[-1] == 8 and all(a < b for a, b in zip(starts, ends, strict=True))
        assert largest == max(sum(costs[a:b]) for a, b in zip(starts, ends, strict=True)) == every(parts, costs)
    assert partition(costs, 2, lambda start, end: end - start < 4) is None
    assert partition(costs, 9) is None


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(F.gelu(self.first(self.norm(x))))
        return out


class Encoder(nn.Module):
    """Like those of Hugging Face: embeddings and a head around a list of blocks, registered in another order."""

    def __init__(self, layers: int = 8, dim: int = 16, words: int = 200, hidden: int = 64) -> None:
        super().__init__()
        self.head = nn.Linear(dim, words)
        self.layers = nn.ModuleList([Block(dim, hidden) for _ in range(layers)])
        self.words = nn.Embedding(words, dim)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def tokens(rows: int) -> dict[str, Tensor]:
    torch.manual_seed(2)
    return {"x": torch.randint(200, (rows, 5)), "y": torch.randint(200, (rows, 5))}


def stages_of(model: nn.Module, inputs: Any = None, cluster: wh.Cluster = EIGHT) -> tuple[tuple[str, ...], ...]:
    plan = wh.plan(model, cluster=cluster, sample_inputs=inputs)
    assert plan.pipeline is not None
    return plan.pipeline.stages


def counted(model: nn.Module, num_stages: int, **options: Any) -> nn.Module:
    return wh.pipeline(model, num_stages=num_stages, **options)


def test_a_sequential_is_cut_by_parameters_without_inputs() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    assert stages_of(counted(layers, 2)) == (("0", "2"), ("3", "5"))
    with wh.pipeline(num_stages=4):
        again = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)])
    assert stages_of(again) == (("0", "1"), ("2", "3"), ("4", "5"), ("6", "7"))
    assert "The stages are balanced by parameters: the largest stage has 1.00 of an even share." in str(
        wh.plan(again, cluster=EIGHT)
    )


@pytest.mark.parametrize("stages", ["by count", "by scopes"])
def test_operations_are_counted_in_one_forward(stages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counters: list[Any] = []

    class Counter(flops.FlopCounterMode):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            counters.append(self)

    monkeypatch.setattr(flops, "FlopCounterMode", Counter)
    model = counted(Encoder(), 4) if stages == "by count" else chain()
    plan = wh.plan(model, cluster=EIGHT, sample_inputs=tokens(8) if stages == "by count" else batch(8))
    assert len(counters) == 1 and plan.pipeline is not None and all(plan.pipeline.stage_flops)


def test_an_encoder_is_cut_by_the_operations_of_a_forward_in_its_order() -> None:
    by_flops = stages_of(counted(Encoder(), 4), tokens(8))
    assert by_flops[0][0] == "words" and by_flops[-1][-1] == "head"
    blocks = [name for names in by_flops for name in names if name.startswith("layers")]
    assert blocks == [f"layers.{number}" for number in range(8)], "whole blocks"
    flops = {"head": 2 * 16 * 200, "words": 0} | {f"layers.{i}": 2 * 2 * 16 * 64 for i in range(8)}
    times = [sum(flops[name] for name in names) for names in by_flops]
    assert max(times) <= 3 * 4096
    assert by_flops == stages_of(counted(Encoder(), 4), tokens(8)), "deterministic"
    without = stages_of(counted(Encoder(), 4))
    assert without[0][0] == "head", "in the order of registration"


def test_large_modules_are_opened_and_what_stays_together_is_whole() -> None:
    outer = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Sequential(*[nn.Linear(4, 4)] * 1))
    assert stages_of(counted(outer, 3), cluster=wh.Cluster.of(1, 3)) == (("0.0",), ("0.1",), ("1",))
    wide = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8), nn.Linear(8, 8))
    assert stages_of(counted(wide, 2)) == (("0",), ("1", "2"))


class Tower(nn.Module):
    """A large layer in the middle, one that nobody calls, and equal ones around."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(64, 64)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 64), nn.Linear(64, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_what_a_forward_does_not_call_makes_no_stage() -> None:
    assert stages_of(counted(Tower(), 3), torch.zeros(4, 8)) == (
        ("layers.0", "layers.1"),
        ("layers.2",),
        ("layers.3",),
    )
    with pytest.raises(wh.PlanError, match=r"asks for 5 stages, but the model has 4 modules"):
        stages_of(counted(Tower(), 5), torch.zeros(4, 8))


def test_of_equally_slow_cuts_the_most_even_one_is_taken() -> None:
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)], nn.Linear(8, 64))  # the last takes longest
    assert [len(names) for names in stages_of(counted(layers, 4), torch.zeros(4, 8), wh.Cluster.of(1, 4))] == [
        2,
        2,
        2,
        1,
    ]


def test_inputs_that_the_model_does_not_take_are_told() -> None:
    said = r"a forward is recorded, which fails on these sample_inputs: TypeError: .*missing 1 required"
    with pytest.raises(wh.PlanError, match=said) as caught:
        wh.plan(chain(), cluster=EIGHT, sample_inputs=torch.zeros(4, 8))
    assert caught.value.where and caught.value.fix


def test_more_stages_than_modules_are_refused() -> None:
    with pytest.raises(wh.PlanError, match=r"num_stages=5\) asks for 5 stages, but the model has 2 modules") as caught:
        stages_of(counted(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 5))
    assert "2 stages at most" in str(caught.value.fix)


def test_the_memory_of_a_rank_bounds_its_stages() -> None:
    def model() -> nn.Module:
        layers = [nn.Linear(32, 32, bias=False), nn.Embedding(64, 32), nn.Linear(32, 32, bias=False)]
        return counted(nn.Sequential(layers[1], layers[0], layers[2]), 2)

    inputs = torch.zeros(4, dtype=torch.int64)
    free = stages_of(model(), inputs, wh.Cluster.of(1, 2))
    assert free == (("0", "1"), ("2",))
    bound = stages_of(model(), inputs, wh.Cluster.of(1, 2, memory_bytes=2 * 64 * 32 * 4))
    assert bound == (("0",), ("1", "2"))
    with pytest.raises(wh.PlanError, match=r"one stage has 8,192 bytes of parameters, .* room for 4,000 a stage"):
        stages_of(model(), inputs, wh.Cluster.of(1, 2, memory_bytes=8000))


def _by_count(rank: int, n: int, kind: str, num_stages: int, given: bool) -> tuple[float, float]:
    torch.manual_seed(0)
    alone: Any = CASES["tied"].make() if kind == "tied" else Encoder()
    torch.manual_seed(0)
    model: Any = CASES["tied"].make() if kind == "tied" else Encoder()
    whole = batch(8, "tied") if kind == "tied" else tokens(8)
    scoped = model.layers if kind == "blocks of an encoder" else model  # the rest runs where its inputs are
    wh.pipeline(scoped, num_stages=num_stages, num_micro_batches=2)
    wh.parallelize(model, sample_inputs=whole if given else None, timeout=30)
    index, count = wh.data_rank(model)
    loss = model(**{key: value.tensor_split(count)[index] for key, value in whole.items()})
    expected = alone(**whole)
    loss.backward()
    expected.backward()
    return float((loss - expected).detach().abs()), relative_error(gradients_of(model), gradients_of(alone))


@pytest.mark.parametrize(
    ("kind", "n", "num_stages", "given"),
    [
        ("encoder", 2, 2, False),
        ("encoder", 4, 4, True),
        ("encoder", 4, 8, True),
        ("blocks of an encoder", 2, 2, True),
        ("blocks of an encoder", 4, 3, False),
        ("tied", 2, 3, False),
    ],
)
def test_stages_by_count_are_one_process(kind: str, n: int, num_stages: int, given: bool) -> None:
    for loss, gradients in world(n, _by_count, kind, num_stages, given):
        assert max(loss, gradients) < 1e-5


@pytest.mark.parametrize("batch_dim", [1, {"input": 1}])
def test_rows_are_counted_where_batch_dim_says(batch_dim: Any) -> None:
    scopes: Any = (wh.replica(batch_dim=1), wh.pipeline()) if batch_dim == 1 else wh.pipeline(batch_dim=batch_dim)
    model = wh.annotate(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        {"0": (wh.stage(), wh.split()), "1": wh.stage()},
        inside=scopes,
    )
    plan = wh.plan(model, cluster=wh.Cluster.of(1, 4), sample_inputs=torch.zeros(7, 4, 8))
    text = " ".join(str(plan).split())
    assert "estimated at 4 rows a rank" in text and "in a step of 4 rows" in text


class Mixes(nn.Sequential):
    """Its samples meet between the stages."""

    def forward(self, x: Tensor) -> Tensor:
        h = self[0](x)
        out: Tensor = self[1](h - h.mean(0))
        return out


class Root(nn.Sequential):
    """Its loss is no sum over samples."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x).square().mean().sqrt()
        return out


@pytest.mark.parametrize(("kind", "error"), [(Mixes, wh.TraceError), (Root, wh.LossError)])
def test_a_plan_refuses_inputs_on_which_no_pipeline_runs(kind: type[nn.Module], error: type[wh.WhaleError]) -> None:
    def planned(**options: Any) -> wh.Plan:
        model = kind(nn.Linear(4, 4), nn.Linear(4, 4))
        return wh.plan(wh.pipeline(model, num_stages=2, **options), cluster=EIGHT, sample_inputs=torch.ones(8, 4))

    with pytest.raises(error):
        planned()
    assert planned(mixing="accept").pipeline is not None
