"""whale_torch: hybrid-parallel training in PyTorch from a few annotations on an ordinary model."""

from whale_torch.apply import parallelize, plan
from whale_torch.checkpoint.load import load
from whale_torch.checkpoint.save import save
from whale_torch.cluster import Cluster
from whale_torch.data import batch_sampler, data_rank, sampler
from whale_torch.errors import (
    AnnotationError,
    CheckpointError,
    CommError,
    LayoutError,
    LossError,
    PlanError,
    TraceError,
    WhaleError,
)
from whale_torch.metrics import reduce
from whale_torch.optim.clip import clip_grad_norm_
from whale_torch.optim.scaler import GradScaler
from whale_torch.planning.plan import Plan
from whale_torch.scopes import annotate, auto_parallel, cpu_offload, pipeline, recompute, replica, split, stage
from whale_torch.state import full_state_dict, no_sync

__version__ = "0.1.0"

__all__ = [
    "AnnotationError",
    "CheckpointError",
    "Cluster",
    "CommError",
    "GradScaler",
    "LayoutError",
    "LossError",
    "Plan",
    "PlanError",
    "TraceError",
    "WhaleError",
    "annotate",
    "auto_parallel",
    "batch_sampler",
    "clip_grad_norm_",
    "cpu_offload",
    "data_rank",
    "full_state_dict",
    "load",
    "no_sync",
    "parallelize",
    "pipeline",
    "plan",
    "recompute",
    "reduce",
    "replica",
    "sampler",
    "save",
    "split",
    "stage",
]
