"""The plan: the whole decision as frozen data, JSON out and in."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from whale_torch.annotation import Annotation
from whale_torch.cluster import Cluster
from whale_torch.errors import PlanError
from whale_torch.names import outward
from whale_torch.planning.pipelines import Links, Moved, PipelinePlan
from whale_torch.planning.placement import VirtualDevice
from whale_torch.planning.render import render
from whale_torch.planning.rules import Cut
from whale_torch.planning.schedules import Schedule, Timeline, draw
from whale_torch.planning.taskgraph import TaskGraph
from whale_torch.planning.timing import timeline_of

__all__ = ["GatherRecord", "Plan", "Reduce", "Traffic"]

_FORMAT = 2
# Byte counts, which differ between ranks that bring other batches.
_PREDICTED = ("traffic", "rows_per_rank", "assumption", "parameter_bytes", "gradient_bytes")
_PREDICTED_OF_PIPELINES = (
    *("stage_parameters", "stage_bytes", "stage_flops"),
    *("moved", "output_bytes", "sliced_bytes", "elsewhere", "links", "recorded"),
)


@dataclass(frozen=True, slots=True)
class Reduce:
    """Gradients averaged together: those of one VirtualDevice with the same options.

    wire: dtype name on the wire, None for the gradients' own. algorithm: "flat" or "hierarchical".
    gradient_bytes, wire_bytes: of the rank that holds most, in the gradients' dtype and in the wire's.
    parameters: those trained when the plan was made, of which the bytes are, and those that may be trained later.
    """

    device: str
    wire: str | None
    algorithm: str
    bucket_bytes: int
    max_in_flight: int
    parameters: tuple[str, ...]
    gradient_bytes: int = 0
    wire_bytes: int = 0

    def wire_dtype(self, own: torch.dtype) -> torch.dtype:
        """In which gradients of a dtype travel."""
        return own if self.wire is None else getattr(torch, self.wire)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank sends in a training step for one purpose, on one VirtualDevice or kind of link.

    In a pipeline the rank is the one that sends most in all.
    """

    what: str
    where: str
    sent_bytes: float


@dataclass(frozen=True, slots=True)
class GatherRecord:
    """An implicit gather of a split's output that happened: operation, the user's file:line, how often, bytes."""

    operation: str
    site: str
    count: int
    num_bytes: float


@dataclass(frozen=True)
class Plan:
    """How a model runs on a cluster.

    feed_size: neighbouring ranks that are fed the same batch. rows_per_rank: rows that byte counts assume.
    assumption: what else they assume, in words.
    parameters: (name, shape) of every parameter in order, to tell whether a saved plan fits a model.
    pipeline: how it is cut into stages, if it is. gathers: what a running model gathered implicitly so far.
    programs: kinds of calls that its pipeline has recorded. Both are no part of the decision.
    """

    cluster: Cluster
    feed_size: int
    taskgraphs: tuple[TaskGraph, ...]
    devices: tuple[VirtualDevice, ...]
    cuts: tuple[Cut, ...]
    reduces: tuple[Reduce, ...]
    traffic: tuple[Traffic, ...]
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    rows_per_rank: int
    assumption: str = ""
    batch_dim: int | tuple[tuple[str, int | None], ...] = 0
    loss: str = "mean"
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    pipeline: PipelinePlan | None = None
    gathers: tuple[GatherRecord, ...] = field(default=(), compare=False)
    programs: int = field(default=0, compare=False)

    @property
    def world(self) -> int:
        return self.cluster.num_ranks

    @property
    def num_feeds(self) -> int:
        """How many times one rank's batch the global batch is."""
        return self.ranks_of_a_stage // self.feed_size

    @property
    def ranks_of_a_stage(self) -> int:
        """Ranks that run the same stages; all of them without a pipeline."""
        return self.world // (1 if self.pipeline is None else self.pipeline.num_ranks)

    def feed_of(self, rank: int) -> int:
        """Number of the feed, of `num_feeds`, whose batch a rank is given."""
        return self.device("replica").index_of(rank) // self.feed_size

    @property
    def feeds(self) -> tuple[int, ...]:
        """The feed of each rank: ranks of one feed are one replica."""
        return tuple(map(self.feed_of, range(self.world)))

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends in a training step."""
        return sum(traffic.sent_bytes for traffic in self.traffic)

    def device(self, name: str) -> VirtualDevice:
        return next(device for device in self.devices if device.name == name)

    @cached_property
    def _graph_of_root(self) -> dict[str, TaskGraph]:
        return {name: graph for graph in self.taskgraphs for name in graph.modules}

    def taskgraph_of(self, module_name: str) -> TaskGraph:
        """The TaskGraph that a module runs in. Raises KeyError for a name that none holds."""
        found = next((name for name in outward(module_name) if name in self._graph_of_root), None)
        if found is None:
            raise KeyError(module_name)
        return self._graph_of_root[found]

    def timeline(self) -> Timeline:
        """When each rank of a pipeline runs what in a training step, simulated; print it, or draw it.

        Stages take as long as their floating-point operations where the plan was made with sample inputs, else equally
        long; a backward is two forwards. Times are seconds, with messages, where the cluster's rates are known, else
        forwards of an average stage. Raises PlanError where the plan has no pipeline.
        """
        return timeline_of(self)

    def draw(self, path: str | Path) -> None:
        """Draws the time line into a file: .svg, .png (by matplotlib), .txt, or .json for chrome://tracing or Perfetto.

        Raises PlanError for another ending, without matplotlib, and where the plan has no pipeline.
        """
        draw(self.timeline(), path)

    def digest(self) -> str:
        """A hash of the decision: equal on every rank that decided the same, whatever it predicts for its own batch."""
        data = json.loads(self.to_json())
        for predicted in _PREDICTED:
            del data[predicted]
        for reduce in data["reduces"]:
            del reduce["gradient_bytes"], reduce["wire_bytes"]
        for predicted in (*_PREDICTED_OF_PIPELINES, "site") if data["pipeline"] else ():
            del data["pipeline"][predicted]
        for graph in data["taskgraphs"]:
            for annotation in graph["annotations"]:
                del annotation["site"]  # a path, seen from each rank's own working directory
        return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]

    def to_json(self, *, indent: int | None = None) -> str:
        """The decision as JSON text; Plan.from_json reads it."""
        return json.dumps(
            {
                "format": _FORMAT,
                "cluster": self.cluster.to_dict(),
                "feed_size": self.feed_size,
                "taskgraphs": [_graph_to_dict(graph) for graph in self.taskgraphs],
                "devices": [asdict(device) for device in self.devices],
                "cuts": [cut.to_dict() for cut in self.cuts],
                "reduces": [asdict(reduce) for reduce in self.reduces],
                "traffic": [asdict(traffic) for traffic in self.traffic],
                "parameters": [[name, list(shape)] for name, shape in self.parameters],
                "rows_per_rank": self.rows_per_rank,
                "assumption": self.assumption,
                "batch_dim": self.batch_dim,
                "loss": self.loss,
                "parameter_bytes": self.parameter_bytes,
                "gradient_bytes": self.gradient_bytes,
                "pipeline": None if self.pipeline is None else asdict(self.pipeline),
            },
            indent=indent,
        )

    @staticmethod
    def from_json(text: str) -> Plan:
        """Reads to_json's text. Raises PlanError where it is not a plan of this version."""
        try:
            data = json.loads(text)
            if data["format"] != _FORMAT:
                raise PlanError(
                    f"the plan has format {data['format']}, this version reads {_FORMAT}.",
                    fix="make it again with wh.plan(model)",
                )
            return Plan(
                cluster=Cluster.from_dict(data["cluster"]),
                feed_size=data["feed_size"],
                taskgraphs=tuple(_graph_from_dict(graph) for graph in data["taskgraphs"]),
                devices=tuple(VirtualDevice(**device) for device in data["devices"]),
                cuts=tuple(_cut_from_dict(cut) for cut in data["cuts"]),
                reduces=tuple(
                    Reduce(**{**reduce, "parameters": tuple(reduce["parameters"])}) for reduce in data["reduces"]
                ),
                traffic=tuple(Traffic(**traffic) for traffic in data["traffic"]),
                parameters=tuple((name, tuple(shape)) for name, shape in data["parameters"]),
                rows_per_rank=data["rows_per_rank"],
                assumption=data["assumption"],
                batch_dim=_batch_dim_from_json(data["batch_dim"]),
                loss=data["loss"],
                parameter_bytes=data["parameter_bytes"],
                gradient_bytes=data["gradient_bytes"],
                pipeline=_pipeline_from_json(data["pipeline"]),
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise PlanError(
                f"this is not a saved plan: {type(error).__name__}: {error}", fix="write it with plan.save(path)"
            ) from error

    def save(self, path: str | Path) -> None:
        """Writes the plan as readable JSON."""
        Path(path).write_text(self.to_json(indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads a plan that `save` wrote."""
        return Plan.from_json(Path(path).read_text())

    def __str__(self) -> str:
        return render(self)


def _cut_from_dict(data: dict[str, Any]) -> Cut:
    try:
        return Cut.from_dict(data)
    except AssertionError as error:
        raise PlanError(
            f"the plan's cut of '{data['module']}' cannot be carried out: {error}.",
            fix="edit widths only, and so that they add up to the units of the module",
        ) from error


def _graph_to_dict(graph: TaskGraph) -> dict[str, Any]:
    annotations = [
        {"kind": a.kind, "options": [[k, _option_to_json(v)] for k, v in a.options], "site": a.site, "entry": a.entry}
        for a in graph.annotations
    ]
    return asdict(graph) | {"annotations": annotations}


def _graph_from_dict(data: dict[str, Any]) -> TaskGraph:
    annotations = tuple(
        Annotation(a["kind"], tuple((k, _option_from_json(v)) for k, v in a["options"]), a["site"], a["entry"])
        for a in data["annotations"]
    )
    return TaskGraph(**{**data, "annotations": annotations, "modules": tuple(data["modules"])})


def _pipeline_from_json(data: dict[str, Any] | None) -> PipelinePlan | None:
    if data is None:
        return None
    read: dict[str, Any] = {
        "stages": tuple(tuple(names) for names in data["stages"]),
        "table": tuple(data.get("table", ())),
        "stage_parameters": tuple(data["stage_parameters"]),
        "stage_bytes": tuple(data["stage_bytes"]),
        "sliced_bytes": tuple(data.get("sliced_bytes", ())),
        "stage_flops": tuple(data.get("stage_flops", ())),
        "moved": tuple(Moved(**moved) for moved in data["moved"]),
        "elsewhere": tuple((name, tuple(stages)) for name, stages in data["elsewhere"]),
        "links": tuple(Links(**links) for links in data["links"]),
    }
    return PipelinePlan(**{**data, **read})


def _batch_dim_from_json(value: Any) -> int | tuple[tuple[str, int | None], ...]:
    return value if isinstance(value, int) else tuple((name, dim) for name, dim in value)


def _option_to_json(value: object) -> object:
    if isinstance(value, Schedule):
        return {"schedule": value.to_dict()}
    return {"dtype": str(value).removeprefix("torch.")} if isinstance(value, torch.dtype) else value


def _option_from_json(value: Any) -> Any:
    if isinstance(value, dict) and "schedule" in value:
        return Schedule.from_dict(value["schedule"])
    if isinstance(value, dict):
        return getattr(torch, value["dtype"])
    return tuple(tuple(v) if isinstance(v, list) else v for v in value) if isinstance(value, list) else value
