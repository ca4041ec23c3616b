"""What recording a forward costs: `python -m benchmarks.recording`.

A BERT of 24 layers with its masked-language loss, one process: a forward of it on fake tensors, the recording of one,
and all that a pipeline does for a kind of call that it has not seen (two recordings, the loss rewritten, stages cut).
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

import whale_torch as wh
from benchmarks.harness import Report, Step, add_arguments, interleave, summarize
from whale_torch.planning.pipelines import leaf_of
from whale_torch.planning.slices import SlicedModules
from whale_torch.strategies.pipeline.programs import Programs
from whale_torch.trace.tracer import record
from whale_torch.trace.twin import Twin

__all__ = ["main"]

_BAR = 4.0


def _bert(num_layers: int) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}
    return BertForMaskedLM(BertConfig(num_hidden_layers=num_layers, max_position_embeddings=32, **sizes)).train()


def _steps(model: Any, batch: dict[str, Tensor]) -> dict[str, Step]:
    scope = wh.pipeline(num_stages=4, num_micro_batches=4)
    plan = wh.plan(wh.annotate(model, {"": scope}), cluster=wh.Cluster.of(1, 4), sample_inputs=batch)
    assert plan.pipeline is not None
    twin = Twin.of(model, torch.device("cpu"))
    leaf = leaf_of(plan.pipeline, SlicedModules(plan.taskgraphs))
    rows = len(batch["input_ids"])

    def fake(number: int) -> None:
        args, kwargs = twin.inputs(((), batch))
        with twin.fake:
            twin.module(*args, **kwargs)

    def recorded(number: int) -> None:
        record(twin, (), batch, leaf)

    def whole(number: int) -> None:
        Programs(model, plan, torch.device("cpu")).of_batch((), batch, rows, "train")

    return {"fake forward": fake, "recording": recorded, "a new kind of call": whole}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recording", description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    add_arguments(parser, ("fake forward", "recording", "a new kind of call"), steps=12)
    options = parser.parse_args()
    report = Report("recording", "What recording a forward of BERT costs, against one forward without memory.")
    torch.set_num_threads(1)
    ids = torch.randint(1, 100, (8, 16), generator=torch.Generator().manual_seed(0))
    steps = _steps(_bert(options.layers), {"input_ids": ids, "labels": ids})
    chosen = {name: steps[name] for name in options.variants}
    summaries = summarize([interleave(chosen, steps=options.steps, warmup=options.warmup)])
    base = summaries["fake forward"].minimum_s if "fake forward" in summaries else float("nan")
    rows = [
        [name, f"{1e3 * own.minimum_s:.1f}", f"{1e3 * own.median_s:.1f}", f"{own.minimum_s / base:.2f}x"]
        for name, own in summaries.items()
    ]
    report.table(f"{options.layers} layers", ["what", "ms, min", "ms, median", "over a fake forward"], rows)
    if {"fake forward", "recording"} <= summaries.keys():
        report.bar("recording over a fake forward", summaries["recording"].minimum_s / base, at_most=_BAR)
    report.data(summaries=summaries)
    return report.finish(options)
