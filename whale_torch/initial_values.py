"""The values a model begins with: made where it was built on the meta device, or read from weights that were given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from whale_torch.agreement import from_all, together
from whale_torch.checkpoint.plain import Weights, latest_of, load_weights, read_weights
from whale_torch.comm.meeting import Meeting
from whale_torch.comm.registry import ParameterPlace
from whale_torch.errors import CheckpointError
from whale_torch.mesh import Mesh
from whale_torch.strategies.materialize import InitFunction, check_can_materialize, materialize
from whale_torch.strategies.pipeline.places import Places

__all__ = ["load_together", "make_together", "read_together"]


def read_together(
    weights: Weights, model: nn.Module, mesh: Mesh, cuts: Mapping[str, ParameterPlace], places: Places | None
) -> Mapping[str, Any]:
    """What is to be loaded; of a run_dir all ranks take one checkpoint, though a job may save another meanwhile."""
    latest = together(mesh, lambda: latest_of(weights), CheckpointError)
    of_first = from_all(mesh, None if latest is None else latest.name)[0]
    given = weights if latest is None or of_first is None else latest.with_name(of_first)

    def read() -> Mapping[str, Any]:
        return read_weights(given, model, cuts, lambda name: places is None or places.kept().is_here(name))

    return together(mesh, read, CheckpointError)


def make_together(
    model: nn.Module,
    mesh: Mesh,
    cuts: Mapping[str, ParameterPlace],
    places: Places | None,
    seed: int,
    init_fn: InitFunction | None,
    given: frozenset[str],
) -> None:
    """Gives what was built on the meta device its initial values, as far as this rank keeps it."""
    together(mesh, lambda: check_can_materialize(model, init_fn, given))
    shards = {name: (at.shard, at.parts.index) for name, at in cuts.items() if at.shard and at.parts}
    kept = None if places is None else places.kept()
    meeting = Meeting(mesh.everyone())
    any_rank = meeting.any_rank

    def work() -> None:
        materialize(model, shards, seed=seed, init_fn=init_fn, given=given, kept=kept, any_rank=any_rank)

    together(mesh, lambda: meeting.run(work))


def load_together(model: nn.Module, state: Mapping[str, Any], mesh: Mesh) -> None:
    """Loads what `read_together` gave."""
    together(mesh, lambda: load_weights(model, state), CheckpointError)
