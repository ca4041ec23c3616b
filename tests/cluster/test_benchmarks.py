"""The benchmarks' variants train alike: a few steps of a small task, in worlds without an emulated network."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import benchmarks.all2all.main as all2all
import benchmarks.all2all.overlap as overlap
import benchmarks.bert_pipeline.main as bert
import benchmarks.bert_pipeline.sizes as bert_sizes
import benchmarks.classifier_split.main as classifier
import benchmarks.moe_layer.main as moe_layer
import benchmarks.moe_layer.parts as parts
import benchmarks.overhead.main as overhead
import benchmarks.pipeline_bubble.main as bubble
import benchmarks.replica.main as replica
import benchmarks.slides_table.main as slides
from benchmarks.classifier_split.model import Task
from benchmarks.cluster import ClusterError
from benchmarks.harness import Summary, add_arguments, ring_seconds, run, sgd_loop, summarize, whole_numbers
from benchmarks.slides_table.sizes import Scale
from tests.world import world

STEPS, WARMUP = 2, 1


def _classifier_alone(rank: int, n: int, task: Task, path: Path) -> list[float]:
    return classifier.one_process(task, WARMUP + STEPS, path)


def _classifier(rank: int, n: int, task: Task, path: Path) -> Any:
    names = [name for name in classifier.VARIANTS if name != "compute"]
    return classifier._measure(rank, names, task, STEPS, WARMUP, path)


def test_the_classifiers_are_one_process(tmp_path: Path) -> None:
    task = Task(classes=300, rows=4, world=2)
    (losses,) = world(1, _classifier_alone, task, tmp_path / "one_process.pt")
    results = world(2, _classifier, task, tmp_path / "one_process.pt")
    summaries = summarize([traces for traces, _ in results])
    for name, own in summaries.items():
        exact = name in classifier._EXACT
        assert own.loss_error(losses) < (1e-5 if exact else 1e-2), name
        assert max(errors[name] for _, errors in results) < (1e-3 if exact else 3e-2), name


def _encoder_alone(rank: int, n: int, path: Path) -> list[float]:
    _shrink()
    return replica.one_process(2, 2, WARMUP + STEPS, path)


def _encoder(rank: int, n: int, path: Path) -> Any:
    _shrink()
    names = [name for name in replica.VARIANTS if name != "compute"]
    return replica._speed(rank, names, 2, STEPS, WARMUP, path)


def _shrink() -> None:
    """In this rank, one layer of the encoder."""
    replica.make_encoder.__globals__["_LAYERS"] = 1


def test_the_encoders_are_one_process(tmp_path: Path) -> None:
    (losses,) = world(1, _encoder_alone, tmp_path / "gradients.pt")
    results = world(2, _encoder, tmp_path / "gradients.pt")
    summaries = summarize([traces for traces, _ in results])
    for name, own in summaries.items():
        exact = name in ("ddp", "whale")
        assert own.loss_error(losses) < (1e-5 if exact else 1e-3), name
        assert max(errors[name][0] for _, errors in results) < (1e-5 if exact else 6e-3), name


def _all2all(rank: int, n: int, sizes: list[int]) -> Any:
    return all2all._measure(rank, list(all2all.VARIANTS), sizes, 1, 0)


def test_rows_come_alike_by_every_route() -> None:
    results = world(4, _all2all, [32, 640], local_world_size=2)
    assert all(same for same, _, _ in results)
    assert all(told["routes"] == results[0][2]["routes"] for _, _, told in results)
    assert results[0][1].keys() == {32, 640} and results[0][1][32].keys() == all2all.VARIANTS.keys()


def _chunks(rank: int, n: int) -> Any:
    overlap.COMPUTE_S = 5e-3
    return overlap.measure(rank, 1 << 16, 1, 0)


def test_tokens_in_chunks_and_in_half_precision_are_the_layers() -> None:
    for traces, errors in world(2, _chunks, local_world_size=1):
        assert traces.keys() == errors.keys() == {f"{c} {wire}" for wire in overlap.WIRES for c in overlap.CHUNKS}
        for name, error in errors.items():
            assert error < (1e-6 if name.endswith("fp32") else 1e-2), name


def _parts(rank: int, n: int) -> Any:
    moe_layer.SIZES["A"] = (64, 16, 32, 8, 2)
    found = moe_layer._measure_parts(rank, ["dense", "gloo", "memory"], "A", "float32", 1, 0)
    return found, moe_layer._measure(rank, ["gloo", "chain"], "A", "float32", 1, 0)[1]


def test_the_parts_of_a_layer_are_a_whole_step() -> None:
    for found, fullest in world(2, _parts, timeout=60):
        assert 1 <= fullest < 2
        for name, seconds in found.items():
            for back in (False, True):
                of_parts = {part: seconds.get((part, back), 0.0) for part in parts.PARTS}
                assert sum(of_parts.values()) == pytest.approx(seconds["all", back], rel=1e-6)
                idle = {part for part, spent in of_parts.items() if not spent}
                assert idle <= (set(parts.PARTS[:2]) if back else set()) or name == "dense", (name, back)


def _hierarchies(rank: int, n: int) -> Any:
    replica._LAYERS, replica._LAYER_PARAMETERS = 1, 640
    return replica._hierarchy(rank, list(replica._HIERARCHY), STEPS)


def test_the_hierarchies_are_ddp() -> None:
    summaries = summarize(world(4, _hierarchies, local_world_size=2))
    for name, own in summaries.items():
        assert own.loss_error(summaries["ddp"].values) < (1e-5 if "fp16" not in name else 1e-3), name


def _pairs(rank: int, n: int) -> Any:
    return overhead._measure(rank, ["plain", "hand", "whale"], n, 16, 8, STEPS, WARMUP)


@pytest.mark.parametrize("n", [1, 2])
def test_by_hand_and_annotated_are_plain(n: int) -> None:
    summaries = summarize(world(n, _pairs))
    for name, own in summaries.items():
        assert own.loss_error(summaries["plain"].values) < 1e-4, name


def _slides(rank: int, n: int) -> Any:
    names = tuple(name for name in slides.VARIANTS if name != "hand_half")  # that one wants nodes of 8 ranks
    cell = slides.Cell(n, 8, Scale(256, 1e-3, 8), names, slow_steps=2, steps=3, half=torch.bfloat16)
    return slides._measure(rank, SimpleNamespace(set_rate=lambda rate: None), cell, names, None)  # type: ignore[arg-type]


def test_the_slides_variants_are_flat_data_parallelism() -> None:
    results = world(2, _slides)
    summaries = summarize([traces for traces, _, _ in results])
    for name, own in summaries.items():
        assert own.loss_error(summaries["flat"].values) < 1e-3, name
        worst = max(errors[name] for _, errors, _ in results)
        assert worst < (2e-2 if name.endswith("half") else 1e-4), name


def _bert(rank: int, n: int) -> Any:
    names = tuple(name for name in bert.VARIANTS if name != "pipeline8")
    cell = bert.Cell(2, bert_sizes.Scale(4096, 1e-3), names, slow_steps=2, steps=3)
    return bert._measure(rank, SimpleNamespace(set_rate=lambda rate: None), cell)  # type: ignore[arg-type]


def test_the_pipelines_of_bert_are_flat_data_parallelism() -> None:
    results = world(4, _bert)
    summaries = summarize([traces for traces, _, _ in results])
    for name, own in summaries.items():
        expected = summaries["flat"].values
        assert Summary(*[0.0] * 5, 0, own.values[: len(expected)]).loss_error(expected) < 1e-3, name
        worst = max(errors[name] for _, errors, _ in results)
        assert worst < (3e-2 if name not in ("flat", "whale_dp") else 1e-4), name
    assert all(where["pipeline2"] for _, _, where in results)


def _bubbles(rank: int, n: int, forward_s: float) -> Any:
    return bubble._measure(rank, list(bubble.VARIANTS), bubble.Shape(n, n, 4), forward_s, STEPS, WARMUP)


def test_the_pipelines_train_alike_and_are_idle_as_long_as_they_must() -> None:
    shape, forward_s = bubble.Shape(2, 2, 4), 2e-3
    summaries = summarize(world(2, _bubbles, forward_s))
    for name, own in summaries.items():
        assert own.loss_error(summaries["gpipe"].values) < 1e-5, name
        assert bubble.idle_share(own.minimum_s, shape, forward_s) > shape.formula(name) - 0.01, name


def test_the_command_lines() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, {"a": "one", "b": "two"}, steps=7)
    parser.add_argument("--widths", type=whole_numbers, default="3,4")
    options = parser.parse_args([])
    assert (options.variants, options.steps, options.widths) == (["a", "b"], 7, [3, 4])
    assert parser.parse_args(["--variants", "b,"]).variants == ["b"]
    with pytest.raises(argparse.ArgumentError, match=r"unknown variants \['c'\], known are a, b"):
        parser.parse_args(["--variants", "a,c"])


def test_a_cluster_that_cannot_run_is_an_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> int:
        raise ClusterError("no root here")

    assert run(refused) == 1
    assert "no root here" in capsys.readouterr().out
    assert run(lambda: 0) == 0


def test_the_loop_is_sgd() -> None:
    torch.manual_seed(0)
    module, x, y = nn.Linear(3, 4), torch.randn(5, 3), torch.tensor([0, 1, 2, 3, 0])
    before = module.weight.detach().clone()
    expected = nn.functional.cross_entropy(module(x), y)
    (gradient,) = torch.autograd.grad(expected, module.weight)
    step = sgd_loop(module, 0.5)
    assert torch.equal(step(x, y), expected.detach())
    torch.testing.assert_close(module.weight.detach(), before - 0.5 * gradient)
    assert step(x, y) < expected


def test_errors_and_limits() -> None:
    summary = Summary(1.0, 1.0, 1.0, 1.0, 1.0, 0, (1.0, 2.0))
    assert summary.loss_error([1.5, 2.25]) == 0.5
    with pytest.raises(ValueError, match="zip"):
        summary.loss_error([1.0])
    assert ring_seconds(4e6, 4, 48e6) == pytest.approx(1.0)
