"""The random states of a rank: kept by its feed, since ranks that share samples draw alike, and others do not."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from whale_torch.errors import CheckpointError
from whale_torch.mesh import Mesh
from whale_torch.strategies.pipeline.runtime import PipelineRuntime
from whale_torch.strategies.runtime import KEY, Runtime

__all__ = ["check_random_state", "feed_of", "random_state", "restore", "state_for"]

Feed = tuple[int, int]
"""The number of a rank's feed, and how many there are."""


def feed_of(model: nn.Module | None) -> Feed:
    """This rank's feed in the plan of a model; the only one where it is not parallelized."""
    runtime = None if model is None else model.__dict__.get(KEY)
    if not isinstance(runtime, Runtime):
        return 0, 1
    return runtime.plan.feed_of(runtime.mesh.rank), runtime.plan.num_feeds


def random_state(mesh: Mesh | None, model: nn.Module | None) -> dict[str, Any]:
    """Those of torch, of Python, of numpy where it is in use, of the rank's GPU and of a pipeline, as plain data and
    tensors.
    """
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss},
    }
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = (kind, keys, *rest)
    gpu = _gpu_of(mesh, model)
    if gpu is not None:
        found["cuda"] = torch.cuda.get_rng_state(gpu)
    pipeline = _pipeline_of(model)
    if pipeline is not None:  # whose steps draw from streams of their own
        found["pipeline"] = {"seed": pipeline.seed, "number": pipeline.number}
    return found


def _gpu_of(mesh: Mesh | None, model: nn.Module | None) -> torch.device | None:
    """The rank's, or in a plain process that of the model's first parameter."""
    devices = [p.device for p in ([] if model is None else model.parameters())] if mesh is None else [mesh.device]
    return devices[0] if devices and devices[0].type == "cuda" else None


def _pipeline_of(model: nn.Module | None) -> PipelineRuntime | None:
    runtime = None if model is None else model.__dict__.get(KEY)
    return runtime if isinstance(runtime, PipelineRuntime) else None


def state_for(feed: Feed, rank: int, feeds: Sequence[Feed]) -> tuple[int, bool]:
    """Of the ranks that were saved, with these feeds, the one whose state a rank takes, and whether that goes on.

    Where there are as many feeds as before, each goes on; else new states are drawn from that of the first rank.
    """
    index, count = feed
    if not feeds or any(size != count for _, size in feeds):
        return 0, False
    if rank < len(feeds) and feeds[rank][0] == index:
        return rank, True
    place = next((place for place, (number, _) in enumerate(feeds) if number == index), None)
    return (0, False) if place is None else (place, True)


def check_random_state(state: Any) -> None:
    """Raises CheckpointError for what `restore` could not take over."""
    try:
        torch.Generator().set_state(state["torch"])
        random.Random().setstate(_python_state(state["python"]))
        if "numpy" in state and "numpy" in sys.modules:
            sys.modules["numpy"].random.RandomState().set_state(state["numpy"])
        if "cuda" in state:
            torch.as_tensor(state["cuda"], dtype=torch.uint8, device="cpu")
        if "pipeline" in state:
            int(state["pipeline"]["seed"]), int(state["pipeline"]["number"])
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise _no_random_state(error) from error


def _python_state(state: Mapping[str, Any]) -> tuple[Any, ...]:
    return state["version"], tuple(state["words"].tolist()), state["gauss"]


def _no_random_state(error: Exception) -> CheckpointError:
    return CheckpointError(f"the checkpoint's random state is none: {error}.", fix="wh.load(rng=False)")


def restore(state: Mapping[str, Any], mesh: Mesh | None, model: nn.Module | None, *, as_it_is: bool) -> None:
    """Takes over a state, or what follows from it for this rank's feed. Raises CheckpointError for what is none."""
    try:
        pipeline = _pipeline_of(model)
        if pipeline is not None and "pipeline" in state:
            pipeline.seed, pipeline.number = int(state["pipeline"]["seed"]), int(state["pipeline"]["number"])
        if not as_it_is:
            _draw_anew(state["torch"], feed_of(model))
            return
        random.setstate(_python_state(state["python"]))
        torch.set_rng_state(state["torch"])
        if "numpy" in state and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(state["numpy"])
        gpu = _gpu_of(mesh, model)
        if "cuda" in state and gpu is not None:
            torch.cuda.set_rng_state(state["cuda"], gpu)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise _no_random_state(error) from error


def _draw_anew(state: torch.Tensor, feed: Feed) -> None:
    text = bytes(state.tolist()) + f"/{feed[0]}/{feed[1]}".encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)
